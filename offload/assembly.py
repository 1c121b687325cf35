"""Puts an engine together: plan, threads, transport, backend, stepper, worker.

The only place that knows all the parts; nothing is allocated before the plan has said that it fits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from offload import rates
from offload.agreement import Ranks
from offload.config import OffloadConfig
from offload.distributed import local_shard
from offload.errors import ConfigError, KernelError, ParameterError
from offload.kernels.backend import Backend, Variant
from offload.kernels.device import is_available
from offload.kernels.numba_backend import NumbaBackend
from offload.kernels.rule import KernelRule
from offload.kernels.torch_backend import TorchBackend
from offload.layout import Chunk, Kind, build_chunks
from offload.memory import cgroup_memory_left
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule.conveyor import FixedSlots, FreshSlots
from offload.schedule.device_stepper import DeviceStepper
from offload.schedule.engine import Engine
from offload.schedule.host_stepper import HostStepper
from offload.schedule.hybrid_stepper import HybridStepper
from offload.schedule.plan import ChunkSize, Machine, Plan, Workload, needs_rates, plan
from offload.schedule.policy import Policy
from offload.schedule.stepper import Stepper
from offload.schedule.stream_stepper import NUM_SLOTS, StreamStepper, stream_tile_numel
from offload.schedule.stream_tiles import num_arrays
from offload.schedule.updater import DeviceUpdater, HostUpdater, Updater, make_device_updater
from offload.schedule.worker import Worker
from offload.threads import Budget, bind_current_thread, configure_cpu_optimizer_threads
from offload.trace import VARIABLE, Trace
from offload.transfer.cuda import CudaTransport
from offload.transfer.host import HostTransport
from offload.transfer.inline import InlineTransport
from offload.transfer.ring import Ring
from offload.transfer.transport import Transport

__all__ = ["EARLY_MODES", "HYBRID_CHUNK_NUMEL", "Options", "assemble", "make_transport"]

logger = logging.getLogger(__name__)

NUM_RINGS = 2

HYBRID_THREADS = 0.85
"""Of the thread budget that a hybrid's host kernels use: copies take a part of the memory's bandwidth, and threads that
issue them compete with the kernels' (11 to 13 of 16 cores were the fastest)."""

TRIPS_AHEAD = 2
"""Trips of streamed state that may be under way, for each device buffer. The driver's queues hold about a thousand calls,
and whoever finds one full waits there for the device, with all other threads that use it behind him."""

HYBRID_CHUNK_NUMEL = 32 * 2**20
"""Elements of a hybrid's chunks. Layers of 100 M, a whole one in turn for the host and for the link, left each of them
idle while the other worked: a quarter of the step (8 K tokens on an H200)."""

EARLY_MODES = ("wavefront", "hybrid")
"""Chunks are stepped inside backward."""

STREAM_MODES = ("all-at-once", "chunked-sync", "chunked-stream")
"""State is on the host and is stepped on the device: placement STREAM."""


@dataclass(frozen=True)
class Options:
    """What a front asks for; see the constructors in `optimizer` for the meaning of each."""

    mode: str
    backend: str
    max_grad_norm: float | None
    nonfinite: str
    clip: str
    accumulation_steps: int
    flush_denormals: bool
    config: OffloadConfig
    overlap_forward: bool = False

    @property
    def needs_norm_first(self) -> bool:
        """Whether a step's norm must be known before anything is updated."""
        return self.max_grad_norm is not None or self.nonfinite != "propagate"

    @property
    def speculates(self) -> bool:
        """Whether a wavefront may update before the norm is known."""
        return self.needs_norm_first and self.clip != "defer"

    @property
    def backlog_tiles(self) -> int:
        """Tiles that may wait for the worker."""
        return self.config.num_backlog_tiles(overlaps_forward=self.overlap_forward)

    @property
    def rebalances(self) -> bool:
        """Whether a hybrid's steps correct its shares.

        How far each side is behind at ``step()`` says what to correct, unless it is hidden in the next forward: there the
        plan stands.
        """
        return self.config.stream_share is None and not self.overlap_forward

    @property
    def fused_sums(self) -> bool:
        """Whether updates take the squared sums on their way."""
        return not self.needs_norm_first


