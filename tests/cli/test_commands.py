"""The commands as a user calls them. What takes measurements is kept small; the rest runs in this process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command line's extra is not installed")
pytest.importorskip("rich", reason="the command line's extra is not installed")

from typer.testing import CliRunner

import offload.cli
from offload.cli import here, host_checks, plan_input, scripts, speed_checks
from offload.cli.app import app, run
from offload.cli.bench import BENCHMARKS
from offload.cli.chunks import parameters
from offload.cli.model_shape import ModelShape
from offload.errors import ConfigError
from offload.kernels import jit
from offload.transfer.pinned import mapped_bytes
from tests.training import KERNEL_CACHE

ROOT = Path(__file__).parents[2]
MODEL = ["--layers", "4", "--hidden", "256", "--vocab", "512"]
RATES = ["--kernel-rate", "4", "--link-rate", "48"]


def call(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


def plan_json(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(call("plan", *arguments, "--json", exit_code=exit_code))
    return made


# Plan ---------------------------------------------------------------------------------------------------------------


def test_plan_from_numbers() -> None:
    made = plan_json(*MODEL, *RATES, "--resident-step", "0.5", "--device-budget", "80GiB")
    assert made["model"]["parameters"] == 4 * (4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256) + 2 * 512 * 256 + 256
    assert made["recommended"] == "resident"
    assert {row["mode"] for row in made["modes"]} >= {"resident", "wavefront", "chunked-stream"}
    assert made["modes"][0]["step_s"] == pytest.approx(0.5)
    assert made["modes"][0]["tokens_per_s"] == pytest.approx(8192 / 0.5)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("options", [[], ["--accumulation-steps", "2"], ["--dtype", "fp32"]])
def test_planned_host_memory_is_what_an_optimizer_of_these_moments_plans_and_maps(
    moments: str, options: list[str]
) -> None:
    made = plan_json(*MODEL, "--no-overlap-forward", "--moments", moments, *options)
    (row,) = [each for each in made["modes"] if each["mode"] == "wavefront"]
    dtype = torch.float32 if "fp32" in options else torch.bfloat16
    shape = ModelShape(4, 256, 1024, 512, 2, 2, 128)
    named = [(name, torch.nn.Parameter(torch.zeros(n, dtype=dtype))) for name, n in parameters(shape)]
    assert made["model"]["parameters"] == sum(parameter.numel() for _, parameter in named)
    before = mapped_bytes()
    with offload.AdamW(
        named,
        mode="wavefront",
        accumulation_steps=2 if "--accumulation-steps" in options else 1,
        config=offload.OffloadConfig(moments=moments, kernel_cache_dir=KERNEL_CACHE),
    ) as optimizer:
        assert row["host_bytes"] == optimizer.plan.host_bytes
        mapped = mapped_bytes() - before
        gradients = sum(parameter.nbytes for _, parameter in named)  # of the observed step: not there yet
        sums = 4 * sum(parameter.numel() for _, parameter in named) * ("--accumulation-steps" in options)
        assert mapped == optimizer.host_bytes
        assert row["host_bytes"] == pytest.approx(mapped + gradients + sums, rel=0.01)


def test_plan_of_reduced_moments_is_a_wavefronts() -> None:
    asked = [*MODEL, *RATES, "--resident-step", "0.5"]
    whole = {row["mode"]: row for row in plan_json(*asked)["modes"]}
    made = plan_json(*asked, "--moments", "int8")
    (row,) = made["modes"]
    assert row["mode"] == made["recommended"] == "wavefront"
    assert row["host_bytes"] < whole["wavefront"]["host_bytes"]
    same = ("step_s", "update_s", "device_bytes", "share_of_resident")
    assert {name: row[name] for name in same} == {name: whole["wavefront"][name] for name in same}
    assert "no other mode keeps moments so" in made["reason"]
    assert any("--moments int8" in note for note in made["notes"])
    assert "int8" in call("plan", *asked, "--moments", "int8")


def test_plan_from_a_config(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = [
        "--tokens",
        "16384",
        "--chunked-loss",
        *RATES,
        "--resident-step",
        "1.94",
        "--device-budget",
        "40GiB",
    ]
    made = plan_json(str(tmp_path), *options)
    assert made["model"]["parameters"] == 4_022_468_096
    assert made["recommended"] == "hybrid"
    assert not made["modes"][0]["fits"]
    assert "resident lacks" in made["reason"]
    table = call("plan", str(tmp_path), *options)
    assert "recommended: hybrid" in table
    assert "hybrid: misc.0 comes last and is divided" in table
    assert "4.02 G parameters" in table
    untied = plan_json(str(tmp_path), *options, "--no-tied")  # what is given goes before the file
    assert untied["model"]["parameters"] == 4_022_468_096 + 151_936 * 2560


def test_plan_of_a_hybrid_with_room_for_no_state() -> None:
    """``device_budget`` of the optimizer, beside that of the whole device: the embedding leaves it."""
    options = [*MODEL, *RATES, "--resident-step", "0.5", "--device-budget", "80GiB"]
    free, bound = (plan_json(*options, *more) for more in ([], ["--device-state", "1KiB"]))
    before, after = (
        next(row["device_bytes"] for row in made["modes"] if row["mode"] == "hybrid")
        for made in (free, bound)
    )
    assert after < before


def test_plan_says_when_nothing_fits() -> None:
    made = plan_json(*MODEL, *RATES, "--device-budget", "1MiB", exit_code=1)
    assert made["recommended"] is None
    assert "comes closest" in made["reason"]


GIB = 2**30
QWEN3_4B = [
    "--layers", "36", "--hidden", "2560", "--intermediate", "9728", "--vocab", "151936", "--heads", "32", "--kv-heads", "8",
    "--head-dim", "128", "--tied", "--chunked-loss", "--tokens", "16384",
]  # fmt: skip


@pytest.mark.parametrize(
    ("free", "device", "options", "says", "says_not"),
    [
        (64, 16, [], "GiB free of 100; all modes fit here. No --host-budget was given", "plans for this"),
        (64, 16, ["--host-budget", "64GiB"], "GiB free of 100; all modes fit here", "No --host-budget"),
        (
            50,
            16,
            [],
            "100; wavefront, hybrid would not fit here, and wavefront is recommended: 52.9",
            "ranks",
        ),
        (50, 70, [], "100; wavefront would not fit here. No --host-budget", "recommended"),
        (50, 16, [], "; --host-budget 50.0GiB plans for this one", "with all"),
        (50, 11, ["--ranks", "4"], "not fit here with all 4 ranks, and wavefront is", "fit here,"),
        (50, 11, ["--ranks", "4"], "GiB a rank (3 of 4 ranks would fit)", "fit here,"),
        (50, 11, ["--ranks", "4"], "; --host-budget 12.5GiB plans for this one", "fit here,"),
    ],
)
def test_plan_says_what_host_memory_is_here(
    monkeypatch: pytest.MonkeyPatch, free: int, device: int, options: list[str], says: str, says_not: str
) -> None:
    """The table says what fits the budgets, and without one everything fits."""
    memory = here.HostMemory(100 * GIB, free * GIB)
    monkeypatch.setattr(plan_input, "host_memory", lambda: memory)
    asked = [*QWEN3_4B, *RATES, "--resident-step", "1.94", "--device-budget", f"{device}GiB", *options]
    made = plan_json(*asked)
    assert made["recommended"] == ("resident" if device == 70 else "wavefront")
    assert says in made["notes"][0]
    assert says_not not in made["notes"][0]
    assert made["here"] == {"total_bytes": 100 * GIB, "free_bytes": free * GIB}
    for row in made["modes"]:
        assert row["fits_host_here"] is (row["host_bytes"] * made["run"]["ranks"] <= free * GIB)
    assert says in " ".join(call("plan", *asked).split())


def test_plan_looks_at_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "cgroup_memory_left", lambda: 3 * GIB)
    found = plan_json(*MODEL, *RATES, "--device-budget", "1GiB")["here"]
    assert found["free_bytes"] <= 3 * GIB < found["total_bytes"] + 3 * GIB
    monkeypatch.setattr(here, "cgroup_memory_left", lambda: None)
    assert 0 < here.host_memory().free_bytes <= here.host_memory().total_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks that GPU")
def test_plan_without_a_device_budget_says_what_it_is_for() -> None:
    made = plan_json(*MODEL, *RATES)
    assert any("no GPU here and no --device-budget" in note for note in made["notes"])
    made = plan_json(*MODEL, *RATES, "--device-budget", "1GiB")
    assert not any("--device-budget" in note for note in made["notes"])


def test_plan_without_a_step_times_the_update_alone() -> None:
    made = plan_json(*MODEL, *RATES, "--device-budget", "1GiB")
    assert all(row["step_s"] is None and row["update_s"] > 0 for row in made["modes"])
    assert any("--resident-step" in note for note in made["notes"])


def test_plan_by_the_rate_of_arithmetic() -> None:
    made = plan_json(*MODEL, *RATES, "--device-rate", "100", "--device-budget", "80GiB")
    half = plan_json(*MODEL, *RATES, "--device-rate", "50", "--device-budget", "80GiB")
    assert half["passes"]["backward_s"] == pytest.approx(2 * made["passes"]["backward_s"])
    assert made["modes"][0]["step_s"] > made["passes"]["forward_s"] + made["passes"]["backward_s"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--layers", "4"], "(missing: --hidden, --vocab)"),
        (["plan", *MODEL, "--heads", "0"], "--heads=0"),
        (["plan", *MODEL, "--intermediate", "0"], "intermediate=0"),
        (["plan", *MODEL, "--sequence", "0"], "sequence=0"),
        (["plan", *MODEL, "--pinned-budget", "4XB"], "--pinned-budget: '4XB'"),
        (["plan", *MODEL, *RATES, "--device-rate", "0"], "--device-rate=0"),
        (["plan", *MODEL, *RATES, "--resident-step", "nan"], "--resident-step=nan"),
        (["plan", *MODEL, *RATES, "--device-rate", "9", "--forward-share", "1"], "--forward-share=1"),
        (["plan", *MODEL, "--link-rate", "-1"], "--link-rate=-1"),
        (["plan", *MODEL, "--moments", "fp8"], "moments='fp8'"),
        (["plan", "nowhere/config.json"], "nowhere"),
    ],
)
def test_mistakes_are_one_line_and_status_two(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["offload", *arguments])
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


# Doctor -------------------------------------------------------------------------------------------------------------


def test_doctor_finds_what_there_is() -> None:
    made = json.loads(call("doctor", "--no-measure", "--json"))
    sections = made["sections"]
    assert sections["software"]["offload"]["value"] == offload.__version__
    assert sections["threads"]["budget"]["value"] >= 1
    assert sections["memory"]["total"]["value"] > 0
    assert {"huge pages", "lockable"} <= sections["memory"].keys()
    assert "GPUs" in sections["gpu"]
    assert all(advice["advice"] for advice in made["advice"])


def test_doctor_in_words_marks_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setattr(host_checks, "available_layers", tuple)
    words = call("doctor", "--no-measure")
    assert "! threads, OMP_PROC_BIND" in words
    assert "pip install tbb" in words


@pytest.mark.skipif(jit.jit_disabled(), reason="times compiled kernels")
def test_doctor_measures_the_kernel() -> None:
    findings = {finding.name: finding for finding in speed_checks.speed_findings(budget(), numel=1 << 20)}
    assert findings["host memory"].value > 0
    assert findings["update kernel"].value > 0
    assert findings["vectors"].value in (None, 32, 128, 256, 512)


@pytest.mark.parametrize(
    ("line", "bits"),
    [
        ("\tvsqrtps\t%zmm1, %zmm2", 512),
        ("\tvsqrtps\t%ymm1, %ymm2", 256),
        ("\tsqrtps\t%xmm1, %xmm2", 128),
        ("\tvsqrtss\t%xmm1, %xmm1, %xmm2", 32),
        ("\tfsqrt\tv0.4s, v1.4s", 128),
        ("\tret", None),
    ],
)
def test_vectors_are_read_from_the_assembly(line: str, bits: int | None) -> None:
    assert speed_checks.vector_bits(f"\tmovl\t$1, %eax\n{line}\n") == bits


# Bench, train, start ------------------------------------------------------------------------------------------------


def test_every_benchmark_has_its_script() -> None:
    assert all((scripts.script_folder() / f"bench_{name}.py").exists() for name in BENCHMARKS)
    assert (scripts.script_folder() / "train.py").exists()
    assert "kernel" in call("bench")
    assert "no benchmark" in call("bench", "nothing", exit_code=2)


def test_scripts_are_found_as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a wheel they are a package beside ours."""
    package = tmp_path / "site" / "offload_scripts"
    package.mkdir(parents=True)
    (package / "train.py").touch()
    monkeypatch.setattr(scripts, "__file__", str(tmp_path / "site" / "offload" / "cli" / "scripts.py"))
    monkeypatch.setattr(scripts, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="no_such_package"):
        scripts.script_folder()
    monkeypatch.setattr(scripts, "PACKAGE", "offload_scripts")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert scripts.script_folder() == package


def test_arguments_and_status_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bench_step.py", "train.py"):
        (tmp_path / name).write_text(
            "import json, sys\njson.dump(sys.argv[1:], open(sys.argv[-1], 'w'))\nsys.exit(7)\n",
            encoding="utf-8",
        )
    monkeypatch.setattr(scripts, "script_folder", lambda: tmp_path)
    out = str(tmp_path / "out.json")
    for command in (["bench", "step"], ["train"]):
        call(*command, "--help", "--modes", "a,b", "--json", out, exit_code=7)
        assert json.loads(Path(out).read_text(encoding="utf-8")) == [
            "--help",
            "--modes",
            "a,b",
            "--json",
            out,
        ]


def test_version() -> None:
    assert call("--version").strip() == offload.__version__


def test_a_missing_extra_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "typer" else real(name))
    with pytest.raises(SystemExit, match=r"needs typer, .* pip install 'offload\[cli\]'"):
        offload.cli.main()


def test_python_m_offload_runs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offload", "--version"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == offload.__version__


def budget() -> Any:
    return offload.configure_cpu_optimizer_threads()
