"""The planner: which mode, and why. Pure: facts in, a `Plan` out.

So far it chooses between `resident` and `wavefront`.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import MemoryBudgetError

__all__ = ["Machine", "Plan", "Workload", "plan"]

STATE_BYTES = 12
"""Per parameter: FP32 master and two moments."""

DEVICE_SHARE = 0.5
"""Of the free device memory that resident state may take where no budget is given: activations need the rest."""


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


@dataclass(frozen=True)
class Workload:
    """What has to be kept: elements of the parameters on this rank, and FP32 state arrays per element."""

    numel: int
    state_arrays: int
    ring_bytes: int
    holds_gradients: bool
    gradient_bytes: int
    accumulates: bool

    @property
    def state_bytes(self) -> int:
        """FP32 state."""
        return 4 * self.state_arrays * self.numel

    @property
    def host_bytes(self) -> int:
        """Host memory of a wavefront: state, rings, held gradients (those of the first step count), accumulators."""
        return self.state_bytes + self.ring_bytes + self.gradient_bytes + 4 * self.numel * self.accumulates


@dataclass(frozen=True)
class Plan:
    """The chosen mode, what it takes (bytes), and the reasons in plain words. ``str()`` is readable."""

    mode: str
    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        amounts = f"device {_gib(self.device_bytes)}, host {_gib(self.host_bytes)}, pinned {_gib(self.pinned_bytes)}"
        return "\n".join([f"mode {self.mode}: {amounts}", *(f"  - {reason}" for reason in self.reasons)])


def plan(requested: str, workload: Workload, machine: Machine) -> Plan:
    """Choose the mode and check that it fits.

    Args:
        requested: the user's mode; ``"auto"`` leaves the choice to the planner.

    Raises:
        MemoryBudgetError: what the mode needs is more than a budget or the machine holds; names the missing bytes.
    """
    if requested == "auto":
        mode, reason = _choose(workload, machine)
    else:
        mode, reason = requested, f"{requested} was asked for"
    if mode == "resident" and machine.device != "cpu":
        made = Plan(mode, workload.state_bytes, 0, 0, (reason,))
        _require("device_budget", machine.device_budget, made.device_bytes, mode)
    else:
        pinned = workload.ring_bytes if machine.device != "cpu" else 0
        reasons = [reason, _host_reason(workload)]
        if workload.host_bytes > machine.available_host_bytes:
            reasons.append(
                f"beware: only {_gib(machine.available_host_bytes)} of host memory are available right now"
            )
        made = Plan(mode, 0, workload.host_bytes, pinned, tuple(reasons))
        _require("host_budget", machine.host_budget, made.host_bytes, mode)
        _require("pinned_budget", machine.pinned_budget, made.pinned_bytes, mode)
        _require("the cgroup's memory limit", machine.host_limit_bytes, made.host_bytes, mode)
    return made


def _choose(workload: Workload, machine: Machine) -> tuple[str, str]:
    if machine.device == "cpu" or machine.free_device_bytes is None:
        return "wavefront", "parameters are on the CPU: the wavefront takes the same path as on a GPU"
    if machine.device_budget is not None:
        limit, what = machine.device_budget, "device_budget"
    else:
        limit = int(DEVICE_SHARE * machine.free_device_bytes)
        what = f"{DEVICE_SHARE:.0%} of the {_gib(machine.free_device_bytes)} free on the device"
    need = f"state of {_gib(workload.state_bytes)}"
    if workload.state_bytes <= limit:
        return "resident", f"{need} fits into {what} ({_gib(limit)}): nothing is faster than not moving it"
    return "wavefront", f"{need} does not fit into {what} ({_gib(limit)})"


def _host_reason(workload: Workload) -> str:
    parts = [f"state {_gib(workload.state_bytes)}", f"rings {_gib(workload.ring_bytes)}"]
    held = (
        "kept until the verdict of each step"
        if workload.holds_gradients
        else "of the observed first step only"
    )
    parts.append(f"gradients {_gib(workload.gradient_bytes)} ({held})")
    if workload.accumulates:
        parts.append(f"accumulators {_gib(4 * workload.numel)}")
    return "host memory: " + ", ".join(parts)


def _require(what: str, limit: int | None, need: int, mode: str) -> None:
    if limit is not None and need > limit:
        raise MemoryBudgetError(
            f"mode={mode!r} needs {need} bytes ({_gib(need)}), {what} is {limit} bytes "
            f"({_gib(limit)}): {need - limit} bytes are missing. Raise the budget, shard over more "
            "ranks, or choose another mode"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
