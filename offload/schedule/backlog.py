"""The queue between hooks and the worker: what waits in it keeps gradients alive on the device.

Bounded, and slow to let producers in again: a producer that found it full sleeps until `REFILL` items (of a short one,
half) are gone. With an ordinary bounded queue every job taken would wake backward for one more, just when the interpreter is
needed to issue copies; and one that sleeps until half of a long queue is gone leaves the device without work. Beside the
jobs there is a lane for reports of work done, which is unbounded and goes first.

Nor may the program run far ahead of the device, if told so (`RUN_AHEAD`): memory of gradients that are still to be computed
is taken all the same, and nobody is helped by it. Where more may wait, because there is memory for it (`Backlog.allow`), it
may run ahead by as much more: a device whose layers bring more gradients than that would stand still while the next ones
are launched.

Items can be put in groups. Among groups that wait, the one that came last goes first, if it is ready: where the next
forward overlaps the update, the layer whose gradients came last is the one whose weights are needed first. Ready, because
the program runs ahead of the device: a copy of what is still to be computed would hold up all that are issued after it.

Note [Ctrl-C]: `Backlog.put` and `Backlog.end` run on the user's thread, where a signal may raise after any call that Python
code makes, but not inside of one that C code makes. A lock that is then held by nobody who knows of it is held for ever. So
one call of C takes it and notes that it is held, there is no ``with`` of a condition, which is Python, and an item is
appended by operations on containers, which are no calls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from offload.errors import ClosedError

__all__ = ["REFILL", "RUN_AHEAD", "Backlog", "always"]

T = TypeVar("T")

REFILL = 16
"""Items that must be gone from a full backlog before it takes more: some 40 ms of the host's work."""

RUN_AHEAD = 32
"""Items that may wait, or be under way, without being ready: enough for a device to find work while the program sleeps."""


def always() -> bool:
    """`ready` of items that wait for nothing; the program does not run ahead with them."""
    return True


class _Waiting(Generic[T]):
    """Items in order of arrival, but for groups: the newest that is ready first, else the oldest; each in order of arrival.

    Nothing passes an item of no group. So the items are stretches that follow each other, of groups and of such items.
    """

    def __init__(self) -> None:
        self._stretches: deque[dict[int | None, deque[tuple[T, Callable[[], bool]]]]] = deque()
        self._number = 0

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[T]:
        for stretch in self._stretches:
            for items in stretch.values():
                yield from (item for item, _ in items)

    def append(self, item: T, group: int | None, ready: Callable[[], bool]) -> None:
        """See Note [Ctrl-C]: from the first change on nothing is called."""
        waits = (item, ready)
        stretch = self._stretches[-1] if self._stretches else None
        if stretch is None or (group is None) is not (None in stretch):
            self._stretches += ({group: deque((waits,))},)
        elif group in stretch:
            stretch[group] += (waits,)
        else:
            stretch[group] = deque((waits,))
        self._number += 1

    def pop(self) -> T:
        stretch = self._stretches[0]
        group = next((key for key in reversed(stretch) if stretch[key][0][1]()), next(iter(stretch)))
        item, _ = stretch[group].popleft()
        if not stretch[group]:
            del stretch[group]
        if not stretch:
            self._stretches.popleft()
        self._number -= 1
        return item


