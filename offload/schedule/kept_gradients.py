"""Gradients that wait on the host until ``step()``, held or summed: their way there, and how a tile's kernels find them.

Memory is `offload.host_state.HostGradients`; the books, written ahead of the jobs that fill it, are `step_books.KeptBooks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import numpy as np

from offload.schedule.host_chunks import HostChunks
from offload.schedule.host_jobs import AccumulatePiece, HoldPiece
from offload.schedule.host_kernels import HostKernels
from offload.schedule.pipeline import Array, Arrival, Launch, Pipeline, TilePlan
from offload.schedule.step_books import KeptBooks, TileBooks
from offload.schedule.worker import Worker

__all__ = ["KeptGradients"]


class KeptGradients:
    """Of the step under way.

    Args:
        chunks: where parameters lie, and the memory.
    """

    def __init__(self, pipe: Pipeline, worker: Worker, chunks: HostChunks, kernels: HostKernels) -> None:
        self._pipe, self._worker, self._chunks, self._kernels = pipe, worker, chunks, kernels
        self._books = KeptBooks()

    def accumulate(self, param: int, arrival: Arrival, *, speculative: bool) -> None:
        """Add a gradient to the parameter's sum.

        Args:
            speculative: the update that the sum is for may have to write a shadow.
        """
        kind = self._chunks.records[param].kind
        self._kernels.ensure(kind, fresh=True, adds=True)
        if speculative:
            self._kernels.ensure(kind, fresh=True, adds=True, new_state=True)
        first = self._books.add(param) == "first"
        for plan, piece in self._chunks.places[param].parts:
            self._worker.submit(
                AccumulatePiece(self._pipe, plan, self._chunks.gradients, piece, arrival, first=first)
            )

    def hold(self, param: int, arrival: Arrival, tiles: TileBooks) -> None:
        """Keep a gradient, but for tiles that were updated early: they have it already.

        One that is held already goes to the sum first.
        """
        fold = self._books.hold(param)
        if fold is not None:
            self._kernels.ensure(self._chunks.records[param].kind, fresh=True, adds=True)
        for plan, piece in self._chunks.places[param].parts:
            if not tiles.is_early(plan):
                self._worker.submit(
                    HoldPiece(self._pipe, plan, self._chunks.gradients, piece, arrival, fold=fold)
                )

    def note_held(self, params: Iterable[int]) -> None:
        """Gradients of `params` are held: speculative updates kept them, and are rolled back."""
        self._books.hold_all(params)

    def has(self, param: int) -> bool:
        """Whether something of the parameter waits."""
        return self._books.has(param)

    def forget(self) -> None:
        """The step is over, or dropped; memory is not touched."""
        self._books = KeptBooks()

    def launches(self, plan: TilePlan, *, from_device: bool, new_state: bool = False) -> list[Launch]:
        """One launch for each way in which gradients of this tile are to be had; one in all but odd cases.

        Args:
            from_device: the last ones come straight from there, instead of being held.
            new_state: the update writes a shadow.
        """
        if from_device and not self._books.has_sums:
            return [plan.complete]
        params = {piece.param for piece in plan.pieces}
        if from_device and self._books.are_summed(params):
            self._kernels.ensure(plan.kind, fresh=True, adds=True, new_state=new_state)
            return [plan.complete_adding]
        launches = []
        for fresh, adds, members in self._books.ways(params, arrived=from_device):
            self._kernels.ensure(plan.kind, fresh=fresh, adds=adds, new_state=new_state)
            launches.append(Launch(_select(plan, members), fresh, adds))
        return launches


def _select(plan: TilePlan, params: Set[int]) -> Array:
    """Of the chunk's rows those of `params`, as kernels take them."""
    select = np.zeros_like(plan.complete.select)
    select[[piece.row for piece in plan.pieces if piece.param in params]] = 1
    return select
