"""Device buffers through which streamed tiles travel: how many there are, how large, and what a tile finds in one.

There are as many as may be under way at a time, each for one tile of any chunk, and they stay: device memory does not grow
with the model. Only where all state is to be on the device at once does each tile have one of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from offload.layout import ALIGN
from offload.schedule.stream_tiles import StreamTile
from offload.transfer.transport import Copy, Transport

__all__ = [
    "BUFFER_BYTES",
    "NUM_SLOTS",
    "FixedSlots",
    "FreshSlots",
    "PieceView",
    "Slot",
    "SlotView",
    "Slots",
    "stream_tile_numel",
]

NUM_SLOTS = 4
"""Device buffers of chunked-stream: one tile coming in, one worked on, one leaving, and one to spare, so that a copy
engine never waits for a kernel."""

BUFFER_BYTES = 192 * 2**20
"""Of device memory that these buffers may take together."""


def stream_tile_numel(tile_numel: int, num_arrays: int) -> int:
    """Elements of the tiles in which state of `num_arrays` FP32 arrays travels, where `tile_numel` is the most."""
    fits = BUFFER_BYTES // (NUM_SLOTS * 4 * max(num_arrays, 1)) // ALIGN * ALIGN
    return min(tile_numel, fits)


class PieceView(NamedTuple):
    """A parameter's part of a tile on the device: FP32 state; sums and flags per block of `ALIGN` elements."""

    state: tuple[torch.Tensor, ...]
    sums: torch.Tensor
    nonfinite: torch.Tensor


@dataclass(frozen=True)
class SlotView:
    """A slot as one tile sees it: the copies to be made, and its pieces in the order of the tile's."""

    copies_in: tuple[Copy, ...]
    copies_out: tuple[Copy, ...]
    sums_out: tuple[Copy, ...]
    pieces: tuple[PieceView, ...]


class Slot:
    """Device buffers for one tile, of which the first elements are used."""

    def __init__(self, transport: Transport, numel: int, num_arrays: int) -> None:
        device = transport.device
        self.state = [torch.empty(numel, dtype=torch.float32, device=device) for _ in range(num_arrays)]
        self.sums = torch.zeros(numel // ALIGN, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(numel // ALIGN, dtype=torch.uint8, device=device)
        #: Once this has happened nothing touches the buffers any more: not even an earlier owner of the memory.
        self.free = transport.record_ready()
        self._views: dict[tuple[int, int], SlotView] = {}

    def view(self, tile: StreamTile) -> SlotView:
        """Views for `tile`; made once, since tiles come into the same slot step after step."""
        view = self._views.get(tile.key)
        if view is None:
            view = self._views[tile.key] = self._make_view(tile)
        return view

    def _make_view(self, tile: StreamTile) -> SlotView:
        numel = tile.tile.numel
        state = [array[:numel] for array in self.state[: len(tile.state)]]
        sums, nonfinite = self.sums[: numel // ALIGN], self.nonfinite[: numel // ALIGN]
        pieces = []
        for piece in tile.tile.pieces:
            stop = piece.tile_start + piece.numel
            elements, blocks = (
                slice(piece.tile_start, stop),
                slice(piece.tile_start // ALIGN, -(-stop // ALIGN)),
            )
            pieces.append(
                PieceView(tuple(array[elements] for array in state), sums[blocks], nonfinite[blocks])
            )
        return SlotView(
            tuple(Copy(device, host) for device, host in zip(state, tile.state, strict=True)),
            tuple(Copy(host, device) for device, host in zip(state, tile.state, strict=True)),
            (Copy(tile.sums, sums), Copy(tile.nonfinite, nonfinite)),
            tuple(pieces),
        )


class Slots(Protocol):
    """Where tiles find their buffers."""

    @property
    def ahead(self) -> int | None:
        """Tiles that may be inside before work begins on the first; None: all of them."""

    def fit(self, numel: int, num_arrays: int) -> None:
        """Make room for tiles of up to `numel` elements and `num_arrays` arrays. Never between take and rewind."""

    @property
    def num_idle(self) -> int:
        """Slots that `take` could still hand out before one is given back."""

    def take(self, tile: StreamTile) -> Slot:
        """A slot; ``Slot.free`` says when the device is done with what it held."""

    def give(self, slot: Slot) -> None:
        """Its tile's way is decided: all that will happen in the slot has been enqueued."""

    def rewind(self) -> None:
        """Everything has ended: begin again with the first one."""

    def release(self) -> None:
        """All copies are at rest, some of them failed: nobody waits for those any more."""

    def clear(self) -> None:
        """Free the buffers."""


class FixedSlots:
    """At most `number` slots, allocated by `fit`, used first back, first out: device memory does not grow with the model."""

    def __init__(self, transport: Transport, number: int) -> None:
        self.ahead = max(number - 1, 1)
        self._transport, self._number = transport, number
        self._size = (0, 0)
        self._slots: list[Slot] = []
        self._idle: deque[Slot] = deque()

    def fit(self, numel: int, num_arrays: int) -> None:
        """See `Slots.fit`."""
        size = max(numel, self._size[0]), max(num_arrays, self._size[1])
        if size != self._size:
            self._size = size
            self.clear()  # before the new ones are allocated
            self._slots += [Slot(self._transport, *size) for _ in range(self._number)]
            self.rewind()

    @property
    def num_idle(self) -> int:
        """See `Slots.num_idle`."""
        return len(self._idle)

    def take(self, tile: StreamTile) -> Slot:
        """See `Slots.take`."""
        return self._idle.popleft()

    def give(self, slot: Slot) -> None:
        """See `Slots.give`."""
        self._idle.append(slot)

    def rewind(self) -> None:
        """See `Slots.rewind`."""
        self._idle = deque(self._slots)

    def release(self) -> None:
        """See `Slots.release`."""
        for slot in self._slots:
            slot.free = self._transport.record_ready()

    def clear(self) -> None:
        """See `Slots.clear`."""
        self._slots.clear()
        self._idle.clear()


class FreshSlots:
    """A slot for every tile, allocated on its way in and freed when all have left: all state at once."""

    ahead = None
    num_idle = 1

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def fit(self, numel: int, num_arrays: int) -> None:
        """Nothing is kept between steps."""

    def take(self, tile: StreamTile) -> Slot:
        """See `Slots.take`."""
        return Slot(self._transport, tile.tile.numel, len(tile.state))

    def give(self, slot: Slot) -> None:
        """It goes with its tile."""

    def rewind(self) -> None:
        """Nothing to begin again."""

    def release(self) -> None:
        """They go with their tiles."""

    def clear(self) -> None:
        """They go with their tiles."""
