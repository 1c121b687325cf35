"""Moves the balance between the host's kernels and the link, once steps show how long each takes. Pure.

The plan divides a hybrid's state by measured rates; what backward leaves of them is only seen in steps. So after each of
the first steps the two sides are compared: whichever was further behind gives chunks to the other. Only chunks that were
planned as streamed can move, since only their state is pinned.

Where the next forward overlaps the update, both sides end in it, and are compared when the step has landed. How long that
forward waited for either is not asked: two sides that end together leave the most room before it has to.
"""

from __future__ import annotations

__all__ = ["FIRST_STEPS", "WORTH_S", "Balancer"]

FIRST_STEPS = 24
"""Steps after which the balance stays as it is: later ones are to be alike."""

WORTH_S = 0.015
"""Difference of the two ends, in seconds, below which all stays: moving one chunk changes it by about as much."""


class Balancer:
    """Decides after each step.

    Args:
        movable: chunks that may be streamed or not.
        streamed: how many of them are streamed at first; None: all.
    """

    def __init__(self, movable: int, streamed: int | None = None) -> None:
        self._movable, self._streamed = movable, movable if streamed is None else streamed
        self._steps = 0
        self._before = self._moved = 0  # chunks, with the sign of their direction
        self._settled = False

    def note(self, host_s: float, stream_s: float) -> int:
        """How many of the movable chunks are to be streamed from now on.

        Some move when two steps in a row call for it, half as many as would make up for the difference. A move back ends it
        all: the balance lies between the two.

        Args:
            host_s, stream_s: how far each was behind backward, in seconds: when it was done, counted from ``step()``, when
                all of its work was submitted, and how long its full queue held backward up before.
        """
        self._steps += 1
        if not self._settled and self._steps <= FIRST_STEPS:
            late = host_s - stream_s
            wanted = int(late / WORTH_S)
            if wanted * self._before > 0:
                fewer = min(wanted, self._before, key=abs)
                self._move(int(fewer / 2) or (1 if fewer > 0 else -1))
                wanted = 0
            self._before = wanted
        return self._streamed

    def _move(self, number: int) -> None:
        self._settled = number * self._moved < 0
        self._moved = number
        self._streamed = min(max(self._streamed + number, 0), self._movable)
