"""The planner: which mode, and why. Pure: facts in, a `Plan` out.

What each mode needs and costs stands in `mode_costs`. A request is checked against the budgets, ``"auto"`` takes the best
that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from offload.errors import MemoryBudgetError
from offload.rates import Rates
from offload.schedule.hybrid_plan import (
    Balance,
    Division,
    at_share,
    balance,
    device_room,
    divide,
    hybrid_needs,
    num_stream_slots,
    place,
)
from offload.schedule.mode_costs import (
    PLACEMENTS,
    ChunkSize,
    Machine,
    Needs,
    Placement,
    Workload,
    cost_of,
    gib,
    needs_of,
)

__all__ = [
    "ChunkPlan",
    "ChunkSize",
    "Machine",
    "Placement",
    "Plan",
    "Workload",
    "draft",
    "needs_rates",
    "plan",
]

DEVICE_SHARE = 0.5
"""Of the free device memory that optimizer state may take where no budget is given: activations need the rest."""

HIDDEN_SHARE = 0.5
"""Of an update on the host that is taken to hide behind backward, where backward's length is not known."""


SPARE_SHARE = 0.1
"""Of a hybrid's state that is pinned beyond what rates say should be streamed: then steps can correct them either way."""

UNMEASURED_SHARE = 0.5
"""Of a hybrid's state that is streamed where neither the user nor rates say how much."""

HYBRID_GAIN = 0.9
"""A hybrid pins state and takes device memory: `auto` chooses it only if it exposes less than this part of the next best."""


class ChunkPlan(NamedTuple):
    """Where a chunk goes. `host_numel`: of a streamed one that is divided, elements from its front that the host steps."""

    name: str
    numel: int
    placement: Placement
    host_numel: int = 0

    def words(self, *, on_cpu: bool) -> str:
        """Where its state is and who steps it."""
        if self.host_numel:
            there = "in buffers" if on_cpu else "on the device"
            return f"state on the host, stepped there and {there}, each its own tiles"
        return self.placement.words_without_gpu() if on_cpu else self.placement.words()


@dataclass(frozen=True)
class Plan:
    """The chosen mode, what it takes (bytes), and the reasons in plain words. ``str()`` is readable.

    `chunk_numel`: elements beyond which layers are cut into several of `chunks`; None: they are not. `stream_share`,
    `num_slots`: of a hybrid, the share of host state that is streamed and the device buffers for it. `num_streamed`: of its
    chunks placed as STREAM and not divided, those that are streamed at first, where the balance may move either way; None:
    all.
    `on_cpu`: there is no device; what would be on one is in host memory, too, and nothing is pinned.
    `device_bytes`: what the optimizer itself takes there, in `step()` at the most. `peak_device_bytes`: the same with
    weights and the gradients that are there at that time, and with nothing else (activations are not known). `step_s`:
    expected seconds of the update, hidden or not; None where rates were not measured. `shadow_bytes`, `pins_gradients`:
    what a wavefront has for steps whose verdict comes after their updates.
    """

    mode: str
    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    reasons: tuple[str, ...]
    peak_device_bytes: int = 0
    step_s: float | None = None
    chunks: tuple[ChunkPlan, ...] = ()
    chunk_numel: int | None = None
    shadow_bytes: int = 0
    pins_gradients: bool = False
    stream_share: float | None = None
    num_slots: int = 0
    num_streamed: int | None = None
    on_cpu: bool = False

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of the chunks, in order."""
        return tuple(chunk.placement for chunk in self.chunks)

    @property
    def divisions(self) -> dict[int, int]:
        """Of the chunks that host and link step together, by index: elements from the front that are the host's."""
        return {index: chunk.host_numel for index, chunk in enumerate(self.chunks) if chunk.host_numel}

    def as_stepped(self, placements: Mapping[int, Placement]) -> Plan:
        """The plan with chunks where they are stepped now; memory is what it was."""
        chunks = tuple(
            chunk._replace(placement=placements.get(index, chunk.placement))
            for index, chunk in enumerate(self.chunks)
        )
        moved = sum(now != then for now, then in zip(chunks, self.chunks, strict=True))
        if not moved:
            return self
        words = f"now: {moved} chunks that could be streamed are stepped on the host"
        return replace(self, chunks=chunks, reasons=(*self.reasons, words))

    def __str__(self) -> str:
        amounts = (
            f"host {gib(self.host_bytes)} (no GPU: all is in host memory, nothing is pinned)"
            if self.on_cpu
            else f"device {gib(self.device_bytes)}, host {gib(self.host_bytes)}, pinned {gib(self.pinned_bytes)}"
        )
        lines = [f"mode {self.mode}: {amounts}", *(f"  - {reason}" for reason in self.reasons)]
        if self.peak_device_bytes:
            lines.append(
                f"  - expected on the device: {gib(self.peak_device_bytes)} with weights and gradients, "
                "activations not counted"
            )
        if self.step_s is not None:
            lines.append(f"  - expected update: {1e3 * self.step_s:.0f} ms a step")
        counts = Counter(chunk.words(on_cpu=self.on_cpu) for chunk in self.chunks)
        lines += [f"  - {number} chunk{'s' * (number != 1)}: {words}" for words, number in counts.items()]
        return "\n".join(lines)


