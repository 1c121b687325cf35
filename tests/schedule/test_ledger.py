"""The ledger against a naive reading of the rules, over all small patterns of fires.

A step is a list of micro-batches; a micro-batch is (inside ``accumulate()``?, fires of A, fires of B). What one step
hands on to the next is a state per parameter, so every step is tried after every pair of states (see `PAST`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from offload.schedule.ledger import Intake, Ledger

A, B = PARAMS = (0, 1)
TOGETHER, APART = {0: [A, B]}, {0: [A], 1: [B]}

MicroBatch = tuple[bool, int, int]

FIRES = [fires for fires in itertools.product(range(3), repeat=2) if any(fires)]
MICRO_BATCHES = [(inside, *fires) for inside in (False, True) for fires in FIRES]
STEPS: list[tuple[MicroBatch, ...]] = [
    step for length in (1, 2) for step in itertools.product(MICRO_BATCHES, repeat=length)
]
STEPS += itertools.product([(i, a, b) for i in (False, True) for a, b in [(1, 0), (0, 1), (1, 1)]], repeat=3)

PAST = {"regular": 1, "missed": 0, "double": 2}
"""How often a parameter fired per micro-batch of the step before."""


class Outcome:
    """What the ledger said, and what became of each gradient, as (parameter, ordinal)."""

    def __init__(self) -> None:
        self.intakes: list[tuple[int, int, Intake]] = []
        self.micro_batch_of: list[int] = []
        self.extra: tuple[int, int] | None = None

    def of(self, param: int) -> list[Intake]:
        return [intake for p, _, intake in self.intakes if p == param]


def fires_of(micro_batch: MicroBatch) -> Iterator[int]:
    """A B A B: second fires come after the other parameter's first, as a reentrant checkpoint makes them."""
    _, *counts = micro_batch
    for nth in range(max(counts)):
        yield from (param for param in PARAMS if counts[param] > nth)


def play(ledger: Ledger, step: Sequence[MicroBatch], *, ends: bool = True) -> Outcome:
    """Feed the ledger as the engine does, up to the first gradient that it calls extra."""
    outcome = Outcome()
    for number, micro_batch in enumerate(step):
        ledger.enter_accumulate(micro_batch[0])
        for param in fires_of(micro_batch):
            assert ledger.is_stepped(param) <= ledger.is_extra(param), "one more gradient would be lost"
            if ledger.is_extra(param):
                outcome.extra = number, param
                ledger.enter_accumulate(False)
                return outcome
            outcome.intakes.append((param, number, ledger.fire(param)))
        if ends:
            ledger.end_backward()
        ledger.enter_accumulate(False)
    return outcome


def make(
    steps: int,
    chunks: dict[int, list[int]],
    *,
    past: tuple[str, str] = ("missed", "missed"),
    early: bool = True,
) -> Ledger:
    """A ledger that has seen one step, of as many micro-batches as declared."""
    ledger = Ledger(steps, early=early)
    for chunk, params in chunks.items():
        ledger.add_chunk(chunk, params)
    play(ledger, [(False, PAST[past[0]], PAST[past[1]])] * steps)
    ledger.end_step()
    return ledger


def is_declared(step: Sequence[MicroBatch], declared: int) -> bool:
    """Whether the user kept to what was declared: by count, or all but the last inside ``accumulate()``."""
    inside = [micro_batch[0] for micro_batch in step]
    return all(inside[:-1]) if any(inside) else len(step) <= declared


def is_whole(step: Sequence[MicroBatch], declared: int) -> bool:
    """Whether the step's last micro-batch has come."""
    complete = not step[-1][0] if any(inside for inside, *_ in step) else len(step) == declared
    return complete and is_declared(step, declared)


def count(step: Sequence[MicroBatch], param: int) -> int:
    return sum(micro_batch[1 + param] for micro_batch in step)


def doubles(step: Sequence[MicroBatch], param: int) -> bool:
    return any(micro_batch[1 + param] > 1 for micro_batch in step)


