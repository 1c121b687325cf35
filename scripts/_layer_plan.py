"""Whether a run fits this machine, said before anything of the model exists, and how many layers do.

What a mode takes comes from the library's planner and its estimate of device memory (docs/planner.md,
docs/performance.md); here it is held against what one rank may have. The functions below `memory_here` are pure.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from _baseline import BUCKET_NUMEL
from _measure import GIB, format_table, in_gib
from _optimizers import ALONE, BASELINE, LIBRARY_RESIDENT, NOT_OURS
from _shapes import DecoderShape

from offload import MemoryBudgetError, OffloadConfig
from offload.cli.workload import Run, activations_of, workload_of
from offload.memory import cgroup_memory_left
from offload.schedule.memory_estimate import Activations, device_peak_bytes
from offload.schedule.mode_costs import PLACEMENTS, Machine, Needs, Placement, Workload
from offload.schedule.plan import Plan, plan

PROCESS_BYTES = 3 * GIB
"""Host memory of a rank beside the optimizer's: Python, torch, CUDA, NCCL. 1.6 GiB were measured on one GPU."""

DEVICE_SHARE = 0.9
"""Of the free device memory that allocations may reach: the allocator reserves 5 to 12 % more than is allocated."""

SNAPSHOT_BYTES = 12
"""Host memory per element of a state dict: master and moments, copied."""

SAVED_BYTES = 14
"""The same with the weight: what a checkpoint has on the disk."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank may take; None: there is no device of its own, no checkpoint. `disk`: of all ranks together."""

    host: int
    device: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class Job:
    """What the ranks will do, as far as memory goes. `tokens`: of the longest batch of one rank; `num_saves`:
    checkpoints that will lie on the disk."""

    shape: DecoderShape
    tokens: int
    sequence: int
    ranks: int = 1
    holds_gradients: bool = False
    num_saves: int = 0
    overlaps_forward: bool = False
    config: OffloadConfig = field(default_factory=OffloadConfig)


@dataclass(frozen=True)
class Need:
    """What one mode takes: bytes of one rank, `disk` of all."""

    mode: str
    host: int
    device: int | None
    pinned: int
    disk: int = 0

    def missing(self, memory: Memory) -> dict[str, int]:
        """What `memory` lacks, by kind; empty where the mode fits."""
        pairs = {
            "host": (self.host, memory.host),
            "device": (self.device, memory.device),
            "disk": (self.disk, memory.disk),
        }
        return {
            name: need - there
            for name, (need, there) in pairs.items()
            if need is not None and there is not None and need > there
        }


# What there is ----------------------------------------------------------------------------------------------


def memory_here(device: torch.device, folder: Path | None) -> Memory:
    """What this rank may take now, beside the other ranks of this host."""
    limits = (psutil.virtual_memory().available, cgroup_memory_left())
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = min(limit for limit in limits if limit is not None) // ranks - PROCESS_BYTES
    free = int(DEVICE_SHARE * _free_device_bytes(device)) if device.type == "cuda" else None
    return Memory(host, free, None if folder is None else _free_disk_bytes(folder))


def memory_of_children(device: torch.device, folder: Path | None) -> Memory:
    """`memory_here`, seen by a process that ends at once: a CUDA context of this one would stay beside its children's."""
    if device.type != "cuda":
        return memory_here(device, folder)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(memory_here, device, folder).result()


def least(memories: Sequence[Memory]) -> Memory:
    """What every rank has: all must come to the same result."""

    def smallest(name: str) -> int | None:
        values = [getattr(memory, name) for memory in memories]
        return None if None in values else min(values)

    host = smallest("host")
    assert host is not None
    return Memory(host, smallest("device"), smallest("disk"))


def _free_device_bytes(device: torch.device) -> int:
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def _free_disk_bytes(folder: Path) -> int:
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free


# What a mode takes ------------------------------------------------------------------------------------------


def need_of(mode: str, job: Job, *, on_gpu: bool) -> Need:
    """What `mode` takes on each rank, by the library's planner."""
    backlog = job.config.num_backlog_tiles(overlaps_forward=job.overlaps_forward)
    config = replace(job.config, backlog_tiles=backlog)
    run = Run(
        job.shape.counted(),
        job.tokens,
        job.sequence,
        ranks=job.ranks,
        chunked_loss=True,
        holds_gradients=job.holds_gradients,
    )
    workload, activations = workload_of(run, config), activations_of(run)
    # auto takes what fits, and a wavefront at the least.
    name = {BASELINE: "resident", LIBRARY_RESIDENT: "resident", ALONE: "wavefront", "auto": "wavefront"}.get(
        mode, mode
    )
    made = plan(name, workload, _unlimited(on_gpu=on_gpu))
    peak = _peak_bytes(made, workload, activations)
    saves = job.num_saves > 0 and mode not in NOT_OURS
    host = made.host_bytes + SNAPSHOT_BYTES * workload.numel * saves
    disk = SAVED_BYTES * job.shape.counted().numel * job.num_saves
    if not on_gpu:  # all in one memory, and activations are FP32
        return Need(mode, host + 2 * peak - workload.weight_bytes, None, 0, disk)
    if mode == BASELINE:
        peak += 4 * min(BUCKET_NUMEL, workload.numel)  # gradients widened
    return Need(mode, host, peak, made.pinned_bytes, disk)


