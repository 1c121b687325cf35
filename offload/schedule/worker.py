"""The worker: two threads that bring jobs through their three stages.

    issue      copier   take slots, start the copy to the host; False while no slot is free
    compute    worker   wait for that copy, run the kernels
    deliver    copier   start the copy back

The worker's thread owns the kernels' team and does nothing between two kernels but to wait for a copy that has mostly
ended by then. The copier issues as far ahead as slots allow, while kernels run. One thread for all would lose the
interpreter time of its own copies between two kernels, and on top of it whatever backward keeps the GIL for: 0.2 of
1.9 s of an 8 K step of a 4 G model were spent on issuing copies alone.

Jobs are computed, and delivered, in the order in which they were taken: that of their submission, but for groups (see
`backlog`). Two queues are all that the threads share;
the bound of the first one holds backward up when the host is slow. An error is kept and raised at the next public
call; after one, jobs are dropped, so that nobody waits for a worker that cannot go on.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from offload.errors import ClosedError, DeadlineError, OffloadError, StateError, WorkerError
from offload.schedule.backlog import Backlog, always

__all__ = ["Call", "Job", "Worker"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
FAILED_CLOSE_TIMEOUT_S = 1.0


class Job(Protocol):
    """Work in three stages, see the module's docstring. Any stage may raise; `drop` is called then, or instead."""

    def issue(self) -> bool:
        """Copier: start the copies; False: no slot is free, try again when an earlier job is done."""

    def compute(self) -> None:
        """Worker: wait for the copies and compute."""

    def deliver(self) -> None:
        """Copier: start the copies of the results."""

    def drop(self, error: BaseException) -> None:
        """Release what the job holds: it will not go on."""


class Call(Generic[T]):
    """A function to be run after all earlier jobs, with its result as a `Future`.

    Args:
        function: what to run.
        on_copier: run it on the copier, when earlier jobs have been delivered, instead of on the worker.
    """

    def __init__(self, function: Callable[[], T], *, on_copier: bool = False) -> None:
        self._function = function
        self._on_copier = on_copier
        self.future: Future[T] = Future()

    def issue(self) -> bool:
        """Nothing to copy."""
        return True

    def compute(self) -> None:
        """Run it here, if it is for the worker."""
        if not self._on_copier:
            self._run()

    def deliver(self) -> None:
        """Run it here, if it is for the copier."""
        if self._on_copier:
            self._run()

    def drop(self, error: BaseException) -> None:
        """Tell the caller why its function did not run."""
        if not self.future.done():
            self.future.set_exception(error)

    def _run(self) -> None:
        """An error of ours is the caller's; any other one stops the worker as well."""
        try:
            result = self._function()
        except OffloadError as error:
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(error)
            raise
        else:
            self.future.set_result(result)


