"""State of STREAM chunks: FP32, in pinned host slabs, cut into the tiles in which it travels.

An FP32 compute weight is its own master: it is on the device anyway and is stepped there in place, so its chunk has
moments alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.kernels.rule import Rule
from offload.layout import ALIGN, Chunk, Piece, Span, Tile
from offload.parameters import ParamRecord
from offload.transfer.pinned import Slab, Touch, allocate

__all__ = ["Place", "StreamChunk", "StreamState", "StreamTile", "num_arrays"]

MASTER = "master"


def num_arrays(rule: Rule, weight: str) -> int:
    """FP32 arrays that travel, for weights of dtype `weight` (``"bf16"`` or ``"fp32"``)."""
    return len(rule.state_names) + (weight != "fp32")


@dataclass(frozen=True, eq=False)
class StreamChunk:
    """A chunk's arrays in host memory: FP32 ``[chunk.numel]`` by name; squared sums per block of `ALIGN`."""

    chunk: Chunk
    arrays: Mapping[str, torch.Tensor]
    sums: torch.Tensor
    nonfinite: torch.Tensor


class StreamTile:
    """One tile: its part of the chunk's arrays, made once, and the compute weights that it updates.

    Args:
        records: by parameter index.
    """

    def __init__(self, chunk: StreamChunk, tile: Tile, records: Mapping[int, ParamRecord]) -> None:
        elements, blocks = slice(tile.start, tile.stop), slice(tile.start // ALIGN, tile.stop // ALIGN)
        self.chunk, self.tile = chunk.chunk, tile
        self.key = (chunk.chunk.index, tile.index)
        self.owns_master = MASTER in chunk.arrays
        self.state = tuple(array[elements] for array in chunk.arrays.values())
        self.sums, self.nonfinite = chunk.sums[blocks], chunk.nonfinite[blocks]
        self.weights: list[torch.Tensor] = []
        self._records = records
        self.aim()

    def aim(self) -> None:
        """Find the compute weights, which may have moved."""
        self.weights = [
            self._records[p.param].weight()[p.param_start : p.param_start + p.numel] for p in self.tile.pieces
        ]


class Place:
    """A parameter's place: its chunk, its span there, and the tiles and pieces that cover it."""

    def __init__(self, record: ParamRecord, chunk: StreamChunk, span: Span) -> None:
        self.record, self.chunk, self.span = record, chunk, span
        self.parts: list[tuple[StreamTile, Piece]] = []

    def state(self) -> dict[str, torch.Tensor]:
        """Flat views, the weight itself serving as the master where there is no other."""
        part = slice(self.span.start, self.span.start + self.span.numel)
        arrays = {name: array[part] for name, array in self.chunk.arrays.items()}
        return arrays if MASTER in arrays else {MASTER: self.record.weight(), **arrays}


class StreamState:
    """Slabs, chunks, tiles and places.

    Args:
        pin_for: the device for which slabs are pinned; None: pageable memory will do.
        touch: fills fresh memory with zeros, and so decides on what NUMA node it lies.
        tile_numel: most elements of a tile.
    """

    def __init__(self, rule: Rule, *, pin_for: torch.device | None, touch: Touch, tile_numel: int) -> None:
        self._names = tuple(rule.state_names)
        self._pin_for, self._touch, self._tile_numel = pin_for, touch, tile_numel
        self._slabs: list[Slab] = []
        self.records: dict[int, ParamRecord] = {}
        self.chunks: dict[int, StreamChunk] = {}
        self.tiles: list[StreamTile] = []
        self.places: dict[int, Place] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes mapped."""
        return sum(slab.num_bytes for slab in self._slabs)

    def add(self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord]) -> None:
        """Allocate and cut. On an error nothing of `chunks` stays."""
        mastered = [chunk for chunk in chunks if chunk.kind.weight != "fp32"]
        slabs: list[Slab] = []
        try:
            arrays = {MASTER: self._allocate(slabs, MASTER, mastered, torch.float32)}
            for name in self._names:
                arrays[name] = self._allocate(slabs, name, chunks, torch.float32)
            sums = self._allocate(slabs, "squared sums", chunks, torch.float64, per=ALIGN)
            nonfinite = self._allocate(slabs, "non-finite flags", chunks, torch.uint8, per=ALIGN)
        except BaseException:
            _close(slabs)
            raise
        self._slabs += slabs
        for chunk in chunks:
            mine = {name: parts[chunk.index] for name, parts in arrays.items() if chunk.index in parts}
            self._cut(StreamChunk(chunk, mine, sums[chunk.index], nonfinite[chunk.index]), records)

    def aim(self) -> None:
        """Find the compute weights of all tiles."""
        for tile in self.tiles:
            tile.aim()

    def close(self) -> None:
        """Unpin and unmap everything; no copy may be running."""
        for owner in (self.records, self.chunks, self.tiles, self.places):
            owner.clear()
        _close(self._slabs)

    def _cut(self, chunk: StreamChunk, records: Mapping[int, ParamRecord]) -> None:
        self.chunks[chunk.chunk.index] = chunk
        for span in chunk.chunk.spans:
            self.records[span.param] = records[span.param]
            self.places[span.param] = Place(records[span.param], chunk, span)
        finer = replace(chunk.chunk, tile_numel=min(chunk.chunk.tile_numel, self._tile_numel))
        for tile in finer.tiles:
            stream_tile = StreamTile(chunk, tile, self.records)
            self.tiles.append(stream_tile)
            for piece in tile.pieces:
                self.places[piece.param].parts.append((stream_tile, piece))

    def _allocate(
        self, slabs: list[Slab], name: str, chunks: Sequence[Chunk], dtype: torch.dtype, *, per: int = 1
    ) -> dict[int, torch.Tensor]:
        """One slab with an element for every `per` ones of `chunks`; its parts by chunk index."""
        if not chunks:
            return {}
        total = sum(chunk.numel // per for chunk in chunks)
        slab = allocate(
            max(total * dtype.itemsize, 1),
            name=f"streamed {name}",
            pin=self._pin_for is not None,
            fallback_pageable=True,
            touch=self._touch,
            device=self._pin_for,
        )
        slabs.append(slab)
        parts, start = {}, 0
        for chunk in chunks:
            parts[chunk.index] = slab.tensor(dtype, start * dtype.itemsize, chunk.numel // per)
            start += chunk.numel // per
        return parts


def _close(slabs: list[Slab]) -> None:
    for slab in slabs:
        slab.close()
    slabs.clear()


def fill_zero(data: npt.NDArray[Any]) -> None:
    """Zero by torch's threads of the calling thread."""
    torch.from_numpy(data.view(np.uint8)).zero_()
