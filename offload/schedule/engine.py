"""The engine: gradient hooks in, steps out. One engine for every mode.

A mode is a placement and a time. The placement is the stepper's business; the time is decided here: with
``early=True`` a tile is updated inside backward, as soon as its last gradient has reached the host (the wavefront);
otherwise, and whatever the ledger calls irregular, at ``step()``. Clipping and the treatment of non-finite
gradients need the norm of all gradients first. With either of them a step is *deferred*: gradients stream to the host
during backward all the same, and are applied when the verdict is known; or it is *speculative*: updates run inside
backward, and are committed or rolled back by the verdict (see `policy`, and Note [Speculation] in `host_stepper`).

Between backward and ``step()`` state is either untouched (`untouched`) or a mixture of two steps; whatever would
see or make a mixture raises.

With ``overlap_forward`` a step goes on after ``step()`` (`flight`); whoever reads or changes state lets it land first.

Life of a step::

    hook → arrivals (of this step?) → ledger (accumulate, hold, step?) → stepper (worker: copy, kernel, copy back)
    step() → gradients assigned by hand → verdict → leftovers → all weights arrived → counts and report

The engine owns the order of these events; state that has rules of its own is owned beside it:

================  =============================================================================================
`gradient_hooks`  the hooks, their lock, and which thread's turn it is
`arrivals`        what has come since the last step, by which backward pass; what does not belong is refused
`early_updates`   the rows of updates inside backward, their commit and their way back
`foreign_writes`  which weights somebody else wrote
`gradient_sums`   the norm and the exchange with other ranks
`change_guard`    the call that is changing state, or was cut short doing so
`landing`         the step that is under way, whether ``step()`` waits for it, and the report of the last one
`state_views`     state as the outside sees it
================  =============================================================================================

Threads: `_receive` and what it calls run in backward, on autograd's threads, one at a time under the hooks' lock; all
else on the thread that calls the optimizer, or lets go of it (`close`). The worker never calls the engine.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from offload.agreement import Ranks
from offload.config import sample
from offload.errors import (
    GradientError,
    MidStepError,
    NoGradientError,
    NonFiniteGradientError,
    OffloadError,
    StateError,
    WorkerError,
)
from offload.layout import Chunk, build_chunks
from offload.parameters import ParamRecord, require_in_modules
from offload.report import StageClock, StepReport
from offload.schedule import messages
from offload.schedule.arrivals import Arrivals
from offload.schedule.backward import BackwardWatch
from offload.schedule.change_guard import ChangeGuard
from offload.schedule.early_updates import EarlyUpdates
from offload.schedule.flight import Departing, Flight
from offload.schedule.foreign_writes import ForeignWrites
from offload.schedule.gradient_hooks import GradientHooks
from offload.schedule.gradient_sums import GradientSums
from offload.schedule.landing import Landing
from offload.schedule.ledger import Intake, Ledger
from offload.schedule.policy import Policy
from offload.schedule.reduced_state import Reduced
from offload.schedule.state_views import StateViews
from offload.schedule.stepper import Stepper
from offload.schedule.verdict import Verdict
from offload.schedule.worker import Worker
from offload.trace import Trace

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

RESET = "zero_grad()"


class Engine:
    """Drives one stepper for one optimizer.

    Args:
        tile_numel, chunk_by: as in `OffloadConfig`, for the layout.
        chunk_numel: see `build_chunks`.
        overlaps: whether steps may end after ``step()``, on this rank or on another.
        departing: the stepper again, where they may on this one.
        reduced: the stepper again, where moments are kept in less than FP32.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        stepper: Stepper,
        worker: Worker,
        clock: StageClock,
        ranks: Ranks,
        tile_numel: int,
        chunk_by: Any = None,
        chunk_numel: int | None = None,
        overlaps: bool = False,
        departing: Departing | None = None,
        reduced: Reduced | None = None,
    ) -> None:
        self.policy = policy
        self.records: dict[int, ParamRecord] = {}
        self.chunks: list[Chunk] = []
        self.num_steps = 0
        self.views = StateViews(stepper, reduced)
        self._writes = ForeignWrites(stepper, self.records)
        self._stepper, self._worker, self._clock = stepper, worker, clock
        self._ranks = ranks
        self._lay_out = functools.partial(
            build_chunks, tile_numel=tile_numel, chunk_by=chunk_by, chunk_numel=chunk_numel
        )
        self._guard = ChangeGuard()
        self._early = EarlyUpdates(stepper, policy, clock, self.chunks, self.records)
        self._sums = GradientSums(stepper, ranks, self.chunks, self.records)
        self._ledger = Ledger(policy.accumulation_steps, early=policy.early)
        self._hooks = GradientHooks(self._ledger, clock)
        watch = BackwardWatch(self._hooks.locked(self._ledger.end_backward))
        self._arrivals = Arrivals(self._ledger, watch, self.records, self._early)
        self._landing = Landing(
            stepper,
            departing,
            policy,
            clock,
            self._sums,
            self._writes,
            self._hooks.take_seconds,
            overlaps=overlaps,
        )
        #: Called before a step's first gradient is taken: the front looks for changed param groups.
        self.before_first: Callable[[], None] = _nothing
        self._begun = False
        self._closed = False
        self._refusal: StateError | None = None

    # Parameters -------------------------------------------------------------------------------------------------

    def add(self, records: Sequence[ParamRecord], masters: Mapping[int, torch.Tensor]) -> None:
        """Lay out, allocate and hook `records`.

        Args:
            masters: FP32 masters by parameter index, shaped as the parameter; the weights serve for the others.
        """
        if not records:
            return
        self.land()
        self._ranks.add([record.param for record in records])
        by_index = {record.index: record for record in records}
        specs = [record.spec for record in records]
        chunks = self._lay_out(specs, first_index=len(self.chunks))
        self._stepper.add_chunks(chunks, by_index, masters)
        self.records |= by_index  # both in place: the parts of the engine hold them too
        self.chunks += chunks
        for chunk in chunks:
            self._ledger.add_chunk(chunk.index, [span.param for span in chunk.spans])
        self._early.add(chunks)
        for record in records:
            record.note_weight()
            self._hooks.attach(record, self._receive)

    # Backward ---------------------------------------------------------------------------------------------------

    def _receive(self, record: ParamRecord) -> None:
        """A gradient has come: take it out of ``param.grad`` and pass it on. Runs inside backward."""
        if self._closed:
            return
        if not self._begun:
            self.before_first()
        if not record.active:
            return
        if self._ledger.fires(record.index) and record.source.dropped:
            raise MidStepError(messages.dropped(record.name))
        gradient = record.source.take()
        if (gradient is None and not record.source.stays) or self.failed:
            return
        self._guard.require_whole("backward")
        self._arrivals.admit(record, self.num_steps + 1)
        try:
            self._begin()
        except WorkerError as error:
            # Raised at step(), never inside backward, whose gradients are lost from here on.
            self.fail(error)
            return
        if gradient is None:
            self._ledger.note_fire(record.index)
        else:
            self._take_in(record, record.flat_gradient(gradient))

    def _take_in(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        intake = self._ledger.fire(record.index)
        if intake is Intake.ACCUMULATE:
            self._stepper.accumulate(record, gradient)
        elif intake is Intake.HOLD:
            self._stepper.hold(record, gradient)
        else:
            # At the step's first one nothing is applied yet, so all weights that changed are the user's doing.
            rows = self._early.rows(before_first=self._follow_weights)
            if record.weight_changed():  # in this very backward pass: a hook did it
                self._writes.follow([record])
            self._stepper.step_early(record, gradient, rows)

    def _begin(self) -> None:
        """At a step's first gradient: how it is taken; and masters must agree with the weights that made it."""
        if not self._begun:
            self.land()
            self._begun = True
            self.policy.begin_step()
            self._ledger.begin_step(early=self.policy.early)
            self._stepper.begin_step(speculative=self.policy.speculative)
            self._follow_weights()

    def _follow_weights(self) -> None:
        """Masters follow weights that somebody else wrote, not those that early updates wrote."""
        self._writes.follow_all(but=self._ledger.is_stepped)

    def enter_accumulate(self, inside: bool) -> None:
        """The optimizer's ``accumulate()`` context is entered or left."""
        self._ledger.enter_accumulate(inside)

    @property
    def in_accumulate(self) -> bool:
        """Whether that context is open."""
        return self._ledger.in_accumulate

    # The step ---------------------------------------------------------------------------------------------------

    def announced(self, *, has_backward: bool = False) -> AbstractContextManager[None]:
        """Around what comes ahead of `step` in the same call: its errors are told to the other ranks, who wait there.

        Args:
            has_backward: forward and backward of the step run in it. Their errors are told only once they have ended: until
                then the others wait for this rank in FSDP's collectives, and would meet ours instead.
        """
        return self._ranks.step(lambda: not has_backward or self._arrivals.complete)

    def step(self) -> None:
        """Apply what came since the last step.

        Raises:
            NoGradientError: nothing came.
            MidStepError: the last backward pass did not end.
            StateError: what `fail` was given; nothing was changed, and the gradients are dropped.
            HyperparameterChangedError: see there.
            NonFiniteGradientError: the policy is to raise; nothing was changed.
            WorkerError: the worker failed.
            PeerError: another rank failed.
        """
        with self._ranks.step(), self._clock.span("step"):
            self._step()

    def _step(self) -> None:
        start = time.perf_counter()
        self._worker.raise_error()
        self._guard.require_whole("step()")
        self.land()
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            self.reset()
            raise refusal
        self._arrivals.require_usable()
        self._take_assigned_gradients()
        self._arrivals.require_kept()
        if not self.num_steps:
            absent = [r for i, r in self.records.items() if r.active and not self._ledger.fires(i)]
            require_in_modules(absent)
        if not self._ledger.touched and self._ranks.alone:  # others may have gradients: see `GradientSums`
            raise NoGradientError(messages.no_gradient())
        self._early.check()
        self._arrivals.note_short_step(self.num_steps + 1)
        self._follow_weights()
        for record in self._arrivals.fired():
            record.require_form()
        self._guard.begin("step()")
        verdict = None
        if self.policy.needs_norm_first:
            with self._clock.span("verdict"):
                verdict = self._judge_first()
        if verdict is not None:
            self._early.carry_out(self.num_steps + 1, verdict)
        if verdict is None or not verdict.skip:
            self._apply(verdict)
        self._conclude(verdict, start)
        self._guard.end()

    def _apply(self, verdict: Verdict | None) -> None:
        with self._guard.refusable():
            self._stepper.step_rest(self._early.rows_of_rest(verdict.coefficient if verdict else 1.0))
            if not self._landing.departs:
                with self._clock.span("wait_stepper"):
                    self._stepper.finish()
        for record in self._arrivals.fired():
            record.num_steps += 1

    def _judge_first(self) -> Verdict:
        with self._guard.refusable():
            self._stepper.measure()
            self._stepper.finish()
            found = self._sums.find(self._sums.spans(self._ledger.fires), touched=self._ledger.touched)
        if found.nonfinite and self.policy.nonfinite == "raise":
            self._early.roll_back(self.num_steps + 1, restore=True)
            self.reset()
            raise NonFiniteGradientError(messages.nonfinite(found.nonfinite))
        verdict = self.policy.judge(found.norm, nonfinite=found.nonfinite is not None)
        if verdict.skip:
            logger.warning(
                "step %d skipped: the gradient %s holds an inf or a NaN", self.num_steps + 1, found.nonfinite
            )
        return verdict

    def take_moved(self) -> list[int]:
        """Indices of the parameters whose state consists of other tensors since the last call."""
        return self._early.take_moved()

    def _conclude(self, verdict: Verdict | None, start: float) -> None:
        """Close the books of a step; what was submitted may still be running where steps depart."""
        skipped = verdict is not None and verdict.skip
        flight = Flight(
            verdict,
            self._sums.spans(self._ledger.fires),
            [] if skipped else self._arrivals.fired(),
            mode=self.policy.mode,
            speculated=self.policy.speculative,
            rolled_back=self._early.rolled_back,
            span=self._clock.span,
        )
        departs, agrees_later = self._landing.departs and not skipped, self._landing.agrees_later
        if agrees_later:
            with self._guard.refusable():
                self._landing.agree(touched=self._ledger.touched)
        if departs:
            self._landing.depart(flight)
        elif verdict is None and not agrees_later:
            with self._guard.refusable():
                flight.verdict = self._landing.judge(flight)
        self._arrivals.end_step()
        flight.irregular = [c.index for c in self.chunks if not self._ledger.may_step_early(c.index)]
        self._begun = False
        self._early.end_step()
        self.num_steps += 1
        flight.step, flight.exposed_s = self.num_steps, time.perf_counter() - start
        self._landing.flight = flight
        if not flight.marks:
            self.land()

    def land(self) -> None:
        """Complete the step that is still under way, if one is.

        Raises:
            WorkerError: the worker failed; it stays under way.
        """
        self._landing.land()

    @property
    def flight(self) -> Flight | None:
        """The step that is still under way."""
        return self._landing.flight

    @property
    def report(self) -> StepReport | None:
        """See `Landing.report`."""
        return self._landing.report

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks that ``step()`` has to agree with."""
        return self._ranks.alone

    @property
    def failed(self) -> bool:
        """Whether ``step()`` will raise what `fail` was given, or an error of the worker. No gradient is taken then."""
        return self._worker.failed or self._refusal is not None

    def fail(self, error: OffloadError) -> None:
        """Have ``step()`` raise `error`, on this rank and by name of it on all others, unless there is another.

        A `StateError` is of the coming step alone, also where ``zero_grad()`` comes before its backward.
        """
        if isinstance(error, StateError):
            self._refusal = self._refusal or error
        else:
            self._worker.fail(error)

    def stop_departing(self) -> None:
        """From now on ``step()`` waits for everything."""
        self._landing.stop_departing()

    def _take_assigned_gradients(self) -> None:
        """Gradients that stand in ``param.grad``: left there by their source, assigned by hand, or made while no hook
        was there."""
        for record in self.records.values():
            if not record.active or not record.source.filled:
                continue
            if self._ledger.is_stepped(record.index) and self.policy.speculative:
                self._early.roll_back(self.num_steps + 1, restore=True)
            elif self._ledger.is_stepped(record.index):
                raise GradientError(messages.assigned_late(record.name))
            self._begin()
            if not record.source.stays:  # else its hook was called, and noted it
                self._ledger.note_fire(record.index)
            for gradient in record.source.standing():
                self._stepper.hold(record, record.flat_gradient(gradient))

    # State between steps ----------------------------------------------------------------------------------------

    @property
    def untouched(self) -> bool:
        """Whether state is that of the last finished step, with nothing of the next one in it."""
        return not self._early.applied

    def require_untouched(self, what: str) -> None:
        """Raise where `what` would see a mixture of two steps.

        Raises:
            MidStepError: parts of the coming step were applied already.
            WorkerError: the worker failed.
        """
        self._worker.raise_error()
        self._guard.require_whole(what)
        self.land()
        if not self.untouched:
            raise MidStepError(messages.mixture(what, self._early.applied))

    def discard(self) -> None:
        """Forget the gradients since the last step.

        Raises:
            MidStepError: parts of the step were applied already.
        """
        if self._guard.changing != RESET:
            self._guard.require_whole("zero_grad()")
            if not self._arrivals.pending:
                return  # a step that is under way has taken its gradients
            self.land()
            if self._early.stuck:
                raise MidStepError(messages.no_way_back(self._early.stuck))
        self._guard.begin(RESET)
        self._early.roll_back(self.num_steps + 1, restore=True)
        self.reset()

    def reset(self) -> None:
        """Forget all gradients, whatever became of them: for `discard`, and before state is loaded.

        Raises:
            WorkerError: the worker failed.
        """
        self._worker.raise_error()
        self.land()
        self._guard.begin(RESET)
        self._stepper.finish()
        self._arrivals.forget()
        self._stepper.end_step([chunk.index for chunk in self.chunks])
        self._begun = False
        self._early.end_step()
        self._guard.end()

    def begin_loading(self) -> None:
        """State is about to be overwritten, whatever became of it; `take_masters` ends that."""
        self.land()  # what is under way was committed
        self._refusal = None
        self._early.roll_back(self.num_steps + 1, restore=True)  # masters may be taken from the weights
        self.reset()
        self._guard.begin("load_state_dict()")

    def synchronize(self) -> None:
        """Block until everything that was submitted is done."""
        self._worker.raise_error()
        self.land()
        self._stepper.finish()

    def resync(self) -> list[str]:
        """Take masters anew from the weights, where those do not agree; the names of these parameters."""
        self.require_untouched("resync()")
        return self._writes.resync()

    def take_masters(self, written: Sequence[ParamRecord]) -> None:
        """After state was loaded: weights of `written` come from their masters, masters of all others from the weights."""
        self._writes.take_masters(written)
        self._guard.end()

    def close(self) -> None:
        """Remove hooks, end the worker, release memory. Safe to call twice.

        A step that is under way ends first: the worker runs what was submitted before it ends. Weights of a speculative
        step that had no verdict are those from before it.
        """
        if self.flight is None and self._guard.changing is None:
            self._abandon()
        self._closed = True
        self._hooks.remove()
        for record in self.records.values():
            record.source.clear()
        self.views.clear()
        try:
            self._stepper.close()
        finally:
            self._worker.close()
            self._landing.flight = None
            self.end_trace()

    def _abandon(self) -> None:
        """Closing must go on, whatever has failed before."""
        try:
            self._early.roll_back(self.num_steps + 1, restore=True)
        except OffloadError as error:
            logger.warning(
                "closed in mid-step; %s could not be rolled back: %s",
                sample(self._early.applied),
                error,
            )

    # Traces -----------------------------------------------------------------------------------------------------

    def begin_trace(self, trace: Trace) -> None:
        """Take `trace` from here until `end_trace` or `close`."""
        self._clock.trace = trace

    @property
    def trace(self) -> Trace | None:
        """The trace that is being taken."""
        return self._clock.trace

    def end_trace(self) -> None:
        """Write the trace that is being taken, if one is.

        Raises:
            OSError: it could not be written.
        """
        trace, self._clock.trace = self._clock.trace, None
        if trace is not None:
            trace.write()


def _nothing() -> None:
    """Nobody asked to be called."""
