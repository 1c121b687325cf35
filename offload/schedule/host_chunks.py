"""Chunks whose state lies in host memory, as the host's jobs see them: memory, tiles, and each parameter's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from offload.host_state import ChunkState, HostGradients, HostState
from offload.kernels.rule import Rule
from offload.layout import Chunk, Piece, Span
from offload.parameters import ParamRecord
from offload.schedule.pipeline import TilePlan
from offload.schedule.reduced_state import counters_of, stored_parts
from offload.schedule.stepper import BlockSums
from offload.transfer.slabs import SlabMaker

__all__ = ["HostChunks", "Place"]


@dataclass(eq=False)
class Place:
    """A parameter's chunk, its span there, and the tiles and pieces that cover it."""

    chunk: ChunkState
    span: Span
    parts: list[tuple[TilePlan, Piece]] = field(default_factory=list)


class HostChunks:
    """Chunks, tiles and places, and the memory of state and gradients.

    Args:
        slabs: makes memory.
        shadow_bytes: memory for a second set of state; chunks get one as long as it lasts.
        pin_gradients: gradients are mapped and pinned ahead.
    """

    def __init__(self, rule: Rule, slabs: SlabMaker, *, shadow_bytes: int, pin_gradients: bool) -> None:
        self._rule, self._shadow_bytes, self._pin_gradients = rule, shadow_bytes, pin_gradients
        self._state = HostState(rule, slabs)
        self.gradients = HostGradients(slabs)
        self.records: dict[int, ParamRecord] = {}
        self.tiles: list[TilePlan] = []
        self.places: dict[int, Place] = {}

    @property
    def states(self) -> Mapping[int, ChunkState]:
        """Arrays of all chunks by index."""
        return self._state.chunks

    @property
    def num_bytes(self) -> int:
        """Bytes mapped for state and gradients; not those of chunks that were adopted."""
        return self._state.num_bytes + self.gradients.num_bytes

    # Coming and going -------------------------------------------------------------------------------------------

    def add(self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord]) -> None:
        """Allocate `chunks`, all zero, and find their tiles."""
        self._allocate(chunks, records)
        for chunk in chunks:
            self._place(self.states[chunk.index], records)

    def adopt(
        self,
        chunks: Sequence[Chunk],
        records: Mapping[int, ParamRecord],
        state: Mapping[int, Sequence[torch.Tensor]],
        sums: Mapping[int, BlockSums],
    ) -> None:
        """Take in chunks whose memory is somebody else's; arguments as in `HostStepper.adopt_chunks`."""
        for chunk in chunks:
            master, *moments = state[chunk.index]
            self._state.adopt(chunk, master, tuple(moments), sums[chunk.index])
            self._place(self.states[chunk.index], records)

    def close(self) -> None:
        """Unmap everything; no job and no copy may be at work on it."""
        for owner in (self.records, self.places, self.tiles):
            owner.clear()
        self.gradients.close()
        self._state.close()

    def _allocate(self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord]) -> None:
        shadowed, left = [], self._shadow_bytes
        for chunk in chunks:
            num_bytes = self._state.bytes_of(chunk)
            if num_bytes <= left:
                left -= num_bytes
                shadowed.append(chunk)
        counters = counters_of(records) if self._rule.is_reduced else None
        self._state.add(chunks, counters, shadowed=shadowed)
        self._shadow_bytes = left
        if self._pin_gradients:
            self.gradients.reserve(chunks)

    def _place(self, state: ChunkState, records: Mapping[int, ParamRecord]) -> None:
        for span in state.chunk.spans:
            self.records[span.param] = records[span.param]
            self.places[span.param] = Place(state, span)
        for tile in state.tiles:
            plan = TilePlan(state, tile.tile, self.records)
            self.tiles.append(plan)
            for piece in plan.pieces:
                self.places[piece.param].parts.append((plan, piece))

    # Looking up -------------------------------------------------------------------------------------------------

    def tiles_of(self, records: Sequence[ParamRecord]) -> list[TilePlan]:
        """Tiles that have something of `records`, in order."""
        wanted = {record.index for record in records}
        return [plan for plan in self.tiles if any(piece.param in wanted for piece in plan.pieces)]

    def state(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """See `Stepper.state`; without moments where these are reduced."""
        place = self.places[record.index]
        part = slice(place.span.start, place.span.start + place.span.numel)
        views = {"master": place.chunk.master[part]}
        if not self._rule.is_reduced:
            moments = zip(self._rule.state_names, place.chunk.moments, strict=True)
            views |= {name: moment[part] for name, moment in moments}
        return views

    def stored_moment(self, record: ParamRecord, name: str) -> tuple[np.ndarray, ...]:
        """A parameter's moment as it lies in memory, see `stored_parts`."""
        place = self.places[record.index]
        return stored_parts(place.chunk, place.span, self._rule.state_names.index(name), self._rule)
