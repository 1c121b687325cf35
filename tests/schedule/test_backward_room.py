"""How much may wait on the device, by what backward has freed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.schedule.backward_room import BackwardRoom, Queue


class FakeWorker:
    """What the room asks of a worker."""

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self.allowed: list[int] = []

    def allow(self, extra: int) -> None:
        self.allowed.append(extra)

    @property
    def extra(self) -> int:
        return self.allowed[-1] if self.allowed else 0


class Allocator:
    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self) -> int:
        return self.num_bytes


def make_room(*shares: float, unit_bytes: int = 10) -> tuple[BackwardRoom, Allocator, list[FakeWorker]]:
    workers, allocator = [FakeWorker() for _ in shares], Allocator()
    queues = [Queue(_as_worker(w), unit_bytes, share) for w, share in zip(workers, shares, strict=True)]
    return BackwardRoom(allocator, queues), allocator, workers


def _as_worker(worker: FakeWorker) -> Any:
    return worker


def observe(room: BackwardRoom, allocator: Allocator, in_use: list[int]) -> None:
    for param, num_bytes in enumerate(in_use):
        allocator.num_bytes = num_bytes
        room.observe(param)
    room.end_step()


def extras(room: BackwardRoom, worker: FakeWorker, params: range) -> list[int]:
    found = []
    for param in params:
        room.enter(param)
        found.append(worker.extra)
    return found


def test_room_is_what_lies_below_the_peak_from_a_gradient_on() -> None:
    room, allocator, (worker,) = make_room(1.0)
    observe(room, allocator, [900, 1000, 600, 700, 300])
    assert extras(room, worker, range(5)) == [0, 0, 30, 30, 70]


def test_before_the_first_pass_and_for_strange_gradients_there_is_none() -> None:
    room, allocator, (worker,) = make_room(1.0)
    room.enter(0)
    assert worker.extra == 0
    observe(room, allocator, [900, 100])
    assert extras(room, worker, range(1, 4)) == [80, 0, 0]


def test_gradients_that_wait_are_not_the_models_memory() -> None:
    """In the observed pass too they wait; the more of them, the later."""
    room, allocator, (worker,) = make_room(1.0)
    allocator.num_bytes = 1000
    room.observe(0)
    allocator.num_bytes, worker.waiting_bytes = 1000, 400
    room.observe(1)
    room.end_step()
    assert extras(room, worker, range(2)) == [0, 40]


def test_two_queues_share_it() -> None:
    room, allocator, workers = make_room(0.5, 0.25)
    observe(room, allocator, [1000, 200])
    room.enter(1)
    assert [worker.extra for worker in workers] == [40, 20]


def test_between_steps_nothing_more_may_wait_than_before() -> None:
    room, allocator, (worker,) = make_room(1.0)
    observe(room, allocator, [1000, 200])
    room.enter(1)
    room.end_step()
    assert worker.extra == 0


def test_a_queue_is_told_only_of_changes() -> None:
    """It takes a lock."""
    room, allocator, (worker,) = make_room(1.0)
    observe(room, allocator, [1000, 200, 200])
    for param in (1, 2, 1):
        room.enter(param)
    assert worker.allowed == [80]


def test_of_several_passes_the_fullest_counts_and_the_last_gives_the_order() -> None:
    room, allocator, (worker,) = make_room(1.0)
    for param, num_bytes in ((0, 1000), (1, 500), (0, 800), (1, 300)):
        allocator.num_bytes = num_bytes
        room.observe(param)
    room.end_step()
    assert extras(room, worker, range(2)) == [0, 50]


def test_a_pass_that_was_dropped_teaches_nothing() -> None:
    """One that ran out of memory half-way would have a peak that no pass may reach again."""
    room, allocator, (worker,) = make_room(1.0)
    for param, num_bytes in ((0, 9000), (1, 500)):
        allocator.num_bytes = num_bytes
        room.observe(param)
    room.end_step(is_dropped=True)
    assert extras(room, worker, range(2)) == [0, 0]
    observe(room, allocator, [1000, 500, 700])
    assert extras(room, worker, range(3)) == [0, 30, 30]


def test_it_learns_once() -> None:
    room, allocator, (worker,) = make_room(1.0)
    observe(room, allocator, [1000, 200])
    observe(room, allocator, [5000, 0])
    assert extras(room, worker, range(2)) == [0, 80]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30), st.integers(1, 1000))
def test_with_all_room_taken_the_peak_is_not_passed(in_use: list[int], unit_bytes: int) -> None:
    """What waits from one gradient on is there at all later ones."""
    room, allocator, (worker,) = make_room(1.0, unit_bytes=unit_bytes)
    observe(room, allocator, in_use)
    waiting = 0
    for param, num_bytes in enumerate(in_use):
        room.enter(param)
        waiting = max(waiting, worker.extra * unit_bytes)
        assert num_bytes + waiting <= max(in_use)


@pytest.mark.parametrize("passes", [0, 1])
def test_a_step_without_observed_gradients_teaches_nothing(passes: int) -> None:
    room, allocator, (worker,) = make_room(1.0)
    room.end_step()
    if passes:
        observe(room, allocator, [1000, 200])
        assert extras(room, worker, range(1, 2)) == [80]
