"""How many layers a machine holds, on machines that are made up."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import _layer_plan
import bench_step
import pytest
import torch
from _layer_plan import PROCESS_BYTES, Job, Memory, decide, least, memory_here, most_layers, need_of, refuse
from _shapes import SHAPES

from offload import MemoryBudgetError, OffloadConfig

GIB = 1 << 30
SHAPE = SHAPES["qwen3-30b-a3b"]
MODES = ["resident", "wavefront", "hybrid"]
EIGHT = Job(SHAPE, 65_536, 65_536, ranks=8)
H200 = Memory(host=560 * GIB // 8 - PROCESS_BYTES, device=int(0.9 * 139 * GIB))
PLENTY = Memory(host=10_000 * GIB, device=10_000 * GIB, disk=10_000 * GIB)


def job_of(layers: int, job: Job = EIGHT) -> Job:
    return replace(job, shape=SHAPE.with_sizes(layers))


def fits(layers: int, memory: Memory, job: Job = EIGHT, modes: list[str] = MODES) -> bool:
    return not any(need_of(mode, job_of(layers, job), on_gpu=True).missing(memory) for mode in modes)


def test_a_wavefront_takes_fourteen_bytes_a_parameter_and_its_rings() -> None:
    """Master, two moments, and the gradients of the observed first step."""
    config = OffloadConfig()
    need = need_of("wavefront", EIGHT, on_gpu=True)
    rings = 2 * config.ring_slots * 2 * config.tile_numel
    assert need.host == pytest.approx(14 * 30_532_122_624 // 8 + rings, abs=1 << 20)
    assert need.pinned == pytest.approx(rings, abs=1 << 20)
    assert need.disk == 0


def test_eight_gpus_of_one_host_hold_all_layers_but_not_with_a_checkpoint() -> None:
    assert most_layers(MODES, EIGHT, H200) == 48
    saving = replace(EIGHT, num_saves=2)
    layers = most_layers(MODES, saving, H200)
    assert 20 < layers < 40  # 26 bytes a parameter instead of 14
    assert fits(layers, H200, saving)
    assert not fits(layers + 1, H200, saving)


@pytest.mark.parametrize("host_gib", [20, 40, 67])
def test_host_memory_cuts_at_the_last_layer_that_fits(host_gib: int) -> None:
    memory = replace(PLENTY, host=host_gib * GIB)
    layers = most_layers(["wavefront"], EIGHT, memory)
    assert fits(layers, memory, modes=["wavefront"])
    assert layers == 48 or not fits(layers + 1, memory, modes=["wavefront"])
    by_hand = (host_gib * GIB - GIB // 2) * 8 / 14 - 2 * SHAPE.vocabulary * SHAPE.hidden
    assert layers == min(48, int(by_hand / SHAPE.counted().layer_numel(sparse=True)))


def test_the_mode_that_takes_most_decides() -> None:
    memory = replace(PLENTY, device=40 * GIB)
    assert most_layers(["wavefront"], EIGHT, memory) > most_layers(MODES, EIGHT, memory)
    assert most_layers(MODES, EIGHT, memory) == most_layers(["resident"], EIGHT, memory)


def test_the_disk_counts_where_checkpoints_are_kept() -> None:
    saving = replace(EIGHT, num_saves=1)
    memory = replace(PLENTY, disk=200 * GIB)
    layers = most_layers(MODES, saving, memory)
    assert 14 * SHAPE.with_sizes(layers).counted().numel <= 200 * GIB
    assert 14 * SHAPE.with_sizes(layers + 1).counted().numel > 200 * GIB
    assert most_layers(MODES, EIGHT, memory) == 48


def test_without_a_gpu_everything_is_in_one_memory() -> None:
    job = Job(SHAPES["tiny-moe"], 32, 32)
    need = need_of("wavefront", job, on_gpu=False)
    assert need.device is None
    assert need.host > need_of("wavefront", job, on_gpu=True).host
    assert most_layers(["wavefront"], job, Memory(host=need.host)) == 3
    assert most_layers(["wavefront"], job, Memory(host=need.host - 1)) == 2


def test_too_little_for_one_layer_names_the_missing_bytes() -> None:
    memory = replace(PLENTY, host=GIB)
    need = need_of("wavefront", job_of(1), on_gpu=True)
    with pytest.raises(MemoryBudgetError) as caught:
        most_layers(["wavefront"], EIGHT, memory)
    message = str(caught.value)
    assert f"takes {need.host} bytes" in message
    assert f"there are {GIB} bytes" in message
    assert f"{need.host - GIB} bytes are missing" in message
    for word in ("'wavefront'", "1 layer", "host memory", "--layers auto", "shard over more ranks"):
        assert word in message


def test_a_depth_that_was_asked_for_is_refused_for_host_memory_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run may be meant to show that the device does not hold a mode; a host without memory kills processes."""
    small = replace(PLENTY, device=30 * GIB)
    layers, planned = decide(MODES, EIGHT, small, cuts=False, of=48, says=True)
    printed = capsys.readouterr().out
    assert layers == planned["layers"] == 48
    missing = {need["mode"]: need["missing"] for need in planned["needs"]}
    assert missing["resident"]["device"] > 0
    assert re.search(r"resident .* lacks \d+\.\d+ of device", printed)
    assert "48 of 48 layers" in printed
    with pytest.raises(MemoryBudgetError, match=r"host memory .* bytes are missing"):
        decide(MODES, EIGHT, replace(small, host=30 * GIB), cuts=False, of=48, says=False)


