"""``bench_step.py`` under torchrun, on two CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_bench_step_under_torchrun(tmp_path: Path) -> None:
    """All modes in one process group; the library's see the same losses, bit for bit."""
    path = tmp_path / "out.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        str(ROOT / "scripts" / "bench_step.py"), "--device", "cpu", "--model", "tiny", "--implementation", "plain",
        "--seq", "16", "--modes", "offload-resident,wavefront,resident", "--steps", "5", "--warmup", "3",
        "--config", "threads=1", "--optimizer", "backend=torch", "--json", str(path),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("figures of rank 0") == 1
    result = json.loads(path.read_text(encoding="utf-8"))
    assert (result["ranks"], result["sharded"]) == (2, True)
    assert result["parameters"] == 131_456
    library, wavefront, torch_itself = result["runs"]
    assert wavefront["bit_equal_losses"]
    assert torch_itself["losses"] == pytest.approx(library["losses"], rel=1e-4)
    assert wavefront["tokens_per_s"] == pytest.approx(2 * 16 / wavefront["step_s"])
