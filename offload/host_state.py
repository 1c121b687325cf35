"""State in host memory: FP32 masters, moments, and the gradients that must outlive their tile.

Moments are FP32 too, unless the rule keeps them in less (`offload.kernels.rule.Rule.stored`).

One slab for each kind of array and each batch of chunks; chunks are slices of it, tiles are slices of chunks.
Views of tiles are made once, so that the worker touches no Python object more than it must per tile. State is
pageable: what is pinned is the rings, and where every step keeps its gradients until a verdict, a slab for these.

A chunk may have a *shadow*: a second set of the same arrays, into which a speculative step writes. Committing such a
step is exchanging the two (`ChunkState.flip`), rolling it back is not doing so; nothing is copied either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from offload.kernels.blocks import make_blocks
from offload.kernels.rounding import with_counters
from offload.kernels.rule import Rule, StoredArray
from offload.layout import ALIGN, Chunk, Tile
from offload.transfer.pinned import Slab
from offload.transfer.slabs import SlabMaker, Wanted, close_all

__all__ = [
    "ChunkState",
    "Counters",
    "Held",
    "HostGradients",
    "HostState",
    "TileState",
    "numpy_dtype",
    "torch_dtype",
]

Array = npt.NDArray[Any]
Counters = Mapping[int, tuple[int, int]]
"""By parameter index, the key of its random bits and the index of its first element in the whole parameter."""


TORCH_DTYPES = {np.float32: torch.float32, np.uint16: torch.uint16, np.uint8: torch.uint8}


def numpy_dtype(name: str) -> type[np.uint16] | type[np.float32]:
    """What kernels see: BF16 as its bit pattern."""
    return np.uint16 if name == "bf16" else np.float32


def torch_dtype(name: str) -> torch.dtype:
    """What copies see."""
    return torch.bfloat16 if name == "bf16" else torch.float32


@dataclass(frozen=True)
class TileState:
    """A tile's arrays, each of ``tile.numel`` elements (`sums`, `nonfinite`, scales: one per `ALIGN` of them)."""

    tile: Tile
    master: Array
    moments: tuple[Array, ...]
    sums: Array
    nonfinite: Array
    blocks: Array


