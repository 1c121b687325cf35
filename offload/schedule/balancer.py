"""Moves the balance between the host's kernels and the link, once steps show how long each takes. Pure.

The plan divides a hybrid's state by measured rates; what backward leaves of them is only seen in steps. So after each of
the first steps the two ends are compared: whichever finished later gives one chunk to the other. Only chunks that were
planned as streamed can move, since only their state is pinned.
"""

from __future__ import annotations

__all__ = ["FIRST_STEPS", "WORTH_S", "Balancer"]

FIRST_STEPS = 24
"""Steps after which the balance stays as it is: later ones are to be alike."""

WORTH_S = 0.015
"""Difference of the two ends, in seconds, below which a chunk stays: moving one changes it by more."""


class Balancer:
    """Decides after each step.

    Args:
        movable: chunks that may be streamed or not; at first all of them are streamed.
    """

    def __init__(self, movable: int) -> None:
        self._movable = self._streamed = movable
        self._steps = 0
        self._before = self._moved = 0
        self._settled = False

    def note(self, host_s: float, stream_s: float) -> int:
        """How many of the movable chunks are to be streamed from now on.

        One moves when two steps in a row call for it. A move back ends it all: the balance lies between the two.

        Args:
            host_s, stream_s: when each was done, in seconds, counted from the call that waited for both.
        """
        self._steps += 1
        if not self._settled and self._steps <= FIRST_STEPS:
            late = host_s - stream_s
            wanted = 0 if abs(late) < WORTH_S else 1 if late > 0 else -1
            if wanted and wanted == self._before:
                self._move(wanted)
                wanted = 0
            self._before = wanted
        return self._streamed

    def _move(self, direction: int) -> None:
        self._settled = self._moved == -direction
        self._moved = direction
        self._streamed = min(max(self._streamed + direction, 0), self._movable)
