"""The order in which what waits is taken."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ClosedError
from offload.schedule import backlog as backlog_module
from offload.schedule.backlog import REFILL, RUN_AHEAD, Backlog

DEADLINE_S = 20.0

T = TypeVar("T")


def put(backlog: Backlog[str], *items: str, not_ready: str = "") -> None:
    """Items are called by their group and a number; those of group ``-`` belong to none."""
    for item in items:
        group = None if item[0] == "-" else ord(item[0])
        assert backlog.put(item, DEADLINE_S, group=group, ready=lambda item=item: item[0] not in not_ready)


def take_all(backlog: Backlog[T], number: int) -> list[T]:
    return [backlog.take() for _ in range(number)]


def test_without_groups_the_oldest_goes_first() -> None:
    backlog: Backlog[str] = Backlog(8)
    put(backlog, "-1", "-2", "-3")
    assert take_all(backlog, 3) == ["-1", "-2", "-3"]


def test_the_newest_group_goes_first_in_its_own_order() -> None:
    backlog: Backlog[str] = Backlog(8)
    put(backlog, "a1", "a2", "b1", "c1", "c2", "b2")
    assert take_all(backlog, 6) == ["c1", "c2", "b1", "b2", "a1", "a2"]


def test_a_group_that_was_empty_counts_as_new() -> None:
    backlog: Backlog[str] = Backlog(8)
    put(backlog, "a1", "b1")
    assert backlog.take() == "b1"
    put(backlog, "c1", "b2")
    assert take_all(backlog, 3) == ["b2", "c1", "a1"]


def test_what_is_not_ready_holds_up_nothing_that_is() -> None:
    backlog: Backlog[str] = Backlog(8)
    put(backlog, "a1", "b1", "c1", "d1", not_ready="cd")
    assert take_all(backlog, 2) == ["b1", "a1"]


def test_where_nothing_is_ready_the_oldest_is_the_first_that_will_be() -> None:
    backlog: Backlog[str] = Backlog(8)
    put(backlog, "a1", "b1", not_ready="ab")
    assert take_all(backlog, 2) == ["a1", "b1"]


def test_nothing_passes_an_item_of_no_group() -> None:
    backlog: Backlog[str] = Backlog(8)
    put(backlog, "a1", "b1", "-1", "-2", "c1", "a2")
    assert take_all(backlog, 6) == ["b1", "a1", "-1", "-2", "a2", "c1"]


@given(st.lists(st.sampled_from("abc-"), max_size=30), st.sampled_from(["", "a", "bc", "abc"]))
def test_groups_keep_their_order_and_stay_between_items_of_no_group(groups: list[str], slow: str) -> None:
    items = [f"{group}{index}" for index, group in enumerate(groups)]
    backlog: Backlog[str] = Backlog(len(items) + 1)
    put(backlog, *items, not_ready=slow)
    taken = take_all(backlog, len(items))
    assert sorted(taken) == sorted(items)
    for group in "abc":
        assert [t for t in taken if t[0] in (group, "-")] == [i for i in items if i[0] in (group, "-")]


@pytest.mark.parametrize("group", [None, 1])
def test_a_full_backlog_admits_again_when_half_of_it_is_gone(group: int | None) -> None:
    backlog: Backlog[int] = Backlog(4)
    for item in range(4):
        assert backlog.put(item, DEADLINE_S, group=group)
    assert backlog.waited_s == 0.0
    assert not backlog.put(4, 0.01, group=group)
    assert backlog.waited_s >= 0.01
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(backlog.put, 4, DEADLINE_S, group=group)
        assert [backlog.take(), backlog.take()] == [0, 1]
        assert late.result(DEADLINE_S)
    assert [backlog.take() for _ in range(3)] == [2, 3, 4]


def test_a_finalizer_may_put_the_end_while_an_item_is_taken() -> None:
    """Closing a forgotten optimizer does, on the thread that takes; it must not wait for itself."""
    backlog: Backlog[str] = Backlog(4)
    was_put: list[bool] = []

    def ready() -> bool:
        was_put.append(backlog.end("end", 0.1))
        return True

    backlog.put("item", 0.1, group=0, ready=ready)
    assert backlog.take() == "item"
    assert was_put == [True]
    assert backlog.take() == "end"


def fill(backlog: Backlog[int], number: int) -> None:
    for item in range(number):
        assert backlog.put(item, DEADLINE_S)


def test_a_deep_backlog_does_not_wait_until_half_of_it_is_gone() -> None:
    """Else the device would run out of work while the program sleeps."""
    depth = 4 * REFILL
    backlog: Backlog[int] = Backlog(depth)
    fill(backlog, depth)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(backlog.put, depth, DEADLINE_S)
        for _ in range(REFILL - 1):
            backlog.take()
        with pytest.raises(TimeoutError):
            late.result(0.05)
        backlog.take()
        assert late.result(DEADLINE_S)


def test_more_may_wait_while_there_is_room_for_more() -> None:
    backlog: Backlog[int] = Backlog(4)
    backlog.allow(2)
    fill(backlog, 6)
    assert not backlog.put(6, 0.01)
    take_all(backlog, 3)
    backlog.allow(0)
    fill(backlog, 1)
    assert not backlog.put(7, 0.01)


class Device:
    """Items become ready in order, as far as it has come."""

    def __init__(self) -> None:
        self.done = 0

    def put(self, backlog: Backlog[int], *items: int, timeout_s: float = DEADLINE_S) -> bool:
        return all(backlog.put(i, timeout_s, group=0, ready=lambda i=i: i < self.done) for i in items)


def test_the_program_does_not_run_far_ahead_of_the_device() -> None:
    backlog: Backlog[int] = Backlog(8 * RUN_AHEAD, run_ahead=RUN_AHEAD)
    device = Device()
    assert device.put(backlog, *range(RUN_AHEAD))
    assert not device.put(backlog, RUN_AHEAD, timeout_s=0.01)
    device.done = 5
    assert device.put(backlog, *range(RUN_AHEAD, RUN_AHEAD + 5))
    assert not device.put(backlog, RUN_AHEAD + 5, timeout_s=0.01)
    assert backlog.waited_s == 0.0  # it was never full


def test_the_program_runs_ahead_by_as_much_more_as_may_wait() -> None:
    backlog: Backlog[int] = Backlog(8 * RUN_AHEAD, run_ahead=RUN_AHEAD)
    device = Device()
    backlog.allow(7)
    assert device.put(backlog, *range(RUN_AHEAD + 7))
    assert not device.put(backlog, RUN_AHEAD + 7, timeout_s=0.01)
    backlog.allow(0)
    device.done = 7
    assert not device.put(backlog, RUN_AHEAD + 7, timeout_s=0.01)
    device.done = 8
    assert device.put(backlog, RUN_AHEAD + 7)


def test_without_a_bound_it_runs_as_far_as_there_is_room() -> None:
    backlog: Backlog[int] = Backlog(8 * RUN_AHEAD)
    assert Device().put(backlog, *range(8 * RUN_AHEAD))


def test_who_runs_ahead_goes_on_when_what_was_awaited_is_done() -> None:
    """Also where nothing is left to be taken, so that the report is all that can wake it."""
    backlog: Backlog[int] = Backlog(8 * RUN_AHEAD, run_ahead=RUN_AHEAD)
    device = Device()
    assert device.put(backlog, *range(RUN_AHEAD))
    in_flight = [backlog.take() for _ in range(RUN_AHEAD)]
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(device.put, backlog, RUN_AHEAD)
        with pytest.raises(TimeoutError):
            late.result(0.05)
        device.done = 1
        backlog.report(in_flight[0])
        assert late.result(DEADLINE_S)


def test_of_several_who_run_ahead_none_is_forgotten_when_one_goes_on() -> None:
    """Backward's thread and one that calls the optimizer: a report that lets one of them go on must not be the last."""
    backlog: Backlog[int] = Backlog(8 * RUN_AHEAD, run_ahead=RUN_AHEAD)
    device = Device()
    assert device.put(backlog, *range(RUN_AHEAD))
    in_flight = [backlog.take() for _ in range(RUN_AHEAD)]
    with ThreadPoolExecutor(2) as pool:
        late = {pool.submit(device.put, backlog, RUN_AHEAD + i) for i in range(2)}
        for index in range(2):
            with pytest.raises(TimeoutError):
                next(iter(late)).result(0.05)
            device.done += 1
            backlog.report(in_flight[index])
            done, late = wait(late, DEADLINE_S / 2, FIRST_COMPLETED)
            assert [future.result() for future in done] == [True]
    assert not late


