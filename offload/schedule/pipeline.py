"""What the jobs of the HOST placement share: the pipeline's rings and transport, and what is known of each tile.

Two threads work here, see `worker`: slots of weights and all issuing belong to the copier, the backend to the worker.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from offload.host_state import ChunkState, TileState
from offload.kernels.backend import Backend
from offload.layout import Piece, Tile
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.transfer.ring import Ring, Slot
from offload.transfer.transport import Copy, Ready, Transfer, Transport

__all__ = ["Arrival", "Launch", "Pipeline", "TilePlan", "part_of"]

Array = npt.NDArray[Any]


class Arrival(NamedTuple):
    """A gradient (or weight) on the device, flat in memory order, and the point on its stream where it is complete."""

    flat: torch.Tensor
    ready: Ready


@dataclass(frozen=True)
class Launch:
    """One kernel call of a tile: which rows take part, and where their gradients are.

    `fresh`: the gradient array is what has just arrived or was held; otherwise it is the accumulator itself.
    `adds`: the accumulator is added to it inside the kernel.
    """

    select: Array
    fresh: bool
    adds: bool


class TilePlan:
    """A tile with all that its jobs need and that stays from step to step.

    Args:
        chunk: where the tile's arrays are.
        records: of the chunk's parameters, by parameter index.
    """

    def __init__(self, chunk: ChunkState, tile: Tile, records: Mapping[int, ParamRecord]) -> None:
        self.chunk, self.tile = chunk, tile
        self.kind, self.numel = chunk.chunk.kind, tile.numel
        self.pieces = tile.pieces
        self.key = (chunk.chunk.index, tile.index)
        self.owners = [records[piece.param] for piece in self.pieces]
        everything = np.ones(len(chunk.chunk.spans), np.uint8)
        self.complete = Launch(everything, fresh=True, adds=False)
        self.complete_adding = Launch(everything, fresh=True, adds=True)
        self._records = records
        self.weights: list[torch.Tensor] = []
        self.aim()

    def aim(self) -> None:
        """Find the compute weights, which may have moved."""
        self.weights = [part_of(self._records[piece.param].weight(), piece) for piece in self.pieces]

    @property
    def state(self) -> TileState:
        """The tile's current arrays."""
        return self.chunk.tiles[self.tile.index]

    @property
    def shadow(self) -> tuple[Array, ...]:
        """Master and moments of the set that is not current."""
        return self.chunk.shadow(self.tile.index)

    @property
    def elements(self) -> slice:
        """The tile's elements in its chunk."""
        return slice(self.tile.start, self.tile.stop)


class Pipeline:
    """What the jobs share. Slots of weights and all issuing belong to the copier's thread, the backend to the worker's."""

    def __init__(
        self, transport: Transport, backend: Backend, to_host: Ring, to_device: Ring, clock: StageClock
    ) -> None:
        self.transport = transport
        self.backend = backend
        self.clock = clock
        self.use_rings(to_host, to_device)
        self._returning: deque[tuple[Transfer, Slot]] = deque()
        self._abandoned: list[Transfer] = []

    def use_rings(self, to_host: Ring, to_device: Ring) -> None:
        """Take slots from these; no job may be in flight."""
        self.to_host, self._to_device = to_host, to_device

    def take_out_slot(self) -> Slot | None:
        """A slot for new weights; waits for the oldest weights to have left where all are taken by such."""
        slot = self._to_device.try_acquire()
        if slot is None and self._returning:
            with self.clock.stage("wait_slot"):
                self._reap()
            slot = self._to_device.try_acquire()
        return slot

    def send(self, slot: Slot, copies: Sequence[Copy], after: Sequence[Ready]) -> None:
        """Start copying weights from `slot`; the slot comes back when they have arrived."""
        start_s = time.perf_counter()
        with self.clock.stage("issue", "issue H2D"):
            transfer = self.transport.issue_to_device(copies, after)
        self.clock.count("bytes_to_device", transfer.num_bytes)
        self.clock.follow("H2D", transfer, start_s)
        self._returning.append((transfer, slot))

    def finish_returns(self) -> None:
        """Until all weights have arrived."""
        while self._returning:
            with self.clock.stage("wait_slot"):
                self._reap()

    def abandon(self, transfer: Transfer | None) -> None:
        """Keep alive what a job that was dropped had in flight, until `forget_abandoned`."""
        if transfer is not None:
            self._abandoned.append(transfer)

    def forget_abandoned(self) -> None:
        """To be called when the transport has come to rest."""
        self._abandoned.clear()

    def _reap(self) -> None:
        transfer, slot = self._returning.popleft()
        self.transport.wait(transfer)
        self._to_device.release(slot)


def part_of(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of a flat parameter that a piece covers."""
    whole = piece.numel == flat.numel()
    return flat if whole else flat[piece.param_start : piece.param_start + piece.numel]
