"""The scripts run from a shell, on the CPU, and write the JSON that they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def test_training_takes_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, " * 20)
    (tmp_path / "b.txt").write_text("that is the question. " * 20)
    for data in (tmp_path, tmp_path / "a.txt"):
        arguments = ["--mode", "resident", "--steps", "2", "--data", str(data), *TINY_TRAINING]
        assert len(run_script("train.py", tmp_path / "out.json", *arguments)["losses"]) == 2


def test_bench_step_compares_modes(tmp_path: Path) -> None:
    result = run_script(
        "bench_step.py", tmp_path / "out.json",
        "--device", "cpu", "--model", "tiny", "--implementation", "plain", "--seq", "16,32", "--modes",
        "resident,wavefront", "--steps", "5", "--warmup", "3", "--config", "tile_numel=4096", "--config", "ring_slots=2",
    )  # fmt: skip
    assert result["config"] == {"tile_numel": 4096, "ring_slots": 2}
    assert [(run["mode"], run["seq"]) for run in result["runs"]] == [
        ("resident", 16), ("resident", 32), ("wavefront", 16), ("wavefront", 32),
    ]  # fmt: skip
    for run in result["runs"]:
        assert run["status"] == "ok"
        assert len(run["losses"]) == 8
        assert run["max_loss_difference"] < 1e-4
        assert run["step_s"] > 0
        assert run["tokens_per_s"] == pytest.approx(run["seq"] / run["step_s"])
        assert run["share_of_resident"] > 0
        assert run["host_bytes"] > 0
        assert run["pinned_bytes"] == 0


def test_bench_step_records_a_mode_that_fails(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--model", "tiny", "--seq", "16", "--modes", "no-such-mode"]
    result = run_script("bench_step.py", tmp_path / "out.json", *arguments, exit_status=1)
    assert result["runs"][0]["status"] == "error"


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
