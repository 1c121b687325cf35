"""Puts an engine together: plan, threads, transport, backend, stepper, worker.

The only place that knows all the parts; nothing is allocated before the plan has said that it fits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import torch

from offload.agreement import Ranks
from offload.config import OffloadConfig
from offload.construction import Construction
from offload.distributed import local_shard
from offload.errors import ConfigError, KernelError, ParameterError
from offload.kernels.rule import KernelRule
from offload.options import EARLY_MODES, STREAM_MODES, Options
from offload.parameters import ParamRecord
from offload.parts import Parts, make_backend, make_hybrid_updater, make_slab_maker, make_updater
from offload.planning import element_bytes, make_plan
from offload.report import StageClock
from offload.schedule.backlog import RUN_AHEAD
from offload.schedule.backward_room import BackwardRoom, Queue
from offload.schedule.device_slots import NUM_SLOTS, FixedSlots, FreshSlots, stream_tile_numel
from offload.schedule.device_stepper import DeviceStepper
from offload.schedule.engine import Engine
from offload.schedule.host_stepper import HostStepper
from offload.schedule.hybrid_stepper import HybridStepper
from offload.schedule.mode_costs import Placement
from offload.schedule.plan import Plan
from offload.schedule.policy import Policy
from offload.schedule.stepper import Stepper
from offload.schedule.stream_stepper import StreamStepper
from offload.schedule.updater import HostUpdater, Updater
from offload.schedule.worker import Worker
from offload.threads import Budget, bind_current_thread, configure_cpu_optimizer_threads
from offload.trace import VARIABLE, Trace
from offload.transfer.cuda import CudaTransport
from offload.transfer.host import HostTransport
from offload.transfer.inline import InlineTransport
from offload.transfer.transport import Transport
from offload.undo import Undo

__all__ = ["DIVIDED_NUMEL", "HYBRID_CHUNK_NUMEL", "assemble", "make_transport"]

logger = logging.getLogger(__name__)

TRIPS_AHEAD = 2
"""Trips of streamed state that may be under way, for each device buffer. The driver's queues hold about a thousand calls,
and whoever finds one full waits there for the device, with all other threads that use it behind him."""

HYBRID_CHUNK_NUMEL = 32 * 2**20
"""Elements of a hybrid's chunks. Layers of 100 M, a whole one in turn for the host and for the link, left each of them
idle while the other worked: a quarter of the step (8 K tokens on an H200)."""

DIVIDED_NUMEL = 2 * HYBRID_CHUNK_NUMEL
"""Elements beyond which the chunk that backward completes last is divided between the host and the link: a tied embedding of
389 M took the host 113 ms, with nothing else to do for the link and the next forward waiting (32 K tokens on an H200)."""


def assemble(
    rule: KernelRule,
    records: Sequence[ParamRecord],
    masters: Mapping[int, torch.Tensor],
    options: Options,
    construction: Construction,
) -> tuple[Engine, Plan]:
    """An engine over `records`, ready for the first backward. On an error nothing is left behind.

    Args:
        construction: times what takes long.

    Raises:
        ParameterError: the parameters lie on several devices.
        MemoryBudgetError: the plan does not fit.
    """
    device = _common_device(records)
    _check_backend(options)
    made = make_plan(
        rule,
        records,
        options,
        device,
        part_numel=HYBRID_CHUNK_NUMEL,
        divide_numel=DIVIDED_NUMEL,
        stage=construction.stage,
    )
    logger.info("%s", made)
    policy, clock = _make_policy(made, options), StageClock(construction)
    with Undo() as undo:
        worker = undo.add(
            Worker(
                "offload-worker",
                depth=options.backlog_tiles,
                timeout_s=options.config.timeout_s,
                run_ahead=RUN_AHEAD,
            )
        )
        parts = Parts(made, device, rule, records, options, worker, clock, undo, masters.keys())
        engine = undo.hand_over(_make_engine(parts, policy))
        engine.add(records, masters)
        if path := os.environ.get(VARIABLE):
            engine.begin_trace(Trace(path, device=device, numbered=True, asked_by=VARIABLE))
    return engine, made


def make_transport(device: torch.device, config: OffloadConfig) -> Transport:
    """The transport between `device` and the host."""
    return CudaTransport(device, config.timeout_s) if device.type == "cuda" else HostTransport(device)


# Engine -------------------------------------------------------------------------------------------------------------


def _common_device(records: Sequence[ParamRecord]) -> torch.device:
    devices = {local_shard(record.param).device: record.name for record in records}
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ParameterError(f"parameters lie on several devices ({listed}); build one optimizer per device")
    device = next(iter(devices), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"parameters on {device.type!r} devices are not supported; use CUDA or the CPU")
    return device


def _check_backend(options: Options) -> None:
    if options.mode == "hybrid" and options.backend != "numba":
        raise ConfigError(
            f"mode='hybrid' with backend={options.backend!r}: chunks on the device and on the host have the same bits "
            "with backend='numba' only; use that, or mode='wavefront'"
        )


def _make_policy(made: Plan, options: Options) -> Policy:
    return Policy(
        mode=made.mode,
        early=made.mode in EARLY_MODES,
        accumulation_steps=options.accumulation_steps,
        max_grad_norm=options.max_grad_norm,
        nonfinite=options.nonfinite,
        clip=options.clip if made.shadow_bytes else "defer",
    )


def _make_engine(parts: Parts, policy: Policy) -> Engine:
    config, stepper = parts.config, _make_stepper(parts)
    overlaps, is_reduced = parts.options.overlap_forward, parts.rule.is_reduced
    return Engine(
        policy=policy,
        stepper=stepper,
        worker=parts.worker,
        clock=parts.clock,
        ranks=Ranks(config.timeout_s, config.is_rank_local, config.rank_local),
        tile_numel=config.tile_numel,
        chunk_by=config.chunk_by,
        chunk_numel=parts.made.chunk_numel,
        overlaps=overlaps,
        departing=stepper if overlaps and isinstance(stepper, HybridStepper) else None,
        reduced=stepper if is_reduced and isinstance(stepper, HostStepper | HybridStepper) else None,
    )


# Steppers -----------------------------------------------------------------------------------------------------------


def _make_stepper(parts: Parts) -> Stepper:
    mode = parts.made.mode
    if mode == "resident" and parts.on_gpu:
        return _make_device_stepper(parts, make_updater(parts))
    budget = configure_cpu_optimizer_threads(
        num_threads=parts.config.threads,
        numa_bind=parts.config.numa_bind,
        device=parts.device if parts.on_gpu else None,
    )
    parts.worker.call(lambda: _bind(budget))
    if mode in STREAM_MODES:
        return _make_stream_stepper(parts, budget)
    if mode == "hybrid":
        return _make_hybrid_stepper(parts, budget)
    host = _make_host_stepper(parts, budget)
    if mode == "wavefront" and parts.options.overlap_forward:
        return HybridStepper(
            host=host,
            stream=None,
            device=None,
            placements=(),
            worker=parts.worker,
            timeout_s=parts.config.timeout_s,
            rebalances=False,
            departs=True,
            room=_make_room(parts),
        )
    return host


def _bind(budget: Budget) -> None:
    """On the worker, before its team starts and inherits it."""
    bind_current_thread(budget.cpus)


def _make_host_stepper(parts: Parts, budget: Budget) -> HostStepper:
    kinds = parts.kinds
    stepper = HostStepper(
        transport=_watched_transport(parts),
        slabs=make_slab_maker(parts, budget),
        backend=make_backend(parts, budget, kinds),
        worker=parts.worker,
        config=parts.config,
        fused_sums=parts.options.fused_sums or parts.speculates,
        element_bytes=element_bytes(kinds),
        clock=parts.clock,
        shadow_bytes=parts.made.shadow_bytes,
        pin_gradients=parts.made.pins_gradients,
        newest_first=parts.options.overlap_forward,
    )
    return parts.undo.add(stepper)


def _make_device_stepper(parts: Parts, updater: Updater, *, marks: bool = False) -> DeviceStepper:
    stepper = DeviceStepper(
        device=parts.device,
        updater=updater,
        worker=parts.worker,
        flush_denormals=parts.options.flush_denormals,
        fused_sums=parts.options.fused_sums,
        clock=parts.clock,
        timeout_s=parts.config.timeout_s,
        marks=marks,
    )
    return parts.undo.add(stepper)


def _make_stream_stepper(parts: Parts, budget: Budget) -> StreamStepper:
    """Only chunked-stream has streams: its copies and its updates run on three of their own."""
    mode, config, on_gpu = parts.made.mode, parts.config, parts.on_gpu
    updater: Updater
    if on_gpu:
        updater = make_updater(parts, own_masters=True)
    else:
        updater = HostUpdater(make_backend(parts, budget))
        parts.worker.call(updater.start)
    overlaps = mode == "chunked-stream"
    transport = (
        _watched_transport(parts)
        if overlaps
        else parts.clock.watch(InlineTransport(parts.device, config.timeout_s))
    )
    number = NUM_SLOTS if overlaps else 1
    stepper = StreamStepper(
        transport=transport,
        slabs=make_slab_maker(parts, budget),
        slots=FreshSlots(transport) if mode == "all-at-once" else FixedSlots(transport, number),
        updater=updater,
        worker=parts.worker,
        stream=torch.cuda.Stream(parts.device) if overlaps and on_gpu else None,
        tile_numel=stream_tile_numel(config.tile_numel, 1 + len(parts.rule.state_names)),
        trips_ahead=TRIPS_AHEAD * number,
        flush_denormals=parts.options.flush_denormals,
        fused_sums=parts.options.fused_sums,
        clock=parts.clock,
    )
    return parts.undo.add(stepper)


def _watched_transport(parts: Parts) -> Transport:
    return parts.clock.watch(parts.undo.add(make_transport(parts.device, parts.config)))


# The three placements of a hybrid -----------------------------------------------------------------------------------


def _make_hybrid_stepper(parts: Parts, budget: Budget) -> HybridStepper:
    """They must agree in every bit, so torch's kernels are no stand-in for ours here."""
    host = _make_host_stepper(parts, budget)
    issuer: Worker | None = None
    updater: Updater = HostUpdater(host.backend)  # which the host's stepper starts
    if parts.on_gpu:
        issuer = _make_issuer(parts)
        updater = _make_hybrid_updater(parts)
    stream = _make_hybrid_stream(parts, budget, updater, issuer)
    return HybridStepper(
        host=host,
        stream=stream,
        device=_make_device_stepper(parts, updater, marks=parts.options.overlap_forward),
        placements=parts.made.placements,
        num_streamed=parts.made.num_streamed,
        divisions=parts.made.divisions,
        worker=parts.worker,
        timeout_s=parts.config.timeout_s,
        rebalances=parts.options.rebalances,
        departs=parts.options.overlap_forward,
        room=_make_room(parts, issuer) if parts.options.overlap_forward else None,
    )


