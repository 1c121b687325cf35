"""What each mode needs and costs: the formulas behind the planner, see docs/planner.md. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from offload.rates import Rates

__all__ = [
    "PLACEMENTS",
    "ChunkSize",
    "Machine",
    "Needs",
    "Placement",
    "Workload",
    "cost_of",
    "gib",
    "needs_of",
]

SUMS_BYTES = 9
"""Squared sum and flag of each block of `BLOCK_NUMEL` elements."""

BLOCK_NUMEL = 1024

MOMENT_BLOCK_BYTES = {"fp32": 4096, "bf16": 2048, "int8": 1024 + 4}
"""Bytes of one moment of `BLOCK_NUMEL` elements, by how moments are kept: in 8 bits each block has an FP32 scale."""

SPARE_SHARE = 0.9
"""Of the host memory available now that a second set of state may make use of."""


class Placement(Enum):
    """Where a chunk's state lives, and where it is stepped."""

    HOST = "state on the host, stepped there"
    STREAM = "state on the host, stepped on the device"
    DEVICE = "state on the device, stepped there"

    def words(self) -> str:
        """For a plan."""
        return self.value

    def words_without_gpu(self) -> str:
        """The same where the host plays the device's part."""
        return {
            Placement.HOST: "stepped where its state is",
            Placement.STREAM: "state copied into buffers, stepped there, and copied back",
            Placement.DEVICE: "stepped where its state is, as a device would",
        }[self]


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
    """A chunk by name, its elements, the index of its first parameter, bytes per element of gradient and weight, and how
    many parameters it has."""

    name: str
    numel: int
    first_param: int = 0
    grad_bytes: int = 2
    weight_bytes: int = 2
    num_params: int = 1