CASES = [
    pytest.param(declared, chunks, past, id=f"{declared}-{name}-{past[0]}-{past[1]}")
    for declared in (1, 2)
    for name, chunks in (("together", TOGETHER), ("apart", APART))
    for past in itertools.product(PAST, repeat=2)
]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("declared", "chunks", "past"), CASES)
def test_no_gradient_is_lost(
    declared: int, chunks: dict[int, list[int]], past: tuple[str, str], ends: bool
) -> None:
    """Every gradient is taken in or refused; a refusal has a reason. Of one chunk, never both held and stepped, but
    where the ends of passes are suddenly not seen any more: then what is unclear is held."""
    for step in STEPS:
        ledger = make(declared, chunks, past=past)
        outcome = play(ledger, step, ends=ends)
        for param in PARAMS:
            assert ledger.fires(param) == len(outcome.of(param))
            assert Intake.STEP not in outcome.of(param)[:-1]
        for members in chunks.values():
            intakes = {intake for param in members for intake in outcome.of(param)}
            assert not ends or not {Intake.HOLD, Intake.STEP} <= intakes
        if outcome.extra is None:
            assert sum(len(outcome.of(param)) for param in PARAMS) == sum(
                count(step, param) for param in PARAMS
            )
        else:
            _, param = outcome.extra
            newly_double = past[param] == "regular" and doubles(step, param)
            assert newly_double or not is_declared(step, declared)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("declared", "chunks", "past"), CASES)
def test_nothing_is_stepped_before_its_last_gradient(
    declared: int, chunks: dict[int, list[int]], past: tuple[str, str], ends: bool
) -> None:
    """A chunk is stepped early only where all its members were regular; then only at the last fire."""
    for step in STEPS:
        outcome = play(make(declared, chunks, past=past), step, ends=ends)
        for members in chunks.values():
            for param in members:
                if Intake.STEP in outcome.of(param):
                    assert all(past[member] == "regular" for member in members)
                    if is_declared(step, declared) and not doubles(step, param):
                        assert len(outcome.of(param)) == count(step, param)


@pytest.mark.parametrize(("declared", "chunks", "past"), CASES)
def test_earlier_micro_batches_accumulate(
    declared: int, chunks: dict[int, list[int]], past: tuple[str, str]
) -> None:
    """A parameter that fires once per micro-batch is accumulated in all but the last, which is held or stepped."""
    for step in STEPS:
        outcome = play(make(declared, chunks, past=past), step)
        regular = [param for param in PARAMS if all(micro_batch[1 + param] == 1 for micro_batch in step)]
        if not is_declared(step, declared) or outcome.extra is not None:
            continue
        for param in regular:
            *earlier, last = outcome.of(param)
            assert set(earlier) <= {Intake.ACCUMULATE}
            assert (last is not Intake.ACCUMULATE) == is_whole(step, declared)


@pytest.mark.parametrize(("declared", "chunks", "past"), CASES)
def test_undeclared_backward_is_extra(
    declared: int, chunks: dict[int, list[int]], past: tuple[str, str]
) -> None:
    """After the step's last micro-batch, one more outside ``accumulate()`` is refused at its first fire."""
    for step in STEPS:
        if is_whole(step, declared) and not any(doubles(step, param) for param in PARAMS):
            for fires in FIRES:
                outcome = play(make(declared, chunks, past=past), [*step, (False, *fires)])
                assert outcome.extra is not None
                assert outcome.extra[0] == len(step)
                assert len(outcome.intakes) == sum(count(step, param) for param in PARAMS)


@pytest.mark.parametrize(("declared", "chunks", "past"), CASES)
def test_what_a_step_teaches(declared: int, chunks: dict[int, list[int]], past: tuple[str, str]) -> None:
    """Regular: as many fires as micro-batches, in this step; never more than that in any step."""
    for step in STEPS:
        ledger = make(declared, chunks, past=past)
        if play(ledger, step).extra is not None:
            continue
        assert ledger.touched
        assert ledger.micro_batches == len(step)
        ledger.end_step()
        assert not ledger.touched
        for chunk, members in chunks.items():
            expected = all(count(step, param) == len(step) and past[param] != "double" for param in members)
            assert ledger.may_step_early(chunk) == expected, step


@pytest.mark.parametrize("declared", [1, 2, 3])
def test_where_ends_stay_unseen_whole_steps_still_teach(declared: int) -> None:
    ledger = make(declared, APART)
    play(ledger, [(False, 1, 1)] * (declared - 1) + [(False, 1, 0)], ends=False)
    ledger.end_step()
    assert (ledger.may_step_early(0), ledger.may_step_early(1)) == (True, False)


def test_first_step_is_observed_then_early() -> None:
    ledger = Ledger(1, early=True)
    ledger.add_chunk(0, [A, B])
    step = [(False, 1, 1)]
    assert {intake for *_, intake in play(ledger, step).intakes} == {Intake.HOLD}
    ledger.end_step()
    assert {intake for *_, intake in play(ledger, step).intakes} == {Intake.STEP}


