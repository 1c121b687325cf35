"""The worker: one thread that issues copies ahead, waits for the oldest, and runs its kernel.

A `Job` has two halves. `issue` starts its copies and returns False while no slot is free for them; `finish` waits
for the copies and computes. The worker issues jobs as far ahead as slots allow and finishes them in order, so
copies of later jobs run under the kernel of an earlier one. Jobs finish in the order in which they were submitted.

The backlog is the only thing that threads share, and its bound holds backward up when the host is slow. Errors are
kept and raised at the next public call; after one, jobs are dropped so that nobody waits for a worker that cannot go on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, Protocol, TypeVar

from offload.errors import ClosedError, DeadlineError, OffloadError, WorkerError
from offload.schedule.backlog import Backlog

__all__ = ["Call", "Job", "Worker"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


class Job(Protocol):
    """Work in two halves, see the module's docstring. `drop` replaces both where the worker cannot go on."""

    def issue(self) -> bool:
        """Start the copies; False: no slot is free, try again after the oldest job has finished."""

    def finish(self) -> None:
        """Wait for the copies and compute."""

    def drop(self, error: BaseException) -> None:
        """Release what the job holds."""


class Call(Generic[T]):
    """A function to be run by the worker after all earlier jobs; its result is a `Future`."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: Future[T] = Future()

    def issue(self) -> bool:
        """Nothing to copy."""
        return True

    def finish(self) -> None:
        """Run the function. An error of ours is the caller's; any other one stops the worker as well."""
        try:
            result = self._function()
        except OffloadError as error:
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(error)
            raise
        else:
            self.future.set_result(result)

    def drop(self, error: BaseException) -> None:
        """Tell the caller why its function did not run."""
        if not self.future.done():
            self.future.set_exception(error)


class Worker:
    """Runs jobs on one daemon thread.

    Args:
        name: of the thread.
        depth: jobs that may wait; `submit` blocks beyond it.
        timeout_s: deadline of every wait of other threads for this one, in seconds.
    """

    def __init__(self, name: str, *, depth: int, timeout_s: float) -> None:
        self._backlog: Backlog[Job] = Backlog(depth)
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._outcome = _Outcome()
        self._closed = False
        self._thread = threading.Thread(target=_run, args=(self._backlog, self._outcome), name=name, daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the worker cannot go on."""
        return self._outcome.error is not None

    def raise_error(self) -> None:
        """Raise what the worker failed with, if it did.

        Raises:
            WorkerError: with the worker's own error as its cause.
            DeadlineError: it did not answer in time.
        """
        error = self._outcome.error
        if isinstance(error, DeadlineError):
            raise DeadlineError(str(error)) from error
        if error is not None:
            raise WorkerError(
                f"the offload worker failed ({type(error).__name__}: {error}) and the optimizer's state may be part "
                "old, part new; build a new optimizer and load the last checkpoint"
            ) from error

    def submit(self, job: Job) -> None:
        """Queue `job`; blocks while the queue is full. Never raises the worker's errors: hooks call this."""
        if self.failed or self._closed:
            job.drop(self._outcome.error or ClosedError("the optimizer is closed"))
            return
        if not self._backlog.put(job, self._timeout_s):
            error = self._late("took no job")
            self._outcome.fail(error)
            job.drop(error)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the worker after everything queued so far and return its result.

        From the worker's own thread (a finalizer that the garbage collector runs there) it is run at once.

        Raises:
            WorkerError: the worker failed, now or earlier.
            DeadlineError: no answer within ``timeout_s``.
        """
        self.raise_error()
        if threading.current_thread() is self._thread:
            return function()
        call = Call(function)
        self.submit(call)
        try:
            error = call.future.exception(self._timeout_s)  # not result(): errors that are timeouts are told apart
        except FutureTimeout:
            self._outcome.fail(self._late("did not finish"))
            self.raise_error()
            raise
        if error is None:
            return call.future.result()
        if not isinstance(error, OffloadError):
            self._outcome.wait_failed(CLOSE_TIMEOUT_S)
        self.raise_error()
        raise error

    def close(self) -> None:
        """End the thread after what is queued; drops what it does not get to. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if not self._backlog.put(_END, CLOSE_TIMEOUT_S):
            logger.warning("the offload worker did not take its end; it is left behind as a daemon thread")
            return
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _late(self, what: str) -> DeadlineError:
        return DeadlineError(f"the offload worker {what} within {self._timeout_s} s (config.timeout_s); it may hang in "
                             "a copy or a kernel, or the machine is overloaded")


class _Outcome:
    """Why the worker cannot go on; the first reason stays."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._failed = threading.Event()

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            logger.error("offload worker: %s: %s", type(error).__name__, error)
        self._failed.set()

    def wait_failed(self, timeout_s: float) -> None:
        """Until the thread has stored the error that a caller has seen already."""
        self._failed.wait(timeout_s)


def _run(jobs: Backlog[Job], outcome: _Outcome) -> None:
    """The thread's loop. Holds no reference to the worker, so that a forgotten one can be collected."""
    issued: deque[Job] = deque()
    waiting: Job | None = None
    try:
        while True:
            if waiting is None:
                waiting = jobs.take(block=not issued)
                if waiting is _END:
                    break
            if waiting is not None and waiting.issue():
                issued.append(waiting)
                waiting = None
            elif issued:
                issued.popleft().finish()
            elif waiting is not None:
                raise RuntimeError(f"{waiting!r} found no free slot though nothing is in flight")
        while issued:
            issued.popleft().finish()
    except BaseException as error:  # noqa: BLE001 - kept, and raised at the next public call
        outcome.fail(error)
        _drop_all(jobs, issued, waiting, error)


class _End:
    """Marks the end of the queue."""

    issue = finish = drop = None


_END: Any = _End()


def _drop_all(jobs: Backlog[Job], issued: deque[Job], waiting: Job | None, error: BaseException) -> None:
    """Release all jobs, and go on doing so until the end is asked for."""
    for job in (*issued, *([waiting] if waiting not in (None, _END) else [])):
        job.drop(error)
    issued.clear()
    if waiting is _END:
        return
    while (job := jobs.take(block=True)) not in (None, _END):
        job.drop(error)
