"""Which gradients of the coming step have arrived, and which do not belong to it.

Owns the knowledge of backward passes (`BackwardWatch`: has the last one ended?) and, with the ledger, decides whether a
gradient fits: one of a pass nobody declared, one after a pass that was cut short, one that was dropped behind the
optimizer's back are refused here, with what to do. What is done with a gradient that fits is the engine's business.

`admit` is called in gradient hooks, under their lock, and ends of passes are noted under it; the rest on the thread that
calls the optimizer, between backward passes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from offload.errors import GradientError, MidStepError, StateError, UndeclaredBackwardError
from offload.parameters import ParamRecord
from offload.schedule import messages
from offload.schedule.backward import BackwardWatch
from offload.schedule.early_updates import EarlyUpdates
from offload.schedule.ledger import Ledger

__all__ = ["Arrivals"]

logger = logging.getLogger(__name__)


class Arrivals:
    """Of one step after the other.

    Args:
        records: of all parameters, by index; others may come.
        early: what of the step was applied already, for messages.
    """

    def __init__(
        self, ledger: Ledger, watch: BackwardWatch, records: Mapping[int, ParamRecord], early: EarlyUpdates
    ) -> None:
        self._ledger, self._watch = ledger, watch
        self._records, self._early = records, early

    def admit(self, record: ParamRecord, step: int) -> None:
        """In a hook: note that a gradient of `record` has come in this backward pass.

        Args:
            step: number of the coming step.

        Raises:
            MidStepError: the pass before was cut short by an exception.
            GradientError: it is the second one of this pass, and the first counted as the last.
            UndeclaredBackwardError: the step has had all its passes.
        """
        if self._ledger.touched and self._watch.follows_interruption():
            raise MidStepError(
                messages.unfinished("an earlier backward pass ended with an exception", self._early.stuck)
            )
        if self._ledger.is_extra(record.index):
            declared, applied = self._ledger.accumulation_steps, self._early.applied
            if self._ledger.fires_twice(record.index):
                raise GradientError(messages.second_fire(record.name, step, applied))
            raise UndeclaredBackwardError(messages.extra_backward(record.name, declared, step, applied))
        self._watch.note_fire()

    @property
    def pending(self) -> bool:
        """Whether there is something to forget: a gradient, or a pass that has begun and not ended."""
        return self._ledger.touched or self._watch.interrupted

    @property
    def complete(self) -> bool:
        """Whether all backward passes of the step have come and ended, as far as ends of passes are seen."""
        return self._ledger.touched and self._ledger.complete and not self._watch.interrupted

    def fired(self) -> list[ParamRecord]:
        """Parameters that got a gradient."""
        return [record for index, record in self._records.items() if self._ledger.fires(index)]

    def require_usable(self) -> None:
        """At ``step()``: raise where the passes or the parameters are not such that their gradients make a step.

        Raises:
            MidStepError: the last backward pass did not end.
            StateError: a param group was removed since.
        """
        if self._watch.interrupted and self._ledger.touched:
            why = "is still running" if self._watch.running else "ended with an exception"
            raise MidStepError(messages.unfinished(f"the last backward pass {why}", self._early.stuck))
        if removed := [record.name for record in self.fired() if not record.active]:
            raise StateError(messages.removed(removed))

    def require_kept(self) -> None:
        """Raise where gradients that have left were dropped by other means than our ``zero_grad()``.

        Raises:
            MidStepError: names the first of them.
        """
        for record in self.fired():
            if record.source.dropped:
                raise MidStepError(messages.dropped(record.name))

    def note_short_step(self, step: int) -> None:
        """Say so where fewer micro-batches came than were declared."""
        most = max(self._ledger.fires(index) for index in self._records)
        if self._ledger.touched and most < self._ledger.accumulation_steps:
            logger.info(
                "step %d: %d of %d declared micro-batches came; stepping with what arrived",
                step,
                most,
                self._ledger.accumulation_steps,
            )

    def end_step(self) -> None:
        """They are applied: the ledger learns from them."""
        self._clear_sources(self.fired())
        self._ledger.end_step()

    def forget(self) -> None:
        """They are dropped, with those that no hook took because of an error that ``step()`` raises."""
        self._clear_sources(self._records.values())
        self._ledger.forget()
        self._watch.reset()

    def _clear_sources(self, records: Iterable[ParamRecord]) -> None:
        for record in records:
            record.source.clear()
