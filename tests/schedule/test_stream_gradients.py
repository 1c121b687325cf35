"""Gradients on the device: what a tile's trip reads, what it begins after, and when nothing here holds them any more."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from offload.layout import ALIGN
from offload.schedule.step_books import TileBooks
from offload.schedule.stream_gradients import StreamGradients
from tests.numbered_tiles import Numbered, cut

TILES = cut([3 * ALIGN, 0, 3 * ALIGN], 2 * ALIGN)
"""Of the parameters 2 and 0; they share the second of three tiles."""

FIRST, SHARED, LAST = TILES


class Point:
    """When a gradient came."""


def tiles_of(param: int) -> list[Numbered]:
    return [tile for tile in TILES if param in tile.params]


def make() -> Any:
    return StreamGradients(tiles_of, flush_denormals=True)  # type: ignore[arg-type]


def test_the_layout_is_as_the_tests_below_need_it() -> None:
    assert [sorted(tile.params) for tile in TILES] == [[2], [0, 2], [0]]
    assert [piece.param for piece in SHARED.tile.pieces] == [2, 0]


def test_a_trip_reads_the_pieces_that_have_a_gradient_and_sums_of_those_before() -> None:
    gradients = make()
    assert gradients.in_tile(SHARED) == []
    one, two, three = (torch.full((3 * ALIGN,), value) for value in (1.0, 2.0, 4.0))
    gradients.hold(0, one)
    [(position, (last, total))] = gradients.in_tile(SHARED)
    assert (position, last is one, total) == (1, True, None)
    gradients.accumulate(2, two)
    gradients.hold(2, three)
    assert [
        (position, last is each) for position, (last, _) in gradients.in_tile(SHARED) for each in (three, one)
    ] == [
        (0, True),
        (0, False),
        (1, False),
        (1, True),
    ]
    assert torch.equal(gradients.in_tile(FIRST)[0][1][1], two)
    assert gradients.in_tile(SHARED) != []  # reading takes nothing away
    assert (gradients.has(0), gradients.has(1), gradients.has(2)) == (True, False, True)


def test_a_sum_alone_is_read_as_the_gradient() -> None:
    """In FP32, whatever the gradients were; at its position in the tile, not in the chunk."""
    gradients = make()
    for _ in range(2):
        gradients.accumulate(0, torch.full((3 * ALIGN,), 1.5, dtype=torch.bfloat16))
    assert LAST.tile.pieces[0].row != 0
    [(position, (last, total))] = gradients.in_tile(LAST)
    assert (position, last.dtype, total) == (0, torch.float32, None)
    assert last.eq(3.0).all()


def test_a_trip_begins_after_all_gradients_of_its_tile_each_once() -> None:
    """One may have come on another stream than the one that completes the tile."""
    gradients, before, now, later = make(), Point(), Point(), Point()
    gradients.note_arrival(2, before)
    gradients.note_arrival(0, now)
    assert gradients.arrivals(SHARED, now) == [now, before]
    assert gradients.arrivals(LAST, now) == [now]
    assert gradients.arrivals(SHARED, later) == [later, before, now]


def test_a_gradient_goes_with_the_last_of_its_tiles() -> None:
    gradients, books = make(), TileBooks()
    seen = {}
    for param in (2, 0):
        gradient = torch.ones(3 * ALIGN)
        seen[param] = weakref.ref(gradient)
        gradients.hold(param, gradient)
        gradients.note_arrival(param, Point())
        del gradient
    assert books.is_complete_with_one_more(FIRST)
    gradients.let_go([FIRST], books.is_early)
    assert gradients.has(2)  # the shared tile waits for it
    assert not books.is_complete_with_one_more(SHARED)
    assert books.is_complete_with_one_more(SHARED)
    gradients.let_go([SHARED], books.is_early)
    assert (gradients.has(2), gradients.has(0)) == (False, True)
    assert books.is_complete_with_one_more(LAST)
    gradients.let_go([LAST], books.is_early)
    assert not gradients.has(0)
    assert [reference() for reference in seen.values()] == [None, None]
    now = Point()
    assert gradients.arrivals(SHARED, now) == [now]


def test_only_parameters_of_tiles_whose_trips_were_made_are_looked_at() -> None:
    """Others may be held although all their tiles count as early: in a step that is taken up again."""
    gradients = make()
    gradients.hold(0, torch.ones(3 * ALIGN))
    gradients.hold(2, torch.ones(3 * ALIGN))
    gradients.let_go([FIRST], lambda tile: True)
    assert (gradients.has(0), gradients.has(2)) == (True, False)


def test_a_step_that_ends_leaves_nothing() -> None:
    gradients, then = make(), Point()
    gradients.hold(0, torch.ones(3 * ALIGN))
    gradients.accumulate(2, torch.ones(3 * ALIGN))
    gradients.note_arrival(0, Point())
    gradients.clear()
    assert (gradients.has(0), gradients.has(2)) == (False, False)
    assert gradients.arrivals(SHARED, then) == [then]
