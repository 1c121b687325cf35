"""The order in which what waits is taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.schedule.backlog import Backlog

DEADLINE_S = 20.0


def put(backlog: Backlog[str], *items: str, not_ready: str = "") -> None:
    """Items are called by their group and a number; those of group ``-`` belong to none."""
    for item in items:
        group = None if item[0] == "-" else ord(item[0])
        assert backlog.put(item, DEADLINE_S, group=group, ready=lambda item=item: item[0] not in not_ready)


def take_all(backlog: Backlog[str], number: int) -> list[str]:
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


def test_a_finalizer_may_put_while_an_item_is_taken() -> None:
    """Closing a forgotten optimizer does, on the thread that takes; it must not wait for itself."""
    backlog: Backlog[str] = Backlog(4)
    was_put: list[bool] = []

    def ready() -> bool:
        was_put.append(backlog.put("end", 0.1))
        return True

    backlog.put("item", 0.1, group=0, ready=ready)
    assert backlog.take() == "item"
    assert was_put == [True]
    assert backlog.take() == "end"
