"""The books of one step: which tiles are complete, and how the gradients that wait are kept. Pure.

They know parameters and tiles by number, keep no memory, and are new for each step. Both are written where a job is
submitted, not where it runs: whoever submits the next job finds in them what memory will hold when that job runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Literal, NamedTuple, Protocol, TypeVar

from offload.layout import Tile

__all__ = ["BookedTile", "Fold", "KeptBooks", "TileBooks", "TileKey", "Way"]

TileKey = tuple[int, int]
"""A chunk's index and a tile's in it."""

Fold = Literal["first", "next"]
"""A gradient that goes to its parameter's sum: what starts it, or one more."""


class BookedTile(Protocol):
    """A tile of any placement, as the books see it."""

    @property
    def key(self) -> TileKey:
        """What it is known by."""

    @property
    def tile(self) -> Tile:
        """Its pieces."""


T = TypeVar("T", bound=BookedTile)


class TileBooks:
    """Tiles of one step: those that wait for a gradient, those that were updated early, those left for ``step()``."""

    def __init__(self) -> None:
        self._missing: dict[TileKey, int] = {}
        self._early: set[TileKey] = set()
        #: Tiles updated at ``step()``, as whoever updates them counts them.
        self.num_late = 0

    def is_complete_with_one_more(self, tile: BookedTile) -> bool:
        """Count one more gradient of `tile`; with the last one it is complete, and counts as updated early."""
        missing = self._missing.get(tile.key, len(tile.tile.pieces)) - 1
        self._missing[tile.key] = missing
        if not missing:
            self._early.add(tile.key)
        return not missing

    def is_early(self, tile: BookedTile) -> bool:
        """Whether `tile` was updated early."""
        return tile.key in self._early

    @property
    def num_early(self) -> int:
        """Tiles that were."""
        return len(self._early)

    @property
    def early_chunks(self) -> set[int]:
        """Indices of the chunks that have such tiles."""
        return {chunk for chunk, _ in self._early}

    def waiting(self, tiles: Iterable[T], has: Callable[[int], bool]) -> list[T]:
        """Of `tiles` those that were not updated early, though some parameter of them `has` a gradient."""
        return [
            tile
            for tile in tiles
            if tile.key not in self._early and any(has(piece.param) for piece in tile.tile.pieces)
        ]

    def take_back(self) -> None:
        """Early updates are undone: no tile was updated, and none has got a gradient."""
        self._early.clear()
        self._missing.clear()


class Way(NamedTuple):
    """How the gradients of some parameters are to be had: `fresh` and `adds` as in `offload.schedule.pipeline.Launch`."""

    fresh: bool
    adds: bool
    params: Set[int]


class KeptBooks:
    """Gradients of one step that wait, by parameter: held as they came, summed in FP32, or one held beside a sum."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._summed: set[int] = set()

    def add(self, param: int) -> Fold:
        """A gradient goes to the parameter's sum: as its first or as one more."""
        fold: Fold = "next" if param in self._summed else "first"
        self._summed.add(param)
        return fold

    def hold(self, param: int) -> Fold | None:
        """A gradient is held. If one was held before, that goes to the sum: as its first or as one more."""
        if param in self._held:
            return self.add(param)
        self._held.add(param)
        return None

    def hold_all(self, params: Iterable[int]) -> None:
        """Gradients of `params` are held: they were kept already, and count from now on."""
        self._held.update(params)

    def has(self, param: int) -> bool:
        """Whether something of the parameter waits."""
        return param in self._held or param in self._summed

    @property
    def has_sums(self) -> bool:
        """Whether any parameter has a sum."""
        return bool(self._summed)

    def are_summed(self, params: Set[int]) -> bool:
        """Whether all `params` have sums."""
        return params <= self._summed

    def ways(self, params: Set[int], *, arrived: bool) -> list[Way]:
        """How the gradients of `params` are to be had: at most three ways, each for parameters of its own.

        Args:
            arrived: all of them have just come, and nothing that is held is meant.
        """
        fresh = params if arrived else params & self._held
        summed = params & self._summed
        ways = (
            Way(True, False, fresh - summed),
            Way(True, True, fresh & summed),
            Way(False, False, summed - fresh),
        )
        return [way for way in ways if way.params]
