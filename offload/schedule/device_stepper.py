"""Chunks whose state lives on the device and is stepped there: placement DEVICE.

Nothing moves, so nothing is tiled: each parameter is one kernel launch, which reads the gradient and writes the
compute weight in place. Gradients are held as they come; accumulators are FP32 and on the device, so that the sums,
and with them all bits, are those of the other placements.

Without a GPU the same code serves beside other placements: state is plain memory, and the host kernels compute on the
worker's thread, the only one that may run them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload.construction import MASTERS
from offload.kernels.device import TileTensors
from offload.kernels.rule import Rule
from offload.layout import ALIGN, Chunk, Span
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule.device_gradients import DeviceGradients
from offload.schedule.stepper import BlockSums, Rows
from offload.schedule.updater import Updater
from offload.schedule.weights import check_given_master, load_weight, store_weight
from offload.schedule.worker import Call, Worker
from offload.streams import note_read
from offload.transfer.deadline import synchronize_device
from offload.transfer.transport import Signal

__all__ = ["DeviceStepper"]


@dataclass(frozen=True, eq=False)
class _Resident:
    """One parameter's state on the device: FP32 ``[numel]`` each; sums per block of `ALIGN` elements."""

    record: ParamRecord
    chunk: int
    span: Span
    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    sums: torch.Tensor
    nonfinite: torch.Tensor
    blocks: torch.Tensor


