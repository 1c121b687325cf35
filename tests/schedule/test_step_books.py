"""A step's books against what they stand for: sets of gradients that have come, and memory that holds numbers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from offload.layout import ALIGN
from offload.schedule.step_books import Fold, KeptBooks, TileBooks, Way
from tests.numbered_tiles import Numbered, cut, layouts

STALE = 1 << 40
"""What memory holds from the step before; it must never show."""


def arrive(books: TileBooks, tiles: Sequence[Numbered], param: int) -> list[Numbered]:
    """Tiles that the gradient of `param` completes."""
    return [tile for tile in tiles if param in tile.params and books.is_complete_with_one_more(tile)]


@given(layouts, st.data())
def test_a_tile_is_complete_with_the_last_of_its_gradients_and_once(
    layout: tuple[list[int], int], data: st.DataObject
) -> None:
    tiles = cut(*layout)
    order = data.draw(st.permutations(range(len(layout[0]))))[: data.draw(st.integers(0, len(layout[0])))]
    books, come = TileBooks(), set[int]()
    for param in order:
        before = {tile.key for tile in tiles if tile.params <= come}
        come.add(param)
        complete = [tile for tile in tiles if tile.params <= come]
        assert arrive(books, tiles, param) == [tile for tile in complete if tile.key not in before]
        assert [tile for tile in tiles if books.is_early(tile)] == complete
        assert books.num_early == len(complete)
        assert books.early_chunks == {tile.key[0] for tile in complete}


@given(layouts, st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_what_waits_has_a_gradient_and_was_not_updated_early(
    layout: tuple[list[int], int], come: set[int], kept: set[int]
) -> None:
    tiles, books = cut(*layout), TileBooks()
    for param in come:
        arrive(books, tiles, param)
    expected = [tile for tile in tiles if tile.params & kept and not tile.params <= come]
    assert books.waiting(tiles, kept.__contains__) == expected


def test_what_was_taken_back_begins_anew() -> None:
    """Two parameters share the second of three tiles; a tile that had half of its gradients has none again."""
    tiles, books = cut([3 * ALIGN, 0, 3 * ALIGN], 2 * ALIGN), TileBooks()
    assert [sorted(tile.params) for tile in tiles] == [[2], [0, 2], [0]]
    assert arrive(books, tiles, 2) == tiles[:1]
    books.take_back()
    assert (books.num_early, books.early_chunks) == (0, set())
    assert books.waiting(tiles, lambda param: True) == tiles
    assert arrive(books, tiles, 0) == tiles[2:]  # the shared one waits for the other gradient again
    assert arrive(books, tiles, 2) == tiles[:2]


class Memory:
    """What gradients of one parameter become when they are kept as the books say; numbers instead of arrays."""

    def __init__(self) -> None:
        self.held = self.summed = STALE

    def add(self, gradient: int, fold: Fold) -> None:
        self.summed = gradient if fold == "first" else self.summed + gradient

    def hold(self, gradient: int, fold: Fold | None) -> None:
        if fold is not None:
            self.add(self.held, fold)
        self.held = gradient

    def read(self, way: Way, arrived: int | None) -> int:
        if not way.fresh:
            return self.summed
        fresh = self.held if arrived is None else arrived
        return fresh + self.summed if way.adds else fresh


PARAMS = range(4)
events = st.lists(st.tuples(st.sampled_from(PARAMS), st.booleans()), max_size=12)


def keep(books: KeptBooks, number: int, param: int, memory: Memory, *, held: bool) -> int:
    """Keep the gradient of this number, a power of two: sums tell what is in them."""
    gradient = 1 << number
    if held:
        memory.hold(gradient, books.hold(param))
    else:
        memory.add(gradient, books.add(param))
    return gradient


@given(events, st.sets(st.sampled_from(PARAMS)))
def test_every_gradient_that_was_kept_is_read_once(events: list[tuple[int, bool]], asked: set[int]) -> None:
    books, memory, totals = KeptBooks(), [Memory() for _ in PARAMS], dict.fromkeys(PARAMS, 0)
    for number, (param, held) in enumerate(events):
        totals[param] += keep(books, number, param, memory[param], held=held)
    assert [param for param in PARAMS if books.has(param)] == [param for param in PARAMS if totals[param]]
    ways = books.ways(asked, arrived=False)
    read = [(param, memory[param].read(way, None)) for way in ways for param in way.params]
    assert sorted(read) == [(param, totals[param]) for param in sorted(asked) if totals[param]]


@given(st.lists(st.sampled_from(PARAMS), max_size=6), st.sets(st.sampled_from(PARAMS), min_size=1))
def test_what_has_just_arrived_is_added_to_sums(summed: list[int], asked: set[int]) -> None:
    books, memory, totals = KeptBooks(), [Memory() for _ in PARAMS], dict.fromkeys(PARAMS, 0)
    for number, param in enumerate(summed):
        totals[param] += keep(books, number, param, memory[param], held=False)
    arrived = 1 << len(summed)
    ways = books.ways(asked, arrived=True)
    read = [(param, memory[param].read(way, arrived)) for way in ways for param in way.params]
    assert sorted(read) == [(param, totals[param] + arrived) for param in sorted(asked)]
    assert books.has_sums == any(totals.values())
    assert books.are_summed(asked) == all(totals[param] for param in asked)


def test_gradients_that_an_update_kept_count_as_held_beside_their_sums() -> None:
    """After a roll back; one that was held before stays one gradient."""
    books = KeptBooks()
    books.add(0)
    books.hold(1)
    assert not books.has(2)
    books.hold_all({0, 1, 2})
    assert books.ways({0, 1, 2, 3}, arrived=False) == [Way(True, False, {1, 2}), Way(True, True, {0})]
