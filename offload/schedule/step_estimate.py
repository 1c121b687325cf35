"""How long a whole training step takes in each mode: a roofline with a clock. Pure; docs/performance.md has the formula.

Forward and backward are given; what is added is the update. In a wavefront it runs beside backward: tiles become ready
as gradients arrive, pass the link, the host kernel and the link again, and each of the three works on one tile at a
time. A step ends when the last tile is back; where the next forward overlaps the update, it need not be back before that.

Nothing here is fitted: bytes per element come from the formats, rates from measurements.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.errors import ConfigError
from offload.rates import UPDATE_BYTES, Rates
from offload.schedule.hybrid_plan import BESIDE_KERNELS, BESIDE_LINK
from offload.schedule.mode_costs import Placement, Workload, cost_of

__all__ = ["Arrival", "Passes", "StepEstimate", "estimate_step", "finish_of_wavefront", "passes_of"]

TILE_NUMEL = 8 * 2**20
"""As `OffloadConfig.tile_numel`: finer tiles would end a step earlier by less than a hundredth."""


class Arrival(NamedTuple):
    """A parameter's or layer's gradient: elements on this rank, and when it is complete.

    `at`: share of backward that is over by then, from 0 to 1. `placement`: where it is stepped.
    """

    numel: int
    at: float
    placement: Placement = Placement.HOST


@dataclass(frozen=True)
class Passes:
    """Seconds of forward and of backward (recomputation included) when nothing else goes on."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class StepEstimate:
    """A step, in seconds. `step_s` is `forward_s` + `backward_s` + `exposed_s`."""

    step_s: float
    forward_s: float
    backward_s: float
    exposed_s: float
    """What the update adds: all of it, or of a wavefront what backward does not hide."""

    update_s: float
    """The update alone, hidden or not."""


def passes_of(resident_step_s: float, workload: Workload, rates: Rates, *, forward_share: float) -> Passes:
    """Forward and backward of a machine whose resident step takes `resident_step_s`: the rest of it, divided.

    Args:
        forward_share: of forward in forward and backward together, from 0 to 1.

    Raises:
        ConfigError: the step is shorter than its update alone, or the share is none.
    """
    update_s = cost_of("resident", workload, rates)
    if resident_step_s <= update_s:
        raise ConfigError(
            f"a resident step of {resident_step_s:.3f} s cannot be: its update alone moves device memory for "
            f"{update_s:.3f} s; check the step's time and the rate of device memory"
        )
    if not 0.0 < forward_share < 1.0:
        raise ConfigError(f"forward_share={forward_share} must lie between 0 and 1")
    both = resident_step_s - update_s
    return Passes(forward_share * both, (1.0 - forward_share) * both)


def estimate_step(
    mode: str,
    workload: Workload,
    rates: Rates,
    passes: Passes,
    arrivals: Sequence[Arrival],
    *,
    overlaps_forward: bool = False,
    last_forward: float = 0.0,
) -> StepEstimate:
    """A step in `mode`.

    Args:
        arrivals: in the order of backward; a wavefront needs them, other modes step after backward. A mode that mixes
            placements inside backward is one whose arrivals name them.
        overlaps_forward: of a mode that steps inside backward: then update and both passes overlap, but for the time from
            the last layer's forward, which needs its weights, to the first gradient: the third line of docs/roofline.md.
        last_forward: share of forward from the last layer's on, from 0 to 1.

    Raises:
        ConfigError: a mode that is not known here.
    """
    if mode in ("wavefront", "hybrid"):
        update = finish_of_wavefront([a._replace(at=0.0) for a in arrivals], 0.0, workload, rates)
        if overlaps_forward:
            start = passes.forward_s * last_forward + passes.backward_s * _first(arrivals)
            exposed = max(0.0, start + update - passes.forward_s - passes.backward_s)
        else:
            end = finish_of_wavefront(arrivals, passes.backward_s, workload, rates)
            exposed = max(0.0, end - passes.backward_s)
    else:
        try:
            exposed = update = cost_of(mode, workload, rates)
        except KeyError:
            raise ConfigError(f"mode={mode!r}: no estimate is known for it") from None
    total = passes.forward_s + passes.backward_s + exposed
    return StepEstimate(total, passes.forward_s, passes.backward_s, exposed, update)