def plan(requested: str, workload: Workload, machine: Machine, rates: Rates | None = None) -> Plan:
    """Choose the mode and check that it fits.

    Args:
        requested: the user's mode; ``"auto"`` leaves the choice to the planner.
        rates: where they are known; without them ``"auto"`` goes by memory alone.

    Raises:
        MemoryBudgetError: what the mode needs is more than a budget or the machine holds; names the missing bytes.
    """
    if requested != "auto":
        made = _make(requested, workload, machine, rates, f"{requested} was asked for")
    else:
        made = _choose(workload, machine, rates)
    for limit in _limits(made, machine):
        limit.require(made.mode)
    return made


def draft(mode: str, workload: Workload, machine: Machine, rates: Rates | None = None) -> Plan:
    """What `mode`, which is not ``"auto"``, would be here, whether it fits or not: for estimates."""
    return _make(mode, workload, machine, rates, f"{mode} was asked for")


def needs_rates(requested: str, workload: Workload, machine: Machine) -> bool:
    """Whether `plan` would choose by rates."""
    if not machine.has_gpu or workload.moments != "fp32":
        return False
    if requested == "hybrid":
        return workload.stream_share is None
    return requested == "auto" and not _fits_on_device(workload, machine)


def _choose(workload: Workload, machine: Machine, rates: Rates | None) -> Plan:
    """The fastest that fits; where nothing does, the one that misses least, for `plan` to refuse."""
    if not machine.has_gpu or machine.free_device_bytes is None:
        reason = "parameters are on the CPU: the wavefront takes the same path as on a GPU"
        return _make("wavefront", workload, machine, rates, reason)
    if workload.moments != "fp32":
        reason = f"moments={workload.moments!r}: only the wavefront keeps them so"
        return _make("wavefront", workload, machine, rates, reason)
    need = f"state of {gib(workload.state_bytes)}"
    limit, what = _device_limit(machine)
    if _fits_on_device(workload, machine):
        reason = f"{need} fits into {what} ({gib(limit)}): nothing is faster than not moving it"
        return _make("resident", workload, machine, rates, reason)
    reason = f"{need} does not fit into {what} ({gib(limit)})"
    wavefront = _make("wavefront", workload, machine, rates, reason)
    streamed = _make("chunked-stream", workload, machine, rates, reason)
    room = limit - streamed.device_bytes - workload.gradient_bytes - workload.accumulator_bytes
    short, too_short = _missing(wavefront, machine), _missing(streamed, machine)
    if room < 0:
        return _with(
            wavefront, "streamed state leaves gradients on the device, where there is no room for them"
        )
    if not short and not too_short:
        best = _faster(wavefront, streamed, workload)
        return _or_hybrid(best, workload, machine, rates, reason)
    if too_short < short:
        return _with(streamed, f"a wavefront would need {gib(short)} more of host memory than there is")
    return wavefront


