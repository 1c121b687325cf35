"""Chunks whose state lives in pinned host memory and is stepped on the device: placement STREAM.

Gradients stay on the device. At ``step()``, or inside backward, tiles of state travel through a few device buffers
(`conveyor`), where they are stepped by the kernel whose bits are the host's; compute weights are written in place. The
update is elementwise, so the buffers need not hold a layer, and their size does not depend on the model's.

The stepper decides which tiles travel, and when. Beside it:

==================  ===========================================================================================
`stream_tiles`      memory of state, tiles, and where each parameter lies among them
`stream_gradients`  gradients that wait for their tiles, and when they came
`stream_trips`      what is launched while a tile is on the device; `uploaded_rows` has its hyperparameters there
`conveyor`          the order of copies and work; `device_slots` has the buffers
`stream_thread`     where trips run, and what an error there means
`tile_forecast`     which tiles are let in before their gradients come
`stream_weights`    weights taken as masters, weights written anew
==================  ===========================================================================================

Books (`step_books`) are kept on the caller's thread. A trip is made there and takes its gradients along.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from offload.construction import MASTERS
from offload.errors import DeadlineError
from offload.kernels.rule import Rule
from offload.layout import Chunk
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule.conveyor import Conveyor, Trip
from offload.schedule.device_slots import Slots
from offload.schedule.step_books import TileBooks
from offload.schedule.stepper import BlockSums, Rows
from offload.schedule.stream_gradients import StreamGradients
from offload.schedule.stream_thread import StreamThread
from offload.schedule.stream_tiles import StreamState, StreamTile
from offload.schedule.stream_trips import StreamTrips
from offload.schedule.stream_weights import StreamWeights
from offload.schedule.tile_forecast import TileForecast
from offload.schedule.updater import Updater
from offload.schedule.worker import Worker
from offload.transfer.deadline import synchronize_device
from offload.transfer.slabs import SlabMaker
from offload.transfer.transport import Signal, Transport, have_passed

__all__ = ["StreamStepper"]


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
        issuer, alone: see `StreamThread`.
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
        self._trips_ahead, self._alone = trips_ahead, alone
        self._on_gpu = transport.device.type == "cuda"
        self._conveyor = Conveyor(transport, slots, clock, stream=stream)
        self._thread = StreamThread(
            worker,
            issuer,
            on_gpu=self._on_gpu,
            recover=self._conveyor.recover,
            alone=alone,
            in_groups=newest_first,
        )
        self._state = StreamState(updater.rule, slabs=slabs, tile_numel=tile_numel)
        self._weights = StreamWeights(self._state)
        self._gradients = StreamGradients(self._state.tiles_of, flush_denormals=flush_denormals)
        self._trips = StreamTrips(
            self._state,
            self._gradients,
            updater,
            fused_sums=fused_sums,
            note_change=self._thread.note_change,
        )
        self._forecast = TileForecast(self._state.tiles_of)
        self._forget_step()
        try:
            self._thread.start(transport, stream)
        except BaseException:
            transport.close()
            raise

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
            self._weights.begin(mine, masters)

    def state(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """See `Stepper.state`. An FP32 weight is its own master."""
        return self._state.places[record.index].state()

    def chunk_state(self, chunk: int) -> list[torch.Tensor]:
        """FP32 ``[chunk.numel]`` in host memory: the master, where there is one of its own, then the moments."""
        return list(self._state.chunks[chunk].arrays.values())

    def aim(self, records: Iterable[ParamRecord]) -> None:
        """Find the compute weights of `records` again, which may have moved."""
        self._state.aim(records)

    def block_sums(self, chunk: int) -> BlockSums:
        """See `Stepper.block_sums`."""
        state = self._state.chunks[chunk]
        return BlockSums(state.sums.numpy(), state.nonfinite.numpy())

    def load_weights(self, records: Sequence[ParamRecord], *, force: bool = False) -> set[int]:
        """See `Stepper.load_weights`."""
        self.finish()
        self.aim(records)
        return self._weights.load(records, force=force)

    def store_weights(self, records: Sequence[ParamRecord]) -> None:
        """See `Stepper.store_weights`."""
        self.finish()
        self.aim(records)
        self._weights.store(records)
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
        now = self._transport.record_ready()
        self._gradients.note_arrival(record.index, now)
        complete = [
            tile
            for tile in self._state.tiles_of(record.index)
            if (elements is None or tile.tile.start in elements)
            and self._books.is_complete_with_one_more(tile)
        ]
        if not complete:
            return
        trips = self._trips.to_update(complete, rows, now)
        self._gradients.let_go(complete, self._books.is_early)
        chunk = self._state.places[record.index].chunk_index
        if elements is not None:
            self._gradients.forget(record.index)
            self._thread.hurry(chunk)
        self._thread.run_later(
            partial(self._run_early, trips), chunk=chunk, ready=partial(have_passed, [now])
        )

    def expect(self, chunks: Collection[int], parts: Mapping[int, range]) -> None:
        """At a backward's first update: let state of `chunks` come in, in the order of the last backward.

        Args:
            parts: see `TileForecast.tiles`.
        """
        tiles = self._forecast.tiles(chunks, parts)
        if tiles and not self._holds:
            self._thread.run_later(lambda: self._conveyor.expect(tiles), changes=False)

    def note_fire(self, param: int) -> None:
        """The last gradient of a parameter has come, whoever steps it: what the order of tiles is known from."""
        self._forecast.note(param)

    @property
    def stepped_early(self) -> list[str]:
        """See `Stepper.stepped_early`."""
        return [self._state.chunks[index].chunk.name for index in sorted(self._books.early_chunks)]

    # The step ---------------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """See `Stepper.measure`. No state moves."""
        now = self._transport.record_ready()
        trips = self._trips.to_measure(self._waiting(), now)
        self._thread.run(lambda: self._conveyor.run(trips))

    def commit(self) -> list[int]:
        """See `Stepper.commit`: nothing was done early."""
        return []

    def roll_back(self, *, restore: bool) -> None:
        """See `Stepper.roll_back`: nothing was done early."""

    def step_rest(self, rows: Rows) -> None:
        """See `Stepper.step_rest`."""
        tiles = self._waiting()
        trips = self._trips.to_update(tiles, rows, self._transport.record_ready())
        self._books.num_late += len(tiles)
        if not self._alone:
            self._thread.run_later(lambda: self._conveyor.run(trips))
            return
        with self._clock.stage("issue"):
            self._thread.run(lambda: self._conveyor.run(trips))

    def finish(self) -> None:
        """See `Stepper.finish`.

        Raises:
            DeadlineError: the device does not come to rest; the optimizer cannot go on.
        """
        if self._on_gpu and self._thread.is_callers:
            self._rest()  # first, because the conveyor's own waits have no deadline then
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
        return self._thread.ask_later(self._conveyor.mark, chunk)

    def settle(self) -> None:
        """Block until all tiles have left; unlike `finish`, without waiting for the device's other work."""
        with self._clock.stage("wait_state"):
            self._thread.run(self._conveyor.finish)

    def settle_later(self) -> Future[float]:
        """The same without blocking; the result is when it was done, by ``time.perf_counter``.

        For steppers with a thread that computes; errors come at `settle`.
        """

        def settle() -> float:
            self._thread.guard(self._conveyor.finish)
            return time.perf_counter()

        return self._thread.ask_later(settle)

    def reap_later(self) -> None:
        """Let go of what all trips so far hold as soon as they have ended.

        For a step that departs: its landing, which waits for them, is a hook of the next backward, and till then their
        gradients would lie beside all that forward saves.
        """
        self._thread.run_later(lambda: self._conveyor.reap(0), changes=False)

    @property
    def waited_s(self) -> float:
        """See `StreamThread.waited_s`."""
        return self._thread.waited_s

    def end_step(self, keep_held: Collection[int]) -> None:
        """See `Stepper.end_step`."""
        self._clock.count("early_tiles", self._books.num_early)
        self._clock.count("late_tiles", self._books.num_late)
        self._forecast.end_step()
        self._forget_step()

    def close(self) -> None:
        """See `Stepper.close`. Memory is unmapped last: no copy may be running then."""
        self._worker.close()
        self._thread.close()
        self._transport.close()
        self._conveyor.close()
        self._forget_step()
        self._state.close()

    # Books ------------------------------------------------------------------------------------------------------

    def _forget_step(self) -> None:
        self._gradients.clear()
        self._books = TileBooks()
        self._forecast.forget_step()
        self._trips.end_step()
        self._thread.end_step()
        self._holds = False

    def _waiting(self) -> list[StreamTile]:
        """Tiles with a gradient to be applied that were not updated early."""
        return self._books.waiting(self._state.tiles, self._gradients.has)

    def _run_early(self, trips: Sequence[Trip]) -> None:
        self._conveyor.run(trips)
        self._conveyor.reap(self._trips_ahead)
