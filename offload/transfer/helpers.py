"""A few threads for a short time, that nobody has to wait for.

Like an executor, but its threads are daemons: a call of the system or the driver that hangs must not hang the
interpreter's exit as well.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

__all__ = ["Helpers"]

Task = tuple[Future[None], Callable[[], object]]

END_S = 1.0
"""Seconds that the threads have to end, all together, after what they are at."""


class Helpers:
    """Up to `number` threads, of which only as many start as there are tasks; ended by leaving ``with``.

    Args:
        name: of the threads.
        bind: called by each thread first; its error is that of the thread's tasks.
    """

    def __init__(self, name: str, number: int, bind: Callable[[], object] | None = None) -> None:
        self._name, self._number, self._bind = name, max(number, 1), bind
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[[], object]) -> Future[None]:
        """Run `function` on one of the threads; what it returns is dropped."""
        future: Future[None] = Future()
        if len(self._threads) < self._number:
            thread = threading.Thread(
                target=_run_all, args=(self._tasks, self._bind), name=self._name, daemon=True
            )
            self._threads.append(thread)  # before it starts: interrupted there it runs, and has to be ended
            thread.start()
        self._tasks.put((future, function))
        return future

    def cancel(self) -> None:
        """Nothing that is still queued will be run; what runs already goes on."""
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if task is not None:
                task[0].cancel()

    def __enter__(self) -> Helpers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the threads after what is queued, or on an error without that; one that hangs is left behind."""
        if error is not None:
            self.cancel()
        for _ in self._threads:
            self._tasks.put(None)
        end = time.monotonic() + END_S
        for thread in self._threads:
            if thread.is_alive():  # one that could not be started is in the list too
                thread.join(max(end - time.monotonic(), 0.0))


def _run_all(tasks: queue.SimpleQueue[Task | None], bind: Callable[[], object] | None) -> None:
    while (task := tasks.get()) is not None:
        future, function = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            if bind is not None:
                bind()
                bind = None
            function()
        except BaseException as error:  # noqa: BLE001 - carried to whoever waits
            future.set_exception(error)
        else:
            future.set_result(None)
        del task, future, function  # what they hold must not live until the next task