@dataclass(frozen=True)
class Workload:
    """What has to be kept, and moved: elements of the parameters on this rank, and state arrays per element.

    `ring_bytes`: of both rings. `backlog_bytes`: gradients that may wait on the device for the worker; beside them what is
    left of the largest one, at most all of it: `largest_gradient_bytes`. `own_master_numel`: elements of FP32 weights,
    which need no master where they are stepped on the device. `tile_bytes`, `num_slots`: the device buffers of
    chunked-stream. `parts`: the chunks of a hybrid, `part_numel` elements each or a single parameter, where those are
    finer. `divide_numel`: elements beyond which a chunk of a single parameter may be divided between host and link; None:
    none is. `speculates`: a wavefront wants a second set of state. `stream_tile_numel`: elements of a tile of
    chunked-stream; `tile_numel`: of all others, a hybrid's streamed ones too. `stream_share`: of a hybrid, where the user
    fixed it; `rebalances`: whether steps may correct it. `can_mix`: whether host and device compute the same bits here.
    `backward_s`: seconds that backward takes; None: not known. `moments`: how they are kept, on the host alone if not
    FP32.
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
    largest_gradient_bytes: int = 0
    tile_bytes: int = 0
    num_slots: int = 1
    chunks: tuple[ChunkSize, ...] = ()
    parts: tuple[ChunkSize, ...] = ()
    part_numel: int | None = None
    divide_numel: int | None = None
    speculates: bool = False
    stream_tile_numel: int = 1
    tile_numel: int = 1
    stream_share: float | None = None
    rebalances: bool = False
    can_mix: bool = False
    backward_s: float | None = None
    moments: str = "fp32"

    @property
    def state_bytes(self) -> int:
        """Masters and moments."""
        return self._state_bytes_of(self.numel)

    @property
    def shadow_bytes(self) -> int:
        """A second set of state, padding included: chunk by chunk it fits or does not."""
        return self._state_bytes_of(sum(chunk.numel for chunk in self.chunks))

    @property
    def reduction_bytes(self) -> int:
        """What reduced moments save."""
        return 4 * self.state_arrays * self.numel - self.state_bytes

    def _state_bytes_of(self, numel: int) -> int:
        per_block = 4 * BLOCK_NUMEL + (self.state_arrays - 1) * MOMENT_BLOCK_BYTES[self.moments]
        return -(-per_block * numel // BLOCK_NUMEL)

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
        return min(self.backlog_bytes + self.largest_gradient_bytes, self.gradient_bytes)


class Needs(NamedTuple):
    """Bytes: on the device, on the host, of those pinned; and gradients on the device in `step()` or backward.

    `shadow`: host memory for speculation, of those on the host. `pins_gradients`: the gradients kept until a verdict are
    pinned.
    """

    device: int
    host: int
    pinned: int
    gradients: int
    words: tuple[str, ...] = ()
    shadow: int = 0
    pins_gradients: bool = False


def needs_of(mode: str, workload: Workload, machine: Machine) -> Needs:
    """What `mode` takes."""
    placement = PLACEMENTS[mode]
    if placement is Placement.STREAM:
        return _stream_needs(mode, workload, machine)
    if placement is Placement.DEVICE and machine.has_gpu:
        gradients = workload.gradient_bytes + workload.accumulator_bytes
        return Needs(workload.state_bytes, 0, 0, gradients)
    early = placement is Placement.HOST
    return _host_needs(replace(workload, speculates=early and workload.speculates), machine)


def _host_needs(workload: Workload, machine: Machine) -> Needs:
    pinned = workload.ring_bytes if machine.has_gpu else 0
    words = [_host_reason(workload)]
    if workload.moments != "fp32":
        words.append(_reduction_reason(workload))
    pins = workload.holds_gradients  # without a GPU nothing is pinned, and copies end there all the same
    if (
        pins
        and machine.pinned_budget is not None
        and pinned + workload.gradient_bytes > machine.pinned_budget
    ):
        pins = False
        words.append(
            "gradients kept until the verdict are not pinned, within pinned_budget: they come through the ring"
        )
    shadow = 0
    if workload.speculates:
        shadow = min(max(_spare_host_bytes(machine) - workload.host_bytes, 0), workload.shadow_bytes)
        words.append(_shadow_reason(shadow, workload))
    return Needs(
        0,
        workload.host_bytes + shadow,
        pinned + workload.gradient_bytes * (pins and machine.has_gpu),
        workload.waiting_gradient_bytes,
        tuple(words),
        shadow,
        pins,
    )


def _spare_host_bytes(machine: Machine) -> int:
    """What may be taken for something that only makes steps faster."""
    limits = (machine.host_budget, machine.host_limit_bytes, int(SPARE_SHARE * machine.available_host_bytes))
    return min(limit for limit in limits if limit is not None)


def _shadow_reason(shadow: int, workload: Workload) -> str:
    if not shadow:
        return "clipping: no memory for a second set of state, so updates wait for the norm of all gradients"
    share = shadow / max(workload.shadow_bytes, 1)
    return (
        f"clipping: {gib(shadow)} for a second set of state, so that {share:.0%} of it may be stepped before the norm "
        "is known"
    )


def _stream_needs(mode: str, workload: Workload, machine: Machine) -> Needs:
    if mode == "all-at-once":
        buffers, how = workload.stream_bytes, "all of it at once"
    else:
        number = workload.num_slots if mode == "chunked-stream" else 1
        buffers = number * min(workload.tile_bytes, workload.stream_bytes)
        how = f"{number} tile{'s' * (number > 1)} of it at a time"
    state = workload.stream_bytes + workload.sums_bytes
    gradients = workload.gradient_bytes + workload.accumulator_bytes
    whose = "device buffers" if machine.has_gpu else "buffers"
    words = [f"host memory: state {gib(state)}; {whose} {gib(buffers)}, {how}"]
    if workload.own_master_numel:
        words.append(
            f"FP32 weights are their own masters: {gib(4 * workload.own_master_numel)} less to keep and to move"
        )
    if not machine.has_gpu:
        return Needs(0, state + buffers + gradients, 0, 0, tuple(words))
    words.append(f"gradients stay on the device until step(): {gib(gradients)}")
    return Needs(buffers, state, state, gradients, tuple(words))


def _reduction_reason(workload: Workload) -> str:
    """An update reads and writes state once, beside a gradient and a weight."""
    saved, numel = workload.reduction_bytes, max(workload.numel, 1)
    moved = 2 * workload.state_bytes + workload.gradient_bytes + workload.weight_bytes
    return (
        f"moments in {workload.moments}: {gib(saved)} less of state, {workload.state_bytes / numel:.2f} bytes per parameter "
        f"instead of {4 * workload.state_arrays}; an update moves {moved / numel:.1f} bytes per parameter instead of "
        f"{(moved + 2 * saved) / numel:.1f}"
    )


def _host_reason(workload: Workload) -> str:
    parts = [f"state {gib(workload.state_bytes)}", f"rings {gib(workload.ring_bytes)}"]
    held = (
        "kept until the verdict of each step"
        if workload.holds_gradients
        else "of the observed first step only"
    )
    parts.append(f"gradients {gib(workload.gradient_bytes)} ({held})")
    if workload.accumulates:
        parts.append(f"accumulators {gib(workload.accumulator_bytes)}")
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


COSTS: dict[str, Callable[[Workload, Rates], float]] = {
    "resident": _resident_cost,
    "all-at-once": _serial_cost,
    "chunked-sync": _serial_cost,
    "chunked-stream": _stream_cost,
    "wavefront": _wavefront_cost,
}


def cost_of(mode: str, workload: Workload, rates: Rates) -> float:
    """Seconds of one update in `mode`."""
    return COSTS[mode](workload, rates)


def gib(num_bytes: int) -> str:
    """An amount of memory in words."""
    if num_bytes >= 2**28:
        return f"{num_bytes / 2**30:.2f} GiB"
    return (
        f"{num_bytes / 2**20:.1f} MiB"
        if num_bytes >= 2**17 or not num_bytes
        else f"{num_bytes / 2**10:.1f} KiB"
    )
