"""Chunks whose state lives in host memory and is stepped there: placement HOST.

Hooks and ``step()`` run on the caller's thread and only keep books (`step_books`: which gradients are held, which tiles
are complete); whatever touches memory is a job of the worker, which runs jobs in order. So the books may be read as the
state of memory at the moment when the job being built will run.

The stepper decides which jobs a call means, and in which order. Beside it:

================  =============================================================================================
`host_chunks`     memory of state and gradients, tiles, and where each parameter lies among them
`kept_gradients`  gradients that wait on the host, and how a tile's kernels find them
`host_kernels`    the backend's start, and kernels compiled ahead of the jobs that need them
`host_weights`    weights taken as masters, weights written anew, and when all weights have arrived
`host_rings`      memory of the two rings
================  =============================================================================================

Note [Speculation]. In a speculative step early updates write the new state into their chunk's shadow and keep their
gradients; new weights are sent as always. When the verdict is to commit, what the chunk's other tiles hold is carried
over and the two sets of arrays change places. When it is to roll back, nothing has to be undone in the state: tiles
count as not updated, their gradients as held, and `step_rest` updates them with the clip coefficient; or, where the
step is skipped, weights are rounded anew from the masters. Chunks for which there is no memory for a shadow wait for
the verdict with their gradients held.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from offload.config import OffloadConfig
from offload.construction import MASTERS
from offload.kernels.backend import Backend
from offload.layout import Chunk
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule.backlog import always
from offload.schedule.host_chunks import HostChunks
from offload.schedule.host_jobs import CarryTile, MeasureTile, StepTile
from offload.schedule.host_kernels import HostKernels
from offload.schedule.host_rings import HostRings
from offload.schedule.host_weights import HostWeights
from offload.schedule.kept_gradients import KeptGradients
from offload.schedule.pipeline import Arrival, Launch, Pipeline, TilePlan
from offload.schedule.step_books import TileBooks
from offload.schedule.stepper import BlockSums, Rows
from offload.schedule.worker import Worker
from offload.transfer.slabs import SlabMaker
from offload.transfer.transport import Ready, Signal, Transport, have_passed

__all__ = ["HostStepper"]


class HostStepper:
    """Implements `Stepper` for placement HOST.

    Args:
        transport: moves bytes between the parameters' device and the rings; closed with the stepper.
        slabs: makes memory for state, gradients and rings.
        backend: computes; started on the worker's thread, where it compiles while memory is made ready here.
        config: tile size, ring, deadlines.
        fused_sums: see `Stepper`.
        element_bytes: bytes of the widest gradient or weight element: what a slot must hold ``tile_numel`` of.
        shadow_bytes: memory for a second set of state; chunks get one as long as it lasts.
        newest_first: of tiles that wait in a step inside backward, those of the chunk that came last go first.
        pin_gradients: every step keeps its gradients until a verdict, so their memory is mapped and pinned ahead, and
            copies end there.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        slabs: SlabMaker,
        backend: Backend,
        worker: Worker,
        config: OffloadConfig,
        fused_sums: bool,
        element_bytes: int,
        clock: StageClock,
        shadow_bytes: int = 0,
        pin_gradients: bool = False,
        newest_first: bool = False,
    ) -> None:
        self.rule = backend.rule
        self._transport, self._worker, self._clock = transport, worker, clock
        self._fused_sums, self._newest_first, self._speculative = fused_sums, newest_first, False
        self._kernels = HostKernels(backend, worker, fused_sums=fused_sums)
        self._rings = HostRings(slabs, config)
        self._chunks = HostChunks(self.rule, slabs, shadow_bytes=shadow_bytes, pin_gradients=pin_gradients)
        self._books = TileBooks()
        self._arrived: dict[int, Arrival] = {}
        try:
            worker.call(transport.attach_thread, on_copier=True)
            worker.call(transport.attach_thread)
            self._kernels.start()
            self._pipe = Pipeline(transport, backend, *self._rings.make(element_bytes), clock)
            self._kept = KeptGradients(self._pipe, worker, self._chunks, self._kernels)
            self._weights = HostWeights(self._pipe, worker, self._chunks)
        except BaseException:
            self._release_memory()
            transport.close()
            raise

    @property
    def backend(self) -> Backend:
        """Who computes; on the worker's thread alone."""
        return self._kernels.backend

    # State ------------------------------------------------------------------------------------------------------

    def add_chunks(
        self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """See `Stepper.add_chunks`."""
        self._fit_rings(chunks)
        self._chunks.add(chunks, records)
        mine = [records[span.param] for chunk in chunks for span in chunk.spans]
        given = [record for record in mine if record.index in masters]
        with self._clock.construction.stage(MASTERS):
            for record in given:
                record.local(self.state(record)["master"]).copy_(masters[record.index])
        self.wait_started()
        with self._clock.construction.stage(MASTERS):
            self._weights.load([record for record in mine if record.index not in masters])
            self._weights.check(given)

    def wait_started(self) -> None:
        """See `HostKernels.wait_started`."""
        self._kernels.wait_started()

    def adopt_chunks(
        self,
        chunks: Sequence[Chunk],
        records: Mapping[int, ParamRecord],
        state: Mapping[int, Sequence[torch.Tensor]],
        sums: Mapping[int, BlockSums],
    ) -> None:
        """Be able to step chunks, or tiles of them, whose state another stepper keeps in host memory.

        Args:
            state: by chunk index, FP32 ``[chunk.numel]``: master, then the moments in the rule's order.
            sums: by chunk index, where both steppers put the sums of their tiles.
        """
        self._fit_rings(chunks)
        self._chunks.adopt(chunks, records, state, sums)

    def aim(self, records: Sequence[ParamRecord]) -> None:
        """Find the compute weights of `records` again, which may have moved."""
        for plan in self._chunks.tiles_of(records):
            plan.aim()

    def state(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """See `Stepper.state`; without moments where these are reduced: `read_moments` has them."""
        return self._chunks.state(record)

    def read_moments(self, record: ParamRecord, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Reduced.read_moments`."""
        values = {name: torch.empty(record.numel) for name in names}

        def unpack() -> None:
            for name, target in values.items():
                self.backend.unpack(name, self._chunks.stored_moment(record, name), target.numpy())

        self._worker.call(unpack)
        return values

    def write_moments(self, record: ParamRecord, values: Mapping[str, torch.Tensor]) -> None:
        """See `Reduced.write_moments`."""

        def pack() -> None:
            for name, source in values.items():
                self.backend.pack(name, source.numpy(), self._chunks.stored_moment(record, name))

        self._worker.call(pack)

    def block_sums(self, chunk: int) -> BlockSums:
        """See `Stepper.block_sums`."""
        state = self._chunks.states[chunk]
        return BlockSums(state.sums, state.nonfinite)

    def load_weights(self, records: Sequence[ParamRecord], *, force: bool = False) -> set[int]:
        """See `Stepper.load_weights`."""
        if force:
            self._weights.load(records)
            return {record.index for record in records}
        changed: set[int] = set()
        self._weights.load(records, changed=changed)
        return changed

    def store_weights(self, records: Sequence[ParamRecord]) -> None:
        """See `Stepper.store_weights`."""
        self._weights.store(records)

    @property
    def host_bytes(self) -> int:
        """See `Stepper.host_bytes`."""
        return self._chunks.num_bytes + self._rings.num_bytes

    def _fit_rings(self, chunks: Sequence[Chunk]) -> None:
        """FP32 parameters that come to a BF16 optimizer need wider slots."""
        widest = max((max(c.kind.grad_bytes, c.kind.weight_bytes) for c in chunks), default=0)
        if widest > self._rings.element_bytes:
            self.finish()
            self._pipe.use_rings(*self._rings.make(widest))

    # Gradients --------------------------------------------------------------------------------------------------

    def begin_step(self, *, speculative: bool) -> None:
        """See `Stepper.begin_step`."""
        self._speculative = speculative

    def accumulate(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.accumulate`."""
        arrival = Arrival(gradient, self._transport.record_ready())
        self._kept.accumulate(record.index, arrival, speculative=self._speculative)

    def hold(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.hold`."""
        self._kept.hold(record.index, Arrival(gradient, self._transport.record_ready()), self._books)

    def step_early(
        self, record: ParamRecord, gradient: torch.Tensor, rows: Rows, elements: range | None = None
    ) -> None:
        """See `Stepper.step_early`.

        Args:
            elements: of the chunk, which then has this one parameter: tiles that begin elsewhere are another stepper's.
        """
        place = self._chunks.places[record.index]
        if self._speculative and not place.chunk.has_shadow:
            self.hold(record, gradient)
            return
        self._arrived[record.index] = Arrival(gradient, self._transport.record_ready())
        for plan, _ in place.parts:
            if elements is not None and plan.tile.start not in elements:
                continue
            if self._books.is_complete_with_one_more(plan):
                self._submit_step(plan, rows, from_device=True)
                self._let_go(plan)
        if elements is not None:
            self._arrived.pop(record.index, None)  # the jobs have it

    @property
    def stepped_early(self) -> list[str]:
        """See `Stepper.stepped_early`."""
        return [self._chunks.states[index].chunk.name for index in sorted(self._books.early_chunks)]

    # The step ---------------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """See `Stepper.measure`."""
        self._hold_arrived()
        for plan in self._waiting():
            launches = self._kept.launches(plan, from_device=False)
            self._worker.submit(MeasureTile(self._pipe, plan, self._chunks.gradients, launches))

    def step_rest(self, rows: Rows) -> None:
        """See `Stepper.step_rest`."""
        self._hold_arrived()
        after = self._weights.now(self._chunks.records)
        for plan in self._waiting():
            self._submit_step(plan, rows, from_device=False, after=after)
            self._books.num_late += 1

    def commit(self) -> list[int]:
        """See `Stepper.commit`, and Note [Speculation]."""
        chunks = self._books.early_chunks
        for plan in self._chunks.tiles:
            if plan.key[0] in chunks and not self._books.is_early(plan):
                self._worker.submit(CarryTile(self._pipe, plan))
        self.finish()
        states = [self._chunks.states[chunk] for chunk in chunks]
        for state in states:
            state.flip()
        return [span.param for state in states for span in state.chunk.spans]

    def roll_back(self, *, restore: bool) -> None:
        """See `Stepper.roll_back`, and Note [Speculation]."""
        self._hold_arrived()  # first: afterwards tiles that have these gradients already do not show any more
        plans = [plan for plan in self._chunks.tiles if self._books.is_early(plan)]
        params = {piece.param for plan in plans for piece in plan.pieces}
        self._books.take_back()
        self._kept.note_held(params)
        if restore:
            self._weights.restore(plans, [self._chunks.records[param] for param in params])

    def finish(self) -> None:
        """See `Stepper.finish`."""
        self._weights.finish()

    def mark(self, chunk: int | None = None) -> Future[Signal]:
        """When the weights of all updates of a chunk (None: of all chunks) submitted so far have arrived."""
        return self._weights.mark(self._group(chunk))

    def settle_later(self) -> Future[float]:
        """See `HostWeights.settle_later`."""
        return self._weights.settle_later()

    def end_step(self, keep_held: Collection[int]) -> None:
        """See `Stepper.end_step`."""
        self._clock.count("early_tiles", self._books.num_early)
        self._clock.count("late_tiles", self._books.num_late)
        release = [state.chunk for index, state in self._chunks.states.items() if index not in keep_held]
        self._worker.call(lambda: self._chunks.gradients.release_held(release))
        self._forget_step()

    def close(self) -> None:
        """See `Stepper.close`. Memory is unmapped last: no copy may be running then."""
        self._worker.close()
        try:
            self._transport.close()
            self._pipe.forget_abandoned()
        finally:
            self._forget_step()
            self._release_memory()

    def _release_memory(self) -> None:
        self._chunks.close()
        self._rings.close()

    # Books ------------------------------------------------------------------------------------------------------

    def _forget_step(self) -> None:
        self._books = TileBooks()
        self._arrived.clear()
        self._kept.forget()

    def _let_go(self, plan: TilePlan) -> None:
        """Drop our references to gradients all of whose tiles are on their way now."""
        for piece in plan.pieces:
            if all(self._books.is_early(each) for each, _ in self._chunks.places[piece.param].parts):
                self._arrived.pop(piece.param, None)

    def _hold_arrived(self) -> None:
        """Gradients that wait for an incomplete tile go the way of held ones, but for tiles already updated."""
        for param, arrival in list(self._arrived.items()):
            self._kept.hold(param, arrival, self._books)
        self._arrived.clear()

    def _waiting(self) -> list[TilePlan]:
        """Tiles with something held or summed that were not updated early."""
        return self._books.waiting(self._chunks.tiles, self._kept.has)

    def _group(self, chunk: int | None) -> int | None:
        return chunk if self._newest_first else None

    def _submit_step(
        self, plan: TilePlan, rows: Rows, *, from_device: bool, after: Sequence[Ready] = ()
    ) -> None:
        speculative = from_device and self._speculative
        launches = self._kept.launches(plan, from_device=from_device, new_state=speculative)
        # Here, not where the weight is written: whoever still needs the old one must fail by rule, not by timing.
        for owner in _changed_by(launches, plan):
            owner.note_write()
        arrivals = [self._arrived[piece.param] for piece in plan.pieces] if from_device else None
        self._worker.submit(
            StepTile(
                self._pipe,
                plan,
                self._chunks.gradients,
                arrivals=arrivals,
                launches=launches,
                rows=rows[plan.key[0]],
                after=after,
                with_sums=self._fused_sums,
                speculative=speculative,
            ),
            group=self._group(plan.key[0] if from_device else None),
            ready=partial(have_passed, [each.ready for each in arrivals]) if arrivals else always,
        )


def _changed_by(launches: Sequence[Launch], plan: TilePlan) -> list[ParamRecord]:
    """Parameters of the tile whose weights these launches change."""
    if launches[0].select is plan.complete.select:
        return plan.owners
    pairs = zip(plan.pieces, plan.owners, strict=True)
    return [owner for piece, owner in pairs if any(launch.select[piece.row] for launch in launches)]
