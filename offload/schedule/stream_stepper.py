"""Chunks whose state lives in pinned host memory and is stepped on the device: placement STREAM.

Gradients stay on the device. At ``step()`` tiles of state travel through a few device buffers (`conveyor`), where they
are stepped by the kernel whose bits are the host's; compute weights are written in place. The update is elementwise, so
the buffers need not hold a layer, and their size does not depend on the model's.

On a GPU everything is enqueued by the calling thread, or by a thread of its own where chunks are stepped inside
backward: a trip costs 0.2 ms of Python, which a gradient hook must not pay. Without a GPU, the device buffers are plain
memory, the host kernels compute, and the same code runs on the worker's thread, the only one that may run them.

Inside backward the tiles come in before their gradients do, in the order of the step before (`expect`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch

from offload.construction import MASTERS
from offload.errors import DeadlineError, StateError, WorkerError
from offload.kernels.device import TileTensors
from offload.kernels.rule import Rule
from offload.layout import ALIGN, Chunk, Piece
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule.backlog import always
from offload.schedule.conveyor import Conveyor, PieceView, Slots, SlotView, Trip
from offload.schedule.device_gradients import DeviceGradients
from offload.schedule.step_books import TileBooks
from offload.schedule.stepper import BlockSums, Rows
from offload.schedule.stream_tiles import Place, StreamState, StreamTile
from offload.schedule.tile_job import Gate, TileJob
from offload.schedule.updater import Updater
from offload.schedule.weights import check_given_master, load_weight, store_weight
from offload.schedule.worker import Call, Worker
from offload.transfer.deadline import synchronize_device
from offload.transfer.slabs import SlabMaker
from offload.transfer.transport import Ready, Signal, Transport, have_passed

__all__ = ["BUFFER_BYTES", "NUM_SLOTS", "StreamStepper", "stream_tile_numel"]

RUNNING_JOBS = 2
"""Jobs, of the tiles that one gradient completes, that the computing thread may have before it: one that it runs, one
next. All others wait in the queue."""

logger = logging.getLogger(__name__)

NUM_SLOTS = 4
"""Device buffers of chunked-stream: one tile coming in, one worked on, one leaving, and one to spare, so that a copy
engine never waits for a kernel."""

BUFFER_BYTES = 192 * 2**20
"""Of device memory that these buffers may take together."""

Gradient = tuple[torch.Tensor, torch.Tensor | None]
"""What a kernel reads: the last gradient, and the FP32 sum of those before it."""


def stream_tile_numel(tile_numel: int, num_arrays: int) -> int:
    """Elements of the tiles in which state of `num_arrays` FP32 arrays travels, where `tile_numel` is the most."""
    fits = BUFFER_BYTES // (NUM_SLOTS * 4 * max(num_arrays, 1)) // ALIGN * ALIGN
    return min(tile_numel, fits)


class StreamStepper:
    """Implements `Stepper` for placement STREAM.

    Args:
        transport: between host and device; closed with the stepper.
        slabs: makes memory for state.
        slots: the device buffers; how many there are, and the transport, make the mode.
        updater: computes on the device; started by the caller.
        stream: for the updates on a GPU; None: they run on the caller's current stream.
        tile_numel: most elements of a tile.
        trips_ahead: early updates that may be under way on the device; those beyond them wait with the issuing thread.
        fused_sums: see `Stepper`.
        issuer: a worker of this stepper alone, closed with it, whose thread enqueues on a GPU; None: the caller does.
        alone: False where other steppers update other chunks in the same step, so that no failure leaves all as it was.
        newest_first: with an `issuer`, a chunk that is stepped in part goes before those that still wait for it.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        slabs: SlabMaker,
        slots: Slots,
        updater: Updater,
        worker: Worker,
        stream: torch.cuda.Stream | None,
        tile_numel: int,
        trips_ahead: int,
        flush_denormals: bool,
        fused_sums: bool,
        clock: StageClock,
        issuer: Worker | None = None,
        alone: bool = True,
        newest_first: bool = False,
    ) -> None:
        self._transport, self._updater, self._worker, self._clock = transport, updater, worker, clock
        self._fused_sums, self._trips_ahead, self._alone = fused_sums, trips_ahead, alone
        self._newest_first = newest_first
        self._on_gpu = transport.device.type == "cuda"
        self._issuer = issuer if self._on_gpu else None
        self._runner = self._issuer if self._on_gpu else worker
        self._gate = Gate(RUNNING_JOBS)
        self._uploaded: tuple[Rows, dict[int, Any]] | None = None
        self._fired: dict[int, None] = {}
        self._order: list[int] = []
        self._expected: list[StreamTile] = []
        self._holds = False
        self._conveyor = Conveyor(transport, slots, clock, stream=stream)
        self._gradients = DeviceGradients(flush_denormals=flush_denormals)
        self._state = StreamState(updater.rule, slabs=slabs, tile_numel=tile_numel)
        self._changed = False
        self._reset_books()
        try:
            if self._issuer is not None:
                self._issuer.call(partial(self._attach, stream))
                self._issuer.call(
                    transport.attach_thread, on_copier=True
                )  # it asks whether gradients are there
        except BaseException:
            transport.close()
            raise

    def _attach(self, stream: torch.cuda.Stream | None) -> None:
        """On the thread that enqueues and does nothing else."""
        self._transport.attach_thread()
        if stream is not None:
            torch.cuda.set_stream(stream)

    @property
    def rule(self) -> Rule:
        """See `Stepper.rule`."""
        return self._updater.rule

    # State ------------------------------------------------------------------------------------------------------

    def add_chunks(
        self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """See `Stepper.add_chunks`."""
        if self._on_gpu or self._state.tiles:  # weights may still be computed, tiles may be on their way
            self.finish()
        self._state.add(chunks, records)
        for tile in self._state.tiles:
            self._conveyor.fit(tile.tile.numel, len(tile.state))
            for piece in tile.tile.pieces:
                self._updater.blocks(piece.numel)
        mine = [records[span.param] for chunk in chunks for span in chunk.spans]
        with self._clock.construction.stage(MASTERS):
            for record in mine:
                given = masters.get(record.index)
                if given is None:
                    load_weight(self._master(record), record.weight(), force=True)
                else:
                    self._take_given_master(record, given)

    def state(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """See `Stepper.state`. An FP32 weight is its own master."""
        return self._state.places[record.index].state()

    def chunk_state(self, chunk: int) -> list[torch.Tensor]:
        """FP32 ``[chunk.numel]`` in host memory: the master, where there is one of its own, then the moments."""
        return list(self._state.chunks[chunk].arrays.values())

    def aim(self, records: Iterable[ParamRecord]) -> None:
        """Find the compute weights of `records` again, which may have moved."""
        for record in records:
            for tile, _ in self._state.places[record.index].parts:
                tile.aim()

    def block_sums(self, chunk: int) -> BlockSums:
        """See `Stepper.block_sums`."""
        state = self._state.chunks[chunk]
        return BlockSums(state.sums.numpy(), state.nonfinite.numpy())

    def load_weights(self, records: Sequence[ParamRecord], *, force: bool = False) -> set[int]:
        """See `Stepper.load_weights`."""
        self.finish()
        self.aim(records)
        return {r.index for r in records if load_weight(self._master(r), r.weight(), force=force)}

    def store_weights(self, records: Sequence[ParamRecord]) -> None:
        """See `Stepper.store_weights`."""
        self.finish()
        self.aim(records)
        for record in records:
            store_weight(record.weight(), self._master(record))
            record.note_write()
        self.finish()

    @property
    def host_bytes(self) -> int:
        """See `Stepper.host_bytes`."""
        return self._state.num_bytes

    # Gradients --------------------------------------------------------------------------------------------------

    def begin_step(self, *, speculative: bool) -> None:
        """See `Stepper.begin_step`. There is no second set of state here: in speculative steps all is held."""
        self._holds = speculative

    def accumulate(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.accumulate`."""
        self._gradients.accumulate(record.index, gradient)

    def hold(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.hold`."""
        self._gradients.hold(record.index, gradient)
        self.note_fire(record.index)

    def step_early(
        self, record: ParamRecord, gradient: torch.Tensor, rows: Rows, elements: range | None = None
    ) -> None:
        """See `Stepper.step_early`.

        Args:
            elements: of the chunk, which then has this one parameter: tiles that begin elsewhere are another stepper's.
        """
        self.hold(record, gradient)
        if self._holds:
            return
        now = self._arrived[record.index] = self._transport.record_ready()
        complete = [
            tile
            for tile, _ in self._state.places[record.index].parts
            if (elements is None or tile.tile.start in elements)
            and self._books.is_complete_with_one_more(tile)
        ]
        if not complete:
            return
        trips = self._step_trips(complete, rows, now)
        self._let_go(complete)
        chunk = _index(self._state.places[record.index])
        if elements is not None:
            self._forget(record.index)
            self._urgent.add(chunk)
        self._do_later(
            partial(self._run_early, trips), group=self._group(chunk), ready=partial(have_passed, [now])
        )

    def _group(self, chunk: int | None) -> int | None:
        """Of the issuing thread's jobs: two, of which the second goes first. It has what the next forward needs at once."""
        if chunk is None or self._issuer is None or not self._newest_first:
            return None
        return int(chunk in self._urgent)

    def expect(self, chunks: Collection[int], parts: Mapping[int, range]) -> None:
        """At a backward's first update: let state of `chunks` come in, in the order of the last backward.

        Args:
            parts: elements of further chunks, of which only the tiles that begin there will be worked on.
        """
        tiles = [
            tile
            for tile in self._expected
            if tile.key[0] in chunks or tile.tile.start in parts.get(tile.key[0], ())
        ]
        if tiles and not self._holds:
            self._do_later(lambda: self._conveyor.expect(tiles), changes=False)

    def note_fire(self, param: int) -> None:
        """The last gradient of a parameter has come, whoever steps it: what the order of tiles is known from."""
        self._fired.pop(param, None)
        self._fired[param] = None

    @property
    def stepped_early(self) -> list[str]:
        """See `Stepper.stepped_early`."""
        return [self._state.chunks[index].chunk.name for index in sorted(self._books.early_chunks)]

    # The step ---------------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """See `Stepper.measure`. No state moves."""
        after = [self._transport.record_ready()]
        trips = [
            Trip(tile, partial(self._measure, tile, self._waiting_in(tile)), False, True, after)
            for tile in self._waiting_tiles()
        ]
        self._do(lambda: self._conveyor.run(trips))

    def commit(self) -> list[int]:
        """See `Stepper.commit`: nothing was done early."""
        return []

    def roll_back(self, *, restore: bool) -> None:
        """See `Stepper.roll_back`: nothing was done early."""

    def step_rest(self, rows: Rows) -> None:
        """See `Stepper.step_rest`."""
        tiles = self._waiting_tiles()
        trips = self._step_trips(tiles, rows, self._transport.record_ready())
        self._books.num_late += len(tiles)
        if not self._alone:
            self._do_later(lambda: self._conveyor.run(trips))
            return
        with self._clock.stage("issue"):
            self._do(lambda: self._conveyor.run(trips))

    def finish(self) -> None:
        """See `Stepper.finish`.

        Raises:
            DeadlineError: the device does not come to rest; the optimizer cannot go on.
        """
        if (
            self._on_gpu and self._runner is None
        ):  # first, because the conveyor's own waits have no deadline then
            self._rest()
        self.settle()
        if self._on_gpu:
            self._rest()

    def _rest(self) -> None:
        with self._clock.stage("wait_state"):
            try:
                synchronize_device(self._transport.device, self._worker.timeout_s)
            except DeadlineError as error:
                self._worker.fail(error)
                raise

    def mark(self, chunk: int | None = None) -> Future[Signal]:
        """When the weights of all updates of a chunk (None: of all chunks) submitted so far are written.

        For steppers with a thread that computes.
        """
        assert self._runner is not None
        call: Call[Signal] = Call(self._conveyor.mark)
        self._runner.submit(call, group=self._group(chunk))
        return call.future

    def settle_later(self) -> Future[float]:
        """The same without blocking; the result is when it was done, by ``time.perf_counter``.

        For steppers with a thread that computes; errors come at `settle`.
        """

        def settle() -> float:
            self._guard(self._conveyor.finish)
            return time.perf_counter()

        assert self._runner is not None
        call = Call(settle)
        self._runner.submit(call)
        return call.future

    def reap_later(self) -> None:
        """Let go of what all trips so far hold as soon as they have ended.

        For a step that departs: its landing, which waits for them, is a hook of the next backward, and till then their
        gradients would lie beside all that forward saves.
        """
        self._do_later(lambda: self._conveyor.reap(0), changes=False)

    @property
    def waited_s(self) -> float:
        """Seconds that backward was held up by this stepper since the beginning, where it has a thread of its own."""
        return 0.0 if self._issuer is None else self._issuer.waited_s

    def settle(self) -> None:
        """Block until all tiles have left; unlike `finish`, without waiting for the device's other work."""
        with self._clock.stage("wait_state"):
            self._do(self._conveyor.finish)

    def end_step(self, keep_held: Collection[int]) -> None:
        """See `Stepper.end_step`."""
        self._clock.count("early_tiles", self._books.num_early)
        self._clock.count("late_tiles", self._books.num_late)
        if self._fired and list(self._fired) != self._order:
            self._order = list(self._fired)
            self._expected = self._completed_by(self._order)
        self._reset_books()

    def close(self) -> None:
        """See `Stepper.close`. Memory is unmapped last: no copy may be running then."""
        self._worker.close()
        if self._issuer is not None:
            self._issuer.close()
        self._transport.close()
        self._conveyor.close()
        self._reset_books()
        self._state.close()

    # Books ------------------------------------------------------------------------------------------------------

    def _reset_books(self) -> None:
        self._gradients.clear()
        self._arrived: dict[int, Ready] = {}
        self._books = TileBooks()
        self._urgent: set[int] = set()
        self._changed = False
        self._uploaded = None
        self._fired = {}
        self._holds = False

    def _completed_by(self, fired: Iterable[int]) -> list[StreamTile]:
        """Tiles in the order in which these gradients complete them."""
        books = TileBooks()
        tiles = (tile for param in fired for tile, _ in self._state.places[param].parts)
        return [tile for tile in tiles if books.is_complete_with_one_more(tile)]

    def _let_go(self, tiles: Iterable[StreamTile]) -> None:
        """Drop our references to gradients all of whose tiles are on their way now; their trips have their own."""
        for param in {piece.param for tile in tiles for piece in tile.tile.pieces}:
            if all(self._books.is_early(tile) for tile, _ in self._state.places[param].parts):
                self._forget(param)

    def _forget(self, param: int) -> None:
        self._gradients.forget(param)
        self._arrived.pop(param, None)

    def _waiting_tiles(self) -> list[StreamTile]:
        """Tiles with a gradient to be applied that were not updated early."""
        return self._books.waiting(self._state.tiles, self._gradients.has)

    def _waiting_in(self, tile: StreamTile) -> list[tuple[int, Gradient]]:
        """Positions of the pieces that have a gradient, and it."""
        pieces = enumerate(tile.tile.pieces)
        return [(index, self._gradients.take(p.param)) for index, p in pieces if self._gradients.has(p.param)]

    # Trips ------------------------------------------------------------------------------------------------------

    def _step_trips(self, tiles: Sequence[StreamTile], rows: Rows, now: Ready) -> list[Trip]:
        """Trips that update `tiles` with the gradients that are there `now`; the weights count as written from here on."""
        waiting = {tile.key: self._waiting_in(tile) for tile in tiles}
        params = sorted({tile.tile.pieces[index].param for tile in tiles for index, _ in waiting[tile.key]})
        if not params:
            return []
        trips = []
        for tile in tiles:
            arrived = (self._arrived.get(piece.param, now) for piece in tile.tile.pieces)
            work = partial(self._update, tile, waiting[tile.key], rows)
            trips.append(Trip(tile, work, True, self._fused_sums, list(dict.fromkeys([now, *arrived]))))
        for param in params:
            self._state.records[param].note_write()
        return trips

    def _update(
        self, tile: StreamTile, waiting: Sequence[tuple[int, Gradient]], rows: Rows, view: SlotView
    ) -> None:
        uploaded = self._upload(rows, [tile.tile.pieces[index].param for index, _ in waiting])
        self._changed = True
        for index, gradient in waiting:
            tensors = self._tensors(tile, index, view.pieces[index], gradient, with_sums=self._fused_sums)
            self._updater.update(tensors, uploaded[tile.tile.pieces[index].param])

    def _upload(self, rows: Rows, params: Sequence[int]) -> Mapping[int, Any]:
        """All rows at once, when a step's first tile needs them, on the computing thread and in line with its work."""
        if self._uploaded is None or self._uploaded[0] is not rows or params[0] not in self._uploaded[1]:
            places = {param: place for param, place in self._state.places.items() if _index(place) in rows}
            table = np.stack([rows[_index(place)][place.span.row] for place in places.values()])
            self._uploaded = rows, dict(zip(places, self._updater.upload(table), strict=True))
        return self._uploaded[1]

    def _measure(self, tile: StreamTile, waiting: Sequence[tuple[int, Gradient]], view: SlotView) -> None:
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

    def _run_early(self, trips: Sequence[Trip]) -> None:
        self._conveyor.run(trips)
        self._conveyor.reap(self._trips_ahead)

    # Threads and errors -----------------------------------------------------------------------------------------

    def _do(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread that computes.

        Raises:
            StateError: it failed, and nothing had been changed since the last step.
            WorkerError: it failed otherwise: some tiles hold the new step, others the old one.
        """
        try:
            if self._runner is None:
                self._guard(function)
            else:
                self._runner.call(lambda: self._guard(function))
        except WorkerError as error:
            self._give_up(error)
            raise
        except Exception:
            self._worker.raise_error()
            raise

    def _do_later(
        self,
        function: Callable[[], None],
        *,
        changes: bool = True,
        group: int | None = None,
        ready: Callable[[], bool] = always,
    ) -> None:
        """The same from a gradient hook, in which nothing may be raised: the next public call does.

        Args:
            group, ready: as `Worker.submit` takes them.
        """
        self._changed |= changes
        if self._runner is not None:
            job = TileJob(lambda: self._guard(function), self._gate, self._give_up)
            self._runner.submit(job, group=group, ready=ready)
            return
        try:
            self._guard(function)
        except Exception:
            logger.debug("kept for the next public call", exc_info=True)

    def _give_up(self, error: BaseException) -> None:
        """What ended the thread that issues ends the whole optimizer."""
        if self._runner is not self._worker:
            cause = error.__cause__ if isinstance(error, WorkerError) else None
            self._worker.fail(error if isinstance(error, DeadlineError) else cause or error)

    def _guard(self, function: Callable[[], None]) -> None:
        if self._worker.failed:
            return
        try:
            function()
        except BaseException as error:
            if self._changed or not self._alone or not isinstance(error, Exception):
                self._worker.fail(error)
                raise
            self._conveyor.recover()
            raise StateError(
                f"the step did not begin ({type(error).__name__}: {error}); nothing was changed and the "
                "gradients are kept: call step() again, or zero_grad() to drop them"
            ) from error

    # Weights ----------------------------------------------------------------------------------------------------

    def _master(self, record: ParamRecord) -> torch.Tensor:
        return self.state(record)["master"]

    def _take_given_master(self, record: ParamRecord, given: torch.Tensor) -> None:
        if record.kind.weight == "fp32":
            flat = torch.empty_like(record.weight(), device="cpu")
            record.local(flat).copy_(given)
            check_given_master(record, flat)
        else:
            record.local(self._master(record)).copy_(given)
            check_given_master(record, self._master(record))


def _index(place: Place) -> int:
    return place.chunk.chunk.index


def _part(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    whole = piece.numel == flat.numel()
    return flat if whole else flat[piece.param_start : piece.param_start + piece.numel]
