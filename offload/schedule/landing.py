"""The end of a step, whether ``step()`` waits for it or not: landing, and the report of it.

Owns the step that is under way (`Flight`) and the report of the last one that has landed. Where steps depart, submitted
work goes on on the worker and on the device after ``step()`` has returned; whoever reads or changes state calls `land`
first, on whatever thread that is: the user's, or backward's in a hook.

Among ranks landing is each rank's own affair, and only ``step()`` is a collective. So a norm that decides nothing is agreed
in the ``step()`` after (`Landing.agree`): that one exchange brings the sums of the step before, and completes its report.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from offload.agreement import Share
from offload.errors import GradientError, NoGradientError
from offload.report import StageClock, StepReport
from offload.schedule.flight import Departing, Flight
from offload.schedule.foreign_writes import ForeignWrites
from offload.schedule.gradient_sums import GradientSums
from offload.schedule.policy import Policy
from offload.schedule.stepper import Stepper
from offload.schedule.verdict import Verdict

__all__ = ["Landing"]


class Landing:
    """Of one stepper's steps.

    Args:
        departing: the stepper again, where steps may end after ``step()``.
        policy: whether a norm decides something.
        overlaps: whether steps may end after ``step()``, on this rank or on another.
        sums: gives the norm, where nobody needed it before.
        writes: weights that somebody wrote while the step was under way.
        hook_seconds: what gradient hooks took since it was last asked.
    """

    def __init__(
        self,
        stepper: Stepper,
        departing: Departing | None,
        policy: Policy,
        clock: StageClock,
        sums: GradientSums,
        writes: ForeignWrites,
        hook_seconds: Callable[[], float],
        *,
        overlaps: bool,
    ) -> None:
        self._stepper, self._departing, self._clock = stepper, departing, clock
        self._policy, self._overlaps = policy, overlaps
        self._sums, self._writes, self._hook_seconds = sums, writes, hook_seconds
        self.flight: Flight | None = None
        self._report: StepReport | None = None
        self._unagreed: tuple[StepReport, Share] | None = None

    @property
    def departs(self) -> bool:
        """Whether ``step()`` returns before all is done."""
        is_agreed = self._sums.alone or self._policy.needs_norm_first
        return self._departing is not None and (is_agreed or self.agrees_later)

    @property
    def agrees_later(self) -> bool:
        """Whether ranks agree on a step's norm in the ``step()`` after, since it is not known yet in its own.

        By what is the same on all ranks. The first step's is agreed in its own, so that there always is a report.
        """
        is_open = self._overlaps and not self._policy.needs_norm_first
        return is_open and not self._sums.alone and self._report is not None

    @property
    def report(self) -> StepReport | None:
        """Of the last step, which is completed for it; where ranks agree later, of the last that they agreed on."""
        if not self.agrees_later:
            self.land()
        return self._report

    def depart(self, flight: Flight) -> None:
        """All of a step has been submitted: it goes on by itself. Only where steps depart."""
        if self._departing is not None:
            flight.marks = self._departing.depart()

    def judge(self, flight: Flight) -> Verdict:
        """The verdict of a step that needed none before its updates: only its norm is to be known."""
        with self._clock.span("verdict"):
            return Verdict(self._sums.norm(self._sums.share(flight.spans, touched=bool(flight.written))))

    def agree(self, *, touched: bool) -> None:
        """Tell the other ranks of the step before, the last that has landed, and complete its report.

        Args:
            touched: whether gradients of the coming step came on this rank.

        Raises:
            NoGradientError, PeerError, GradientError: as `GradientSums.find`.
        """
        report, share = self._unagreed or (None, Share())
        try:
            with self._clock.span("verdict"):
                norm = self._sums.norm(share._replace(touched=touched))
        except NoGradientError:  # no step: the next one brings it
            raise
        except GradientError:  # raised on all ranks, and not again after state was loaded
            self._unagreed = None
            raise
        if report is not None:
            self._report, self._unagreed = replace(report, grad_norm=norm), None

    def land(self) -> None:
        """Complete the step that is under way, if one is.

        Raises:
            WorkerError: the worker failed; it stays under way.
        """
        flight = self.flight
        if flight is None:
            return
        start = time.perf_counter()
        if self._departing is not None:
            with self._clock.span("wait_landing"):
                self._departing.settle()
        share = None
        verdict = flight.verdict
        if verdict is None and self._sums.alone:
            verdict = self.judge(flight)
        elif verdict is None:
            verdict, share = Verdict(math.nan), self._sums.share(flight.spans)
        self._stepper.end_step(flight.irregular)
        self.flight = None
        self._writes.follow([record for record in flight.written if record.weight_changed()])
        seconds, counts = self._clock.take()
        seconds |= {"hook": self._hook_seconds(), "exposed": flight.exposed_s}
        if flight.marks:
            seconds["landing"] = time.perf_counter() - start
        report = StepReport(
            step=flight.step,
            grad_norm=verdict.norm,
            clipped=verdict.clipped,
            skipped=verdict.skip,
            clip_coefficient=verdict.coefficient,
            speculated=flight.speculated,
            rolled_back=flight.rolled_back,
            mode=flight.mode,
            timings=seconds,
            **counts,
        )
        if share is None:
            self._report = report
        else:
            self._unagreed = report, share

    def stop_departing(self) -> None:
        """From now on ``step()`` waits for everything."""
        self.land()
        self._departing = None