class Worker:
    """Runs jobs on two daemon threads.

    Args:
        name: prefix of the threads' names.
        depth: jobs that may wait; `submit` blocks beyond it.
        run_ahead: see `Backlog`; for workers whose jobs wait for what they need, and so are done when it has come.
        timeout_s: deadline of every wait of other threads for these, in seconds.
    """

    def __init__(self, name: str, *, depth: int, timeout_s: float, run_ahead: int | None = None) -> None:
        self._inbox: Backlog[Any] = Backlog(depth, run_ahead=run_ahead)
        #: Deadline of every wait for the worker, in seconds.
        self.timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._outcome = _Outcome(self._inbox.lift)
        self._closed = self._is_told = False
        self._pid = os.getpid()
        computing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        targets = {"worker": _compute_all, "copier": _copy_all}
        self._threads = [
            threading.Thread(
                target=target,
                args=(self._inbox, computing, self._outcome),
                name=f"{name}-{role}",
                daemon=True,
            )
            for role, target in targets.items()
        ]
        for thread in self._threads:
            try:
                thread.start()
            except BaseException:
                # For those that run, also one that was interrupted: they have no work yet.
                computing.put(_END)
                self._inbox.end(_END, CLOSE_TIMEOUT_S)
                raise

    @property
    def failed(self) -> bool:
        """Whether the worker cannot go on."""
        return self._outcome.error is not None

    @property
    def waited_s(self) -> float:
        """Seconds that `submit` has waited because the queue was full, since the beginning."""
        return self._inbox.waited_s

    @property
    def waiting_bytes(self) -> int:
        """Bytes of gradients that wait in the queue, of jobs that tell."""
        return sum(getattr(job, "num_bytes", 0) for job in self._inbox.waiting())

    def allow(self, extra: int) -> None:
        """From now on let so many more jobs wait than `depth`."""
        self._inbox.allow(extra)

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

    def fail(self, error: BaseException) -> None:
        """Go no further because of `error`, which another thread met: `raise_error` raises it from now on."""
        self._outcome.fail(error)

    def submit(self, job: Job, *, group: int | None = None, ready: Callable[[], bool] = always) -> None:
        """Queue `job`; blocks while the queue is full. Never raises the worker's errors: hooks call this.

        A job that is not queued, because the worker has failed, was closed (also while this waited) or took too long, is
        dropped with the reason.

        Args:
            group: jobs that may be taken before earlier ones of other groups, in their own order; None: after all
                earlier jobs, before all later ones.
            ready: of a job in a group, whether its copies would not have to wait.
        """
        if self.failed or self._closed:
            job.drop(self._outcome.error or _closed())
            return
        try:
            if self._inbox.put(job, self.timeout_s, group=group, ready=ready):
                return
        except ClosedError:  # by another thread, since we looked
            job.drop(self._outcome.error or _closed())
            return
        error = self._late("took no job")
        self._outcome.fail(error)
        job.drop(error)

    def call(self, function: Callable[[], T], *, on_copier: bool = False) -> T:
        """Run `function` after everything queued so far and return its result; see `Call`.

        From one of the worker's own threads (a finalizer that the garbage collector runs there) it is run at once.

        Raises:
            WorkerError: the worker failed, now or earlier.
            DeadlineError: no answer within ``timeout_s``.
        """
        self.raise_error()
        if os.getpid() != self._pid:
            raise StateError(
                "this is a forked child: the optimizer's threads and memory stayed in the parent process"
            )
        if threading.current_thread() in self._threads:
            return function()
        call = Call(function, on_copier=on_copier)
        self.submit(call)
        try:
            error = call.future.exception(
                self.timeout_s
            )  # not result(): errors that are timeouts are told apart
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
        """End the threads after what is queued; who waits for room in the queue is refused. Safe to call twice."""
        if self._is_told or os.getpid() != self._pid:
            return
        self._closed = True
        timeout_s = FAILED_CLOSE_TIMEOUT_S if self.failed else CLOSE_TIMEOUT_S
        end = time.monotonic() + timeout_s  # of all together: the copier cannot end before the worker
        is_told = self._inbox.end(_END, timeout_s)
        self._is_told = True  # only now: interrupted before, it is done when called again
        if threading.current_thread() in self._threads:  # a finalizer there: each of them waits for the other
            return
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        if not is_told or any(thread.is_alive() for thread in self._threads):
            logger.warning(
                "the offload worker did not end within %s s; its threads are left behind as daemons",
                timeout_s,
            )

    def _late(self, what: str) -> DeadlineError:
        return DeadlineError(
            f"the offload worker {what} within {self.timeout_s} s (config.timeout_s); it may hang in "
            "a copy or a kernel, or the machine is overloaded"
        )


class _Outcome:
    """Why the worker cannot go on; the first reason stays. `lift`: lets go whoever waits for room in the queue."""

    def __init__(self, lift: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._failed = threading.Event()
        self._lift = lift

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            logger.error("offload worker: %s: %s", type(error).__name__, error)
        self._failed.set()
        self._lift()

    def wait_failed(self, timeout_s: float) -> None:
        """Until the thread has stored the error that a caller has seen already."""
        self._failed.wait(timeout_s)

    def run(self, job: Job, stage: Callable[[], T], default: T) -> T:
        """Run one stage of `job`, or drop it where the worker has failed or fails now."""
        if self.error is None:
            try:
                return stage()
            except BaseException as error:  # noqa: BLE001 - kept, and raised at the next public call
                self.fail(error)
        job.drop(self.error or RuntimeError("dropped"))
        return default


class _Computed(NamedTuple):
    """The worker's report to the copier."""

    job: Job


def _closed() -> ClosedError:
    return ClosedError("the optimizer is closed")


_END: Any = object()
"""Closes a queue."""


def _copy_all(inbox: Backlog[Any], computing: queue.SimpleQueue[Any], outcome: _Outcome) -> None:
    """The copier's loop. Holds no reference to the `Worker`, so that a forgotten one can be collected."""
    waiting: Job | None = None
    num_computing = 0
    ended = False
    while not ended or num_computing:
        item = inbox.take(reports_only=ended or waiting is not None)
        if isinstance(item, _Computed):
            num_computing -= 1
            outcome.run(item.job, item.job.deliver, None)
        elif item is _END:
            ended = True
        else:
            waiting = item
        if waiting is not None and outcome.run(waiting, waiting.issue, True):
            computing.put(waiting)
            num_computing += 1
            waiting = None
        elif waiting is not None and not num_computing:
            outcome.fail(RuntimeError(f"{waiting!r} found no free slot though nothing is in flight"))
            waiting.drop(outcome.error or RuntimeError())
            waiting = None
    computing.put(_END)


def _compute_all(inbox: Backlog[Any], computing: queue.SimpleQueue[Any], outcome: _Outcome) -> None:
    """The worker's loop."""
    while (job := computing.get()) is not _END:
        outcome.run(job, job.compute, None)
        inbox.report(_Computed(job))