@pytest.mark.parametrize("is_full", [False, True])
def test_nobody_waits_in_a_backlog_whose_taker_has_failed(is_full: bool) -> None:
    backlog: Backlog[int] = Backlog(RUN_AHEAD if is_full else 2 * RUN_AHEAD, run_ahead=RUN_AHEAD)
    device = Device()
    assert device.put(backlog, *range(RUN_AHEAD))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(device.put, backlog, RUN_AHEAD)
        with pytest.raises(TimeoutError):
            late.result(0.05)
        backlog.lift()
        assert late.result(DEADLINE_S)
    assert device.put(backlog, *range(3 * RUN_AHEAD))


@pytest.mark.parametrize("is_full", [False, True])
def test_nothing_comes_behind_the_end(is_full: bool) -> None:
    backlog: Backlog[int] = Backlog(2)
    fill(backlog, 2 if is_full else 1)
    assert backlog.end(-1, DEADLINE_S)
    with pytest.raises(ClosedError):
        backlog.put(5, DEADLINE_S)
    assert backlog.waiting() == [*range(2 if is_full else 1), -1]


def test_what_waits_can_be_asked_for() -> None:
    backlog: Backlog[str] = Backlog(8)
    put(backlog, "a1", "b1", "-1", "a2")
    assert sorted(backlog.waiting()) == ["-1", "a1", "a2", "b1"]