def _first(arrivals: Sequence[Arrival]) -> float:
    """When there is a tile's worth to update; a norm alone is not."""
    numel = 0
    for arrival in sorted(arrivals, key=lambda each: each.at):
        numel += arrival.numel
        if numel >= TILE_NUMEL:
            return arrival.at
    return 0.0


# The clock ----------------------------------------------------------------------------------------------------------


class _Job(NamedTuple):
    """One tile: when it is ready, and where it passes for how many seconds."""

    ready_s: float
    route: tuple[tuple[str, float], ...]


def finish_of_wavefront(
    arrivals: Sequence[Arrival], backward_s: float, workload: Workload, rates: Rates
) -> float:
    """Seconds from the start of backward until the last tile is where forward needs it (or backward ends, if later).

    Gradients that wait for room hold backward up (`OffloadConfig.backlog_tiles`); that moves the wait from after
    backward into it and changes nothing here, since the kernel has work all the while.
    """
    speeds = _speeds(arrivals, workload, rates)
    jobs = [
        _Job(backward_s * arrival.at, _route(arrival, numel, workload, rates, speeds))
        for arrival in arrivals
        for numel in _tiles(arrival.numel)
    ]
    return max(backward_s, _simulate(jobs))


def _simulate(jobs: Sequence[_Job]) -> float:
    """When the last job leaves the last station of its route. Each station serves one at a time, first come first served."""
    free: dict[str, float] = {}
    end = 0.0
    events = [(job.ready_s, number, 0) for number, job in enumerate(jobs)]
    heapq.heapify(events)
    while events:
        ready, number, place = heapq.heappop(events)
        if place == len(jobs[number].route):
            end = max(end, ready)
            continue
        station, seconds = jobs[number].route[place]
        free[station] = max(ready, free.get(station, 0.0)) + seconds
        heapq.heappush(events, (free[station], number, place + 1))
    return end


def _tiles(numel: int) -> Iterator[int]:
    for start in range(0, numel, TILE_NUMEL):
        yield min(TILE_NUMEL, numel - start)


class _Speeds(NamedTuple):
    """What is left of the host kernel's rate (elements per second) and of the link's, each way (bytes per second)."""

    host: float
    link: float


def _route(
    arrival: Arrival, numel: int, workload: Workload, rates: Rates, speeds: _Speeds
) -> tuple[tuple[str, float], ...]:
    """Stations of one tile of `numel` elements, and its seconds in each."""
    share = numel / max(workload.numel, 1)
    on_device = share * cost_of("resident", workload, rates)
    if arrival.placement is Placement.DEVICE:
        return (("device", on_device),)
    if arrival.placement is Placement.STREAM:
        state = share * workload.stream_bytes / speeds.link
        return ("to device", state), ("device", on_device), ("to host", state)
    gradient = share * workload.gradient_bytes / speeds.link
    weight = share * workload.weight_bytes / speeds.link
    return ("to host", gradient), ("host", numel / speeds.host), ("to device", weight)


def _speeds(arrivals: Sequence[Arrival], workload: Workload, rates: Rates) -> _Speeds:
    """Beside each other. Host memory is one: gradients that the device writes there and weights that it reads are gone for
    the kernel. Where state is streamed too, the link is busy all the time, and what both then reach was measured; they move
    more bytes together than the kernel does alone, so that memory is no bound for them.
    """
    if not _numel_at(arrivals, Placement.HOST):
        return _Speeds(rates.kernel_numel, rates.duplex_bytes)
    if _numel_at(arrivals, Placement.STREAM):
        return _Speeds(BESIDE_LINK * rates.kernel_numel, BESIDE_KERNELS * rates.duplex_bytes)
    copied = (workload.gradient_bytes + workload.weight_bytes) / max(workload.numel, 1)
    return _Speeds(rates.kernel_numel * UPDATE_BYTES / (UPDATE_BYTES + copied), rates.duplex_bytes)


def _numel_at(arrivals: Sequence[Arrival], placement: Placement) -> int:
    return sum(arrival.numel for arrival in arrivals if arrival.placement is placement)
