"""The scripts run from a shell, on the CPU, and write the JSON that they promise."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import _baseline
import _loss
import _published
import bench_step
import pytest
import torch
import torch.nn.functional as F
from _models import build_model
from _optimizers import make_optimizer, parse_assignments
from _ranks import World
from _shapes import SHAPES
from _text import load_text, sample_batch

ROOT = Path(__file__).parent.parent
TINY_TRAINING = ["--device", "cpu", "--layers", "1", "--hidden", "64", "--batch", "4", "--length", "32"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same short training in two modes."""
    folder = tmp_path_factory.mktemp("train")
    return {
        mode: run_script("train.py", folder / f"{mode}.json", "--mode", mode, "--steps", "12", *TINY_TRAINING)
        for mode in ("resident", "wavefront")
    }


def test_training_reports_what_it_cost(trained: dict[str, dict[str, Any]]) -> None:
    for mode, result in trained.items():
        assert result["script"] == "train"
        assert result["mode"] == mode
        assert len(result["losses"]) == result["steps"] == 12
        assert result["final_loss"] < result["first_loss"]
        assert result["loss_ratio"] == result["final_loss"] / result["first_loss"]
        assert result["step_s"] > 0
        assert result["peak_host_bytes"] >= result["host_bytes"] > 0
        assert result["peak_device_bytes"] is None
        assert result["environment"]["packages"]["torch"]
    assert not trained["resident"]["stages"]
    assert trained["wavefront"]["stages"]["timings.kernel"] > 0


def test_wavefront_trains_as_torch_does(trained: dict[str, dict[str, Any]]) -> None:
    """Torch's scalar tails may differ by an ulp, nothing else."""
    assert trained["wavefront"]["losses"] == pytest.approx(trained["resident"]["losses"], rel=1e-5)


