"""Which tiles the coming backward will complete, and in which order: those of the last one. Pure.

Gradients come in the same order step after step, so the order in which they came, whoever stepped them, tells in which
order tiles will be complete. What it tells is a guess: a wrong one costs a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Generic, TypeVar

from offload.schedule.step_books import BookedTile, TileBooks

__all__ = ["TileForecast"]

T = TypeVar("T", bound=BookedTile)


class TileForecast(Generic[T]):
    """From the order of gradients, by parameter index, to the order of tiles; nothing before the first step has ended.

    Args:
        tiles_of: the tiles that need a parameter's gradient.
    """

    def __init__(self, tiles_of: Callable[[int], Iterable[T]]) -> None:
        self._tiles_of = tiles_of
        self._fired: dict[int, None] = {}
        self._order: list[int] = []
        self._tiles: list[T] = []

    def note(self, param: int) -> None:
        """A gradient has come; of several of one parameter the last counts."""
        self._fired.pop(param, None)
        self._fired[param] = None

    def end_step(self) -> None:
        """The gradients noted were those of a step: the next ones will come in the same order. None: nothing is learnt."""
        if self._fired and list(self._fired) != self._order:
            self._order = list(self._fired)
            self._tiles = self._completed_by(self._order)
        self.forget_step()

    def forget_step(self) -> None:
        """The gradients noted do not count; what was learnt of steps before them does."""
        self._fired = {}

    @property
    def order(self) -> list[int]:
        """Parameters in the order that is expected."""
        return list(self._order)

    def tiles(self, chunks: Container[int], parts: Mapping[int, Container[int]]) -> list[T]:
        """Tiles of `chunks` that will be complete, in order.

        Args:
            parts: elements of further chunks, of which only the tiles that begin there are meant.
        """
        return [
            tile
            for tile in self._tiles
            if tile.key[0] in chunks or tile.tile.start in parts.get(tile.key[0], ())
        ]

    def _completed_by(self, fired: Iterable[int]) -> list[T]:
        books = TileBooks()
        tiles = (tile for param in fired for tile in self._tiles_of(param))
        return [tile for tile in tiles if books.is_complete_with_one_more(tile)]
