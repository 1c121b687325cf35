"""Room that backward itself makes for gradients that wait.

With the next forward overlapped, the host's work ends in the middle of it, and what waited on the device at the end of
backward is what it works on till then: the more may wait, the shorter the host stands still before the next backward. But
device memory is at its peak when backward begins, with all that forward has saved; layer by layer this is freed, and at
the end of backward the peak is gigabytes away. So the number of gradients that may wait grows with what has been freed,
and the peak stays what it is.

What is freed is observed once, in the first backward pass (whose gradients leave at once), at each gradient's hook::

    room at a gradient = highest of all hooks' allocations - highest from this hook on

The second term looks ahead, because what waits cannot be sent away when the next layer needs its memory. Passes of other
lengths free other amounts: of a longer one this room is a part, and a shorter one has its peak below the observed one.

Memory is looked at in hooks, and not between them: a layer whose own need is higher than that of the one at the peak passes
it by the difference. A gradient of which some tiles are on their way counts as the others. Two optimizers of one device
know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from offload.schedule.worker import Worker

__all__ = ["BackwardRoom", "Queue"]


class Queue(NamedTuple):
    """Where gradients wait.

    `unit_bytes`: of one job's gradients. `share`: of the room that is this queue's, 0 to 1.
    """

    worker: Worker
    unit_bytes: int
    share: float


class BackwardRoom:
    """Gives queues the room that backward has made by the time of each gradient.

    Args:
        allocated: bytes of device memory in use, in the order of the program; the slow call of an allocator's statistics.
        queues: that share the room.
    """

    def __init__(self, allocated: Callable[[], int], queues: Sequence[Queue]) -> None:
        self._allocated, self._queues = allocated, tuple(queues)
        self._observed: dict[int, int] = {}
        self._room: dict[int, int] | None = None
        self._extras = [0] * len(self._queues)

    def observe(self, param: int) -> None:
        """A gradient has come in a pass that is only observed; of several, the one with most memory in use counts."""
        if self._room is None:
            waiting = sum(queue.worker.waiting_bytes for queue in self._queues)
            in_use = max(self._allocated() - waiting, self._observed.pop(param, 0))
            self._observed[param] = in_use  # at the end: the order is that of the last pass

    def enter(self, param: int) -> None:
        """A gradient is about to be queued: let as much wait as there is room now."""
        room = 0 if self._room is None else self._room.get(param, 0)
        self._give([int(queue.share * room) // queue.unit_bytes for queue in self._queues])

    def end_step(self, *, is_dropped: bool = False) -> None:
        """Learn from what was observed, once; nothing more than the queues' own depths until the next backward.

        Args:
            is_dropped: the step was not taken. Its backward may have been cut short, by a lack of memory for example, so
                that its peak is no measure and what came after its last gradient is not known; the next one is observed.
        """
        if is_dropped:
            self._observed.clear()
        if self._room is None and self._observed:
            peak = max(self._observed.values())
            highest, self._room = 0, {}
            for param in reversed(self._observed):
                highest = max(highest, self._observed[param])
                self._room[param] = peak - highest
            self._observed.clear()
        self._give([0] * len(self._queues))

    def _give(self, extras: list[int]) -> None:
        for queue, extra, before in zip(self._queues, extras, self._extras, strict=True):
            if extra != before:
                queue.worker.allow(extra)
        self._extras = extras