def _faster(wavefront: Plan, streamed: Plan, workload: Workload) -> Plan:
    if wavefront.step_s is None or streamed.step_s is None:
        return wavefront
    how = (
        f"{HIDDEN_SHARE:.0%} of it taken to hide behind backward"
        if workload.backward_s is None
        else f"{workload.backward_s:.2f} s of backward to hide behind"
    )
    exposed = _exposed(wavefront, workload)
    words = (
        f"an update on the host takes {wavefront.step_s:.2f} s ({how}), one on the device with its state streamed "
        f"{streamed.step_s:.2f} s"
    )
    return _with(wavefront if exposed <= streamed.step_s else streamed, words)


def _exposed(made: Plan, workload: Workload) -> float:
    """Seconds of the update that backward does not hide, for modes that step inside backward."""
    seconds = made.step_s or 0.0
    if made.mode not in ("wavefront", "hybrid"):
        return seconds
    hidden = HIDDEN_SHARE * seconds if workload.backward_s is None else min(workload.backward_s, seconds)
    return seconds - hidden


def _or_hybrid(best: Plan, workload: Workload, machine: Machine, rates: Rates | None, reason: str) -> Plan:
    """The hybrid instead of `best`, where rates say that it is clearly faster, and it fits."""
    if rates is None or not workload.can_mix:
        return best
    hybrid = _make("hybrid", workload, machine, rates, reason)
    before, after = _exposed(best, workload), _exposed(hybrid, workload)
    words = (
        f"a hybrid would leave {1e3 * after:.0f} ms of the update exposed, {best.mode} {1e3 * before:.0f} ms"
    )
    if _missing(hybrid, machine):
        return _with(best, f"{words}, but it needs {gib(_missing(hybrid, machine))} more than there is")
    return _with(hybrid if after < HYBRID_GAIN * before else best, words)


def _fits_on_device(workload: Workload, machine: Machine) -> bool:
    return machine.free_device_bytes is not None and workload.state_bytes <= _device_limit(machine)[0]


def _device_limit(machine: Machine) -> tuple[int, str]:
    """Bytes of device memory that are the optimizer's, and where they come from."""
    if machine.device_budget is not None:
        return machine.device_budget, "device_budget"
    free = machine.free_device_bytes or 0
    return int(DEVICE_SHARE * free), f"{DEVICE_SHARE:.0%} of the {gib(free)} free on the device"


def _make(mode: str, workload: Workload, machine: Machine, rates: Rates | None, reason: str) -> Plan:
    known = rates if machine.has_gpu else None
    if mode == "hybrid":
        return _make_hybrid(workload, machine, known, reason)
    needs = needs_of(mode, workload, machine)
    return _plan_of(
        mode,
        workload,
        machine,
        needs,
        reasons=(reason, *needs.words),
        step_s=None if known is None else cost_of(mode, workload, known),
        placements=(PLACEMENTS[mode],) * len(workload.chunks),
    )


def _make_hybrid(workload: Workload, machine: Machine, rates: Rates | None, reason: str) -> Plan:
    workload = replace(
        workload,
        chunks=workload.parts or workload.chunks,
        tile_bytes=workload.tile_bytes * workload.tile_numel // workload.stream_tile_numel,
        stream_tile_numel=workload.tile_numel,
    )
    room = device_room(workload, machine)
    share, found, words = _share(workload, room, rates)
    moves = found is not None and workload.rebalances
    pinned = min(share + SPARE_SHARE, 1.0) if moves else share
    division = divide(workload, room, share)

    def pinning(pinned: float, division: Division | None) -> Plan:
        placements = place(workload.chunks, pinned, room, division)
        needs = hybrid_needs(workload, machine, placements, division)
        how = () if division is None else (division.words(workload.chunks[division.chunk]),)
        made = _plan_of(
            "hybrid",
            workload,
            machine,
            needs,
            reasons=(reason, words, *how, *needs.words),
            step_s=found.step_s if found else None,
            placements=placements,
        )
        movable = placements.count(Placement.STREAM) - len(how)
        return replace(
            made,
            chunks=_divided(made.chunks, division),
            stream_share=share,
            num_slots=num_stream_slots(workload.chunks, placements, workload.stream_tile_numel),
            num_streamed=round(movable * share / pinned) if pinned else 0,
            chunk_numel=workload.part_numel,
        )

    tried = ((pinned, division), (share, division), (share, None))
    plans = [pinning(*each) for each in dict.fromkeys(tried)]
    return next((made for made in plans if not _missing(made, machine)), plans[-1])


