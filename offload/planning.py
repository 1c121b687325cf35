"""What the planner is told of parameters and machine, and the plan that it makes of that."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import psutil
import torch

from offload import rates
from offload.config import OffloadConfig
from offload.construction import RATES, Stage, no_stage
from offload.kernels.device import is_available
from offload.kernels.rule import KernelRule
from offload.layout import Chunk, Kind, build_chunks
from offload.memory import cgroup_memory_left
from offload.options import Options
from offload.parameters import ParamRecord
from offload.schedule.device_slots import NUM_SLOTS, stream_tile_numel
from offload.schedule.plan import ChunkSize, Machine, Plan, Workload, needs_rates, plan
from offload.schedule.stream_tiles import num_arrays
from offload.threads import configure_cpu_optimizer_threads
from offload.transfer.ring import Ring

__all__ = ["element_bytes", "make_plan"]

NUM_RINGS = 2


def make_plan(
    rule: KernelRule,
    records: Sequence[ParamRecord],
    options: Options,
    device: torch.device,
    *,
    part_numel: int,
    divide_numel: int,
    stage: Stage = no_stage,
) -> Plan:
    """The plan for `records`. Rates are measured only where the choice depends on them.

    Args:
        part_numel: elements of a hybrid's chunks, at most.
        divide_numel: elements beyond which one of them may be divided between host and link.
        stage: told when rates are being measured.

    Raises:
        MemoryBudgetError: no mode that was asked for fits.
    """
    workload = _workload(rule, records, options, part_numel, divide_numel)
    machine = _machine(device, options.config)
    if needs_rates(options.mode, workload, machine):
        threads = configure_cpu_optimizer_threads(
            num_threads=options.config.threads, numa_bind=options.config.numa_bind, device=device
        ).num_threads
        with stage(RATES):
            measured = rates.measured(device, threads)
        return plan(options.mode, workload, machine, measured)
    return plan(options.mode, workload, machine, rates.known(device))


def element_bytes(kinds: Collection[Kind]) -> int:
    """Of the widest gradient or weight."""
    return max((max(kind.grad_bytes, kind.weight_bytes) for kind in kinds), default=2)


def _workload(
    rule: KernelRule, records: Sequence[ParamRecord], options: Options, part_numel: int, divide_numel: int
) -> Workload:
    config, kinds = options.config, {record.kind for record in records}
    arrays, widest = 1 + len(rule.state_names), element_bytes(kinds)
    stream_tile = stream_tile_numel(config.tile_numel, arrays)
    return Workload(
        numel=sum(record.numel for record in records),
        state_arrays=arrays,
        moments=rule.moments if rule.is_reduced else "fp32",
        ring_bytes=NUM_RINGS * Ring.required_bytes(config.ring_slots, config.tile_numel * widest),
        holds_gradients=options.needs_norm_first,
        gradient_bytes=sum(record.numel * record.kind.grad_bytes for record in records),
        accumulates=options.accumulation_steps > 1,
        weight_bytes=sum(record.numel * record.kind.weight_bytes for record in records),
        own_master_numel=sum(record.numel for record in records if record.kind.weight == "fp32"),
        backlog_bytes=(options.backlog_tiles + config.ring_slots) * config.tile_numel * widest,
        largest_gradient_bytes=max((record.numel * record.kind.grad_bytes for record in records), default=0),
        tile_bytes=4 * max((num_arrays(rule, kind.weight) for kind in kinds), default=0) * stream_tile,
        num_slots=NUM_SLOTS,
        chunks=_chunk_sizes(records, config),
        parts=_chunk_sizes(records, config, part_numel),
        part_numel=part_numel,
        divide_numel=divide_numel,
        speculates=options.speculates,
        stream_tile_numel=stream_tile,
        tile_numel=config.tile_numel,
        stream_share=config.stream_share,
        rebalances=options.rebalances,
        can_mix=options.backend == "numba" and is_available(),
    )


def _chunk_sizes(
    records: Sequence[ParamRecord], config: OffloadConfig, chunk_numel: int | None = None
) -> tuple[ChunkSize, ...]:
    chunks = build_chunks(
        [record.spec for record in records],
        tile_numel=config.tile_numel,
        chunk_by=config.chunk_by,
        chunk_numel=chunk_numel,
    )
    return tuple(_chunk_size(chunk) for chunk in chunks)


def _chunk_size(chunk: Chunk) -> ChunkSize:
    first = min((span.param for span in chunk.spans), default=0)
    return ChunkSize(
        chunk.name, chunk.numel, first, chunk.kind.grad_bytes, chunk.kind.weight_bytes, len(chunk.spans)
    )


def _machine(device: torch.device, config: OffloadConfig) -> Machine:
    return Machine(
        device=device.type,
        free_device_bytes=_free_device_bytes(device) if device.type == "cuda" else None,
        host_limit_bytes=cgroup_memory_left(),
        available_host_bytes=psutil.virtual_memory().available,
        device_budget=config.device_budget,
        host_budget=config.host_budget,
        pinned_budget=config.pinned_budget,
    )


def _free_device_bytes(device: torch.device) -> int:
    """What the driver has left, and what torch's allocator keeps for later."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept
