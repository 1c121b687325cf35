"""What a step did: `StepReport`, and the clock that fills its timings."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from offload.construction import Construction
from offload.trace import Trace
from offload.transfer.cuda import CudaTransport
from offload.transfer.inline import InlineTransport
from offload.transfer.transport import Transfer, Transport

__all__ = ["StageClock", "StepReport"]


@dataclass(frozen=True)
class StepReport:
    """One step, after the fact. ``str()`` is one readable line, `as_dict` is flat, for loggers."""

    step: int
    """Steps taken by the optimizer so far, this one and skipped ones included."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping."""

    clipped: bool = False
    """Whether the clip coefficient was below 1."""

    skipped: bool = False
    """Whether non-finite gradients made the step change nothing (``nonfinite="skip"``)."""

    clip_coefficient: float = 1.0
    """What gradients were multiplied with."""

    speculated: bool = False
    """Whether updates ran inside backward before the norm was known (``clip="speculate"`` or ``"auto"``)."""

    rolled_back: bool = False
    """Whether these were rolled back, because of clipping or non-finite gradients."""

    mode: str = ""
    """The mode that ran."""

    early_tiles: int = 0
    """Tiles that were stepped inside backward."""

    late_tiles: int = 0
    """Tiles that were stepped at ``step()``."""

    bytes_to_host: int = 0
    """Bytes that crossed to the host: gradients, or streamed state."""

    bytes_to_device: int = 0
    """Bytes that crossed to the device: weights, or streamed state."""

    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage: ``wait_gradient``, ``kernel``, ``wait_slot``, ``issue`` are the worker's since the step
    before; ``hook`` is what gradient hooks took, held-up time included; ``exposed`` is what ``step()`` itself took.
    Where state is streamed, ``issue`` and ``wait_state`` are the times to start all tiles and to wait for the last.
    ``landing``, with ``overlap_forward``: the wait for what had not ended when somebody asked."""

    def as_dict(self, prefix: str = "offload/") -> dict[str, float]:
        """Flat name → number, for wandb, tensorboard and the like."""
        numbers = {
            name: float(value) for name, value in vars(self).items() if isinstance(value, bool | int | float)
        }
        numbers |= {f"seconds/{stage}": seconds for stage, seconds in self.timings.items()}
        return {prefix + name: number for name, number in numbers.items()}

    def __str__(self) -> str:
        stages = " ".join(f"{stage} {1e3 * seconds:.1f}" for stage, seconds in self.timings.items())
        flags = "".join(
            f", {name}"
            for name, is_so in (
                ("clipped", self.clipped),
                ("skipped", self.skipped),
                ("rolled back", self.rolled_back),
            )
            if is_so
        )
        return (
            f"step {self.step} ({self.mode}{flags}): norm {self.grad_norm:.4g}, tiles {self.early_tiles} early "
            f"{self.late_tiles} late, {self.bytes_to_host / 1e6:.1f} MB in {self.bytes_to_device / 1e6:.1f} MB out, "
            f"ms: {stages}"
        )


_NOTHING: AbstractContextManager[None] = nullcontext()


class StageClock:
    """Seconds and counts by stage, from any thread; `take` is called when the step's threads are idle.

    While there is a `trace` it gets each stage, and what is of interest there alone: `span`, `follow`.

    Args:
        construction: times the stages before the first step.
    """

    def __init__(self, construction: Construction | None = None) -> None:
        self.construction = construction or Construction()
        self._trace: Trace | None = None
        self._timed: list[CudaTransport | InlineTransport] = []
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str, shown: str | None = None) -> Iterator[None]:
        """Add the time that the block takes to stage `name`; `shown`: its name in a trace, if another one."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.add(name, end - start)
            trace = self._trace
            if trace is not None:
                trace.add(shown or name, start, end)

    @property
    def trace(self) -> Trace | None:
        """The trace that is being taken."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = trace
        for transport in self._timed:
            transport.is_timing = trace is not None

    def watch(self, transport: Transport) -> Transport:
        """Have `transport` time its copies while there is a trace, if it can; returned as it is."""
        if isinstance(transport, CudaTransport | InlineTransport):
            transport.is_timing = self._trace is not None
            self._timed.append(transport)
        return transport

    def span(self, name: str, *, on_device: bool = False) -> AbstractContextManager[None]:
        """What the block does, for a trace alone; `on_device`: what it enqueues on the current stream of a GPU."""
        trace = self._trace
        return _NOTHING if trace is None else trace.span(name, on_device=on_device)

    def follow(self, name: str, transfer: Transfer, start: float) -> None:
        """A copy was issued just now, from `start` on: a trace shows it until its end is seen."""
        trace = self._trace
        if trace is not None:
            trace.follow(name, transfer, start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a stage."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def count(self, name: str, number: int) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + number

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and counts so far; both start again from nothing."""
        if self._trace is not None:
            self._trace.settle()
        with self._lock:
            taken = self._seconds, self._counts
            self._seconds, self._counts = {}, {}
        return taken
