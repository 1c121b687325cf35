"""Gradients of STREAM chunks, on the device, from their arrival until all of their tiles are on their way.

A gradient lies there once, whatever the number of its tiles: a trip holds what its kernels read, and the last trip to be
made leaves nothing here. When a gradient came is known to each trip that reads it, since those before the last one may have
been computed on another stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from offload.schedule.device_gradients import DeviceGradients
from offload.schedule.stream_tiles import StreamTile
from offload.transfer.transport import Ready

__all__ = ["Gradient", "StreamGradients", "WaitingPiece"]

Gradient = tuple[torch.Tensor, torch.Tensor | None]
"""What a kernel reads: the last gradient, and the FP32 sum of those before it."""

WaitingPiece = tuple[int, Gradient]
"""A piece of a tile by its position, and its parameter's gradient."""


class StreamGradients:
    """Of the step under way, by parameter index.

    Args:
        tiles_of: the tiles that need a parameter's gradient.
        flush_denormals: as for the host kernels.
    """

    def __init__(self, tiles_of: Callable[[int], Iterable[StreamTile]], *, flush_denormals: bool) -> None:
        self._tiles_of = tiles_of
        self._kept = DeviceGradients(flush_denormals=flush_denormals)
        self._arrived: dict[int, Ready] = {}

    def accumulate(self, param: int, gradient: torch.Tensor) -> None:
        """See `DeviceGradients.accumulate`."""
        self._kept.accumulate(param, gradient)

    def hold(self, param: int, gradient: torch.Tensor) -> None:
        """See `DeviceGradients.hold`."""
        self._kept.hold(param, gradient)

    def note_arrival(self, param: int, now: Ready) -> None:
        """The gradient that is held came `now`; trips that read it begin after that."""
        self._arrived[param] = now

    def has(self, param: int) -> bool:
        """Whether there is something to be applied."""
        return self._kept.has(param)

    def in_tile(self, tile: StreamTile) -> list[WaitingPiece]:
        """The pieces of `tile` that have a gradient; it stays."""
        pieces = enumerate(tile.tile.pieces)
        return [(index, self._kept.take(p.param)) for index, p in pieces if self._kept.has(p.param)]

    def arrivals(self, tile: StreamTile, now: Ready) -> list[Ready]:
        """What a trip of `tile` begins after: `now`, and when the gradients of its pieces came, each once."""
        arrived = (self._arrived.get(piece.param, now) for piece in tile.tile.pieces)
        return list(dict.fromkeys([now, *arrived]))

    def let_go(self, tiles: Iterable[StreamTile], is_early: Callable[[StreamTile], bool]) -> None:
        """Trips of `tiles` were made, and have references of their own: drop ours to what no other tile waits for.

        Args:
            is_early: whether a trip of a tile was made in this step.
        """
        for param in {piece.param for tile in tiles for piece in tile.tile.pieces}:
            if all(is_early(tile) for tile in self._tiles_of(param)):
                self.forget(param)

    def forget(self, param: int) -> None:
        """Let go of a parameter's gradients."""
        self._kept.forget(param)
        self._arrived.pop(param, None)

    def clear(self) -> None:
        """Let go of all: the step is over, or dropped."""
        self._kept.clear()
        self._arrived = {}
