"""Chunks whose state lives in host memory and is stepped there: placement HOST.

Hooks and ``step()`` run on the caller's thread and only keep books (which gradients are held, which tiles are
complete); whatever touches memory is a job of the worker, which runs jobs in order. So the books may be read as the
state of memory at the moment when the job being built will run.

Note [Speculation]. In a speculative step early updates write the new state into their chunk's shadow and keep their
gradients; new weights are sent as always. When the verdict is to commit, what the chunk's other tiles hold is carried
over and the two sets of arrays change places. When it is to roll back, nothing has to be undone in the state: tiles
count as not updated, their gradients as held, and `step_rest` updates them with the clip coefficient; or, where the
step is skipped, weights are rounded anew from the masters. Chunks for which there is no memory for a shadow wait for
the verdict with their gradients held.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch

from offload.config import OffloadConfig
from offload.construction import MASTERS
from offload.errors import OffloadError, ParameterError
from offload.host_state import ChunkState, Counters, HostGradients, HostState
from offload.kernels.backend import Backend, Variant
from offload.layout import Chunk, Piece, Span
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule.backlog import always
from offload.schedule.host_jobs import (
    AccumulatePiece,
    CarryTile,
    HoldPiece,
    LoadTile,
    MeasureTile,
    StepTile,
    StoreTile,
)
from offload.schedule.pipeline import Arrival, Launch, Pipeline, TilePlan
from offload.schedule.reduced_state import counters_of, stored_parts
from offload.schedule.stepper import BlockSums, Rows
from offload.schedule.worker import Call, Job, Worker
from offload.transfer.pinned import Slab
from offload.transfer.ring import Ring
from offload.transfer.slabs import SlabMaker, Wanted, close_all
from offload.transfer.transport import Ready, Signal, Transport, have_passed

__all__ = ["HostStepper"]

TileKey = tuple[int, int]


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
        self._shadow_bytes, self._speculative = shadow_bytes, False
        self._pin_gradients, self._newest_first = pin_gradients, newest_first
        self._transport, self._backend, self._worker, self._clock = transport, backend, worker, clock
        self.rule = backend.rule
        self._fused_sums = fused_sums
        self._config, self._element_bytes = config, element_bytes
        self._prepared: set[Variant] = set()
        self._slabs = slabs
        self._state = HostState(backend.rule, slabs)
        self._gradients = HostGradients(slabs)
        self._records: dict[int, ParamRecord] = {}
        self._plans: list[TilePlan] = []
        self._places: dict[int, list[tuple[TilePlan, Piece]]] = {}
        self._spans: dict[int, tuple[int, Span]] = {}
        self._rings: list[Slab] = []
        self._is_started = False
        self._refusal: OffloadError | None = None
        self._reset_books()
        try:
            worker.call(transport.attach_thread, on_copier=True)
            worker.call(transport.attach_thread)
            worker.submit(Call(self._start_backend))
            self._pipe = Pipeline(transport, backend, *self._make_rings(config, element_bytes), clock)
        except BaseException:
            self._release_memory()
            transport.close()
            raise

    @property
    def backend(self) -> Backend:
        """Who computes; on the worker's thread alone."""
        return self._backend

    # State ------------------------------------------------------------------------------------------------------

    def add_chunks(
        self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """See `Stepper.add_chunks`."""
        self._fit_rings(chunks)
        self._allocate(chunks, counters_of(records) if self.rule.is_reduced else None)
        for chunk in chunks:
            self._register(chunk, records)
        mine = [records[span.param] for chunk in chunks for span in chunk.spans]
        given = [record for record in mine if record.index in masters]
        with self._clock.construction.stage(MASTERS):
            for record in given:
                record.local(self.state(record)["master"]).copy_(masters[record.index])
        self.wait_started()
        with self._clock.construction.stage(MASTERS):
            self._load([record for record in mine if record.index not in masters])
            self._check(given)

    def _allocate(self, chunks: Sequence[Chunk], counters: Counters | None) -> None:
        shadowed, left = [], self._shadow_bytes
        for chunk in chunks:
            num_bytes = self._state.bytes_of(chunk)
            if num_bytes <= left:
                left -= num_bytes
                shadowed.append(chunk)
        self._state.add(chunks, counters, shadowed=shadowed)
        self._shadow_bytes = left
        if self._pin_gradients:
            self._gradients.reserve(chunks)

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
        for chunk in chunks:
            master, *moments = state[chunk.index]
            self._state.adopt(chunk, master, tuple(moments), sums[chunk.index])
            self._register(chunk, records)

    def aim(self, records: Sequence[ParamRecord]) -> None:
        """Find the compute weights of `records` again, which may have moved."""
        for plan in self._plans_of(records):
            plan.aim()

    def _register(self, chunk: Chunk, records: Mapping[int, ParamRecord]) -> None:
        state = self._state.chunks[chunk.index]
        for span in chunk.spans:
            self._records[span.param] = records[span.param]
            self._spans[span.param] = (chunk.index, span)
            self._places[span.param] = []
        for tile in state.tiles:
            plan = TilePlan(state, tile.tile, self._records)
            self._plans.append(plan)
            for piece in plan.pieces:
                self._places[piece.param].append((plan, piece))

    def state(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """See `Stepper.state`; without moments where these are reduced: `read_moments` has them."""
        index, span = self._spans[record.index]
        chunk = self._state.chunks[index]
        part = slice(span.start, span.start + span.numel)
        views = {"master": chunk.master[part]}
        if not self.rule.is_reduced:
            moments = zip(self.rule.state_names, chunk.moments, strict=True)
            views |= {name: moment[part] for name, moment in moments}
        return views

    def read_moments(self, record: ParamRecord, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Reduced.read_moments`."""
        values = {name: torch.empty(record.numel) for name in names}

        def unpack() -> None:
            for name, target in values.items():
                self._backend.unpack(name, self._stored(record, name), target.numpy())

        self._worker.call(unpack)
        return values

    def write_moments(self, record: ParamRecord, values: Mapping[str, torch.Tensor]) -> None:
        """See `Reduced.write_moments`."""

        def pack() -> None:
            for name, source in values.items():
                self._backend.pack(name, source.numpy(), self._stored(record, name))

        self._worker.call(pack)

    def _stored(self, record: ParamRecord, name: str) -> tuple[np.ndarray, ...]:
        index, span = self._spans[record.index]
        return stored_parts(self._state.chunks[index], span, self.rule.state_names.index(name), self.rule)

    def block_sums(self, chunk: int) -> BlockSums:
        """See `Stepper.block_sums`."""
        state = self._state.chunks[chunk]
        return BlockSums(state.sums, state.nonfinite)

    def load_weights(self, records: Sequence[ParamRecord], *, force: bool = False) -> set[int]:
        """See `Stepper.load_weights`."""
        if force:
            self._load(records)
            return {record.index for record in records}
        changed: set[int] = set()
        self._load(records, changed=changed)
        return changed

    def store_weights(self, records: Sequence[ParamRecord]) -> None:
        """See `Stepper.store_weights`."""
        params = {record.index for record in records}
        after = self._now(records)
        for plan in self._plans_of(records):
            plan.aim()
            self._worker.submit(StoreTile(self._pipe, plan, params, after))
        for record in records:
            record.note_write()
        self.finish()

    @property
    def host_bytes(self) -> int:
        """See `Stepper.host_bytes`."""
        return self._state.num_bytes + self._gradients.num_bytes + sum(slab.num_bytes for slab in self._rings)

    # Gradients --------------------------------------------------------------------------------------------------

    def begin_step(self, *, speculative: bool) -> None:
        """See `Stepper.begin_step`."""
        self._speculative = speculative

    def accumulate(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.accumulate`."""
        arrival = Arrival(gradient, self._transport.record_ready())
        first = record.index not in self._accumulated
        self._prepare(self._variant(record, fresh=True, adds=True))
        if self._speculative:
            self._prepare(self._variant(record, fresh=True, adds=True, new_state=True))
        self._accumulated.add(record.index)
        for plan, piece in self._places[record.index]:
            self._worker.submit(
                AccumulatePiece(self._pipe, plan, self._gradients, piece, arrival, first=first)
            )

    def hold(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.hold`."""
        self._hold_pieces(record.index, Arrival(gradient, self._transport.record_ready()))

    def step_early(
        self, record: ParamRecord, gradient: torch.Tensor, rows: Rows, elements: range | None = None
    ) -> None:
        """See `Stepper.step_early`.

        Args:
            elements: of the chunk, which then has this one parameter: tiles that begin elsewhere are another stepper's.
        """
        if self._speculative and not self._chunk_of(record).has_shadow:
            self.hold(record, gradient)
            return
        self._arrived[record.index] = Arrival(gradient, self._transport.record_ready())
        for plan, _ in self._places[record.index]:
            if elements is not None and plan.tile.start not in elements:
                continue
            missing = self._missing.get(plan.key, len(plan.pieces)) - 1
            self._missing[plan.key] = missing
            if not missing:
                self._early.add(plan.key)
                self._submit_step(plan, rows, from_device=True)
                self._let_go(plan)
        if elements is not None:
            self._arrived.pop(record.index, None)  # the jobs have it

    @property
    def stepped_early(self) -> list[str]:
        """See `Stepper.stepped_early`."""
        return [self._state.chunks[index].chunk.name for index in sorted({chunk for chunk, _ in self._early})]

    # The step ---------------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """See `Stepper.measure`."""
        self._hold_arrived()
        for plan in self._waiting_plans():
            launches = self._launches(plan, from_device=False)
            self._worker.submit(MeasureTile(self._pipe, plan, self._gradients, launches))

    def step_rest(self, rows: Rows) -> None:
        """See `Stepper.step_rest`."""
        self._hold_arrived()
        after = self._now(list(self._records.values())[:1])
        for plan in self._waiting_plans():
            self._submit_step(plan, rows, from_device=False, after=after)
            self._late += 1

    def commit(self) -> list[int]:
        """See `Stepper.commit`, and Note [Speculation]."""
        chunks = {chunk for chunk, _ in self._early}
        for plan in self._plans:
            if plan.key[0] in chunks and plan.key not in self._early:
                self._worker.submit(CarryTile(self._pipe, plan))
        self.finish()
        for chunk in chunks:
            self._state.chunks[chunk].flip()
        return [span.param for chunk in chunks for span in self._state.chunks[chunk].chunk.spans]

    def roll_back(self, *, restore: bool) -> None:
        """See `Stepper.roll_back`, and Note [Speculation]."""
        self._hold_arrived()  # first: afterwards tiles that have these gradients already do not show any more
        plans = [plan for plan in self._plans if plan.key in self._early]
        params = {piece.param for plan in plans for piece in plan.pieces}
        self._early.clear()
        self._missing.clear()
        self._held |= params
        if not restore:
            return
        after = self._now(list(self._records.values())[:1])
        for plan in plans:
            self._worker.submit(StoreTile(self._pipe, plan, params, after))
        for param in params:
            self._records[param].note_write()
        self.finish()

    def finish(self) -> None:
        """See `Stepper.finish`."""
        self._worker.call(self._pipe.finish_returns, on_copier=True)

    def mark(self, chunk: int | None = None) -> Future[Signal]:
        """When the weights of all updates of a chunk (None: of all chunks) submitted so far have arrived.

        Copies to the device end in order.
        """
        call = Call(self._mark, on_copier=True)
        self._worker.submit(call, group=self._group(chunk))
        return call.future

    def _group(self, chunk: int | None) -> int | None:
        return chunk if self._newest_first else None

    def _mark(self) -> Signal:
        signal = self._transport.issue_to_device((), ()).signal
        assert signal is not None
        return signal

    def settle_later(self) -> Future[float]:
        """`finish` without blocking; the result is when it was done, by ``time.perf_counter``."""

        def settle() -> float:
            self._pipe.finish_returns()
            return time.perf_counter()

        call = Call(settle, on_copier=True)
        self._worker.submit(call)
        return call.future

    def end_step(self, keep_held: Collection[int]) -> None:
        """See `Stepper.end_step`."""
        self._clock.count("early_tiles", len(self._early))
        self._clock.count("late_tiles", self._late)
        release = [state.chunk for index, state in self._state.chunks.items() if index not in keep_held]
        self._worker.call(lambda: self._gradients.release_held(release))
        self._reset_books()

    def close(self) -> None:
        """See `Stepper.close`. Memory is unmapped last: no copy may be running then."""
        self._worker.close()
        try:
            self._transport.close()
            self._pipe.forget_abandoned()
        finally:
            self._reset_books()
            self._records.clear()
            self._places.clear()
            self._plans.clear()
            self._release_memory()

    def _release_memory(self) -> None:
        self._gradients.close()
        self._state.close()
        close_all(self._rings)

    def _chunk_of(self, record: ParamRecord) -> ChunkState:
        return self._state.chunks[self._spans[record.index][0]]

    # Books ------------------------------------------------------------------------------------------------------

    def _reset_books(self) -> None:
        self._arrived: dict[int, Arrival] = {}
        self._held: set[int] = set()
        self._accumulated: set[int] = set()
        self._missing: dict[TileKey, int] = {}
        self._early: set[TileKey] = set()
        self._late = 0

    def _let_go(self, plan: TilePlan) -> None:
        """Drop our references to gradients all of whose tiles are on their way now."""
        for piece in plan.pieces:
            if all(place.key in self._early for place, _ in self._places[piece.param]):
                self._arrived.pop(piece.param, None)

    def _hold_arrived(self) -> None:
        """Gradients that wait for an incomplete tile go the way of held ones, but for tiles already updated."""
        for param, arrival in list(self._arrived.items()):
            self._hold_pieces(param, arrival)
        self._arrived.clear()

    def _hold_pieces(self, param: int, arrival: Arrival) -> None:
        fold = None if param not in self._held else "next" if param in self._accumulated else "first"
        self._held.add(param)
        if fold is not None:
            self._prepare(self._variant(self._records[param], fresh=True, adds=True))
            self._accumulated.add(param)
        for plan, piece in self._places[param]:
            if plan.key not in self._early:
                self._worker.submit(HoldPiece(self._pipe, plan, self._gradients, piece, arrival, fold=fold))

    def _waiting_plans(self) -> list[TilePlan]:
        """Tiles with something held or accumulated that were not updated early."""
        waiting = self._held | self._accumulated
        return [
            plan
            for plan in self._plans
            if plan.key not in self._early and any(piece.param in waiting for piece in plan.pieces)
        ]

    def _submit_step(
        self, plan: TilePlan, rows: Rows, *, from_device: bool, after: Sequence[Ready] = ()
    ) -> None:
        launches = self._launches(plan, from_device=from_device)
        group = self._group(plan.key[0] if from_device else None)
        changed = plan.owners
        if launches[0].select is not plan.complete.select:
            pairs = zip(plan.pieces, plan.owners, strict=True)
            changed = [
                owner for piece, owner in pairs if any(launch.select[piece.row] for launch in launches)
            ]
        # Here, not where the weight is written: whoever still needs the old one must fail by rule, not by timing.
        for owner in changed:
            owner.note_write()
        arrivals = [self._arrived[piece.param] for piece in plan.pieces] if from_device else None
        self._worker.submit(
            StepTile(
                self._pipe,
                plan,
                self._gradients,
                arrivals=arrivals,
                launches=launches,
                rows=rows[plan.key[0]],
                after=after,
                with_sums=self._fused_sums,
                speculative=from_device and self._speculative,
            ),
            group=group,
            ready=partial(have_passed, [each.ready for each in arrivals]) if arrivals else always,
        )

    def _launches(self, plan: TilePlan, *, from_device: bool) -> list[Launch]:
        """One launch for each way in which gradients of this tile are to be had; one in all but odd cases."""
        if from_device and not self._accumulated:
            return [plan.complete]
        rows = {piece.param: piece.row for piece in plan.pieces}
        if from_device and rows.keys() <= self._accumulated:
            first = self._records[plan.pieces[0].param]
            self._prepare(self._variant(first, fresh=True, adds=True, new_state=self._speculative))
            return [plan.complete_adding]
        fresh = set(rows) if from_device else rows.keys() & self._held
        groups = [
            (True, False, fresh - self._accumulated),
            (True, True, fresh & self._accumulated),
            (False, False, (rows.keys() & self._accumulated) - fresh),
        ]
        launches = []
        for is_fresh, adds, members in groups:
            if members:
                first = self._records[next(iter(members))]
                new_state = from_device and self._speculative
                self._prepare(self._variant(first, fresh=is_fresh, adds=adds, new_state=new_state))
                select = np.zeros_like(plan.complete.select)
                select[[rows[member] for member in members]] = 1
                launches.append(Launch(select, is_fresh, adds))
        return launches

    def _variant(self, record: ParamRecord, *, fresh: bool, adds: bool, new_state: bool = False) -> Variant:
        kind = record.kind
        return Variant(
            grad=kind.grad if fresh else "fp32",  # type: ignore[arg-type]
            acc=adds,
            weight=kind.weight,  # type: ignore[arg-type]
            sums=self._fused_sums,
            new_state=new_state,
        )

    def _prepare(self, variant: Variant) -> None:
        """Have a kernel compiled that the layout did not foresee: on the worker, ahead of the job that needs it."""
        if variant not in self._prepared:
            self._prepared.add(variant)
            self._worker.submit(Call(lambda: self._backend.prepare(variant)))

    # Weights ----------------------------------------------------------------------------------------------------

    def _load(
        self, records: Sequence[ParamRecord], *, changed: set[int] | None = None, check_only: bool = False
    ) -> None:
        ready = self._now(records)
        arrivals = {record.index: Arrival(record.weight(), ready[0]) for record in records}
        for plan in self._plans_of(records):
            plan.aim()
            job: Job = LoadTile(self._pipe, plan, arrivals, changed=changed, check_only=check_only)
            self._worker.submit(job)
        self.finish()

    def _check(self, records: Sequence[ParamRecord]) -> None:
        changed: set[int] = set()
        self._load(records, changed=changed, check_only=True)
        if changed:
            names = ", ".join(self._records[index].name for index in sorted(changed)[:3])
            raise ParameterError(
                f"masters= of {len(changed)} parameter(s) do not round to the model's weights ({names}): the weights "
                "were changed after cast_compute_weights; cast again, or leave masters out to start from the weights"
            )

    def _plans_of(self, records: Sequence[ParamRecord]) -> list[TilePlan]:
        wanted = {record.index for record in records}
        return [plan for plan in self._plans if any(piece.param in wanted for piece in plan.pieces)]

    def _now(self, records: Sequence[ParamRecord]) -> list[Ready]:
        return [self._transport.record_ready()] if records else []

    def _start_backend(self) -> None:
        """On the worker's thread, whose team inherits what the worker set."""
        try:
            self._backend.start()
        except OffloadError as error:  # ours do not end the worker; `wait_started` raises it
            self._refusal = error

    def wait_started(self) -> None:
        """Until the kernels are compiled; jobs that need them are submitted after this.

        Raises:
            KernelError: they cannot run here.
        """
        if not self._is_started:
            self._worker.call(self._require_started)
            self._is_started = True

    def _require_started(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _make_rings(self, config: OffloadConfig, element_bytes: int) -> tuple[Ring, Ring]:
        """Pinned where there is a device; slabs of rings before them are released."""
        slot_bytes = config.tile_numel * element_bytes
        num_bytes = Ring.required_bytes(config.ring_slots, slot_bytes)
        names = ("gradients in", "weights out")
        before = self._rings
        self._rings = self._slabs.make_all([Wanted(num_bytes, f"ring: {name}", pin=True) for name in names])
        close_all(before)
        to_host, to_device = (Ring(slab, config.ring_slots, slot_bytes) for slab in self._rings)
        return to_host, to_device

    def _fit_rings(self, chunks: Sequence[Chunk]) -> None:
        """FP32 parameters that come to a BF16 optimizer need wider slots."""
        widest = max((max(c.kind.grad_bytes, c.kind.weight_bytes) for c in chunks), default=0)
        if widest > self._element_bytes:
            self.finish()
            self._pipe.use_rings(*self._make_rings(self._config, widest))
            self._element_bytes = widest