def test_missing_once_is_forgiven_after_one_regular_step() -> None:
    ledger = make(1, TOGETHER, past=("regular", "regular"))
    seen = []
    for step in [(False, 1, 0)], [(False, 1, 1)], [(False, 1, 1)]:
        seen.append(play(ledger, step).of(A)[0])
        ledger.end_step()
    assert seen == [Intake.STEP, Intake.HOLD, Intake.STEP]


def test_double_is_never_forgiven() -> None:
    ledger = make(1, APART, past=("double", "regular"))
    for _ in range(3):
        assert play(ledger, [(False, 1, 1)]).of(A) == [Intake.HOLD]
        ledger.end_step()


def test_experts_that_miss_a_micro_batch_do_not_make_the_others_doubles() -> None:
    """Most parameters fire once in two micro-batches; the dense one fires in both and is the regular one."""
    dense, experts = 0, range(1, 6)
    ledger = Ledger(1, early=True)
    for param in (dense, *experts):
        ledger.add_chunk(param, [param])
    for inside in (True, False):
        ledger.enter_accumulate(inside)
        for param in (dense, *(experts if inside else ())):
            ledger.fire(param)
        ledger.end_backward()
    ledger.end_step()
    assert [chunk for chunk in range(6) if ledger.may_step_early(chunk)] == [dense]


def test_double_in_a_short_step_is_seen() -> None:
    """Two fires in one of two declared micro-batches are not two micro-batches."""
    ledger = make(2, APART)
    play(ledger, [(False, 2, 1)])
    ledger.end_step()
    assert not ledger.may_step_early(0)
    assert ledger.may_step_early(1)


def test_forget_learns_nothing() -> None:
    ledger = make(1, APART, past=("regular", "regular"))
    play(ledger, [(True, 2, 0)])
    ledger.forget()
    assert not ledger.touched
    assert ledger.micro_batches == 0
    assert {intake for *_, intake in play(ledger, [(False, 1, 1)]).intakes} == {Intake.STEP}


def test_gradient_assigned_by_hand_counts() -> None:
    ledger = make(1, APART)
    ledger.note_fire(A)
    assert ledger.touched
    assert (ledger.fires(A), ledger.fires(B)) == (1, 0)
    assert not ledger.is_stepped(A)
    ledger.end_step()
    assert (ledger.may_step_early(0), ledger.may_step_early(1)) == (True, False)


def test_chunk_added_later_is_observed_first() -> None:
    ledger = Ledger(1, early=True)
    ledger.add_chunk(0, [A])
    ledger.fire(A)
    ledger.end_step()
    ledger.add_chunk(1, [B])
    assert (ledger.fire(A), ledger.fire(B)) == (Intake.STEP, Intake.HOLD)


@pytest.mark.parametrize(("declared", "chunks", "past"), CASES)
def test_without_early_nothing_is_stepped(
    declared: int, chunks: dict[int, list[int]], past: tuple[str, str]
) -> None:
    for step in STEPS:
        outcome = play(make(declared, chunks, past=past, early=False), step)
        assert all(intake is not Intake.STEP for *_, intake in outcome.intakes)


def test_the_context_wins_over_the_count() -> None:
    ledger = make(4, TOGETHER, past=("regular", "regular"))
    outcome = play(ledger, [(True, 1, 0), (False, 1, 1)])
    assert outcome.of(A) == [Intake.ACCUMULATE, Intake.STEP]
    assert outcome.of(B) == [Intake.STEP]


def test_the_context_is_forgotten_with_its_step() -> None:
    ledger = make(2, TOGETHER)
    play(ledger, [(True, 1, 1), (False, 1, 1)])
    ledger.end_step()
    assert play(ledger, [(False, 1, 1)]).of(A) == [Intake.ACCUMULATE]


def test_a_backward_inside_the_context_is_never_extra_while_gradients_are_held() -> None:
    outcome = play(make(1, TOGETHER), [(False, 1, 1), (True, 1, 1)])
    assert outcome.of(A) == outcome.of(B) == [Intake.HOLD, Intake.ACCUMULATE]


def test_context_is_reported() -> None:
    ledger = Ledger(1, early=True)
    ledger.enter_accumulate(True)
    assert ledger.in_accumulate
    ledger.enter_accumulate(False)
    assert not ledger.in_accumulate