# Ctrl-C


PLACES = ("RESUME", "CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "POP_JUMP_BACKWARD")
"""Instructions, of some version of Python, after which a signal's handler may run."""


@dataclass
class Interrupt:
    """Raises `KeyboardInterrupt` at the `number`-th place, from 0, where the interpreter would let a signal's handler run:
    after a call, at the beginning of a function, at a turn of a loop; inside `function` and the Python that it calls.
    """

    number: int
    where: str = ""
    _seen: int = 0
    _last: dict[FrameType, str] = field(default_factory=dict)

    def run(self, function: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            function()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if Path(frame.f_code.co_filename).name not in ("backlog.py", "threading.py"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call":
            self._last[frame] = "RESUME"
        elif event == "opcode":
            last, now = self._last[frame], opcode_at(frame)
            self._last[frame] = now
            if last.startswith(PLACES) and not now.startswith("CALL"):
                self._count(frame)
        return self._trace

    def _count(self, frame: FrameType) -> None:
        self._seen += 1
        if self._seen > self.number and not self.where:
            self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
            raise KeyboardInterrupt


def opcode_at(frame: FrameType) -> str:
    if frame.f_code not in opcodes:
        opcodes[frame.f_code] = {each.offset: each.opname for each in dis.get_instructions(frame.f_code)}
    return opcodes[frame.f_code].get(frame.f_lasti, "")


opcodes: dict[CodeType, dict[int, str]] = {}


def is_free(backlog: Backlog[int]) -> bool:
    """Asked from a thread that does not hold the lock."""
    return backlog._lock.acquire(timeout=DEADLINE_S / 4) and backlog._lock.release() is None


def interrupted_everywhere(make: Callable[[], tuple[Backlog[int], Callable[[], object]]]) -> list[str]:
    """Where `Interrupt` struck. Each time the lock is free afterwards, and what is in can be taken, with the end."""
    places: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        for number in range(1000):
            backlog, function = make()
            interrupt = Interrupt(number)
            try:
                interrupt.run(function)
            except KeyboardInterrupt:
                places.append(interrupt.where)
            else:
                return places
            assert pool.submit(is_free, backlog).result(DEADLINE_S), places[-1]
            items = backlog.waiting()
            assert backlog.end(-1, DEADLINE_S)
            assert take_all(backlog, len(backlog._items)) == [*items, -1], places[-1]
            assert backlog._num_held_up == 0, places[-1]
    raise AssertionError("it has no end")


@pytest.mark.parametrize("groups", [(None,), (1,), (None, 1), (1, None), (1, 1), (1, 2)])
def test_ctrl_c_in_put_leaves_the_lock_free_and_the_items_whole(groups: tuple[int | None, ...]) -> None:
    def make() -> tuple[Backlog[int], Callable[[], object]]:
        backlog: Backlog[int] = Backlog(8, run_ahead=8)
        *before, last = groups
        for item, group in enumerate(before):
            backlog.put(item, DEADLINE_S, group=group)
        return backlog, partial(backlog.put, 9, DEADLINE_S, group=last, ready=bool)

    places = interrupted_everywhere(make)
    assert any(place.startswith("put,") for place in places)
    assert any(place.startswith("append,") for place in places)


def test_ctrl_c_while_waiting_for_room_leaves_the_lock_free() -> None:
    def make() -> tuple[Backlog[int], Callable[[], object]]:
        backlog: Backlog[int] = Backlog(1)
        fill(backlog, 1)
        return backlog, partial(backlog.put, 9, 0.001)

    places = interrupted_everywhere(make)
    assert any(place.startswith("wait,") for place in places)


def test_ctrl_c_in_end_leaves_the_lock_free() -> None:
    places = interrupted_everywhere(lambda: (backlog := Backlog[int](1), partial(backlog.end, 9, DEADLINE_S)))
    assert any(place.startswith("end,") for place in places)


def test_a_producer_that_has_run_ahead_when_there_is_room_again_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of its wait is not the host's doing: that is what shares are corrected by."""
    backlog: Backlog[int] = Backlog(2, run_ahead=2)
    device = Device()
    assert device.put(backlog, 0, 1)
    now = 0.0
    monkeypatch.setattr(backlog_module, "time", SimpleNamespace(monotonic=lambda: now))

    def host() -> None:
        take_all(backlog, 1)

    def others() -> None:
        device.done = 2

    comes = iter([(5.0, host), (7.0, others)])

    def wait(timeout_s: float) -> bool:
        nonlocal now
        seconds, happens = next(comes)
        now += seconds
        happens()
        return True

    monkeypatch.setattr(backlog._room, "wait", wait)
    assert device.put(backlog, 2)
    assert (now, backlog.waited_s) == (12.0, 5.0)