def assemble(
    rule: KernelRule, records: Sequence[ParamRecord], masters: Mapping[int, torch.Tensor], options: Options
) -> tuple[Engine, Plan]:
    """An engine over `records`, ready for the first backward. On an error nothing is left behind.

    Raises:
        ParameterError: the parameters lie on several devices.
        MemoryBudgetError: the plan does not fit.
    """
    device = _common_device(records)
    if options.mode == "hybrid" and options.backend != "numba":
        raise ConfigError(
            f"mode='hybrid' with backend={options.backend!r}: chunks on the device and on the host have the same bits "
            "with backend='numba' only; use that, or mode='wavefront'"
        )
    made = _plan(rule, records, options, device)
    logger.info("%s", made)
    policy = Policy(
        mode=made.mode,
        early=made.mode in EARLY_MODES,
        accumulation_steps=options.accumulation_steps,
        max_grad_norm=options.max_grad_norm,
        nonfinite=options.nonfinite,
        clip=options.clip if made.shadow_bytes else "defer",
    )
    config, clock = options.config, StageClock()
    worker = Worker("offload-worker", depth=options.backlog_tiles, timeout_s=config.timeout_s)
    engine: Engine | None = None
    try:
        stepper = _make_stepper(made, device, rule, records, options, worker, clock)
        engine = Engine(
            policy=policy,
            stepper=stepper,
            worker=worker,
            clock=clock,
            ranks=Ranks(config.timeout_s, config.is_rank_local),
            tile_numel=config.tile_numel,
            chunk_by=config.chunk_by,
            chunk_numel=made.chunk_numel,
            departing=stepper if isinstance(stepper, HybridStepper) and options.overlap_forward else None,
            reduced=stepper if rule.is_reduced and isinstance(stepper, HostStepper | HybridStepper) else None,
        )
        engine.add(records, masters)
        if path := os.environ.get(VARIABLE):
            engine.begin_trace(Trace(path, device=device, numbered=True, asked_by=VARIABLE))
    except BaseException:
        if engine is not None:
            engine.close()
        worker.close()
        raise
    return engine, made


def make_transport(device: torch.device, config: OffloadConfig) -> Transport:
    """The transport between `device` and the host."""
    return CudaTransport(device, config.timeout_s) if device.type == "cuda" else HostTransport(device)


def _make_stepper(
    made: Plan,
    device: torch.device,
    rule: KernelRule,
    records: Sequence[ParamRecord],
    options: Options,
    worker: Worker,
    clock: StageClock,
) -> Stepper:
    mode = made.mode
    if mode == "resident" and device.type == "cuda":
        return DeviceStepper(
            device=device,
            updater=_make_updater(device, rule, records, options),
            worker=worker,
            flush_denormals=options.flush_denormals,
            fused_sums=options.fused_sums,
            clock=clock,
            timeout_s=options.config.timeout_s,
        )
    config = options.config
    budget = configure_cpu_optimizer_threads(
        num_threads=config.threads,
        numa_bind=config.numa_bind,
        device=device if device.type == "cuda" else None,
    )
    if mode == "hybrid" and config.threads is None:
        budget = replace(budget, num_threads=max(round(HYBRID_THREADS * budget.num_threads), 1))
    worker.call(lambda: _bind(budget))
    if mode in STREAM_MODES:
        return _make_stream_stepper(mode, device, rule, records, options, worker, clock, budget)
    if mode == "hybrid":
        return _make_hybrid_stepper(made, device, rule, records, options, worker, clock, budget)
    host = _make_host_stepper(made, device, rule, records, options, worker, clock, budget)
    if mode == "wavefront" and options.overlap_forward:
        return HybridStepper(
            host=host,
            stream=None,
            device=None,
            placements=(),
            worker=worker,
            timeout_s=config.timeout_s,
            rebalances=False,
            departs=True,
        )
    return host


def _make_host_stepper(
    made: Plan,
    device: torch.device,
    rule: KernelRule,
    records: Sequence[ParamRecord],
    options: Options,
    worker: Worker,
    clock: StageClock,
    budget: Budget,
) -> HostStepper:
    config, kinds = options.config, {record.kind for record in records}
    speculates = made.shadow_bytes > 0
    return HostStepper(
        transport=clock.watch(make_transport(device, config)),
        backend=_make_backend(rule, kinds, budget, options, speculates=speculates),
        worker=worker,
        config=config,
        fused_sums=options.fused_sums or speculates,
        element_bytes=_element_bytes(kinds),
        clock=clock,
        shadow_bytes=made.shadow_bytes,
        pin_gradients=made.pins_gradients,
        newest_first=options.overlap_forward,
    )