def test_a_model_alone_has_no_gradient_left_at_any_time() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    alone = make_optimizer("model-alone", model)
    seen: list[bool] = []
    for parameter in model.parameters():  # after the hooks that drop them
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
    model(torch.ones(1, 4)).sum().backward()
    alone.step()
    assert seen == [True] * 4
    alone.close()
    model(torch.ones(1, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bench_step_compares_modes(tmp_path: Path) -> None:
    result = run_script(
        "bench_step.py", tmp_path / "out.json",
        "--device", "cpu", "--model", "tiny", "--implementation", "plain", "--seq", "16,32", "--modes",
        "resident,wavefront,model-alone", "--steps", "5", "--warmup", "3",
        "--config", "tile_numel=4096", "--config", "ring_slots=2",
        "--trace", str(tmp_path / "traces"),
    )  # fmt: skip
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {
        "wavefront-16.json",
        "wavefront-32.json",
    }
    assert result["construction_s"]["wavefront"] > 0
    built = result["construction"]["wavefront"]
    assert 0 < built["stages"]["compile"] <= built["stages"]["total"] <= result["construction_s"]["wavefront"]
    assert built["close_s"] > 0
    assert result["construction"].keys() == {"wavefront"}
    assert result["config"] == {"tile_numel": 4096, "ring_slots": 2}
    assert [(run["mode"], run["seq"]) for run in result["runs"]] == [
        ("resident", 16), ("resident", 32), ("wavefront", 16), ("wavefront", 32),
        ("model-alone", 16), ("model-alone", 32),
    ]  # fmt: skip
    for run in result["runs"][4:]:
        assert run["status"] == "ok"
        assert len(set(run["losses"])) == 1
        assert run["share_of_resident"] > 0
    for run in result["runs"][:4]:
        assert run["status"] == "ok"
        assert len(run["losses"]) == 8
        assert run["max_loss_difference"] < 1e-4
        assert run["step_s"] > 0
        assert run["tokens_per_s"] == pytest.approx(run["seq"] / run["step_s"])
        assert run["share_of_resident"] > 0
        assert run["host_bytes"] > 0
        assert run["pinned_bytes"] == 0


def test_bench_step_with_experts_in_all_modes_and_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts' weights as chunks of their layers, the next forward waiting for them; each mode saved, built anew, loaded."""
    modes = ["resident", "offload-resident", "wavefront", "hybrid"]

    def run_here(mode: str, args: Any) -> dict[str, Any]:  # kernels are then compiled once
        return bench_step.measure_mode(argparse.Namespace(**{**vars(args), "worker": mode}), World())

    monkeypatch.setattr(bench_step, "run_in_subprocess", run_here)
    arguments = [
        "--device", "cpu", "--model", "tiny-moe", "--layers", "auto", "--seq", "16", "--modes", ",".join(modes),
        "--steps", "5", "--warmup", "3", "--config", "tile_numel=4096", "--config", "threads=1",
        "--config", "stream_share=0.5", "--optimizer", "overlap_forward=true", "--checkpoint", str(tmp_path / "saved"),
        "--json", str(tmp_path / "out.json"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bench_step.py", *arguments])
    bench_step.main()
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (result["layers"], result["implementation"]) == (3, "plain")
    assert result["layer_plan"]["layers"] == result["layer_plan"]["of"] == 3
    assert [need["mode"] for need in result["layer_plan"]["needs"]] == modes
    assert [run["mode"] for run in result["runs"]] == modes
    losses = {run["mode"]: run["losses"] for run in result["runs"]}
    assert losses["offload-resident"] == losses["wavefront"] == losses["hybrid"]
    assert losses["wavefront"] == pytest.approx(losses["resident"], rel=1e-4)
    assert losses["wavefront"][-1] < losses["wavefront"][0] - 0.1
    assert "copied into buffers, stepped there" in result["plans"]["hybrid"]
    (budget,) = result["threads"]
    assert budget["num_threads"] == 1
    assert budget["cpus"]
    assert list(result["checkpoints"]) == modes[1:]
    for mode, check in result["checkpoints"].items():
        assert check["bit_equal"], mode
        assert check["resumed_losses"] == check["losses"]
        assert check["losses"][1] != check["losses"][0] < losses[mode][-1]
        # Weight, master and two moments of each parameter, and little else.
        assert 14 * result["parameters"] <= check["bytes"] < 20 * result["parameters"]
        assert (tmp_path / "saved" / mode / ".metadata").is_file()


@pytest.mark.gpu
def test_bench_step_with_experts_on_a_gpu(tmp_path: Path) -> None:
    """The grouped product in BF16, each mode in its own process, planned by another one that leaves no context behind."""
    modes = ["resident", "offload-resident", "wavefront", "hybrid"]
    result = run_script(
        "bench_step.py", tmp_path / "out.json",
        "--device", "cuda", "--model", "tiny-moe", "--layers", "auto", "--seq", "256", "--modes", ",".join(modes),
        "--steps", "5", "--warmup", "3", "--config", "tile_numel=65536", "--optimizer", "overlap_forward=true",
        "--deterministic", "--checkpoint", str(tmp_path / "saved"),
    )  # fmt: skip
    assert result["layer_plan"]["layers"] == result["layer_plan"]["of"] == 3
    assert result["layer_plan"]["memory"]["device"] > 1 << 30
    losses = {run["mode"]: run["losses"] for run in result["runs"]}
    assert losses["offload-resident"] == losses["wavefront"] == losses["hybrid"]
    assert losses["wavefront"] == pytest.approx(losses["resident"], rel=1e-3)
    assert all(run["peak_device_bytes"] > 0 for run in result["runs"])
    assert list(result["checkpoints"]) == modes[1:]
    assert all(check["bit_equal"] for check in result["checkpoints"].values())


def test_a_mode_gets_the_layers_that_were_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(bench_step.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--layers", "auto"])
    args = bench_step.parse_arguments()
    args.layers = 7
    assert bench_step.run_in_subprocess("wavefront", args)["runs"][0]["status"] == "error"
    monkeypatch.setattr(sys, "argv", commands[0][1:])
    again = bench_step.parse_arguments()
    assert (again.layers, again.worker) == (7, "wavefront")


def test_published_rows_stand_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    runs: list[dict[str, Any]] = [
        {"mode": mode, "seq": seq, "step_s": seconds, "share_of_resident": share, "peak_device_bytes": 20 << 30}
        for mode, seq, seconds, share in (
            ("resident", 8192, 1.5, 1.0), ("hybrid", 8192, 2.0, 0.75), ("hybrid", 65_536, 60.0, None),
            ("hybrid", 512, 1.0, None),
        )
    ]  # fmt: skip
    published = _published.beside("qwen3-30b-a3b", runs)
    assert published is not None
    assert [row["seq"] for row in published["rows"]] == [8192, 65_536]
    _published.print_beside({"published": published, "ranks": 2, "layers": 6}, runs)
    title, *_, resident, ours, long, _, stages = capsys.readouterr().out.strip().splitlines()
    assert title.endswith("this is 6 layers on 2 rank(s):")
    assert resident.split()[1::2] == ["resident", "8192", "1.500", "1.75", "100.0%", "100%", "20.00", "63.10"]
    assert ours.split()[1::2] == ["hybrid", "8192", "2.000", "3.96", "75.0%", "44%", "20.00", "17.50"]
    assert long.split()[1::2] == ["hybrid", "65536", "60.000", "-", "-", "100%", "20.00", "44.90"]
    assert "kernel 1.86 s" in stages
    assert _published.beside("qwen3-4b", runs) is None
    _published.print_beside({"published": None}, runs)
    assert not capsys.readouterr().out


def test_bench_step_records_a_mode_that_fails(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--model", "tiny", "--seq", "16", "--modes", "wavefront"]
    result = run_script(
        "bench_step.py", tmp_path / "out.json", *arguments, "--optimizer", "lr=-1", exit_status=1
    )
    assert result["runs"][0]["status"] == "error"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--modes", "resident,wavefrunt", "wavefrunt: choose among"),
        ("--config", "threds=2", "did you mean threads?"),
    ],
)
def test_bench_step_refuses_what_it_does_not_know_before_the_run(
    monkeypatch: pytest.MonkeyPatch, option: str, value: str, said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--device", "cpu", "--model", "tiny", option, value])
    with pytest.raises(SystemExit, match=re.escape(said)):
        bench_step.main()


def test_text_comes_from_a_file_a_folder_or_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first ")
    assert bytes(load_text(tmp_path).tolist()) == b"first second"
    assert bytes(load_text(tmp_path / "b.txt", max_bytes=3).tolist()) == b"sec"
    assert load_text(None, max_bytes=100_000).numel() == 100_000
    with pytest.raises(SystemExit, match="--data"):
        load_text(tmp_path / "nothing")


def test_batches_are_shifted_windows() -> None:
    text = torch.arange(50, dtype=torch.uint8)
    ids, targets = sample_batch(text, 1000, 9, torch.Generator().manual_seed(0))
    assert ids.shape == targets.shape == (1000, 9)
    assert torch.equal(ids + 1, targets)
    assert ids.min() == 0
    assert targets.max() == 49


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 300, 1000])
def test_chunked_loss_is_cross_entropy(monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int) -> None:
    vocabulary = 101
    monkeypatch.setattr(_loss, "MAX_TEMPORARY_BYTES", rows_per_chunk * vocabulary * _loss._BYTES_PER_LOGIT)
    torch.manual_seed(0)
    hidden = torch.randn(300, 16, requires_grad=True)
    weight = torch.randn(vocabulary, 16, requires_grad=True)
    targets = torch.randint(vocabulary, (300,))
    expected = F.cross_entropy(hidden @ weight.t(), targets)
    loss = _loss.linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(3 * expected, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(3 * loss, (hidden, weight)), gradients)


def test_chunked_loss_needs_no_gradient() -> None:
    with torch.no_grad():
        loss = _loss.linear_cross_entropy(torch.zeros(5, 4), torch.zeros(8, 4), torch.arange(5))
    assert loss.item() == pytest.approx(math.log(8))


def test_baseline_is_torch_on_fp32_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with several buckets, with clipping, and with a parameter that gets no gradient."""
    monkeypatch.setattr(_baseline, "BUCKET_NUMEL", 40)
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(*size).bfloat16()) for size in ((8, 4), (64,), (2, 3), (5,))]
    copies = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    baseline = _baseline.ResidentAdamW(
        ((str(i), weight) for i, weight in enumerate(weights)), lr=0.1, weight_decay=0.3, max_grad_norm=0.5
    )
    assert len(baseline.param_groups) > 1
    reference = torch.optim.AdamW(copies, lr=0.1, weight_decay=0.3, fused=True)
    for _ in range(5):
        for weight, copy in zip(weights[:-1], copies[:-1], strict=True):
            weight.grad = torch.randn_like(weight)
            copy.grad = weight.grad.float()
        torch.nn.utils.clip_grad_norm_(copies, 0.5)
        baseline.step()
        reference.step()
        baseline.zero_grad()
        assert all(weight.grad is None for weight in weights)
    for weight, copy in zip(weights, copies, strict=True):
        torch.testing.assert_close(weight, copy.bfloat16())


def test_models_of_one_seed_are_equal_and_checkpointing_changes_nothing() -> None:
    ids = torch.arange(24).view(2, 12)
    models = [
        build_model(
            SHAPES["tiny"],
            torch.device("cpu"),
            dtype=torch.bfloat16,
            implementation="plain",
            checkpointing=on,
        )
        for on in (True, False)
    ]
    for model in models:
        model(ids, ids + 1).backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert one.dtype == one.grad.dtype == torch.bfloat16
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)


def test_options_are_read_from_the_command_line() -> None:
    assert parse_assignments(["tile_numel=1024", "clip=defer", "betas=(0.9, 0.95)", "numa_bind=False"]) == {
        "tile_numel": 1024,
        "clip": "defer",
        "betas": (0.9, 0.95),
        "numa_bind": False,
    }


def run_script(name: str, json_path: Path, *arguments: str, exit_status: int = 0) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments, "--json", str(json_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.returncode == exit_status, process.stdout + process.stderr
    result: dict[str, Any] = json.loads(json_path.read_text(encoding="utf-8"))
    return result
