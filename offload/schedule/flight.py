"""The part of a step that goes on after ``step()`` has returned, and the marks at which its weights are complete.

With ``overlap_forward`` the books of a step are closed at ``step()``: gradients are taken, hyperparameters are read,
versions of weights are counted up. What is left is work that was submitted already. Each chunk has a `Mark`, which the
forward of its modules waits for; whoever reads anything else lets the flight land first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from offload.errors import DeadlineError
from offload.layout import Chunk, Span
from offload.parameters import ParamRecord
from offload.schedule.verdict import Verdict
from offload.schedule.worker import Worker
from offload.transfer.transport import Signal

__all__ = ["Departing", "Flight", "Mark"]


class Mark:
    """A point after which a chunk's weights are the new ones.

    Args:
        signals: one of each side that writes them; they come when the work is enqueued, and on a GPU are events of the
            streams that write.
        worker: raises what went wrong.
        timeout_s: longest wait for each of `signals`, in seconds.
    """

    def __init__(self, signals: Sequence[Future[Signal]], worker: Worker, timeout_s: float) -> None:
        self._signals, self._worker, self._timeout_s = tuple(signals), worker, timeout_s

    def wait(self, *, on_host: bool) -> None:
        """Wait for the work to be enqueued, and make the current stream wait for it, or, `on_host`, the caller.

        Raises:
            WorkerError: the worker failed.
            DeadlineError: it did not come so far in time.
        """
        for signal in self._signals:
            enqueued = self._enqueued(signal)
            if on_host:
                enqueued.synchronize()
            else:
                enqueued.wait()

    def _enqueued(self, signal: Future[Signal]) -> Signal:
        try:
            failed = signal.exception(
                self._timeout_s
            )  # not result(): errors that are timeouts are told apart
        except FutureTimeout as error:
            raise DeadlineError(
                f"weights that the forward needs were not ready within {self._timeout_s} s (config.timeout_s)"
            ) from error
        if failed is not None:
            self._worker.raise_error()
            raise failed
        return signal.result()


@dataclass
class Flight:
    """A step that is not complete yet.

    Args:
        verdict: None where the norm is known when everything has ended.
        spans: of the parameters that got a gradient, in the optimizer's order: what the norm is made of.
        written: parameters whose weights are new when it has landed: only then do their versions stand still.
        step, mode, speculated, rolled_back, exposed_s: for its report; `exposed_s` is what ``step()`` took, in seconds.
        irregular: indices of chunks whose next gradients will be held.
        marks: by chunk index; empty where ``step()`` waits for everything.
        span: `StageClock.span`, for waits.
    """

    verdict: Verdict | None
    spans: list[tuple[Chunk, Span]]
    written: list[ParamRecord] = field(default_factory=list)
    step: int = 0
    mode: str = ""
    speculated: bool = False
    rolled_back: bool = False
    irregular: list[int] = field(default_factory=list)
    exposed_s: float = 0.0
    marks: Mapping[int, Mark] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    span: Callable[[str], AbstractContextManager[object]] = nullcontext

    def wait(self, chunks: Collection[int], *, on_host: bool) -> None:
        """Wait for the weights of `chunks` and for no others."""
        for index in chunks:
            mark = self.marks.get(index)
            if mark is not None:
                with self.span("wait_weights"):
                    mark.wait(on_host=on_host)
                self.passed.add(index)

    @property
    def missed(self) -> list[int]:
        """Chunks whose weights nobody has waited for."""
        return sorted(self.marks.keys() - self.passed)


class Departing(Protocol):
    """A stepper whose step may end later."""

    def depart(self) -> Mapping[int, Mark]:
        """All of a step has been submitted: the marks of the chunks that are part of it."""

    def settle(self) -> None:
        """Block until all that was submitted has ended, without waiting for the device's other work."""