class Backlog(Generic[T]):
    """At most `depth` items that wait, and more while `allow` says so; and a FIFO without a bound that `take` prefers.

    Args:
        run_ahead: items put last that may all be still to become ready; None: any number. For takers that report an item
            when it has become ready: such a report is what a producer waits for that has run ahead.
    """

    def __init__(self, depth: int, *, run_ahead: int | None = None) -> None:
        self._depth, self._extra, self._run_ahead = depth, 0, run_ahead
        self._early: deque[Callable[[], bool]] = deque()  # of the items put last, those not known to be ready
        self._num_held_up = 0  # several threads may put: the first that goes on leaves the others waiting
        self._is_lifted = self._has_ended = False
        self._items: _Waiting[T] = _Waiting()
        self._reports: deque[T] = deque()
        self._lock = threading.RLock()  # a finalizer, which may run while an item is taken, puts the last one
        self._not_empty = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._full = False
        #: Seconds that producers have waited because it was full, all together; not those who had run ahead.
        self.waited_s = 0.0

    def put(
        self,
        item: T,
        timeout_s: float,
        *,
        group: int | None = None,
        ready: Callable[[], bool] = always,
    ) -> bool:
        """Append an item; False where there was no room for `timeout_s` seconds.

        Args:
            group: where it may be taken before items of other groups that came earlier.
            ready: whether taking it now would hold up nothing; asked from the thread that takes, and from the one that
                puts. Keeps nothing alive that is worth keeping, since it may be asked when the item is gone.

        Raises:
            ClosedError: `end` was called, before or while this waited for room; the item is not in.
        """
        held: list[bool] = []  # see Note [Ctrl-C]
        try:
            held.extend(map(self._lock.acquire, (True,), (timeout_s,)))
            if not held[0]:
                return False
            self._full |= len(self._items) >= self._limit
            if self._must_wait() and not self._wait_for_room(timeout_s):
                return False
            if self._has_ended:
                raise ClosedError("nothing more is taken: the end was put")
            self._items.append(item, group, ready)
            if self._run_ahead is not None and ready is not always:
                self._early.append(ready)
            self._not_empty.notify()
            return True
        finally:
            if True in held:
                try:  # noqa: SIM105 - a context manager is more Python
                    self._lock.release()
                except RuntimeError:  # interrupted inside `wait`, which had given it away
                    pass

    def end(self, item: T, timeout_s: float) -> bool:
        """Append the last item, for which there is always room: from now on `put` refuses, also who waits for room in it.

        So nothing lies behind it that nobody will take. False: the backlog was locked for `timeout_s` seconds.
        """
        held: list[bool] = []  # see Note [Ctrl-C]
        try:
            held.extend(map(self._lock.acquire, (True,), (timeout_s,)))
            if held[0]:
                self._has_ended = True
                self._items.append(item, None, always)
                self._not_empty.notify()
                self._room.notify_all()
            return held[0]
        finally:
            if True in held:
                self._lock.release()

    def allow(self, extra: int) -> None:
        """From now on let so many more items wait than the depth says, ready or not."""
        with self._lock:
            self._extra = extra

    def lift(self) -> None:
        """From now on nobody waits for room: what is taken is only dropped."""
        with self._lock:
            self._is_lifted = True
            self._room.notify_all()

    def waiting(self) -> list[T]:
        """The items, for whoever wants to know what they hold."""
        with self._lock:
            return list(self._items)

    def report(self, item: T) -> None:
        """Append to the lane that goes first; never blocks."""
        with self._not_empty:
            self._reports.append(item)
            self._not_empty.notify()
            if self._num_held_up:  # what was done was ready
                self._room.notify_all()

    def take(self, *, reports_only: bool = False) -> T:
        """The oldest report, else the next item; blocks while there is none of the kinds asked for."""
        with self._not_empty:
            while not self._reports and (reports_only or not self._items):
                self._not_empty.wait()
            if self._reports:
                return self._reports.popleft()
            item = self._items.pop()
            if self._full and len(self._items) <= max(self._limit - REFILL, self._limit // 2):
                self._full = False
                self._room.notify_all()
            return item

    @property
    def _limit(self) -> int:
        return self._depth + self._extra

    def _must_wait(self) -> bool:
        return not (self._is_lifted or self._has_ended) and (self._full or self._runs_ahead())

    def _runs_ahead(self) -> bool:
        """Whether as many of the last items as may be are still to become ready."""
        if self._run_ahead is None:
            return False
        most = self._run_ahead + self._extra
        while len(self._early) >= most and self._early[0]():
            self._early.popleft()
        return len(self._early) >= most

    def _wait_for_room(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        self._num_held_up += 1
        try:
            while self._must_wait():
                if not self._wait_once(end):
                    return not self._must_wait()
            return True
        finally:
            self._num_held_up -= 1

    def _wait_once(self, end: float) -> bool:
        """Until somebody tells of a change; it may begin as full, and go on as one that has run ahead."""
        start, is_full = time.monotonic(), self._full
        try:
            return self._room.wait(end - start)
        finally:
            if is_full:
                self.waited_s += time.monotonic() - start