def test_what_is_asked_for_is_cut_to_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    memory = replace(PLENTY, host=30 * GIB)
    layers, planned = decide(MODES, EIGHT, memory, cuts=True, of=48, says=True)
    assert layers == planned["layers"] == most_layers(MODES, EIGHT, memory) < 48
    assert not any(need["missing"] for need in planned["needs"])
    assert f"{layers} of 48 layers" in capsys.readouterr().out
    refuse([need_of(mode, job_of(layers), on_gpu=True) for mode in MODES], memory, layers=layers)


def test_ranks_go_by_the_poorest() -> None:
    assert least([Memory(5, 7, 9), Memory(6, 3, 9)]) == Memory(5, 3, 9)
    assert least([Memory(5), Memory(6)]) == Memory(5)


def test_ranks_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_layer_plan, "cgroup_memory_left", lambda: 4000)
    monkeypatch.setattr(_layer_plan, "PROCESS_BYTES", 100)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    memory = memory_here(torch.device("cpu"), tmp_path / "not" / "there")
    assert (memory.host, memory.device) == (900, None)
    assert memory.disk is not None
    assert memory.disk > 0


def test_an_old_checkpoint_ends_the_script_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_step, "run_in_subprocess", lambda *arguments: pytest.fail("ran"))
    (tmp_path / "wavefront").mkdir()
    monkeypatch.setattr(
        sys,
        "argv",
        ["bench_step.py", "--device", "cpu", "--modes", "wavefront", "--checkpoint", str(tmp_path)],
    )
    with pytest.raises(SystemExit, match="wavefront: there already"):
        bench_step.main()


def test_the_script_refuses_before_it_builds_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_layer_plan, "memory_here", lambda device, folder: Memory(host=1000))
    monkeypatch.setattr(bench_step, "run_in_subprocess", lambda *arguments: pytest.fail("built"))
    path = tmp_path / "out.json"
    for layers in (["--layers", "auto"], []):
        arguments = ["--device", "cpu", "--model", "tiny-moe", "--seq", "16", *layers, "--json", str(path)]
        monkeypatch.setattr(sys, "argv", ["bench_step.py", *arguments])
        with pytest.raises(SystemExit, match=r"bench_step\.py: mode 'resident' .* bytes are missing"):
            bench_step.main()
    assert not path.exists()
