"""``bench_step.py`` under torchrun, on two CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _models import build_model
from _one_mode import make_batch
from _shapes import SHAPES

ROOT = Path(__file__).parents[2]


def test_bench_step_under_torchrun(tmp_path: Path) -> None:
    """All modes in one process group; the library's see the same losses, bit for bit."""
    result, printed = bench_step(
        tmp_path / "out.json", "--model", "tiny", "--implementation", "plain", "--modes",
        "offload-resident,wavefront,resident", "--optimizer", "backend=torch",
    )  # fmt: skip
    assert printed.count("figures of rank 0") == 1
    assert (result["ranks"], result["sharded"]) == (2, True)
    assert result["parameters"] == 131_456
    library, wavefront, torch_itself = result["runs"]
    assert wavefront["bit_equal_losses"]
    assert torch_itself["losses"] == pytest.approx(library["losses"], rel=1e-4)
    assert wavefront["tokens_per_s"] == pytest.approx(2 * 16 / wavefront["step_s"])


def test_experts_under_torchrun(tmp_path: Path) -> None:
    """Sharded by experts, from weights that one process has too; the overlap with the next forward; a sharded checkpoint."""
    modes = ["offload-resident", "wavefront", "hybrid", "resident"]
    result, printed = bench_step(
        tmp_path / "out.json", "--model", "tiny-moe", "--layers", "2", "--modes", ",".join(modes), "--config",
        "tile_numel=4096", "--config", "stream_share=0.5", "--optimizer", "overlap_forward=true",
        "--checkpoint", str(tmp_path / "saved"),
    )  # fmt: skip
    assert (result["ranks"], result["layers"], result["layer_plan"]["of"]) == (2, 2, 3)
    assert printed.count("Before the run: 2 of 3 layers") == 1
    library, wavefront, hybrid, torch_itself = result["runs"]
    assert wavefront["bit_equal_losses"]
    assert hybrid["bit_equal_losses"]
    assert torch_itself["losses"] == pytest.approx(library["losses"], rel=1e-4)
    assert library["losses"][-1] < library["losses"][0] - 0.1
    assert library["losses"][0] == pytest.approx(first_loss(layers=2, length=16), abs=1e-5)
    assert [budget["num_threads"] for budget in result["threads"]] == [1, 1]
    assert list(result["checkpoints"]) == modes[:-1]
    for mode, check in result["checkpoints"].items():
        assert check["bit_equal"], mode
        assert check["losses"] == check["resumed_losses"]
        assert check["losses"] == result["checkpoints"]["wavefront"]["losses"], mode


def first_loss(*, layers: int, length: int) -> float:
    """Of rank 0's batch, by an unsharded model of the same seed."""
    shape = SHAPES["tiny-moe"].with_sizes(layers)
    model = build_model(shape, torch.device("cpu"), dtype=torch.bfloat16)
    loss: float = model(*make_batch(shape.vocabulary, 1, length, 0, torch.device("cpu"))).item()
    return loss


def bench_step(path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What two ranks wrote, and what they printed."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        str(ROOT / "scripts" / "bench_step.py"), "--device", "cpu", "--seq", "16", "--steps", "5", "--warmup", "3",
        "--config", "threads=1", *arguments, "--json", str(path),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding="utf-8")), done.stdout