class _Side:
    """One set of a chunk's arrays, and the same cut into tiles."""

    def __init__(
        self,
        chunk: Chunk,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        sums: Array,
        nonfinite: Array,
        blocks: Sequence[Array],
    ) -> None:
        self.master, self.moments = master, moments
        self.tiles: list[TileState] = []
        for tile, tile_blocks in zip(chunk.tiles, blocks, strict=True):
            elements, norms = slice(tile.start, tile.stop), slice(tile.start // ALIGN, tile.stop // ALIGN)
            parts = tuple(
                moment.numpy()[elements if moment.numel() == chunk.numel else norms] for moment in moments
            )
            self.tiles.append(
                TileState(tile, master.numpy()[elements], parts, sums[norms], nonfinite[norms], tile_blocks)
            )


class ChunkState:
    """A chunk's arrays: `master` FP32 ``[chunk.numel]``, `moments` as the rule stores them, sums per block of `ALIGN`.

    With a shadow there are two sets, of which one is current; sums belong to both. `counters`: where moments are rounded
    by chance. `sums`: float64 sums and uint8 flags that are somebody else's too; else they are made here.
    """

    def __init__(
        self,
        chunk: Chunk,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        counters: Counters | None = None,
        sums: tuple[Array, Array] | None = None,
    ) -> None:
        self.chunk = chunk
        blocks = chunk.numel // ALIGN
        self.sums, self.nonfinite = sums or (np.zeros(blocks, np.float64), np.zeros(blocks, np.uint8))
        self._blocks = [
            make_blocks([(p.tile_start, p.tile_start + p.numel, p.row) for p in tile.pieces])
            for tile in chunk.tiles
        ]
        if counters is not None:
            self._blocks = [
                with_counters(blocks, _origins(tile, counters))
                for blocks, tile in zip(self._blocks, chunk.tiles, strict=True)
            ]
        self._current = self._side(master, moments)
        self._shadow: _Side | None = None

    @property
    def master(self) -> torch.Tensor:
        """The current masters."""
        return self._current.master

    @property
    def moments(self) -> tuple[torch.Tensor, ...]:
        """The current moments."""
        return self._current.moments

    @property
    def tiles(self) -> list[TileState]:
        """The current arrays, by tile."""
        return self._current.tiles

    @property
    def has_shadow(self) -> bool:
        """Whether a step may be taken without touching the current arrays."""
        return self._shadow is not None

    def add_shadow(self, master: torch.Tensor, moments: tuple[torch.Tensor, ...]) -> None:
        """Give the chunk a second set of arrays."""
        self._shadow = self._side(master, moments)

    def shadow(self, tile: int) -> tuple[Array, ...]:
        """The tile's master and moments of the set that is not current."""
        assert self._shadow is not None
        state = self._shadow.tiles[tile]
        return (state.master, *state.moments)

    def flip(self) -> None:
        """What was the shadow is current from now on. No job may be at work on the chunk."""
        assert self._shadow is not None
        self._current, self._shadow = self._shadow, self._current

    def _side(self, master: torch.Tensor, moments: tuple[torch.Tensor, ...]) -> _Side:
        return _Side(self.chunk, master, moments, self.sums, self.nonfinite, self._blocks)


class HostState:
    """Masters and moments of all chunks, all zero at first."""

    def __init__(self, rule: Rule, slabs: SlabMaker) -> None:
        self.rule = rule
        self._maker = slabs
        self._slabs: list[Slab] = []
        self.chunks: dict[int, ChunkState] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes mapped for state."""
        return sum(slab.num_bytes for slab in self._slabs)

    def add(
        self, chunks: Sequence[Chunk], counters: Counters | None = None, *, shadowed: Sequence[Chunk] = ()
    ) -> None:
        """Allocate the state of `chunks`, and a second set of arrays for `shadowed`. On an error nothing stays."""
        slabs = self._maker.make_all([*self._wanted(chunks, ""), *self._wanted(shadowed, "shadow of ")])
        self._slabs += slabs
        number = len(self._arrays)
        for chunk, (master, *moments) in zip(chunks, self._cut(chunks, slabs[:number]), strict=True):
            self.chunks[chunk.index] = ChunkState(chunk, master, tuple(moments), counters)
        for chunk, (master, *moments) in zip(shadowed, self._cut(shadowed, slabs[number:]), strict=True):
            self.chunks[chunk.index].add_shadow(master, tuple(moments))

    def bytes_of(self, chunk: Chunk) -> int:
        """Of one set of the chunk's arrays."""
        return sum(array.num_bytes(chunk.numel) for array in self._arrays)

    def _wanted(self, chunks: Sequence[Chunk], prefix: str) -> list[Wanted]:
        """A slab for each kind of array of all `chunks`; none for no chunks."""
        total = sum(chunk.numel for chunk in chunks)
        return [
            Wanted(max(array.num_bytes(total), 1), prefix + array.name) for array in self._arrays if chunks
        ]

    def _cut(self, chunks: Sequence[Chunk], slabs: Sequence[Slab]) -> list[list[torch.Tensor]]:
        """For each chunk its master and moments."""
        return [
            [
                slab.tensor(TORCH_DTYPES[array.dtype], array.num_bytes(start), chunk.numel // array.per)
                for slab, array in zip(slabs, self._arrays, strict=True)
            ]
            for chunk, start in zip(chunks, _starts(chunks), strict=True)
        ]

    @property
    def _arrays(self) -> tuple[StoredArray, ...]:
        return (StoredArray("master", np.float32), *self.rule.stored)

    def adopt(
        self,
        chunk: Chunk,
        master: torch.Tensor,
        moments: tuple[torch.Tensor, ...],
        sums: tuple[Array, Array],
    ) -> None:
        """Take in a chunk whose state, FP32 ``[chunk.numel]`` each, and sums somebody else owns and releases."""
        self.chunks[chunk.index] = ChunkState(chunk, master, moments, sums=sums)

    def close(self) -> None:
        """Unmap everything; views that are still out keep their memory."""
        self.chunks.clear()
        close_all(self._slabs)


class Held(NamedTuple):
    """A chunk's gradients as kernels and as copies see them, ``[chunk.numel]``. `direct`: copies may end here."""

    array: Array
    tensor: torch.Tensor
    direct: bool


class HostGradients:
    """Gradients kept until ``step()``: `held` in their own dtype, `accumulated` in FP32. Mapped on first use.

    Where each step holds its gradients, `reserve` maps and pins their slab ahead, and they are copied straight into it;
    otherwise they come through the ring. Which elements hold something is the caller's to know: nothing here is zeroed
    between steps.
    """

    def __init__(self, slabs: SlabMaker) -> None:
        self._maker = slabs
        self._reserved: list[Slab] = []
        self._held: dict[int, tuple[Slab | None, Held]] = {}
        self._accumulated: dict[int, tuple[Slab, Array]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes mapped for gradients."""
        return sum(slab.num_bytes for slab in self._slabs())

    def reserve(self, chunks: Sequence[Chunk]) -> None:
        """Map the gradients of `chunks` for good, pinned where a device copies into them."""
        starts, total = [], 0
        for chunk in chunks:
            starts.append(total)
            total += chunk.numel * chunk.kind.grad_bytes  # a multiple of ALIGN elements: all stay aligned
        slab = self._maker.make(max(total, 1), "gradients", pin=True)
        self._reserved.append(slab)
        direct = slab.pinned or self._maker.device is None
        for chunk, start in zip(chunks, starts, strict=True):
            self._held[chunk.index] = (None, _held_in(slab, chunk, start, direct=direct))

    def held(self, chunk: Chunk) -> Held:
        """The chunk's gradients."""
        entry = self._held.get(chunk.index)
        if entry is None:
            entry = self._held[chunk.index] = self._map_held(chunk)
        return entry[1]

    def takes_copies(self, chunk: Chunk) -> bool:
        """Whether `held` is where copies from the device may end."""
        entry = self._held.get(chunk.index)
        return entry is not None and entry[1].direct

    def accumulated(self, chunk: Chunk) -> Array:
        """The chunk's FP32 accumulator, ``[chunk.numel]``."""
        entry = self._accumulated.get(chunk.index)
        if entry is None:
            slab = self._maker.make(max(4 * chunk.numel, 1), f"accumulator of {chunk.name}")
            entry = self._accumulated[chunk.index] = (slab, slab.array(np.float32, 0, chunk.numel))
        return entry[1]

    def release_held(self, chunks: Iterable[Chunk]) -> None:
        """Unmap what `held` mapped for `chunks`; what was reserved stays."""
        for chunk in chunks:
            slab, _ = self._held.get(chunk.index, (None, None))
            if slab is not None:
                del self._held[chunk.index]
                slab.close()

    def close(self) -> None:
        """Unmap everything."""
        close_all(self._slabs())
        self._reserved.clear()
        self._held.clear()
        self._accumulated.clear()

    def _slabs(self) -> list[Slab]:
        held = [slab for slab, _ in self._held.values() if slab is not None]
        return self._reserved + held + [slab for slab, _ in self._accumulated.values()]

    def _map_held(self, chunk: Chunk) -> tuple[Slab, Held]:
        num_bytes = max(chunk.numel * chunk.kind.grad_bytes, 1)
        slab = self._maker.make(num_bytes, f"gradients of {chunk.name}")
        return slab, _held_in(slab, chunk, 0, direct=False)


def _held_in(slab: Slab, chunk: Chunk, start: int, *, direct: bool) -> Held:
    grad = chunk.kind.grad
    return Held(
        slab.array(numpy_dtype(grad), start, chunk.numel),
        slab.tensor(torch_dtype(grad), start, chunk.numel),
        direct,
    )


def _origins(tile: Tile, counters: Counters) -> dict[int, tuple[int, int]]:
    """By row, as `with_counters` takes them."""
    return {
        piece.row: (key, first + piece.param_start - piece.tile_start)
        for piece in tile.pieces
        for key, first in (counters[piece.param],)
    }


def _starts(chunks: Sequence[Chunk]) -> list[int]:
    starts, start = [], 0
    for chunk in chunks:
        starts.append(start)
        start += chunk.numel
    return starts
