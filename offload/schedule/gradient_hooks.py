"""The hooks through which gradients come, and the threads that call them.

Owns the hooks, the lock under which they run and whose turn it is. Hooks run on autograd's threads: one per device, and as
many as run backward at a time. All of them enter the engine one at a time; what they wait for while they hold the lock
has a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from offload.errors import MidStepError
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule import messages
from offload.schedule.ledger import Ledger
from offload.schedule.turns import Turns

__all__ = ["GradientHooks"]


class GradientHooks:
    """Two per parameter.

    Args:
        ledger: which gradients have come.
        clock: whose trace shows each gradient.
    """

    def __init__(self, ledger: Ledger, clock: StageClock) -> None:
        self._ledger, self._clock = ledger, clock
        self._lock = threading.RLock()
        self._turns = Turns(self._lock)
        self._handles: list[RemovableHandle] = []
        self._seconds = 0.0

    def attach(self, record: ParamRecord, receive: Callable[[ParamRecord], None]) -> None:
        """Call `receive` whenever a gradient has been accumulated, under the lock.

        Before it is accumulated the sentinel of the last one must go. Only the parameter holds `receive`, so that whose
        method it is goes at once when the hooks have been removed.
        """

        def before(gradient: torch.Tensor) -> None:
            with self._lock:
                self._turns.take(record.index)
                fires = self._ledger.fires(record.index)
                if fires and record.source.dropped:
                    raise MidStepError(messages.dropped(record.name))
                record.source.before(gradient, more=fires > 0 or self._ledger.expects_more)

        def after(parameter: torch.Tensor) -> None:
            start = time.perf_counter()
            with self._lock:
                try:
                    receive(record)
                finally:
                    self._turns.give(record.index)
                end = time.perf_counter()
                self._seconds += end - start
            trace = self._clock.trace
            if trace is not None:
                trace.add("hook", start, end, {"parameter": record.name})

        parameter = record.param
        self._handles.append(parameter.register_hook(before))
        self._handles.append(parameter.register_post_accumulate_grad_hook(after))

    def locked(self, function: Callable[[], None]) -> Callable[[], None]:
        """`function` under the lock; holds neither hooks nor engine, so that closed ones go at once."""
        lock = self._lock

        def call() -> None:
            with lock:
                function()

        return call

    def take_seconds(self) -> float:
        """What hooks took since the last call, held-up time included."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def remove(self) -> None:
        """No gradient comes any more. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