def _divided(chunks: tuple[ChunkPlan, ...], division: Division | None) -> tuple[ChunkPlan, ...]:
    return tuple(
        chunk._replace(host_numel=division.host_numel)
        if division is not None and index == division.chunk
        else chunk
        for index, chunk in enumerate(chunks)
    )


def _share(workload: Workload, room: int, rates: Rates | None) -> tuple[float, Balance | None, str]:
    """How much of the host's state is streamed, and why."""
    resident = place(workload.chunks, 0.0, room)
    numel = sum(c.numel for c, p in zip(workload.chunks, resident, strict=True) if p is Placement.HOST)
    crossing = {"stream_bytes": 4 * workload.state_arrays, "edge_bytes": 2}
    share = workload.stream_share
    if share is not None:
        found = None if rates is None else at_share(share, numel, rates=rates, **crossing)
        return share, found, f"stream_share={share} was asked for"
    if rates is None:
        return (
            UNMEASURED_SHARE,
            None,
            f"{UNMEASURED_SHARE:.0%} of the host's state is streamed, a guess: rates were not measured",
        )
    found = balance(numel, rates=rates, backward_s=workload.backward_s, **crossing)
    words = (
        f"{found.share:.0%} of the host's state is streamed: the host's kernels then take {1e3 * found.host_s:.0f} ms, "
        f"the link {1e3 * found.link_s:.0f} ms, at the same time"
    )
    return found.share, found, words


def _plan_of(
    mode: str,
    workload: Workload,
    machine: Machine,
    needs: Needs,
    *,
    reasons: tuple[str, ...],
    step_s: float | None,
    placements: tuple[Placement, ...],
) -> Plan:
    if needs.host > machine.available_host_bytes:
        beware = f"beware: only {gib(machine.available_host_bytes)} of host memory are available right now"
        reasons = (*reasons, beware)
    return Plan(
        mode,
        needs.device,
        needs.host,
        needs.pinned,
        reasons,
        peak_device_bytes=(needs.device + needs.gradients + workload.weight_bytes) * machine.has_gpu,
        step_s=step_s,
        chunks=tuple(
            ChunkPlan(chunk.name, chunk.numel, placement)
            for chunk, placement in zip(workload.chunks, placements, strict=True)
        ),
        on_cpu=not machine.has_gpu,
        shadow_bytes=needs.shadow,
        pins_gradients=needs.pins_gradients,
    )


# Limits -------------------------------------------------------------------------------------------------------------


class _Limit(NamedTuple):
    what: str
    limit: int | None
    need: int

    @property
    def missing(self) -> int:
        return 0 if self.limit is None else max(self.need - self.limit, 0)

    def require(self, mode: str) -> None:
        if self.limit is not None and self.missing:
            raise MemoryBudgetError(
                f"mode={mode!r} needs {self.need} bytes ({gib(self.need)}), {self.what} is {self.limit} bytes "
                f"({gib(self.limit)}): {self.missing} bytes are missing. Raise the budget, shard over more "
                "ranks, or choose another mode"
            )


def _limits(made: Plan, machine: Machine) -> tuple[_Limit, ...]:
    """Free device memory is a limit where there is no budget: nothing can be allocated beyond it."""
    free = machine.free_device_bytes if machine.device_budget is None else None
    return (
        _Limit("device_budget", machine.device_budget, made.device_bytes),
        _Limit("the free device memory", free, made.device_bytes),
        _Limit("host_budget", machine.host_budget, made.host_bytes),
        _Limit("pinned_budget", machine.pinned_budget, made.pinned_bytes),
        _Limit("the cgroup's memory limit", machine.host_limit_bytes, made.host_bytes),
    )


def _missing(made: Plan, machine: Machine) -> int:
    return sum(limit.missing for limit in _limits(made, machine))


def _with(made: Plan, reason: str) -> Plan:
    first, *rest = made.reasons
    return replace(made, reasons=(first, reason, *rest))
