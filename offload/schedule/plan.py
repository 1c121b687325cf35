"""The planner: which mode, and why. Pure: facts in, a `Plan` out.

Every mode is an entry of what it needs (`_needs`) and what it costs (`_cost`); a request is checked against the
budgets, ``"auto"`` takes the best that fits. docs/planner.md has the formulas in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from offload.errors import MemoryBudgetError
from offload.rates import Rates

__all__ = ["ChunkPlan", "ChunkSize", "Machine", "Placement", "Plan", "Workload", "needs_rates", "plan"]

DEVICE_SHARE = 0.5
"""Of the free device memory that optimizer state may take where no budget is given: activations need the rest."""

HIDDEN_SHARE = 0.5
"""Of an update on the host that is taken to hide behind backward, where backward's length is not known."""

SUMS_BYTES = 9
"""Squared sum and flag of each block of `BLOCK_NUMEL` elements."""

BLOCK_NUMEL = 1024


class Placement(Enum):
    """Where a chunk's state lives, and where it is stepped."""

    HOST = "state on the host, stepped there"
    STREAM = "state on the host, stepped on the device"
    DEVICE = "state on the device, stepped there"


PLACEMENTS = {
    "resident": Placement.DEVICE,
    "all-at-once": Placement.STREAM,
    "chunked-sync": Placement.STREAM,
    "chunked-stream": Placement.STREAM,
    "wavefront": Placement.HOST,
}


@dataclass(frozen=True)
class Machine:
    """What there is. Bytes; None: not known, or no such thing.

    `available_host_bytes` is what the system says of now: it may grow on virtual machines, so exceeding it is
    remarked on, not refused. `host_limit_bytes` is what the cgroup leaves, which does not grow.
    """

    device: str
    free_device_bytes: int | None
    available_host_bytes: int
    host_limit_bytes: int | None = None
    device_budget: int | None = None
    host_budget: int | None = None
    pinned_budget: int | None = None

    @property
    def has_gpu(self) -> bool:
        """Whether parameters are on a device with memory of its own."""
        return self.device != "cpu"


class ChunkSize(NamedTuple):
    """A chunk by name, and its elements."""

    name: str
    numel: int


class ChunkPlan(NamedTuple):
    """Where a chunk goes."""

    name: str
    numel: int
    placement: Placement


@dataclass(frozen=True)
class Workload:
    """What has to be kept, and moved: elements of the parameters on this rank, and FP32 state arrays per element.

    `ring_bytes`: of both rings. `backlog_bytes`: gradients that may wait on the device for the worker. `own_master_numel`:
    elements of FP32 weights, which need no master where they are stepped on the device. `tile_bytes`, `num_slots`: the
    device buffers of chunked-stream. `backward_s`: seconds that backward takes; None: not known.
    """

    numel: int
    state_arrays: int
    ring_bytes: int
    holds_gradients: bool
    gradient_bytes: int
    accumulates: bool
    weight_bytes: int = 0
    own_master_numel: int = 0
    backlog_bytes: int = 0
    tile_bytes: int = 0
    num_slots: int = 1
    chunks: tuple[ChunkSize, ...] = ()
    backward_s: float | None = None

    @property
    def state_bytes(self) -> int:
        """FP32 state."""
        return 4 * self.state_arrays * self.numel

    @property
    def stream_bytes(self) -> int:
        """FP32 state that travels: without the masters of FP32 weights."""
        return self.state_bytes - 4 * self.own_master_numel

    @property
    def sums_bytes(self) -> int:
        """Squared sums."""
        return SUMS_BYTES * self.numel // BLOCK_NUMEL

    @property
    def accumulator_bytes(self) -> int:
        """FP32 accumulators."""
        return 4 * self.numel * self.accumulates

    @property
    def host_bytes(self) -> int:
        """Host memory of a wavefront: state, rings, held gradients (those of the first step count), accumulators."""
        return self.state_bytes + self.ring_bytes + self.gradient_bytes + self.accumulator_bytes

    @property
    def waiting_gradient_bytes(self) -> int:
        """Gradients that a wavefront may have on the device at a time."""
        return min(self.backlog_bytes, self.gradient_bytes)


