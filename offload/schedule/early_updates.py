"""Updates of the coming step that run inside backward: with which rows, what they have reached, and their way back.

Owns the rows with which they are made, from the first of them to the step's end, and what became of them: with a
speculative step they are committed or rolled back (Note [Speculation] in `host_stepper`), without one they are final.
Rows are made in a gradient hook, under the hooks' lock; everything else happens on the thread that calls ``step()``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from offload.config import sample
from offload.layout import Chunk
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule.hyperparameters import HyperRows, make_rows
from offload.schedule.policy import Policy
from offload.schedule.stepper import Rows, Stepper
from offload.schedule.verdict import Verdict

__all__ = ["EarlyUpdates"]

logger = logging.getLogger(__name__)


class EarlyUpdates:
    """Of one stepper.

    Args:
        chunks, records: of all parameters; others may come.
    """

    def __init__(
        self,
        stepper: Stepper,
        policy: Policy,
        clock: StageClock,
        chunks: Sequence[Chunk],
        records: Mapping[int, ParamRecord],
    ) -> None:
        self._stepper, self._policy, self._clock = stepper, policy, clock
        self._chunks, self._records = chunks, records
        self._hyper: HyperRows | None = None
        self._moved: list[int] = []
        self.rolled_back = False
        """Whether updates of the coming step were."""

    @property
    def applied(self) -> list[str]:
        """Chunks that hold something of the coming step."""
        return self._stepper.stepped_early

    @property
    def stuck(self) -> list[str]:
        """Those of them that cannot be rolled back."""
        return [] if self._policy.speculative else self.applied

    # Rows -------------------------------------------------------------------------------------------------------

    def rows(self, before_first: Callable[[], None]) -> Rows:
        """Hyperparameters as they are at the step's first update; `check` finds out whether they stayed.

        Args:
            before_first: called before that update, when nothing of the step is applied yet.
        """
        if self._hyper is None:
            before_first()
            self._hyper = HyperRows(self._stepper.rule, self._chunks, self._records)
        return self._hyper.rows

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Chunks have come, maybe between backward and ``step()``."""
        if self._hyper is not None:
            self._hyper.add(chunks)

    def check(self) -> None:
        """Raise where a param group is not what it was at the first update.

        Raises:
            HyperparameterChangedError: see `HyperRows.check`.
        """
        if self._hyper is not None:
            self._hyper.check(sample(self.applied))

    def rows_of_rest(self, coefficient: float) -> Rows:
        """For all that was not updated early: the same rows where there are any; else as param groups are now."""
        if self._hyper is not None:
            return self._hyper.rows
        return make_rows(self._stepper.rule, self._chunks, self._records, coefficient)

    # What becomes of them ---------------------------------------------------------------------------------------

    def carry_out(self, step: int, verdict: Verdict) -> None:
        """Keep speculative updates, or undo them; `step`: the coming step's number."""
        roll_back = verdict.clipped or verdict.skip
        self._policy.note(roll_back=roll_back)
        if roll_back:
            self.roll_back(step, restore=verdict.skip)
        elif self._policy.speculative:
            self._moved += self._stepper.commit()

    def roll_back(self, step: int, *, restore: bool) -> None:
        """Undo speculative updates, if there are any.

        Args:
            step: the coming step's number.
            restore: compute weights too, which nothing will write otherwise.
        """
        self._hyper = None  # without the coefficient, also where no update came to be applied
        if not self._policy.speculative or not (applied := self.applied):
            return
        with self._clock.span("roll back"):
            self._stepper.roll_back(restore=restore)
        self.rolled_back = True
        logger.debug("step %d: %s rolled back", step, sample(applied))

    def take_moved(self) -> list[int]:
        """Indices of the parameters whose state consists of other tensors since the last call."""
        moved, self._moved = self._moved, []
        return moved

    def end_step(self) -> None:
        """The step is over, or dropped."""
        self._hyper = None
        self.rolled_back = False
