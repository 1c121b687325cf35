"""The jobs of chunks whose state lives on the host: one tile or one piece each. See `worker` for their three stages.

A gradient takes one of three ways: straight into its tile's update (`StepTile` with arrivals), into the held
gradients of its chunk (`HoldPiece`), or into the FP32 accumulator (`AccumulatePiece`). What was held or accumulated
is applied by `StepTile` without arrivals. A speculative update goes the first way and the second one at a time: its
gradients are kept, and it writes the chunk's shadow. New weights leave through the second ring.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from offload.host_state import HostGradients, numpy_dtype, torch_dtype
from offload.kernels.backend import TileArrays
from offload.layout import Chunk, Piece
from offload.schedule.pipeline import Arrival, Launch, Pipeline, TilePlan, part_of
from offload.transfer.ring import Slot
from offload.transfer.transport import Copy, Ready, Transfer

__all__ = ["AccumulatePiece", "CarryTile", "HoldPiece", "LoadTile", "MeasureTile", "StepTile", "StoreTile"]

Array = npt.NDArray[Any]


class Target(NamedTuple):
    """Where copies go, as kernels and as copies see it."""

    array: Array
    tensor: torch.Tensor


def _target(gradients: HostGradients, chunk: Chunk, elements: slice) -> Target | None:
    """A part of the chunk's held gradients, where copies may end in them."""
    if not gradients.takes_copies(chunk):
        return None
    held = gradients.held(chunk)
    return Target(held.array[elements], held.tensor[elements])


class _SlotJob:
    """A job with gradients (or weights) coming in, a slot of weights going out, or both.

    Args:
        dtype, numel: of what comes in.
        sources: arrival, the piece of it to be copied, and the element where it goes.
        sends: whether there will be weights.
        into: where that is, if not in a slot of the ring.
    """

    def __init__(
        self,
        pipe: Pipeline,
        dtype: str,
        numel: int,
        sources: Sequence[tuple[Arrival, Piece, int]] = (),
        *,
        sends: bool = False,
        into: Target | None = None,
    ) -> None:
        self._pipe, self._dtype, self._numel = pipe, dtype, numel
        self._sources, self._sends, self._into = sources, sends, into
        self._in: Slot | None = None
        self._out: Slot | None = None
        self._transfer: Transfer | None = None

    def issue(self) -> bool:
        """Take slots and start the copies; gradients stay alive until these have ended."""
        if self._sends and self._out is None:
            self._out = self._pipe.take_out_slot()
            if self._out is None:
                return False
        if self._sources:
            if self._into is None and not self._take_slot():
                return False
            self._copy_in()
        return True

    def deliver(self) -> None:
        """Let go of the gradients: here, because on the worker that would keep the next kernel waiting."""
        if self._transfer is not None:
            self._transfer.finish()
            self._transfer = None

    @property
    def num_bytes(self) -> int:
        """Of device memory that the job keeps alive until it is issued."""
        width = np.dtype(numpy_dtype(self._dtype)).itemsize
        return width * sum(piece.numel for _, piece, _ in self._sources)

    def drop(self, error: BaseException) -> None:
        """Let go of all but what is crossing."""
        self._sources = ()
        self._pipe.abandon(self._transfer)
        self._transfer = None

    def _take_slot(self) -> bool:
        self._in = slot = self._pipe.to_host.try_acquire()
        if slot is None:
            return False
        self._into = Target(
            slot.array(numpy_dtype(self._dtype), self._numel),
            slot.tensor(torch_dtype(self._dtype), self._numel),
        )
        return True

    def _copy_in(self) -> None:
        assert self._into is not None
        start_s = time.perf_counter()
        with self._pipe.clock.stage("issue", "issue D2H"):
            target = self._into.tensor
            copies = [
                Copy(target[start : start + piece.numel], part_of(arrival.flat, piece))
                for arrival, piece, start in self._sources
            ]
            self._transfer = self._pipe.transport.issue_to_host(
                copies, [arrival.ready for arrival, *_ in self._sources]
            )
        self._pipe.clock.count("bytes_to_host", self._transfer.num_bytes)
        self._pipe.clock.follow("D2H", self._transfer, start_s)
        self._sources = ()

    def _wait(self) -> Array:
        """Until the copies have ended; what came, as kernels see it."""
        assert self._into is not None
        assert self._transfer is not None
        with self._pipe.clock.stage("wait_gradient"):
            self._pipe.transport.wait(self._transfer, release=False)
        return self._into.array

    def _release(self) -> None:
        """The incoming slot has been read."""
        if self._in is not None:
            self._pipe.to_host.release(self._in)

    def _weights(self, plan: TilePlan) -> Array:
        """The outgoing slot as kernels see it."""
        assert self._out is not None
        return self._out.array(numpy_dtype(plan.kind.weight), plan.numel)

    def _send(self, plan: TilePlan, wanted: Sequence[bool], after: Sequence[Ready]) -> None:
        """Start the way of the wanted pieces to the compute weights."""
        assert self._out is not None
        slot = self._out.tensor(torch_dtype(plan.kind.weight), plan.numel)
        copies = [
            Copy(weight, slot[piece.tile_start : piece.tile_start + piece.numel])
            for weight, piece, want in zip(plan.weights, plan.pieces, wanted, strict=True)
            if want
        ]
        self._pipe.send(self._out, copies, after)