def _make_hybrid_updater(parts: Parts) -> Updater:
    try:
        return make_hybrid_updater(parts)
    except KernelError as error:
        raise KernelError(
            f"mode='hybrid' steps on the device with our own kernel, and there is none here ({error}); "
            "use mode='wavefront'"
        ) from error


def _make_room(parts: Parts, issuer: Worker | None = None) -> BackwardRoom | None:
    """Two queues have half of it each: which one is the longer changes within a step."""
    if not parts.on_gpu:
        return None
    unit = parts.config.tile_numel * element_bytes(parts.kinds)
    queues = [Queue(parts.worker, unit, 1.0)]
    if issuer is not None:
        queues = [
            Queue(parts.worker, unit, 0.5),
            Queue(issuer, _streamed_numel(parts.made) * element_bytes(parts.kinds), 0.5),
        ]
    return BackwardRoom(lambda: torch.cuda.memory_allocated(parts.device), queues)


def _streamed_numel(made: Plan) -> int:
    """Elements of the largest job that may wait for the stream's thread: a chunk's, and a chunk may be one parameter of any
    size. A divided one comes last, and is one job."""
    streamed = [c.numel for c in made.chunks if c.placement is Placement.STREAM and not c.host_numel]
    return max([HYBRID_CHUNK_NUMEL, *streamed])


