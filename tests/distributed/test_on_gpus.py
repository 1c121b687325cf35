"""Two GPUs and NCCL alone: bits, verdicts, streams and contexts. Needs two CUDA devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import offload
from tests.distributed.ranks import Ranks
from tests.distributed.test_checkpoints import restore, states
from tests.distributed.test_hybrid_on_ranks import ends_of_hybrids
from tests.distributed.test_replicated import ddp
from tests.distributed.test_verdicts import counted_collectives
from tests.distributed.training import (
    MODES,
    assert_equal,
    local_bits,
    mesh_of,
    optimizer_over,
    poisoned,
    sharded_decoder,
    state_bits,
    train_beside_reference,
)
from tests.training import Recorder, batches, loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

CYCLES = 20_000_000
"""Of `torch.cuda._sleep`: about 10 ms."""


def backward(model: torch.nn.Module, step: int = 0) -> None:
    ids = batches(step + 1, device="cuda")[step]
    loss_of(model, ids.roll(dist.get_rank(), 1)).backward()


def all_modes(mesh: tuple[int, ...], names: tuple[str, ...], **options: Any) -> None:
    """Each mode beside the reference, with its gradients; every optimizer knows NCCL only."""
    for mode in MODES:
        model = sharded_decoder(mesh_of(mesh, *names, device="cuda"), device="cuda")
        recorder = Recorder(model)
        with optimizer_over(model, mode, backend="numba", **options) as optimizer:
            parts = options.get("accumulation_steps", 1)
            reports = train_beside_reference(model, optimizer, recorder, micro_batches=parts)
            early = mode == "wavefront" and "max_grad_norm" not in options
            assert (reports[-1].early_tiles > 0) == early
            assert all(report.clipped for report in reports) == ("max_grad_norm" in options)


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 3}, {"max_grad_norm": 0.1}])
def test_bits_in_every_mode(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.run(all_modes, 2, (2,), ("shard",), backend="nccl", deadline_s=240.0, **options)


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
def test_bits_on_a_mesh_of_replicas(ranks: Ranks, mesh: tuple[int, int]) -> None:
    """(2, 1): gradients come on FSDP's all-reduce stream."""
    ranks.close()  # in a process that has had another NCCL group before, torch 2.11 crashes in split_group
    ranks.run(all_modes, 2, mesh, ("replicate", "shard"), backend="nccl", deadline_s=240.0)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=str)
