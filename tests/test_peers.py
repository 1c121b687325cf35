"""The benchmark of peers, on the CPU: who runs, who is skipped and why, and that all learn the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import bench_peers
import pytest
import torch

TINY = [
    "--model",
    "tiny",
    "--implementation",
    "plain",
    "--seq",
    "32",
    "--device",
    "cpu",
    "--steps",
    "2",
    "--warmup",
    "2",
]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers one after another without a process each, which takes seconds to start."""

    def measure(peer: str, timeout_s: float) -> dict[str, Any]:
        args = bench_peers.parse_arguments()
        args.worker = peer
        return bench_peers.measure_peer(args)

    monkeypatch.setattr(bench_peers, "run_in_subprocess", measure)


def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "peers.json"
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", *TINY, *arguments, "--json", str(path)])
    bench_peers.main()
    made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return made


@pytest.mark.usefixtures("in_this_process")
def test_peers_stand_side_by_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench(
        monkeypatch, tmp_path, "--peers", "resident,fsdp-offload,torchao,wavefront,wavefront+overlap"
    )
    runs = {run["peer"]: run for run in result["runs"]}
    assert runs["torchao"]["status"] == "skipped"
    assert runs["torchao"]["reason"] in capsys.readouterr().out
    for peer in ("resident", "fsdp-offload", "wavefront", "wavefront+overlap"):
        assert runs[peer]["status"] == "ok", runs[peer]
        assert len(runs[peer]["losses"]) == 4
        assert runs[peer]["losses"][-1] < runs[peer]["losses"][0]
        # Fused AdamW on FP32 masters in all of them. FSDP computes in BF16 where the others have FP32 on a CPU.
        assert runs[peer]["losses"] == pytest.approx(runs["resident"]["losses"], abs=0.02)
    assert runs["wavefront+overlap"]["losses"] == runs["wavefront"]["losses"]
    assert runs["resident"]["share_of_resident"] == 1.0
    assert not torch.distributed.is_initialized()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("peer", ["no-such-mode", "wavefront+speed"])
def test_a_peer_that_fails_has_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peer: str) -> None:
    (run,) = bench(monkeypatch, tmp_path, "--peers", peer)["runs"]
    assert run["status"] == "error"
    assert peer in run["reason"]


def test_a_peer_that_dies_or_hangs_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_peers.py"])
    monkeypatch.setattr(bench_peers, "__file__", "/no/such/script.py")
    (run,) = bench_peers.run_in_subprocess("wavefront", 60.0)["runs"]
    assert run["status"] == "error"
    assert run["reason"].startswith("exit status")
    (run,) = bench_peers.run_in_subprocess("wavefront", 1e-9)["runs"]
    assert "none after" in run["reason"]
