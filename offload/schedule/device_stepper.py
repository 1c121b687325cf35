"""Chunks whose state lives on the device and is stepped there: placement DEVICE.

Nothing moves, so nothing is tiled: each parameter is one kernel launch, which reads the gradient and writes the
compute weight in place. Gradients are held as they come; accumulators are FP32 and on the device, so that the sums,
and with them all bits, are those of the other placements.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from offload.errors import ParameterError
from offload.kernels.blocks import make_blocks
from offload.kernels.device import DeviceBackend, TileTensors
from offload.kernels.rule import Rule
from offload.layout import ALIGN, Chunk, Span
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule.stepper import BlockSums, Rows

__all__ = ["DeviceStepper"]

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(eq=False)
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
    held: torch.Tensor | None = None
    accumulated: torch.Tensor | None = None

    @property
    def waits(self) -> bool:
        """Whether there is a gradient to be applied."""
        return self.held is not None or self.accumulated is not None

    def forget(self) -> None:
        """Let go of gradients."""
        self.held = self.accumulated = None


class DeviceStepper:
    """Implements `Stepper` for placement DEVICE. Runs on the caller's current stream.

    Args:
        device: where parameters and state are.
        rule: the optimizer's update rule.
        flush_denormals: as for the host kernels.
    """

    def __init__(
        self, *, device: torch.device, rule: Rule, flush_denormals: bool, fused_sums: bool, clock: StageClock
    ) -> None:
        self.rule = rule
        self._device, self._flush, self._clock = device, flush_denormals, clock
        self._fused_sums = fused_sums
        self._backend = DeviceBackend(rule, flush_denormals=flush_denormals)
        self._params: dict[int, _Resident] = {}
        self._chunks: dict[int, Chunk] = {}
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._early: set[int] = set()
        self._select = torch.ones(1, dtype=torch.uint8, device=device)

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
            for span in chunk.spans:
                self._params[span.param] = self._make(records[span.param], chunk.index, span, state, sums)
        mine = [self._params[span.param] for chunk in chunks for span in chunk.spans]
        for resident in mine:
            self._set_master(resident, masters.get(resident.record.index))

    def state(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """See `Stepper.state`."""
        resident = self._params[record.index]
        names = ("master", *self.rule.state_names)
        return dict(zip(names, (resident.master, *resident.moments), strict=True))

    def accumulate(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.accumulate`."""
        self._fold(self._params[record.index], gradient)

    def hold(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.hold`."""
        resident = self._params[record.index]
        if resident.held is not None:
            self._fold(resident, resident.held)
        resident.held = gradient

    def step_early(self, record: ParamRecord, gradient: torch.Tensor, rows: Rows) -> None:
        """See `Stepper.step_early`: on the stream of backward, as soon as the hook has fired."""
        resident = self._params[record.index]
        resident.held = gradient
        self._update(resident, self._upload(rows[resident.chunk][resident.span.row]))
        resident.forget()
        self._early.add(resident.chunk)

    @property
    def stepped_early(self) -> list[str]:
        """See `Stepper.stepped_early`."""
        return [self._chunks[index].name for index in sorted(self._early)]

    def measure(self) -> None:
        """See `Stepper.measure`."""
        for resident in self._waiting():
            self._backend.square_sums(self._tile(resident, with_sums=True), self._select)

    def step_rest(self, rows: Rows) -> None:
        """See `Stepper.step_rest`."""
        waiting = self._waiting()
        uploaded = self._upload(np.stack([rows[r.chunk][r.span.row] for r in waiting])) if waiting else None
        for index, resident in enumerate(waiting):
            assert uploaded is not None
            self._update(resident, uploaded[index])
        self._clock.count("late_tiles", len(waiting))

    def block_sums(self, chunk: int) -> BlockSums:
        """See `Stepper.block_sums`."""
        sums, nonfinite = self._sums[chunk]
        return BlockSums(sums.cpu().numpy(), nonfinite.cpu().numpy())

    def finish(self) -> None:
        """See `Stepper.finish`."""
        torch.cuda.synchronize(self._device)

    def end_step(self, keep_held: Collection[int]) -> None:
        """See `Stepper.end_step`."""
        for resident in self._params.values():
            resident.forget()
        self._early.clear()

    def load_weights(self, records: Sequence[ParamRecord], *, force: bool = False) -> set[int]:
        """See `Stepper.load_weights`."""
        changed = set()
        for record in records:
            resident = self._params[record.index]
            weight = record.weight()
            if force or not torch.equal(resident.master.to(weight.dtype), weight):
                resident.master.copy_(weight)
                changed.add(record.index)
        return changed

    def store_weights(self, records: Sequence[ParamRecord]) -> None:
        """See `Stepper.store_weights`."""
        for record in records:
            record.weight().copy_(self._params[record.index].master)
            torch.autograd.graph.increment_version(record.param)
        self.finish()

    @property
    def host_bytes(self) -> int:
        """See `Stepper.host_bytes`."""
        return 0

    def close(self) -> None:
        """See `Stepper.close`."""
        self._params.clear()
        self._sums.clear()

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
        table = torch.from_numpy(make_blocks([(0, span.numel, 0)] if span.numel else [])).to(self._device)
        return _Resident(record, chunk, span, master, tuple(moments), sums[0][blocks], sums[1][blocks], table)

    def _set_master(self, resident: _Resident, master: torch.Tensor | None) -> None:
        weight = resident.record.weight()
        if master is None:
            resident.master.copy_(weight)
            return
        resident.record.shaped(resident.master).copy_(master)
        if not torch.equal(resident.master.to(weight.dtype), weight):
            raise ParameterError(
                f"masters= of {resident.record.name} do not round to the model's weights: the weights were "
                "changed after cast_compute_weights; cast again, or leave masters out"
            )

    def _waiting(self) -> list[_Resident]:
        return [resident for resident in self._params.values() if resident.waits]

    def _update(self, resident: _Resident, row: torch.Tensor) -> None:
        """Gradients were made on backward's stream and are used on the current one: the allocator must know."""
        tile = self._tile(resident, with_sums=self._fused_sums)
        self._backend.update(tile, row.unsqueeze(0), self._select)
        stream = torch.cuda.current_stream(self._device)
        for gradient in (tile.grad, tile.acc):
            if gradient is not None:
                gradient.record_stream(stream)
        torch.autograd.graph.increment_version(resident.record.param)

    def _tile(self, resident: _Resident, *, with_sums: bool) -> TileTensors:
        gradient, accumulated = resident.held, resident.accumulated
        if gradient is None:
            assert accumulated is not None
            gradient, accumulated = accumulated, None
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

    def _fold(self, resident: _Resident, gradient: torch.Tensor) -> None:
        """Add to the accumulator with the host kernels' bits: denormals flushed in and out where they are there."""
        fresh = gradient.to(torch.float32, copy=True)
        if resident.accumulated is None:
            resident.accumulated = fresh
            return
        total = resident.accumulated
        if self._flush:
            _flush_denormals(fresh)
            _flush_denormals(total)
        total.add_(fresh)
        if self._flush:
            _flush_denormals(total)

    def _upload(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self._device)

    def _zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)


def _flush_denormals(tensor: torch.Tensor) -> None:
    """Denormals become zeros of their sign, in place; NaN stays."""
    tensor.mul_((tensor.abs() >= SMALLEST_NORMAL).to(tensor.dtype))