@dataclass(frozen=True)
class Plan:
    """The chosen mode, what it takes (bytes), and the reasons in plain words. ``str()`` is readable.

    `device_bytes`: what the optimizer itself takes there, in `step()` at the most. `peak_device_bytes`: the same with
    weights and the gradients that are there at that time, and with nothing else (activations are not known). `step_s`:
    expected seconds of the update, hidden or not; None where rates were not measured.
    """

    mode: str
    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    reasons: tuple[str, ...]
    peak_device_bytes: int = 0
    step_s: float | None = None
    chunks: tuple[ChunkPlan, ...] = ()

    def __str__(self) -> str:
        amounts = f"device {_gib(self.device_bytes)}, host {_gib(self.host_bytes)}, pinned {_gib(self.pinned_bytes)}"
        lines = [f"mode {self.mode}: {amounts}", *(f"  - {reason}" for reason in self.reasons)]
        if self.peak_device_bytes:
            lines.append(
                f"  - expected on the device: {_gib(self.peak_device_bytes)} with weights and gradients, "
                "activations not counted"
            )
        if self.step_s is not None:
            lines.append(f"  - expected update: {1e3 * self.step_s:.0f} ms a step")
        counts = Counter(chunk.placement for chunk in self.chunks)
        lines += [f"  - {number} chunks: {placement.value}" for placement, number in counts.items()]
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


def needs_rates(requested: str, workload: Workload, machine: Machine) -> bool:
    """Whether `plan` would choose by rates."""
    return requested == "auto" and machine.has_gpu and not _fits_on_device(workload, machine)


def _choose(workload: Workload, machine: Machine, rates: Rates | None) -> Plan:
    """The fastest that fits; where nothing does, the one that misses least, for `plan` to refuse."""
    if not machine.has_gpu or machine.free_device_bytes is None:
        reason = "parameters are on the CPU: the wavefront takes the same path as on a GPU"
        return _make("wavefront", workload, machine, rates, reason)
    need = f"state of {_gib(workload.state_bytes)}"
    limit, what = _device_limit(machine)
    if _fits_on_device(workload, machine):
        reason = f"{need} fits into {what} ({_gib(limit)}): nothing is faster than not moving it"
        return _make("resident", workload, machine, rates, reason)
    reason = f"{need} does not fit into {what} ({_gib(limit)})"
    wavefront = _make("wavefront", workload, machine, rates, reason)
    streamed = _make("chunked-stream", workload, machine, rates, reason)
    room = limit - streamed.device_bytes - workload.gradient_bytes - workload.accumulator_bytes
    short, too_short = _missing(wavefront, machine), _missing(streamed, machine)
    if room < 0:
        return _with(
            wavefront, "streamed state leaves gradients on the device, where there is no room for them"
        )
    if not short and not too_short:
        return _faster(wavefront, streamed, workload)
    if too_short < short:
        return _with(streamed, f"a wavefront would need {_gib(short)} more of host memory than there is")
    return wavefront


def _faster(wavefront: Plan, streamed: Plan, workload: Workload) -> Plan:
    if wavefront.step_s is None or streamed.step_s is None:
        return wavefront
    if workload.backward_s is None:
        hidden, how = (
            HIDDEN_SHARE * wavefront.step_s,
            f"{HIDDEN_SHARE:.0%} of it taken to hide behind backward",
        )
    else:
        hidden, how = (
            min(workload.backward_s, wavefront.step_s),
            f"{workload.backward_s:.2f} s of backward to hide behind",
        )
    exposed = wavefront.step_s - hidden
    words = (
        f"an update on the host takes {wavefront.step_s:.2f} s ({how}), one on the device with its state streamed "
        f"{streamed.step_s:.2f} s"
    )
    return _with(wavefront if exposed <= streamed.step_s else streamed, words)


def _fits_on_device(workload: Workload, machine: Machine) -> bool:
    return machine.free_device_bytes is not None and workload.state_bytes <= _device_limit(machine)[0]


def _device_limit(machine: Machine) -> tuple[int, str]:
    """Bytes of device memory that are the optimizer's, and where they come from."""
    if machine.device_budget is not None:
        return machine.device_budget, "device_budget"
    free = machine.free_device_bytes or 0
    return int(DEVICE_SHARE * free), f"{DEVICE_SHARE:.0%} of the {_gib(free)} free on the device"


# What each mode needs -----------------------------------------------------------------------------------------------


class _Needs(NamedTuple):
    """Bytes: on the device, on the host, of those pinned; and gradients on the device in `step()` or backward."""

    device: int
    host: int
    pinned: int
    gradients: int
    words: tuple[str, ...] = ()