def _make_hybrid_stepper(
    made: Plan,
    device: torch.device,
    rule: KernelRule,
    records: Sequence[ParamRecord],
    options: Options,
    worker: Worker,
    clock: StageClock,
    budget: Budget,
) -> HybridStepper:
    """The three placements. They must agree in every bit, so torch's kernels are no stand-in for ours here."""
    config, on_gpu = options.config, device.type == "cuda"
    host = _make_host_stepper(made, device, rule, records, options, worker, clock, budget)
    num_slots = made.num_slots or NUM_SLOTS
    issuer: Worker | None = None
    try:
        if on_gpu:
            variants = _device_variants(records, options)
            jobs = max(options.backlog_tiles * config.tile_numel // HYBRID_CHUNK_NUMEL, 2)
            issuer = Worker("offload-stream", depth=jobs, timeout_s=config.timeout_s)
            updater: Updater = DeviceUpdater(
                device, rule, flush_denormals=options.flush_denormals, variants=variants
            )
            updater.start()
        else:
            updater = HostUpdater(host.backend, starts=False)
        transport = clock.watch(make_transport(device, config))
        stream = StreamStepper(
            transport=transport,
            slots=FixedSlots(transport, num_slots),
            updater=updater,
            worker=worker,
            stream=torch.cuda.Stream(device) if on_gpu else None,
            tile_numel=config.tile_numel,
            trips_ahead=TRIPS_AHEAD * num_slots,
            flush_denormals=options.flush_denormals,
            fused_sums=options.fused_sums,
            clock=clock,
            issuer=issuer,
            alone=False,
        )
    except BaseException as error:
        host.close()
        if issuer is not None:
            issuer.close()
        if isinstance(error, KernelError):
            raise KernelError(
                f"mode='hybrid' steps on the device with our own kernel, and there is none here ({error}); "
                "use mode='wavefront'"
            ) from error
        raise
    resident = DeviceStepper(
        device=device,
        updater=updater,
        worker=worker,
        flush_denormals=options.flush_denormals,
        fused_sums=options.fused_sums,
        clock=clock,
        timeout_s=config.timeout_s,
        marks=options.overlap_forward,
    )
    return HybridStepper(
        host=host,
        stream=stream,
        device=resident,
        placements=made.placements,
        num_streamed=made.num_streamed,
        worker=worker,
        timeout_s=config.timeout_s,
        rebalances=options.rebalances,
        departs=options.overlap_forward,
    )


def _make_stream_stepper(
    mode: str,
    device: torch.device,
    rule: KernelRule,
    records: Sequence[ParamRecord],
    options: Options,
    worker: Worker,
    clock: StageClock,
    budget: Budget,
) -> StreamStepper:
    """Only chunked-stream has streams: its copies and its updates run on three of their own."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        updater = _make_updater(device, rule, records, options, own_masters=True)
    else:
        updater = HostUpdater(_make_backend(rule, (), budget, options))
    overlaps = mode == "chunked-stream"
    transport = (
        clock.watch(make_transport(device, options.config))
        if overlaps
        else clock.watch(InlineTransport(device, options.config.timeout_s))
    )
    number = NUM_SLOTS if overlaps else 1
    return StreamStepper(
        transport=transport,
        slots=FreshSlots(transport) if mode == "all-at-once" else FixedSlots(transport, number),
        updater=updater,
        worker=worker,
        stream=torch.cuda.Stream(device) if overlaps and on_gpu else None,
        tile_numel=stream_tile_numel(options.config.tile_numel, 1 + len(rule.state_names)),
        trips_ahead=TRIPS_AHEAD * number,
        flush_denormals=options.flush_denormals,
        fused_sums=options.fused_sums,
        clock=clock,
    )


def _make_updater(
    device: torch.device,
    rule: KernelRule,
    records: Sequence[ParamRecord],
    options: Options,
    *,
    own_masters: bool = False,
) -> Updater:
    """`own_masters`: FP32 weights are masters themselves, and no separate weight is written."""
    variants = _variants({record.kind for record in records}, options)
    if own_masters:
        variants = _with_own_masters(variants)
    return make_device_updater(device, rule, flush_denormals=options.flush_denormals, variants=variants)


def _with_own_masters(variants: Sequence[Variant]) -> list[Variant]:
    return [replace(variant, weight=None) if variant.weight == "fp32" else variant for variant in variants]


def _device_variants(records: Sequence[ParamRecord], options: Options) -> list[Variant]:
    """Of a hybrid: streamed FP32 weights are their own masters, those of device chunks are not."""
    variants = _variants({record.kind for record in records}, options)
    return list(dict.fromkeys([*variants, *_with_own_masters(variants)]))


def _make_backend(
    rule: KernelRule, kinds: Collection[Kind], budget: Budget, options: Options, *, speculates: bool = False
) -> Backend:
    if options.backend == "torch":
        return TorchBackend(rule, num_threads=budget.num_threads, flush_denormals=options.flush_denormals)
    return NumbaBackend(
        rule,
        num_threads=budget.num_threads,
        flush_denormals=options.flush_denormals,
        variants=_variants(kinds, options, speculates=speculates),
        cache_dir=options.config.kernel_cache_dir,
    )


def _variants(kinds: Collection[Kind], options: Options, *, speculates: bool = False) -> list[Variant]:
    """What steps will call, as far as it can be foreseen."""
    return [
        Variant(
            grad=kind.grad,  # type: ignore[arg-type]
            weight=kind.weight,  # type: ignore[arg-type]
            sums=options.fused_sums or speculates,
            acc=acc,
            new_state=new_state,
        )
        for kind in sorted(kinds)
        for acc in ([False, True] if options.accumulation_steps > 1 else [False])
        for new_state in ([False, True] if speculates else [False])
    ]


def _bind(budget: Budget) -> None:
    """On the worker, before its team starts and inherits it."""
    bind_current_thread(budget.cpus)


def _common_device(records: Sequence[ParamRecord]) -> torch.device:
    devices = {local_shard(record.param).device: record.name for record in records}
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ParameterError(f"parameters lie on several devices ({listed}); build one optimizer per device")
    device = next(iter(devices), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"parameters on {device.type!r} devices are not supported; use CUDA or the CPU")
    return device


def _element_bytes(kinds: Collection[Kind]) -> int:
    return max((max(kind.grad_bytes, kind.weight_bytes) for kind in kinds), default=2)


def _plan(rule: KernelRule, records: Sequence[ParamRecord], options: Options, device: torch.device) -> Plan:
    """Rates are measured only where the choice depends on them."""
    workload, machine = _workload(rule, records, options), _machine(device, options.config)
    if needs_rates(options.mode, workload, machine):
        threads = configure_cpu_optimizer_threads(
            num_threads=options.config.threads, numa_bind=options.config.numa_bind, device=device
        ).num_threads
        return plan(options.mode, workload, machine, rates.measured(device, threads))
    return plan(options.mode, workload, machine, rates.known(device))


def _workload(rule: KernelRule, records: Sequence[ParamRecord], options: Options) -> Workload:
    kinds = {record.kind for record in records}
    config = options.config
    specs = [record.spec for record in records]
    layout: dict[str, Any] = {"tile_numel": config.tile_numel, "chunk_by": config.chunk_by}
    chunks = build_chunks(specs, **layout)
    parts = build_chunks(specs, **layout, chunk_numel=HYBRID_CHUNK_NUMEL)
    arrays = 1 + len(rule.state_names)
    widest = max((num_arrays(rule, kind.weight) for kind in kinds), default=0)
    return Workload(
        numel=sum(record.numel for record in records),
        state_arrays=arrays,
        moments=rule.moments if rule.is_reduced else "fp32",
        ring_bytes=NUM_RINGS
        * Ring.required_bytes(config.ring_slots, config.tile_numel * _element_bytes(kinds)),
        holds_gradients=options.needs_norm_first,
        gradient_bytes=sum(record.numel * record.kind.grad_bytes for record in records),
        accumulates=options.accumulation_steps > 1,
        weight_bytes=sum(record.numel * record.kind.weight_bytes for record in records),
        own_master_numel=sum(record.numel for record in records if record.kind.weight == "fp32"),
        backlog_bytes=(options.backlog_tiles + config.ring_slots) * config.tile_numel * _element_bytes(kinds),
        largest_gradient_bytes=max((record.numel * record.kind.grad_bytes for record in records), default=0),
        tile_bytes=4 * widest * stream_tile_numel(config.tile_numel, arrays),
        num_slots=NUM_SLOTS,
        chunks=tuple(_chunk_size(chunk) for chunk in chunks),
        parts=tuple(_chunk_size(part) for part in parts),
        part_numel=HYBRID_CHUNK_NUMEL,
        speculates=options.speculates,
        stream_tile_numel=stream_tile_numel(config.tile_numel, arrays),
        tile_numel=config.tile_numel,
        stream_share=config.stream_share,
        rebalances=options.rebalances,
        can_mix=options.backend == "numba" and is_available(),
    )


def _chunk_size(chunk: Chunk) -> ChunkSize:
    first = min((span.param for span in chunk.spans), default=0)
    return ChunkSize(chunk.name, chunk.numel, first, chunk.kind.grad_bytes, chunk.kind.weight_bytes)


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