class _Passed:
    """A signal that has been given: without a device, what a thread has done is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def wait(self) -> None:
        return


class DeviceStepper:
    """Implements `Stepper` for placement DEVICE. Runs on the caller's current stream.

    Args:
        device: where parameters and state are.
        updater: computes there; started by the caller.
        worker: told of errors inside backward; without a GPU its thread computes.
        flush_denormals: as for the host kernels.
        timeout_s: longest wait for the device, in seconds.
        marks: whether `mark` will be called: needs pinned memory for the squared sums.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        updater: Updater,
        worker: Worker,
        flush_denormals: bool,
        fused_sums: bool,
        clock: StageClock,
        timeout_s: float,
        marks: bool = False,
    ) -> None:
        self._timeout_s = timeout_s
        self._device, self._updater, self._worker, self._clock = device, updater, worker, clock
        self._on_gpu = device.type == "cuda"
        self._fused_sums, self._marks = fused_sums, marks
        self._gradients = DeviceGradients(flush_denormals=flush_denormals)
        self._params: dict[int, _Resident] = {}
        self._chunks: dict[int, Chunk] = {}
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._early: set[int] = set()
        self._num_early = self._num_late = 0
        self._holds = False
        self._mirrors: dict[int, tuple[torch.Tensor, ...]] = {}
        self._mirrored: torch.cuda.Event | None = None

    @property
    def rule(self) -> Rule:
        """See `Stepper.rule`."""
        return self._updater.rule

    def add_chunks(
        self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """See `Stepper.add_chunks`."""
        for chunk in chunks:
            self._chunks[chunk.index] = chunk
            state = [self._zeros(chunk.numel, torch.float32) for _ in range(1 + len(self.rule.state_names))]
            sums = (
                self._zeros(chunk.numel // ALIGN, torch.float64),
                self._zeros(chunk.numel // ALIGN, torch.uint8),
            )
            self._sums[chunk.index] = sums
            if self._marks and self._on_gpu:
                self._mirrors[chunk.index] = tuple(
                    torch.empty_like(each, device="cpu", pin_memory=True) for each in sums
                )
            for span in chunk.spans:
                self._params[span.param] = self._make(records[span.param], chunk.index, span, state, sums)
        mine = [self._params[span.param] for chunk in chunks for span in chunk.spans]
        with self._clock.construction.stage(MASTERS):
            for resident in mine:
                self._set_master(resident, masters.get(resident.record.index))
            if self._on_gpu:  # backward may run on another stream than the one that made this
                self.finish()

    def state(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """See `Stepper.state`."""
        resident = self._params[record.index]
        names = ("master", *self.rule.state_names)
        return dict(zip(names, (resident.master, *resident.moments), strict=True))

    def begin_step(self, *, speculative: bool) -> None:
        """See `Stepper.begin_step`. There is no second set of state here: in speculative steps all is held."""
        self._holds = speculative

    def accumulate(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.accumulate`."""
        self._gradients.accumulate(record.index, gradient)

    def hold(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.hold`."""
        self._gradients.hold(record.index, gradient)

    def step_early(self, record: ParamRecord, gradient: torch.Tensor, rows: Rows) -> None:
        """See `Stepper.step_early`: on the stream of backward, as soon as the hook has fired."""
        resident = self._params[record.index]
        self._gradients.hold(record.index, gradient)
        if self._holds:
            return
        self._early.add(resident.chunk)
        self._num_early += 1
        row = rows[resident.chunk][resident.span.row]
        try:
            self._update(resident, self._updater.upload(row[np.newaxis])[0])
        except Exception as error:  # noqa: BLE001 - nothing may be raised inside backward: the next public call does
            self._worker.fail(error)
        self._gradients.forget(record.index)

    @property
    def stepped_early(self) -> list[str]:
        """See `Stepper.stepped_early`."""
        return [self._chunks[index].name for index in sorted(self._early)]

    def measure(self) -> None:
        """See `Stepper.measure`."""
        for resident in self._waiting():
            tile = self._tile(resident, with_sums=True)
            self._run(lambda tile=tile: self._updater.measure(tile))  # type: ignore[misc]

    def commit(self) -> list[int]:
        """See `Stepper.commit`: nothing was done early."""
        return []

    def roll_back(self, *, restore: bool) -> None:
        """See `Stepper.roll_back`: nothing was done early."""

    def step_rest(self, rows: Rows) -> None:
        """See `Stepper.step_rest`."""
        waiting = self._waiting()
        if waiting:
            uploaded = self._updater.upload(np.stack([rows[r.chunk][r.span.row] for r in waiting]))
            for resident, row in zip(waiting, uploaded, strict=True):
                self._update(resident, row)
        self._num_late += len(waiting)

    def block_sums(self, chunk: int) -> BlockSums:
        """See `Stepper.block_sums`."""
        sums, nonfinite = self._sums[chunk]
        if self._mirrored is not None:
            self._mirrored.synchronize()
            sums, nonfinite = self._mirrors[chunk]
        return BlockSums(sums.cpu().numpy(), nonfinite.cpu().numpy())

    def finish(self) -> None:
        """See `Stepper.finish`.

        Raises:
            DeadlineError: the device does not come to rest.
        """
        if self._on_gpu:
            synchronize_device(self._device, self._timeout_s)
        else:
            self._worker.call(lambda: None)

    def mark(self, chunk: int | None = None) -> Future[Signal]:
        """When all updates enqueued on the current stream are done. Their squared sums are copied to the host behind them.

        `block_sums` can then be read without a wait for what the stream has to do besides.
        """
        call: Call[Signal] = Call(_Passed)
        if not self._on_gpu:
            self._worker.submit(call)
            return call.future
        for index, sums in self._sums.items():
            for mirror, source in zip(self._mirrors[index], sums, strict=True):
                mirror.copy_(source, non_blocking=True)
        self._mirrored = torch.cuda.Event()
        self._mirrored.record(torch.cuda.current_stream(self._device))
        call.future.set_result(self._mirrored)
        return call.future

    def end_step(self, keep_held: Collection[int]) -> None:
        """See `Stepper.end_step`."""
        self._clock.count("early_tiles", self._num_early)
        self._clock.count("late_tiles", self._num_late)
        self._gradients.clear()
        self._early.clear()
        self._num_early = self._num_late = 0
        self._holds = False
        self._mirrored = None

    def load_weights(self, records: Sequence[ParamRecord], *, force: bool = False) -> set[int]:
        """See `Stepper.load_weights`."""
        self._rest()
        masters = [(record, self._params[record.index].master) for record in records]
        return {
            record.index for record, master in masters if load_weight(master, record.weight(), force=force)
        }

    def store_weights(self, records: Sequence[ParamRecord]) -> None:
        """See `Stepper.store_weights`."""
        self._rest()
        for record in records:
            store_weight(record.weight(), self._params[record.index].master)
            record.note_write()
        self.finish()

    @property
    def host_bytes(self) -> int:
        """See `Stepper.host_bytes`."""
        return 0

    def close(self) -> None:
        """See `Stepper.close`."""
        self._worker.close()
        self._gradients.clear()
        self._params.clear()
        self._sums.clear()
        self._mirrors.clear()

    def _make(
        self,
        record: ParamRecord,
        chunk: int,
        span: Span,
        state: Sequence[torch.Tensor],
        sums: tuple[torch.Tensor, torch.Tensor],
    ) -> _Resident:
        elements = slice(span.start, span.start + span.numel)
        blocks = slice(span.start // ALIGN, -(-(span.start + span.numel) // ALIGN))
        master, *moments = (array[elements] for array in state)
        table = self._updater.blocks(span.numel)
        return _Resident(record, chunk, span, master, tuple(moments), sums[0][blocks], sums[1][blocks], table)

    def _set_master(self, resident: _Resident, given: torch.Tensor | None) -> None:
        if given is None:
            load_weight(resident.master, resident.record.weight(), force=True)
        else:
            resident.record.local(resident.master).copy_(given)
            check_given_master(resident.record, resident.master)

    def _waiting(self) -> list[_Resident]:
        return [resident for index, resident in self._params.items() if self._gradients.has(index)]

    def _update(self, resident: _Resident, row: Any) -> None:
        """Gradients were made on backward's stream and are used on the current one: the allocator must know."""
        tile = self._tile(resident, with_sums=self._fused_sums)
        self._run(lambda: self._updater.update(tile, row))
        for gradient in (tile.grad, tile.acc):
            if gradient is not None:
                note_read(gradient)
        resident.record.note_write()

    def _run(self, function: Callable[[], None]) -> None:
        """On the current stream; without a GPU, on the thread that computes, after what it has to do."""

        def run() -> None:
            with self._clock.span("device step", on_device=True):
                function()

        if self._on_gpu:
            run()
        else:
            self._worker.submit(Call(run))

    def _rest(self) -> None:
        """The device orders what touches state by its stream; the host does not."""
        if not self._on_gpu:
            self.finish()

    def _tile(self, resident: _Resident, *, with_sums: bool) -> TileTensors:
        gradient, accumulated = self._gradients.take(resident.record.index)
        return TileTensors(
            grad=gradient,
            acc=accumulated,
            master=resident.master,
            moments=resident.moments,
            weight=resident.record.weight(),
            sums=resident.sums if with_sums else None,
            nonfinite=resident.nonfinite if with_sums else None,
            blocks=resident.blocks,
        )

    def _zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)
