"""The queue between hooks and the worker: what waits in it keeps gradients alive on the device.

Bounded, and slow to let producers in again: a producer that found the queue full sleeps until half of it is gone.
With an ordinary bounded queue every job that the worker takes would wake backward for one more, just when the worker
needs the interpreter to issue its copies.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Backlog"]

T = TypeVar("T")


class Backlog(Generic[T]):
    """A FIFO of at most `depth` items; `put` blocks while it is full, `take` while it is empty."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        lock = threading.Lock()
        self._not_empty = threading.Condition(lock)
        self._room = threading.Condition(lock)
        self._was_full = False

    def put(self, item: T, timeout_s: float) -> bool:
        """Append `item`; False where there was no room for `timeout_s` seconds."""
        with self._room:
            if len(self._items) >= self._depth:
                self._was_full = True
            if self._was_full and not self._wait_for_room(timeout_s):
                return False
            self._items.append(item)
            self._not_empty.notify()
            return True

    def take(self, *, block: bool) -> T | None:
        """The oldest item; None where there is none and `block` is False."""
        with self._not_empty:
            while not self._items:
                if not block:
                    return None
                self._not_empty.wait()
            item = self._items.popleft()
            if self._was_full and len(self._items) <= self._depth // 2:
                self._was_full = False
                self._room.notify_all()
            return item

    def _wait_for_room(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._was_full:
            if not self._room.wait(deadline - time.monotonic()):
                return not self._was_full
        return True