class StepTile(_SlotJob):
    """Update one tile and send its new weights.

    Args:
        arrivals: in the order of pieces, where the gradients come straight from the device; None: they are held or
            accumulated.
        launches: the kernel calls; their rows are disjoint.
        rows: hyperparameters, one row per parameter of the chunk.
        after: points that the device must have passed before weights may be written.
        with_sums: whether the update also takes the squared sums.
        speculative: keep the gradients, and write the new state into the chunk's shadow.
    """

    def __init__(
        self,
        pipe: Pipeline,
        plan: TilePlan,
        gradients: HostGradients,
        *,
        arrivals: Sequence[Arrival] | None,
        launches: Sequence[Launch],
        rows: Array,
        after: Sequence[Ready] = (),
        with_sums: bool = True,
        speculative: bool = False,
    ) -> None:
        sources = (
            ()
            if arrivals is None
            else [(a, p, p.tile_start) for a, p in zip(arrivals, plan.pieces, strict=True)]
        )
        into = _target(gradients, plan.chunk.chunk, plan.elements) if speculative else None
        self._keeps = speculative and into is None
        super().__init__(pipe, plan.kind.grad, plan.numel, sources, sends=True, into=into)
        self._plan, self._gradients, self._speculative = plan, gradients, speculative
        self._from_device = arrivals is not None
        self._launches, self._rows, self._with_sums, self._after = launches, rows, with_sums, after

    def compute(self) -> None:
        """Wait for the gradients and run the kernels."""
        fresh = self._wait() if self._from_device else None
        if self._keeps and fresh is not None:
            self._gradients.held(self._plan.chunk.chunk).array[self._plan.elements] = fresh
        weight = self._weights(self._plan)
        new_state = self._plan.shadow if self._speculative else None
        with self._pipe.clock.stage("kernel"):
            for launch in self._launches:
                arrays = _tile_arrays(
                    self._plan, self._gradients, launch, fresh, weight, new_state, self._with_sums
                )
                self._pipe.backend.update(arrays, self._rows, launch.select)
        self._release()

    def deliver(self) -> None:
        """Start the way back, then let go of the gradients."""
        pieces = self._plan.pieces
        updated = [any(launch.select[piece.row] for launch in self._launches) for piece in pieces]
        self._send(self._plan, updated, self._after)
        super().deliver()


class MeasureTile:
    """Squared sums of what is held and accumulated in one tile; changes nothing."""

    def __init__(
        self, pipe: Pipeline, plan: TilePlan, gradients: HostGradients, launches: Sequence[Launch]
    ) -> None:
        self._pipe, self._plan, self._gradients, self._launches = pipe, plan, gradients, launches

    def issue(self) -> bool:
        """Nothing to copy."""
        return True

    def compute(self) -> None:
        """Run the norm kernel."""
        state = self._plan.state
        with self._pipe.clock.stage("norm"):
            for launch in self._launches:
                arrays = _tile_arrays(self._plan, self._gradients, launch)
                self._pipe.backend.square_sums(
                    arrays.grad, arrays.acc, state.sums, state.nonfinite, state.blocks, launch.select
                )

    def deliver(self) -> None:
        """Nothing to send."""

    def drop(self, error: BaseException) -> None:
        """Nothing is held."""


class CarryTile:
    """Current state of one tile copied into its shadow: the rest of a chunk whose shadow is about to become current."""

    def __init__(self, pipe: Pipeline, plan: TilePlan) -> None:
        self._pipe, self._plan = pipe, plan

    def issue(self) -> bool:
        """Nothing to copy from the device."""
        return True

    def compute(self) -> None:
        """Copy."""
        state = self._plan.state
        for source, target in zip((state.master, *state.moments), self._plan.shadow, strict=True):
            self._pipe.backend.expand(source, target)

    def deliver(self) -> None:
        """Nothing to send."""

    def drop(self, error: BaseException) -> None:
        """Nothing is held."""


