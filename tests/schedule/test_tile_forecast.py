"""The order of tiles that is expected, against that in which sets of gradients complete them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from offload.layout import ALIGN
from offload.schedule.tile_forecast import TileForecast
from tests.numbered_tiles import Numbered, cut, layouts

ALL = range(1000)
"""Of chunks: more than there are."""


def forecast_of(tiles: Sequence[Numbered]) -> TileForecast[Numbered]:
    return TileForecast(lambda param: [tile for tile in tiles if param in tile.params])


def learn(forecast: TileForecast[Numbered], order: Sequence[int]) -> list[Numbered]:
    """A step in which gradients come in this order, and what is expected of the next one."""
    for param in order:
        forecast.note(param)
    forecast.end_step()
    return forecast.tiles(ALL, {})


def completed(tiles: Sequence[Numbered], order: Sequence[int]) -> list[Numbered]:
    """Tiles in the order in which gradients that come like this complete them; each chunk's in its own."""
    come, done = set[int](), list[Numbered]()
    for param in order:
        come.add(param)
        done += [tile for tile in tiles if tile not in done and param in tile.params and tile.params <= come]
    return done


@given(layouts, st.data())
def test_tiles_are_expected_as_the_gradients_of_the_last_step_completed_them(
    layout: tuple[list[int], int], data: st.DataObject
) -> None:
    tiles, params = cut(*layout), range(len(layout[0]))
    forecast = forecast_of(tiles)
    assert forecast.tiles(ALL, {}) == []
    for _ in range(2):
        order = data.draw(st.permutations(params))[: data.draw(st.integers(1, len(params)))]
        assert learn(forecast, order) == completed(tiles, order)
        assert forecast.order == order


@given(layouts, st.sets(st.integers(0, 3)), st.data())
def test_only_tiles_that_are_asked_for_are_expected(
    layout: tuple[list[int], int], chunks: set[int], data: st.DataObject
) -> None:
    """Whole chunks, or the tiles that begin among certain elements; a chunk that is asked for twice comes once."""
    tiles = cut(*layout)
    forecast = forecast_of(tiles)
    everything = learn(forecast, range(len(layout[0])))
    bounds = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    part = range(bounds[0] * ALIGN, bounds[1] * ALIGN)
    assert forecast.tiles(chunks, {0: part}) == [
        tile for tile in everything if tile.key[0] in chunks or (tile.key[0] == 0 and tile.tile.start in part)
    ]


def test_of_several_gradients_of_a_parameter_the_last_counts() -> None:
    tiles = cut([ALIGN, ALIGN, ALIGN], ALIGN)
    forecast = forecast_of(tiles)
    assert [tile.params for tile in learn(forecast, [0, 1, 2, 0])] == [{1}, {2}, {0}]
    assert forecast.order == [1, 2, 0]


def test_what_was_learnt_outlives_steps_without_gradients_and_those_that_were_dropped() -> None:
    tiles = cut([ALIGN, ALIGN], ALIGN)
    forecast = forecast_of(tiles)
    expected = learn(forecast, [1, 0])
    assert learn(forecast, []) == expected
    forecast.note(0)
    forecast.note(1)
    forecast.forget_step()
    assert forecast.order == [1, 0]
    assert learn(forecast, [1]) == completed(tiles, [1])  # the dropped ones do not come before it


def test_an_order_that_stays_is_not_worked_out_again() -> None:
    """Step after step is alike, and there may be thousands of tiles."""
    tiles, asked = cut([ALIGN, ALIGN], ALIGN), list[int]()

    def tiles_of(param: int) -> list[Numbered]:
        asked.append(param)
        return [tile for tile in tiles if param in tile.params]

    forecast = TileForecast(tiles_of)
    for order in ([1, 0], [1, 0], [0, 1]):
        learn(forecast, order)
    assert asked == [1, 0, 0, 1]


def test_tiles_of_a_chunk_that_came_later_are_expected_once_the_order_is_another() -> None:
    first = cut([ALIGN], ALIGN)
    tiles = list(first)
    forecast = forecast_of(tiles)
    learn(forecast, [0])
    tiles += [tile for tile in cut([ALIGN, ALIGN], ALIGN) if 1 in tile.params]
    assert learn(forecast, [0]) == first
    assert learn(forecast, [0, 1]) == tiles
