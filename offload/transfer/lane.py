"""One direction of :class:`~offload.transfer.host.LaneTransport`: a thread that runs copies in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from offload.errors import DeadlineError

__all__ = ["Lane", "PendingCopy"]


class PendingCopy:
    """A job of a lane, and the signal of its end (the shape of ``torch.cuda.Event``)."""

    def __init__(self, run: Callable[[], None], delay_s: float, lane: Lane) -> None:
        """``run`` copies, or raises what ``synchronize`` is to raise."""
        self.run = run
        self.delay_s = delay_s
        self._lane = lane
        self._ended = False
        self._error: BaseException | None = None

    def query(self) -> bool:
        """Whether it has run, well or not."""
        return self._ended

    def synchronize(self) -> None:
        """Block until it has run; raise its error."""
        self.await_end()
        if self._error is not None:
            raise self._error

    def await_end(self) -> None:
        """Block until it has run, well or not."""
        self._lane.wait_until(lambda: self._ended, "a copy to end")

    def wait(self) -> None:
        """Without streams, the caller itself waits."""
        self.synchronize()

    def execute(self) -> None:
        """Run and remember the outcome. On the lane's thread only; the lane then announces it."""
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits
            self._error = error
        self.run = _nothing  # holds the tensors
        self._ended = True


class Lane:
    """A thread, its queue, and a gate before the queue's head. All fields belong to the one condition."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """Start the thread."""
        self.name = name
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._jobs: deque[PendingCopy] = deque()
        #: Transfers that may still start; None: any number (the lane is not held).
        self._allowed: int | None = None
        self._closing = False
        # A daemon: a test that fails with the lane held must not hang the interpreter's exit.
        self._thread = threading.Thread(target=self._serve, name=f"offload-lane-{name}", daemon=True)
        self._thread.start()

    def put(self, job: PendingCopy) -> None:
        """Queue ``job``."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def hold(self) -> None:
        """Let nothing start from now on."""
        with self._changed:
            self._allowed = 0

    def release(self, num_transfers: int | None) -> None:
        """Let ``num_transfers`` more start, or any number if None."""
        with self._changed:
            self._allowed = None if num_transfers is None else (self._allowed or 0) + num_transfers
            self._changed.notify_all()

    def synchronize(self) -> None:
        """Block until everything queued has run."""
        self.wait_until(lambda: not self._jobs, "all copies to end")

    def close(self) -> None:
        """Run the rest without gates and delays, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(self.timeout_s)
        if self._thread.is_alive():
            raise self._late("its thread to end")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Block until ``condition``, evaluated under the lock, holds; DeadlineError after ``timeout_s``."""
        with self._changed:
            if not self._changed.wait_for(condition, self.timeout_s):
                raise self._late(what)

    def _late(self, what: str) -> DeadlineError:
        held = ", it is held: release it" if self._allowed == 0 else ""
        return DeadlineError(f"lane {self.name}: waited {self.timeout_s} s for {what}{held}")

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            job.execute()
            with self._changed:
                self._jobs.popleft()  # only now: an empty queue means that nothing runs
                self._changed.notify_all()

    def _next(self) -> PendingCopy | None:
        """The queue's head once it may start; None when closing and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (self._jobs and self._allowed != 0))
            if not self._jobs:
                return None
            if self._allowed:
                self._allowed -= 1
            if self._jobs[0].delay_s > 0:
                self._changed.wait_for(lambda: self._closing, self._jobs[0].delay_s)
            return self._jobs[0]


def _nothing() -> None:
    """What is left to run of a job that has run."""