def _unlimited(*, on_gpu: bool) -> Machine:
    """A machine on which every plan can be made; what it takes is compared afterwards."""
    return Machine(device="cuda" if on_gpu else "cpu", free_device_bytes=None, available_host_bytes=1 << 62)


def _peak_bytes(made: Plan, workload: Workload, activations: Activations) -> int:
    gradients = max(made.peak_device_bytes - made.device_bytes - workload.weight_bytes, 0)
    needs = Needs(made.device_bytes, made.host_bytes, made.pinned_bytes, gradients)
    # Of mixed placements too, gradients leave in backward.
    placement = PLACEMENTS.get(made.mode, Placement.HOST)
    return device_peak_bytes(placement, needs, workload, activations)


# What fits --------------------------------------------------------------------------------------------------


def decide(
    modes: Sequence[str], job: Job, memory: Memory, *, cuts: bool, of: int, says: bool
) -> tuple[int, dict[str, Any]]:
    """The number of layers to run, and the plan as numbers; printed too if `says`.

    Args:
        cuts: whether the shape's layers may be cut to what fits. Else they are run where host memory and disk hold them;
            that the device does not is only said: a run may be meant to show it.
        of: layers of the whole model.

    Raises:
        MemoryBudgetError: too little memory; names the missing bytes.
    """
    layers = most_layers(modes, job, memory) if cuts else job.shape.num_layers
    job = replace(job, shape=job.shape.with_sizes(layers))
    needs = needs_of_all(modes, job, on_gpu=memory.device is not None)
    if says:
        print_plan(needs, memory, layers=layers, of=of)
    if not cuts:
        refuse(needs, memory, layers=layers, kinds=("host", "disk"))
    return layers, as_json(needs, memory, layers=layers, of=of)


def needs_of_all(modes: Sequence[str], job: Job, *, on_gpu: bool) -> list[Need]:
    """`need_of` each mode, in order."""
    return [need_of(mode, job, on_gpu=on_gpu) for mode in modes]


def most_layers(modes: Sequence[str], job: Job, memory: Memory) -> int:
    """The largest number of layers, up to the shape's own, with which all modes fit.

    Raises:
        MemoryBudgetError: not even one does; names the missing bytes.
    """
    for layers in range(job.shape.num_layers, 0, -1):
        cut = replace(job, shape=job.shape.with_sizes(num_layers=layers))
        needs = needs_of_all(modes, cut, on_gpu=memory.device is not None)
        if not any(need.missing(memory) for need in needs):
            return layers
    refuse(needs, memory, layers=1)
    raise AssertionError("one layer neither fits nor lacks anything")


def refuse(needs: Sequence[Need], memory: Memory, *, layers: int, kinds: Sequence[str] | None = None) -> None:
    """Raise where a mode does not fit.

    Args:
        kinds: of memory that are looked at; None: all.

    Raises:
        MemoryBudgetError: names the mode, what it takes, what there is and the missing bytes.
    """
    has = asdict(memory)
    for need in needs:
        for kind, missing in need.missing(memory).items():
            if kinds is not None and kind not in kinds:
                continue
            takes = getattr(need, kind)
            raise MemoryBudgetError(
                f"mode {need.mode!r} with {layers} layer(s) takes {takes} bytes ({in_gib(takes)} GiB) of {kind} memory "
                f"{_whose(kind)}, and there are {has[kind]} bytes ({in_gib(has[kind])} GiB): {missing} bytes are missing. "
                "Take fewer layers (--layers auto: as many as fit), shard over more ranks or hosts, or fewer tokens"
            )


def print_plan(needs: Sequence[Need], memory: Memory, *, layers: int, of: int) -> None:
    """What each mode takes and what there is."""
    columns = ("host", "device", "disk")
    rows = [
        [
            need.mode,
            *(in_gib(getattr(need, name)) for name in columns),
            in_gib(need.pinned),
            _verdict(need, memory),
        ]
        for need in needs
    ]
    rows.append(["there is", *(in_gib(getattr(memory, name)) for name in columns), "-", ""])
    print(f"\nBefore the run: {layers} of {of} layers, GiB of one rank (disk: of all)\n")
    print(format_table(("mode", *columns, "pinned", "fits"), rows) + "\n", flush=True)


def as_json(needs: Sequence[Need], memory: Memory, *, layers: int, of: int) -> dict[str, Any]:
    """The same as numbers."""
    rows: list[Mapping[str, Any]] = [{**asdict(need), "missing": need.missing(memory)} for need in needs]
    return {"layers": layers, "of": of, "memory": asdict(memory), "needs": rows}


def _verdict(need: Need, memory: Memory) -> str:
    lacks = [f"lacks {in_gib(number)} of {kind}" for kind, number in need.missing(memory).items()]
    return ", ".join(lacks) or "yes"


def _whose(kind: str) -> str:
    return "for all ranks" if kind == "disk" else "on each rank"