def _make_issuer(parts: Parts) -> Worker:
    """The thread of streamed chunks, which issues their copies and launches; without a GPU the worker does both."""
    jobs = max(parts.options.backlog_tiles * parts.config.tile_numel // HYBRID_CHUNK_NUMEL, 2)
    return parts.undo.add(Worker("offload-stream", depth=jobs, timeout_s=parts.config.timeout_s))


def _make_hybrid_stream(
    parts: Parts, budget: Budget, updater: Updater, issuer: Worker | None
) -> StreamStepper:
    transport, num_slots = _watched_transport(parts), parts.made.num_slots or NUM_SLOTS
    if isinstance(transport, CudaTransport):
        transport.take_turns()  # with backward's own copies, and with the host's gradients and weights
    stepper = StreamStepper(
        transport=transport,
        slabs=make_slab_maker(parts, budget),
        slots=FixedSlots(transport, num_slots),
        updater=updater,
        worker=parts.worker,
        stream=torch.cuda.Stream(parts.device) if parts.on_gpu else None,
        tile_numel=parts.config.tile_numel,
        trips_ahead=TRIPS_AHEAD * num_slots,
        flush_denormals=parts.options.flush_denormals,
        fused_sums=parts.options.fused_sums,
        clock=parts.clock,
        issuer=issuer,
        alone=False,
        newest_first=parts.options.overlap_forward,
    )
    return parts.undo.add(stepper)