def test_hybrids_with_and_without_overlap(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    variants = [options, {"overlap_forward": True, **options}]
    ranks.run(ends_of_hybrids, 2, str(tmp_path), variants, "cuda", backend="nccl", deadline_s=240.0)


def resumed(first: int, last: int, folder: Path, source: bool) -> dict[str, torch.Tensor]:
    model = sharded_decoder(device="cuda")
    options: dict[str, Any] = {"betas": (0.1, 0.2), "eps": 0.1} if source else {}
    with optimizer_over(model, "wavefront", backend="numba", **options) as optimizer:
        if source:
            restore(model, optimizer, folder)
        for step in range(first, last):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        if not source and last < 6:
            offload.save_sharded(states(model, optimizer), folder)
        return local_bits(model, optimizer)


def test_f26_resumed_in_new_processes_on_gpus(ranks: Ranks, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "nccl", "deadline_s": 120.0}
    expected = ranks.run(resumed, 2, 0, 6, tmp_path / "none", False, **options)
    ranks.run(resumed, 2, 0, 3, tmp_path / "saved", False, **options)
    ranks.close()
    actual = ranks.run(resumed, 2, 3, 6, tmp_path / "saved", True, **options)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_equal(ours, theirs)


def skip_with_nccl() -> list[float]:
    norms = []
    for mode in MODES:
        model = sharded_decoder(device="cuda")
        with optimizer_over(model, mode, max_grad_norm=0.1, nonfinite="skip") as optimizer:
            backward(model)
            with counted_collectives() as devices:
                optimizer.step()
            assert devices == ["cuda"]
            optimizer.zero_grad()
            norms.append(optimizer.last_step.grad_norm)
            before = local_bits(model, optimizer)
            with poisoned(model, "layers.1.up.weight", rank=1):
                backward(model, 1)
            optimizer.step()
            assert optimizer.last_step.skipped
            optimizer.zero_grad()
            assert_equal(local_bits(model, optimizer), before)
    return norms


def test_f19_f21_clip_and_skip_with_an_nccl_only_group(ranks: Ranks) -> None:
    first, second = ranks.run(skip_with_nccl, 2, backend="nccl", deadline_s=240.0)
    assert first == second


def delayed(mode: str) -> None:
    """The device is late in every reduction, and the host in nothing: FSDP's streams must be waited for."""
    ends = []
    for delay in (False, True):
        model = sharded_decoder(device="cuda")
        for parameter in model.parameters():
            if delay:
                parameter.register_post_accumulate_grad_hook(lambda _: torch.cuda._sleep(CYCLES))
        with optimizer_over(model, mode, backend="numba") as optimizer:
            for step in range(3):
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
            ends.append(state_bits(model, optimizer))
    assert_equal(ends[1], ends[0])


@pytest.mark.parametrize("mode", ["wavefront", "chunked-stream", "resident"])
def test_f13_late_reductions_change_nothing(ranks: Ranks, mode: str) -> None:
    ranks.run(delayed, 2, mode, backend="nccl", deadline_s=240.0)


def contexts() -> tuple[int, set[int]]:
    """This process, and the processes that have a context on GPU 0, as NVML sees them."""
    model = sharded_decoder(device="cuda")
    with optimizer_over(model, "wavefront", backend="numba") as optimizer:
        for step in range(2):
            backward(model, step)
            optimizer.step()
        dist.barrier()
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        running = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        dist.barrier()
        return os.getpid(), running


def test_no_rank_is_seen_on_another_rank_s_gpu(ranks: Ranks) -> None:
    pytest.importorskip("pynvml")
    ranks.close()  # a process that had been another rank before may have a context there
    (first, running), (second, _) = ranks.run(contexts, 2, backend="nccl")
    if first not in running:
        pytest.skip(f"NVML does not show this container's process ids ({running})")
    assert second not in running


def primary_context_of(device: int) -> bool:
    """Whether this process has made the primary context of `device`; asking makes none."""
    return bool(torch._C._cuda_hasPrimaryContext(device))


def contexts_by_driver() -> list[bool]:
    model = sharded_decoder(device="cuda")
    for mode in MODES:
        with optimizer_over(model, mode, backend="numba") as optimizer:
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
    return [primary_context_of(device) for device in range(2)]


def test_no_primary_context_is_made_on_another_rank_s_gpu(ranks: Ranks) -> None:
    ranks.close()  # as above
    assert ranks.run(contexts_by_driver, 2, backend="nccl") == [[True, False], [False, True]]


def ddp_on_gpus() -> None:
    for mode in ("wavefront", "chunked-stream", "resident"):
        assert ddp(mode, device="cuda") == [0] * 3


def test_ddp_on_gpus(ranks: Ranks) -> None:
    ranks.run(ddp_on_gpus, 2, backend="nccl", deadline_s=240.0)


def cpu_offload_policy() -> None:
    """Shards on the CPU, a mesh of GPUs: the sum must travel over the mesh's device."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    fully_shard(model, mesh=mesh_of((2,), "shard", device="cuda"), offload_policy=CPUOffloadPolicy())
    with optimizer_over(model, "wavefront", max_grad_norm=1e-3) as optimizer:
        for _ in range(2):
            model(torch.ones(2, 16, device="cuda")).square().sum().backward()
            with counted_collectives() as devices:
                optimizer.step()
            assert devices == ["cuda"]
            assert optimizer.last_step.clipped
            optimizer.zero_grad()


def test_f19_shards_of_fsdp_s_cpu_offload(ranks: Ranks) -> None:
    ranks.run(cpu_offload_policy, 2, backend="nccl")


def lost_rank() -> str:
    """Rank 1 does not come to ``step()``: rank 0 has an error by the deadline."""
    model = sharded_decoder(device="cuda")
    optimizer = optimizer_over(model, "wavefront", config={"timeout_s": 5.0})
    backward(model)
    if dist.get_rank() == 0:
        with pytest.raises(offload.PeerError, match=r"did not reach step\(\)"):
            optimizer.step()
    os._exit(0 if dist.get_rank() else 17)  # NCCL is broken now: an orderly end would wait for it


def test_a_rank_that_does_not_come_is_missed_by_the_deadline(ranks: Ranks) -> None:
    assert ranks.run(lost_rank, 2, backend="nccl", may_die=[0, 1], deadline_s=120.0) == [None, None]
