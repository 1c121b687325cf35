"""What steps do to memory, and to their own pace, when many follow each other: where a leak or a drift would show."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

FIRST = 10
"""Steps before memory is compared: pools grow to the most that was ever in flight."""


class Memory(NamedTuple):
    """Bytes after a step: allocated on the device, pinned, resident in the process."""

    device: int
    pinned: int
    host: int


def is_sampled(step: int, num_steps: int) -> bool:
    """Whether memory is compared after this step: two samples of a run that is long enough, else none.

    Only there, since what is under way has to end first: an update that overlaps the next forward holds gradients.
    """
    return num_steps >= 2 * FIRST and step in (FIRST - 1, num_steps - 1)


def growth(memory: Sequence[Memory], step_s: Sequence[float]) -> dict[str, Any] | None:
    """Bytes gained from step `FIRST` to the last, and how much slower the last `FIRST` steps are than the first ones.

    Args:
        memory: the samples that `is_sampled` asks for; without them the result is None.
        step_s: seconds of all steps.
    """
    if not memory:
        return None
    before, after = memory
    first, last = (statistics.median(part) for part in (step_s[:FIRST], step_s[-FIRST:]))
    return {
        "growth_bytes": {
            name: now - then for name, now, then in zip(Memory._fields, after, before, strict=True)
        },
        "slowdown": last / first - 1.0,
    }