def _make(mode: str, workload: Workload, machine: Machine, rates: Rates | None, reason: str) -> Plan:
    needs = _needs(mode, workload, machine)
    reasons = [reason, *needs.words]
    if needs.host > machine.available_host_bytes:
        reasons.append(
            f"beware: only {_gib(machine.available_host_bytes)} of host memory are available right now"
        )
    placement = PLACEMENTS[mode]
    return Plan(
        mode,
        needs.device,
        needs.host,
        needs.pinned,
        tuple(reasons),
        peak_device_bytes=(needs.device + needs.gradients + workload.weight_bytes) * machine.has_gpu,
        step_s=None if rates is None or not machine.has_gpu else _COSTS[mode](workload, rates),
        chunks=tuple(ChunkPlan(chunk.name, chunk.numel, placement) for chunk in workload.chunks),
    )


def _needs(mode: str, workload: Workload, machine: Machine) -> _Needs:
    placement = PLACEMENTS[mode]
    if placement is Placement.STREAM:
        return _stream_needs(mode, workload, machine)
    if placement is Placement.DEVICE and machine.has_gpu:
        gradients = workload.gradient_bytes + workload.accumulator_bytes
        return _Needs(workload.state_bytes, 0, 0, gradients)
    pinned = workload.ring_bytes if machine.has_gpu else 0
    return _Needs(0, workload.host_bytes, pinned, workload.waiting_gradient_bytes, (_host_reason(workload),))


def _stream_needs(mode: str, workload: Workload, machine: Machine) -> _Needs:
    if mode == "all-at-once":
        buffers, how = workload.stream_bytes, "all of it at once"
    else:
        number = workload.num_slots if mode == "chunked-stream" else 1
        buffers = number * min(workload.tile_bytes, workload.stream_bytes)
        how = f"{number} tile{'s' * (number > 1)} of it at a time"
    state = workload.stream_bytes + workload.sums_bytes
    gradients = workload.gradient_bytes + workload.accumulator_bytes
    words = [f"host memory: state {_gib(state)}; device buffers {_gib(buffers)}, {how}"]
    if workload.own_master_numel:
        words.append(
            f"FP32 weights are their own masters: {_gib(4 * workload.own_master_numel)} less to keep and to move"
        )
    if not machine.has_gpu:
        return _Needs(0, state + buffers + gradients, 0, 0, tuple(words))
    words.append(f"gradients stay on the device until step(): {_gib(gradients)}")
    return _Needs(buffers, state, state, gradients, tuple(words))


def _host_reason(workload: Workload) -> str:
    parts = [f"state {_gib(workload.state_bytes)}", f"rings {_gib(workload.ring_bytes)}"]
    held = (
        "kept until the verdict of each step"
        if workload.holds_gradients
        else "of the observed first step only"
    )
    parts.append(f"gradients {_gib(workload.gradient_bytes)} ({held})")
    if workload.accumulates:
        parts.append(f"accumulators {_gib(workload.accumulator_bytes)}")
    return "host memory: " + ", ".join(parts)


# What each mode costs -----------------------------------------------------------------------------------------------


def _resident_cost(workload: Workload, rates: Rates) -> float:
    return (2 * workload.state_bytes + workload.gradient_bytes + workload.weight_bytes) / rates.device_bytes


def _serial_cost(workload: Workload, rates: Rates) -> float:
    """In, step, out, one after the other."""
    moved = workload.stream_bytes
    return moved / rates.to_device_bytes + moved / rates.to_host_bytes + _resident_cost(workload, rates)


def _stream_cost(workload: Workload, rates: Rates) -> float:
    """Both directions at once; the first tile's way in and the last one's way out have nothing beside them."""
    edge = workload.tile_bytes / rates.to_device_bytes
    return max(workload.stream_bytes / rates.duplex_bytes, _resident_cost(workload, rates)) + edge


def _wavefront_cost(workload: Workload, rates: Rates) -> float:
    """The slowest of the kernel, the gradients' way in and the weights' way out, which overlap."""
    ways = (workload.gradient_bytes / rates.duplex_bytes, workload.weight_bytes / rates.duplex_bytes)
    return max(workload.numel / rates.kernel_numel, *ways)


_COSTS: dict[str, Callable[[Workload, Rates], float]] = {
    "resident": _resident_cost,
    "all-at-once": _serial_cost,
    "chunked-sync": _serial_cost,
    "chunked-stream": _stream_cost,
    "wavefront": _wavefront_cost,
}


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
                f"mode={mode!r} needs {self.need} bytes ({_gib(self.need)}), {self.what} is {self.limit} bytes "
                f"({_gib(self.limit)}): {self.missing} bytes are missing. Raise the budget, shard over more "
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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
