"""State of STREAM chunks: FP32, in pinned host slabs, cut into the tiles in which it travels.

An FP32 compute weight is its own master: it is on the device anyway and is stepped there in place, so its chunk has
moments alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from offload.kernels.rule import Rule
from offload.layout import ALIGN, Chunk, Piece, Span, Tile
from offload.parameters import ParamRecord
from offload.transfer.pinned import Slab
from offload.transfer.slabs import SlabMaker, Wanted, close_all

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

    @property
    def chunk_index(self) -> int:
        """The chunk's index."""
        return self.chunk.chunk.index

    def state(self) -> dict[str, torch.Tensor]:
        """Flat views, the weight itself serving as the master where there is no other."""
        part = slice(self.span.start, self.span.start + self.span.numel)
        arrays = {name: array[part] for name, array in self.chunk.arrays.items()}
        return arrays if MASTER in arrays else {MASTER: self.record.weight(), **arrays}


class StreamState:
    """Slabs, chunks, tiles and places.

    Args:
        slabs: makes them, pinned for the device.
        tile_numel: most elements of a tile.
    """

    def __init__(self, rule: Rule, *, slabs: SlabMaker, tile_numel: int) -> None:
        self._names = tuple(rule.state_names)
        self._maker, self._tile_numel = slabs, tile_numel
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
        arrays = [_Array(MASTER, torch.float32, mastered)] if mastered else []
        arrays += [_Array(name, torch.float32, chunks) for name in self._names]
        norms = [
            _Array("squared sums", torch.float64, chunks, ALIGN),
            _Array("non-finite flags", torch.uint8, chunks, ALIGN),
        ]
        slabs = self._maker.make_all([each.wanted for each in (*arrays, *norms)])
        self._slabs += slabs
        parts = {each.name: each.cut(slab) for each, slab in zip((*arrays, *norms), slabs, strict=True)}
        sums, nonfinite = (parts.pop(each.name) for each in norms)
        for chunk in chunks:
            mine = {name: part[chunk.index] for name, part in parts.items() if chunk.index in part}
            self._cut(StreamChunk(chunk, mine, sums[chunk.index], nonfinite[chunk.index]), records)

    def tiles_of(self, param: int) -> list[StreamTile]:
        """The tiles that a parameter lies in, in order."""
        return [tile for tile, _ in self.places[param].parts]

    def aim(self, records: Iterable[ParamRecord]) -> None:
        """Find the compute weights of `records` again, which may have moved."""
        for record in records:
            for tile in self.tiles_of(record.index):
                tile.aim()

    def close(self) -> None:
        """Unpin and unmap everything; no copy may be running."""
        for owner in (self.records, self.chunks, self.tiles, self.places):
            owner.clear()
        close_all(self._slabs)

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


@dataclass(frozen=True)
class _Array:
    """One slab with an element for every `per` ones of `chunks`."""

    name: str
    dtype: torch.dtype
    chunks: Sequence[Chunk]
    per: int = 1

    @property
    def wanted(self) -> Wanted:
        total = sum(chunk.numel // self.per for chunk in self.chunks)
        return Wanted(max(total * self.dtype.itemsize, 1), f"streamed {self.name}", pin=True)

    def cut(self, slab: Slab) -> dict[int, torch.Tensor]:
        """Its parts by chunk index."""
        parts, start = {}, 0
        for chunk in self.chunks:
            numel = chunk.numel // self.per
            parts[chunk.index] = slab.tensor(self.dtype, start * self.dtype.itemsize, numel)
            start += numel
        return parts
