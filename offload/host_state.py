"""FP32 state in host memory: masters, moments, and the gradients that must outlive their tile.

One slab for each kind of array and each batch of chunks; chunks are slices of it, tiles are slices of chunks.
Views of tiles are made once, so that the worker touches no Python object more than it must per tile. State is
pageable: only the rings are pinned, which is what bounds pinned memory whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.kernels.blocks import make_blocks
from offload.kernels.rule import Rule
from offload.layout import ALIGN, Chunk, Tile
from offload.transfer.pinned import Slab, allocate

__all__ = ["ChunkState", "HostGradients", "HostState", "TileState", "numpy_dtype", "torch_dtype"]

Array = npt.NDArray[Any]
Touch = Callable[[Array], None]


def numpy_dtype(name: str) -> type[np.uint16] | type[np.float32]:
    """What kernels see: BF16 as its bit pattern."""
    return np.uint16 if name == "bf16" else np.float32


def torch_dtype(name: str) -> torch.dtype:
    """What copies see."""
    return torch.bfloat16 if name == "bf16" else torch.float32


@dataclass(frozen=True)
class TileState:
    """A tile's arrays, each of ``tile.numel`` elements (`sums` and `nonfinite`: one per `ALIGN` of them)."""

    tile: Tile
    master: Array
    moments: tuple[Array, ...]
    sums: Array
    nonfinite: Array
    blocks: Array


class ChunkState:
    """A chunk's arrays: `master` and `moments` FP32 ``[chunk.numel]``, squared sums per block of `ALIGN`."""

    def __init__(self, chunk: Chunk, master: torch.Tensor, moments: tuple[torch.Tensor, ...]) -> None:
        self.chunk = chunk
        self.master = master
        self.moments = moments
        self.sums: Array = np.zeros(chunk.numel // ALIGN, np.float64)
        self.nonfinite: Array = np.zeros(chunk.numel // ALIGN, np.uint8)
        self.tiles = [self._tile_state(tile) for tile in chunk.tiles]

    def _tile_state(self, tile: Tile) -> TileState:
        elements, blocks = slice(tile.start, tile.stop), slice(tile.start // ALIGN, tile.stop // ALIGN)
        return TileState(
            tile,
            self.master.numpy()[elements],
            tuple(moment.numpy()[elements] for moment in self.moments),
            self.sums[blocks],
            self.nonfinite[blocks],
            make_blocks([(p.tile_start, p.tile_start + p.numel, p.row) for p in tile.pieces]),
        )


class HostState:
    """Masters and moments of all chunks, zero-filled by `touch` (which decides on what NUMA node pages lie)."""

    def __init__(self, rule: Rule, touch: Touch) -> None:
        self.rule = rule
        self._touch = touch
        self._slabs: list[Slab] = []
        self.chunks: dict[int, ChunkState] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes mapped for state."""
        return sum(slab.num_bytes for slab in self._slabs)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the state of `chunks`. On an error nothing of it stays."""
        names = ("master", *self.rule.state_names)
        total = sum(chunk.numel for chunk in chunks)
        slabs: list[Slab] = []
        try:
            slabs.extend(_fp32_slab(total, name, self._touch) for name in names)
        except BaseException:
            _close(slabs)
            raise
        self._slabs += slabs
        for chunk, start in zip(chunks, _starts(chunks), strict=True):
            master, *moments = (slab.tensor(torch.float32, 4 * start, chunk.numel) for slab in slabs)
            self.chunks[chunk.index] = ChunkState(chunk, master, tuple(moments))

    def adopt(self, chunk: Chunk, master: torch.Tensor, moments: tuple[torch.Tensor, ...]) -> None:
        """Take in a chunk whose state, FP32 ``[chunk.numel]`` each, somebody else owns and releases."""
        self.chunks[chunk.index] = ChunkState(chunk, master, moments)

    def close(self) -> None:
        """Unmap everything; views that are still out keep their memory."""
        self.chunks.clear()
        _close(self._slabs)


class HostGradients:
    """Gradients kept until ``step()``: `held` in their own dtype, `accumulated` in FP32. Mapped on first use.

    Which elements hold something is the caller's to know: nothing here is zeroed between steps.
    """

    def __init__(self, touch: Touch) -> None:
        self._touch = touch
        self._held: dict[int, tuple[Slab, Array]] = {}
        self._accumulated: dict[int, tuple[Slab, Array]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes mapped for gradients."""
        return sum(slab.num_bytes for slab in self._slabs())

    def held(self, chunk: Chunk) -> Array:
        """The chunk's gradients as kernels see them, ``[chunk.numel]``."""
        entry = self._held.get(chunk.index)
        if entry is None:
            entry = self._held[chunk.index] = self._map_held(chunk)
        return entry[1]

    def accumulated(self, chunk: Chunk) -> Array:
        """The chunk's FP32 accumulator, ``[chunk.numel]``."""
        entry = self._accumulated.get(chunk.index)
        if entry is None:
            slab = _fp32_slab(chunk.numel, f"accumulator of {chunk.name}", self._touch)
            entry = self._accumulated[chunk.index] = (slab, slab.array(np.float32, 0, chunk.numel))
        return entry[1]

    def release_held(self, chunks: Iterable[Chunk]) -> None:
        """Unmap what `held` mapped for `chunks`."""
        for chunk in chunks:
            entry = self._held.pop(chunk.index, None)
            if entry is not None:
                entry[0].close()

    def close(self) -> None:
        """Unmap everything."""
        _close(self._slabs())
        self._held.clear()
        self._accumulated.clear()

    def _slabs(self) -> list[Slab]:
        held = [slab for slab, _ in self._held.values()]
        return held + [slab for slab, _ in self._accumulated.values()]

    def _map_held(self, chunk: Chunk) -> tuple[Slab, Array]:
        slab = allocate(
            max(chunk.numel * chunk.kind.grad_bytes, 1),
            name=f"gradients of {chunk.name}",
            pin=False,
            fallback_pageable=True,
            touch=self._touch,
        )
        return slab, slab.array(numpy_dtype(chunk.kind.grad), 0, chunk.numel)


def _fp32_slab(numel: int, name: str, touch: Touch) -> Slab:
    return allocate(max(4 * numel, 1), name=name, pin=False, fallback_pageable=True, touch=touch)


def _starts(chunks: Sequence[Chunk]) -> list[int]:
    starts, start = [], 0
    for chunk in chunks:
        starts.append(start)
        start += chunk.numel
    return starts


def _close(slabs: list[Slab]) -> None:
    for slab in slabs:
        slab.close()
    slabs.clear()
