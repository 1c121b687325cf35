"""What happens to a tile while it is on the device: one kernel launch for each piece that has a gradient.

A trip is made where its gradients are known, on the thread that calls, and holds them; it runs later, on the thread that
computes, with the device buffer that it has got by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from offload.kernels.device import TileTensors
from offload.layout import Piece
from offload.schedule.conveyor import Trip
from offload.schedule.device_slots import PieceView, SlotView
from offload.schedule.stepper import Rows
from offload.schedule.stream_gradients import Gradient, StreamGradients, WaitingPiece
from offload.schedule.stream_tiles import StreamState, StreamTile
from offload.schedule.updater import Updater
from offload.schedule.uploaded_rows import UploadedRows
from offload.transfer.transport import Ready

__all__ = ["StreamTrips"]


class StreamTrips:
    """Makes trips.

    Args:
        updater: launches the kernels.
        fused_sums: see `offload.schedule.stepper.Stepper`.
        note_change: called before the first kernel of a trip that changes state.
    """

    def __init__(
        self,
        state: StreamState,
        gradients: StreamGradients,
        updater: Updater,
        *,
        fused_sums: bool,
        note_change: Callable[[], None],
    ) -> None:
        self._state, self._gradients, self._updater = state, gradients, updater
        self._fused_sums, self._note_change = fused_sums, note_change
        self._rows = UploadedRows(updater, state.places)

    def to_update(self, tiles: Sequence[StreamTile], rows: Rows, now: Ready) -> list[Trip]:
        """Trips that update `tiles` with the gradients that are there `now`; the weights count as written from here on."""
        waiting = {tile.key: self._gradients.in_tile(tile) for tile in tiles}
        params = sorted({tile.tile.pieces[index].param for tile in tiles for index, _ in waiting[tile.key]})
        if not params:
            return []
        trips = []
        for tile in tiles:
            work = partial(self._update, tile, waiting[tile.key], rows)
            trips.append(Trip(tile, work, True, self._fused_sums, self._gradients.arrivals(tile, now)))
        for param in params:
            self._state.records[param].note_write()
        return trips

    def to_measure(self, tiles: Sequence[StreamTile], now: Ready) -> list[Trip]:
        """Trips that take the squared sums of the gradients that are there `now`; no state moves."""
        after = [now]
        return [
            Trip(tile, partial(self._measure, tile, self._gradients.in_tile(tile)), False, True, after)
            for tile in tiles
        ]

    def end_step(self) -> None:
        """What was uploaded for the step is not for the next one."""
        self._rows.forget()

    # On the thread that computes --------------------------------------------------------------------------------

    def _update(self, tile: StreamTile, waiting: Sequence[WaitingPiece], rows: Rows, view: SlotView) -> None:
        uploaded = self._rows.of([tile.tile.pieces[index].param for index, _ in waiting], rows)
        self._note_change()
        for index, gradient in waiting:
            tensors = self._tensors(tile, index, view.pieces[index], gradient, with_sums=self._fused_sums)
            self._updater.update(tensors, uploaded[tile.tile.pieces[index].param])

    def _measure(self, tile: StreamTile, waiting: Sequence[WaitingPiece], view: SlotView) -> None:
        for index, gradient in waiting:
            self._updater.measure(self._tensors(tile, index, view.pieces[index], gradient, with_sums=True))

    def _tensors(
        self, tile: StreamTile, index: int, view: PieceView, gradient: Gradient, *, with_sums: bool
    ) -> TileTensors:
        piece, weight = tile.tile.pieces[index], tile.weights[index]
        last, total = gradient
        master, *moments = view.state if tile.owns_master else (weight, *view.state)
        return TileTensors(
            grad=_part(last, piece),
            acc=None if total is None else _part(total, piece),
            master=master,
            moments=tuple(moments),
            weight=weight if tile.owns_master else None,
            sums=view.sums if with_sums else None,
            nonfinite=view.nonfinite if with_sums else None,
            blocks=self._updater.blocks(piece.numel),
        )


def _part(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    whole = piece.numel == flat.numel()
    return flat if whole else flat[piece.param_start : piece.param_start + piece.numel]
