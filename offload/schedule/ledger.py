"""The ledger: which gradient of which micro-batch has come. Pure; unit-tested without a tensor.

PyTorch has no event "this parameter's gradient is complete": a hook fires whenever autograd has accumulated into a
leaf, which is once per backward for most parameters, twice for some (a tied weight of which one use lies inside a
reentrant checkpoint), not at all for others (an expert that saw no token). So the ledger counts, and compares with
what it saw in the step before:

- The first step of a parameter is *observed*: its gradients are held and applied at ``step()``.
- A parameter is *regular* while it fires exactly once per micro-batch. A chunk is stepped early, inside backward,
  only while all its parameters are regular; otherwise its gradients are held until ``step()``.
- A parameter that missed a micro-batch is irregular for the next step; one that fired more often than there were
  micro-batches stays irregular for good, since its last gradient cannot be known.

Micro-batches: a backward inside ``accumulate()`` is never the last of its step; the one outside it is. Without that
context the declared count decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum

__all__ = ["Intake", "Ledger"]


class Intake(Enum):
    """What is to be done with a gradient that has just come."""

    ACCUMULATE = "add to the FP32 accumulator: more micro-batches follow"
    HOLD = "keep in BF16 until step(); a gradient held already goes to the accumulator first"
    STEP = "the last one, and its chunk may be stepped inside backward"


class Ledger:
    """Counts fires per parameter and step.

    Args:
        accumulation_steps: declared micro-batches per step.
        early: False: nothing is stepped before ``step()`` (every mode but the wavefront); `begin_step` says so anew.
    """

    def __init__(self, accumulation_steps: int, *, early: bool) -> None:
        self.accumulation_steps = accumulation_steps
        self._early = early
        self._chunk_of: dict[int, int] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._regular: set[int] = set()
        self._doubles: set[int] = set()
        self._fires: dict[int, int] = {}
        self._stepped: set[int] = set()
        self._unclear: set[int] = set()
        self._backwards = 0
        self._accumulated_backwards = 0
        self._in_accumulate = False
        self._context_used = False
        self._ends_are_seen = False

    def add_chunk(self, chunk: int, params: Iterable[int]) -> None:
        """Register a chunk's parameters; they are observed in their first step."""
        self._members[chunk] = tuple(params)
        for param in self._members[chunk]:
            self._chunk_of[param] = chunk

    @property
    def touched(self) -> bool:
        """Whether any gradient came since the last step."""
        return bool(self._fires)

    @property
    def micro_batches(self) -> int:
        """Finished backward passes since the last step, as far as their ends were seen."""
        return self._backwards

    @property
    def complete(self) -> bool:
        """Whether the gradients that came are those of the step's last micro-batch already."""
        if self._context_used:
            return self._backwards > self._accumulated_backwards
        return self._backwards >= self.accumulation_steps

    def begin_step(self, *, early: bool) -> None:
        """At a step's first gradient: whether anything of it may be stepped before ``step()``."""
        self._early = early

    def enter_accumulate(self, inside: bool) -> None:
        """The ``accumulate()`` context is entered (True) or left (False)."""
        self._in_accumulate = inside

    @property
    def in_accumulate(self) -> bool:
        """Whether the ``accumulate()`` context is open."""
        return self._in_accumulate

    @property
    def expects_more(self) -> bool:
        """Whether the gradients of one backward pass may not be all of a step."""
        return self._in_accumulate or self.accumulation_steps > 1

    def end_backward(self) -> None:
        """A backward pass in which gradients came has ended."""
        self._ends_are_seen = True
        self._backwards += 1
        if self._in_accumulate:
            self._accumulated_backwards += 1

    def fire(self, param: int) -> Intake:
        """A gradient of `param` has come; say what to do with it. Call `is_extra` first."""
        count = self._fires[param] = self._fires.get(param, 0) + 1
        self._context_used |= self._in_accumulate
        chunk = self._chunk_of[param]
        if (
            self._ends_are_seen and count > self._backwards + 1
        ):  # twice in one backward pass: which is the last?
            self._unclear.add(chunk)
        if self._in_accumulate or (not self._context_used and count < self.accumulation_steps):
            return Intake.ACCUMULATE
        if chunk in self._unclear or not self.may_step_early(chunk):
            return Intake.HOLD
        self._stepped.add(param)
        return Intake.STEP

    def is_extra(self, param: int) -> bool:
        """Whether one more gradient of `param` is one that nobody declared.

        True after the step's last gradient of it was passed on, and after as many backward passes as were declared.
        """
        if param in self._stepped:
            return True
        return not self._in_accumulate and self.complete

    def fires_twice(self, param: int) -> bool:
        """Whether `param` had a gradient of the running backward pass already, as far as ends of passes were seen."""
        return self._ends_are_seen and not self.complete and self.fires(param) > self._backwards

    def is_stepped(self, param: int) -> bool:
        """Whether the step's last gradient of `param` went into an early update."""
        return param in self._stepped

    def note_fire(self, param: int) -> None:
        """A gradient came that no update of this backward pass may use: assigned by hand, or not complete yet."""
        self._context_used |= self._in_accumulate
        self._fires[param] = self._fires.get(param, 0) + 1

    def may_step_early(self, chunk: int) -> bool:
        """Whether the chunk was regular in the step before."""
        return self._early and all(param in self._regular for param in self._members[chunk])

    def fires(self, param: int) -> int:
        """Gradients of `param` that came since the last step."""
        return self._fires.get(param, 0)

    def end_step(self) -> None:
        """The step is over: what was seen decides how the next one runs."""
        expected = self._expected()
        for param in self._chunk_of:
            count = self._fires.get(param, 0)
            if count > expected:
                self._doubles.add(param)
            if count == expected and param not in self._doubles:
                self._regular.add(param)
            else:
                self._regular.discard(param)
        self.forget()

    def forget(self) -> None:
        """Drop what came since the last step, without learning from it."""
        self._fires.clear()
        self._stepped.clear()
        self._unclear.clear()
        self._backwards = self._accumulated_backwards = 0
        self._context_used = False

    def _expected(self) -> int:
        """Micro-batches of this step: as their ends showed, else as declared; where the context or a short step
        decided, what most saw."""
        if self._backwards:
            return self._backwards
        counts = self._fires.values()
        if counts and (self._context_used or max(counts) < self.accumulation_steps):
            return Counter(counts).most_common(1)[0][0]
        return self.accumulation_steps
