"""Tiles without memory: what books and forecasts know of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from offload.layout import ALIGN, Kind, ParamSpec, Tile, build_chunks
from offload.schedule.step_books import TileKey

__all__ = ["Numbered", "cut", "layouts"]


class Numbered(NamedTuple):
    key: TileKey
    tile: Tile

    @property
    def params(self) -> set[int]:
        return {piece.param for piece in self.tile.pieces}


def cut(numels: Sequence[int], tile_numel: int) -> list[Numbered]:
    """Tiles of two layers over which parameters of these sizes are spread."""
    specs = [
        ParamSpec(index, f"layers.{index % 2}.w{index}", numel, Kind("bf16", "bf16"))
        for index, numel in enumerate(numels)
    ]
    chunks = build_chunks(specs, tile_numel=tile_numel)
    return [Numbered((tile.chunk, tile.index), tile) for chunk in chunks for tile in chunk.tiles]


layouts = st.tuples(
    st.lists(st.integers(0, 3 * ALIGN), min_size=1, max_size=8), st.sampled_from([ALIGN, 2 * ALIGN])
)
"""Sizes of parameters, and the most elements of a tile."""
