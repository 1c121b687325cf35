"""Masters and compute weights agree: whose turn it is to follow when somebody else has written one of them.

Owns what records have `seen` of their weights, but for our own writes (`ParamRecord.note_write`). A weight that was
written from outside (a loaded model, a hook, an averaged weight) wins: its master is taken anew, its moments stay. Called
between steps, at a step's first gradient, and in a hook before its early update; never while writes of ours may be on
their way to the weights in question.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from offload.parameters import ParamRecord
from offload.schedule.stepper import Stepper

__all__ = ["ForeignWrites"]

logger = logging.getLogger(__name__)


class ForeignWrites:
    """Lets one stepper's masters follow.

    Args:
        records: of all parameters, by index; others may come.
    """

    def __init__(self, stepper: Stepper, records: Mapping[int, ParamRecord]) -> None:
        self._stepper, self._records = stepper, records

    def follow_all(self, *, but: Callable[[int], bool]) -> None:
        """Masters follow all weights that somebody else wrote; `but`: of an index, whether an early update wrote it."""
        self.follow([r for index, r in self._records.items() if not but(index) and r.weight_changed()])

    def follow(self, stale: Sequence[ParamRecord]) -> None:
        """Take masters anew from weights that somebody else wrote; nothing of ours may be on its way to them."""
        if not stale:
            return
        changed = self._stepper.load_weights(stale)
        for record in stale:
            record.note_weight()
        if changed:
            names = ", ".join(self._records[index].name for index in sorted(changed)[:3])
            logger.warning(
                "weights of %d parameter(s) were changed outside the optimizer (%s ...): their masters were "
                "taken anew from the weights, the moments were kept",
                len(changed),
                names,
            )

    def resync(self) -> list[str]:
        """Masters follow all weights that they do not round to, seen or not; the names of these parameters."""
        records = list(self._records.values())
        changed = self._stepper.load_weights(records)
        for record in records:
            record.note_weight()
        return [self._records[index].name for index in sorted(changed)]

    def take_masters(self, written: Sequence[ParamRecord]) -> None:
        """Weights of `written` come from their masters, masters of all others from the weights."""
        mastered = {record.index for record in written}
        others = [r for index, r in self._records.items() if index not in mastered and r.active]
        self._stepper.load_weights(others, force=True)
        self._stepper.store_weights(written)
        for record in self._records.values():
            record.note_weight()