class _PieceJob(_SlotJob):
    """A job for the part of one parameter's gradient that lies in one tile. `keeps`: it ends in the held gradients."""

    def __init__(
        self,
        pipe: Pipeline,
        plan: TilePlan,
        gradients: HostGradients,
        piece: Piece,
        arrival: Arrival,
        *,
        keeps: bool = False,
    ) -> None:
        self._chunk, self._gradients = plan.chunk.chunk, gradients
        start = plan.tile.start + piece.tile_start
        self._range = slice(start, start + piece.numel)
        into = _target(gradients, self._chunk, self._range) if keeps else None
        self._kept = into is not None
        super().__init__(pipe, plan.kind.grad, piece.numel, [(arrival, piece, 0)], into=into)

    def _accumulate(self, gradient: Array, *, first: bool) -> None:
        with self._pipe.clock.stage("accumulate"):
            self._pipe.backend.accumulate(
                gradient, self._gradients.accumulated(self._chunk)[self._range], first
            )


class AccumulatePiece(_PieceJob):
    """Add a gradient to the accumulator, or start it where `first`."""

    def __init__(self, *args: Any, first: bool) -> None:
        super().__init__(*args)
        self._first = first

    def compute(self) -> None:
        """Wait for the gradient and add it."""
        self._accumulate(self._wait(), first=self._first)
        self._release()


class HoldPiece(_PieceJob):
    """Keep a gradient; one that is held already goes to the accumulator first (`fold`: "first" starts it)."""

    def __init__(
        self,
        pipe: Pipeline,
        plan: TilePlan,
        gradients: HostGradients,
        piece: Piece,
        arrival: Arrival,
        *,
        fold: str | None,
    ) -> None:
        # With a fold through the ring: the copy is issued ahead, and must not overwrite what is still to be added.
        super().__init__(pipe, plan, gradients, piece, arrival, keeps=fold is None)
        self._fold = fold

    def compute(self) -> None:
        """Wait for the gradient and keep it."""
        fresh = self._wait()
        if not self._kept:
            held = self._gradients.held(self._chunk).array[self._range]
            if self._fold is not None:
                self._accumulate(held, first=self._fold == "first")
            held[:] = fresh
        self._release()


class LoadTile(_SlotJob):
    """Masters of one tile taken from the compute weights.

    Where `changed` is given, masters that round to the weight are left as they are, and the parameters whose
    masters did not are added to it; with `check_only` those keep their masters all the same.
    """

    def __init__(
        self,
        pipe: Pipeline,
        plan: TilePlan,
        arrivals: Mapping[int, Arrival],
        *,
        changed: set[int] | None = None,
        check_only: bool = False,
    ) -> None:
        self._pieces = [piece for piece in plan.pieces if piece.param in arrivals]
        sources = [(arrivals[p.param], p, p.tile_start) for p in self._pieces]
        super().__init__(pipe, plan.kind.weight, plan.numel, sources)
        self._tile, self._changed, self._check_only = plan.state, changed, check_only

    def compute(self) -> None:
        """Wait for the weights and take them."""
        if not self._pieces:
            return
        weight = self._wait()
        for piece in self._pieces:
            part = slice(piece.tile_start, piece.tile_start + piece.numel)
            if self._changed is None or not self._agrees(weight[part], self._tile.master[part], piece.param):
                self._pipe.backend.expand(weight[part], self._tile.master[part])
        self._release()

    def _agrees(self, weight: Array, master: Array, param: int) -> bool:
        assert self._changed is not None
        rounded = np.empty_like(weight)
        self._pipe.backend.round_weights(master, rounded)
        if np.array_equal(rounded.view(np.uint8), weight.view(np.uint8)):
            return True
        self._changed.add(param)
        return self._check_only


class StoreTile(_SlotJob):
    """Compute weights of one tile written anew from the masters, for the pieces of `params`."""

    def __init__(
        self, pipe: Pipeline, plan: TilePlan, params: Collection[int], after: Sequence[Ready]
    ) -> None:
        super().__init__(pipe, plan.kind.weight, plan.numel, sends=True)
        self._plan, self._after = plan, after
        self._wanted = [piece.param in params for piece in plan.pieces]

    def compute(self) -> None:
        """Round."""
        self._pipe.backend.round_weights(self._plan.state.master, self._weights(self._plan))

    def deliver(self) -> None:
        """Start the way to the device."""
        self._send(self._plan, self._wanted, self._after)


def _tile_arrays(
    plan: TilePlan,
    gradients: HostGradients,
    launch: Launch,
    fresh: Array | None = None,
    weight: Array | None = None,
    new_state: tuple[Array, ...] | None = None,
    with_sums: bool = True,
) -> TileArrays:
    chunk, state = plan.chunk.chunk, plan.state
    accumulated = gradients.accumulated(chunk)[plan.elements] if launch.adds or not launch.fresh else None
    if launch.fresh:
        gradient = gradients.held(chunk).array[plan.elements] if fresh is None else fresh
    else:
        assert accumulated is not None
        gradient, accumulated = accumulated, None
    return TileArrays(
        grad=gradient,
        acc=accumulated,
        master=state.master,
        moments=state.moments,
        weight=weight,
        sums=state.sums if with_sums else None,
        nonfinite=state.nonfinite if with_sums else None,
        blocks=state.blocks,
        new_state=new_state,
    )
