"""The queue between hooks and the worker: what waits in it keeps gradients alive on the device.

Bounded, and slow to let producers in again: a producer that found it full sleeps until half of it is gone. With an
ordinary bounded queue every job taken would wake backward for one more, just when the interpreter is needed to issue
copies. Beside the jobs there is a lane for reports of work done, which is unbounded and goes first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Backlog"]

T = TypeVar("T")


class Backlog(Generic[T]):
    """A FIFO of at most `depth` items, and a second one without a bound that `take` prefers."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._reports: deque[T] = deque()
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._full = False

    def put(self, item: T, timeout_s: float) -> bool:
        """Append an item; False where there was no room for `timeout_s` seconds."""
        # Called on the user's thread, where Ctrl-C may strike anywhere: the lock itself, whose methods are C and cannot be
        # interrupted half-way, and not a condition's ``with``, which is Python and could leave the lock taken for ever.
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            self._full |= len(self._items) >= self._depth
            if self._full and not self._wait_for_room(timeout_s):
                return False
            self._items.append(item)
            self._not_empty.notify()
            return True
        finally:
            self._lock.release()

    def report(self, item: T) -> None:
        """Append to the lane that goes first; never blocks."""
        with self._not_empty:
            self._reports.append(item)
            self._not_empty.notify()

    def take(self, *, reports_only: bool = False) -> T:
        """The oldest report, else the oldest item; blocks while there is none of the kinds asked for."""
        with self._not_empty:
            while not self._reports and (reports_only or not self._items):
                self._not_empty.wait()
            if self._reports:
                return self._reports.popleft()
            item = self._items.popleft()
            if self._full and len(self._items) <= self._depth // 2:
                self._full = False
                self._room.notify_all()
            return item

    def _wait_for_room(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._full:
            if not self._room.wait(deadline - time.monotonic()):
                return not self._full
        return True
