"""Several placements in one wavefront: every call goes to the stepper of the chunk's placement.

One engine drives this stepper as it drives any other. The placements work side by side: the host kernels on the worker,
streamed state on a thread and streams of its own, device state on backward's stream. What they share is the link, the
worker whose error ends them all, and the order in which they are closed.

Streamed state lies in host memory, so the host can step it too: between steps a chunk may change sides (`Balancer`), and
a large one may be on both at once, tile by tile (`division`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack

import torch

from offload.kernels.rule import Rule
from offload.layout import Chunk
from offload.parameters import ParamRecord
from offload.schedule.backward_room import BackwardRoom
from offload.schedule.balancer import Balancer
from offload.schedule.device_stepper import DeviceStepper
from offload.schedule.division import Divisions
from offload.schedule.flight import Mark
from offload.schedule.host_stepper import HostStepper
from offload.schedule.mode_costs import Placement
from offload.schedule.stepper import BlockSums, Rows, Stepper
from offload.schedule.stream_stepper import StreamStepper
from offload.schedule.worker import Worker

__all__ = ["HybridStepper"]

logger = logging.getLogger(__name__)

BITS = 16


class HybridStepper:
    """Implements `Stepper` for chunks of several placements.

    Args:
        placements: of the first chunks, by index; chunks beyond them are stepped on the host.
        num_streamed: of the chunks placed as STREAM, how many are streamed at first; None: all. Divided ones do not count.
        divisions: of chunks placed as STREAM that both sides step, by index: elements from the front that are the host's.
        worker: shared by all, closed first.
        stream, device: None where no chunk is placed there.
        timeout_s: longest wait for a mark, in seconds.
        rebalances: whether chunks may change sides after the first steps.
        departs: whether steps end after ``step()``, see `flight`.
        room: for gradients that wait; None: no more than their queues are deep.
    """

    def __init__(
        self,
        *,
        host: HostStepper,
        stream: StreamStepper | None,
        device: DeviceStepper | None,
        placements: Sequence[Placement],
        worker: Worker,
        timeout_s: float,
        rebalances: bool,
        num_streamed: int | None = None,
        divisions: Mapping[int, int] | None = None,
        departs: bool = False,
        room: BackwardRoom | None = None,
    ) -> None:
        self._host, self._stream, self._worker = host, stream, worker
        self._rebalances = rebalances
        self._balancer: Balancer | None = None
        self._movable: dict[int, list[ParamRecord]] = {}
        self._first_streamed, self._num_streamed = num_streamed, 0
        self._divisions = Divisions(divisions or {})
        # In its first step a chunk is only observed: its gradients wait for step(). On the host they need no device memory.
        self._observed: set[int] = set()
        self._rest_stepped = self._is_reached = False
        self._ends: tuple[float, float] | None = None
        self._waited = (0.0, 0.0)
        self._parts: dict[Placement, HostStepper | StreamStepper | DeviceStepper] = {Placement.HOST: host}
        if stream is not None:
            self._parts[Placement.STREAM] = stream
        if device is not None:
            self._parts[Placement.DEVICE] = device
        self._steppers: Mapping[Placement, Stepper] = self._parts
        self._timeout_s, self._departs, self._room = timeout_s, departs, room
        self._marks: dict[int, Mark] = {}
        self._left: dict[int, int] = {}
        self._members: dict[int, int] = {}
        self._settling: tuple[float, Future[float], Future[float]] | None = None
        self._planned = tuple(placements)
        self._placement: dict[int, Placement] = {}
        self._chunk_of: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._is_underway = self._speculative = False

    @property
    def rule(self) -> Rule:
        """See `Stepper.rule`: the same for all placements."""
        return self._steppers[Placement.HOST].rule

    # State ------------------------------------------------------------------------------------------------------

    def add_chunks(
        self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """See `Stepper.add_chunks`. The host comes last: it waits for its kernels, which are being compiled meanwhile."""
        for placement, stepper in reversed(tuple(self._steppers.items())):
            mine = [chunk for chunk in chunks if self._planned_for(chunk) is placement]
            if mine:
                stepper.add_chunks(mine, records, masters)
            for chunk in mine:
                self._placement[chunk.index] = placement
                self._names[chunk.index] = chunk.name
                self._members[chunk.index] = len(chunk.spans)
                self._chunk_of |= {span.param: chunk.index for span in chunk.spans}
        self._make_movable(chunks, records)
        self._host.wait_started()

    def _make_movable(self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord]) -> None:
        """Let the host know streamed chunks; FP32 weights have no master there, and stay."""
        movable = [
            chunk
            for chunk in chunks
            if self._placement[chunk.index] is Placement.STREAM and chunk.kind.weight != "fp32"
        ]
        if not movable or self._stream is None:
            return
        state = {chunk.index: self._stream.chunk_state(chunk.index) for chunk in movable}
        sums = {chunk.index: self._stream.block_sums(chunk.index) for chunk in movable}
        self._host.adopt_chunks(movable, records, state, sums)
        for chunk in movable:
            self._placement[chunk.index] = Placement.HOST
            if not self._divisions.add(chunk):
                self._movable[chunk.index] = [records[span.param] for span in chunk.spans]
                self._observed.add(chunk.index)
        if not self._movable:
            return
        most, first = len(self._movable), self._first_streamed
        self._num_streamed = most if first is None else min(first, most)
        if self._rebalances:
            self._balancer = Balancer(most, self._num_streamed)

    @property
    def placements(self) -> Mapping[int, Placement]:
        """Where chunks are stepped now, by index; those whose first step is still to come: where they will be.

        Divided ones count as STREAM, where the plan has them.
        """
        return {
            **self._placement,
            **dict.fromkeys(self._observed | self._divisions.chunks, Placement.STREAM),
        }

    def state(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """See `Stepper.state`."""
        return self._stepper(record).state(record)

    def read_moments(self, record: ParamRecord, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Reduced.read_moments`: only chunks on the host have such."""
        return self._host.read_moments(record, names)

    def write_moments(self, record: ParamRecord, values: Mapping[str, torch.Tensor]) -> None:
        """See `Reduced.write_moments`."""
        self._host.write_moments(record, values)

    def load_weights(self, records: Sequence[ParamRecord], *, force: bool = False) -> set[int]:
        """See `Stepper.load_weights`."""
        self._recall(records)
        taken: set[int] = set()
        for stepper, mine in self._split(records):
            taken |= stepper.load_weights(mine, force=force)
        return taken

    def store_weights(self, records: Sequence[ParamRecord]) -> None:
        """See `Stepper.store_weights`."""
        self._recall(records)
        for stepper, mine in self._split(records):
            stepper.store_weights(mine)

    def _recall(self, records: Sequence[ParamRecord]) -> None:
        """Before the host writes masters of divided chunks: what has come in ahead of its trip would be old."""
        divided = [record for record in records if self._chunk_of[record.index] in self._divisions]
        if divided and self._stream is not None:
            self._stream.settle()
            self._stream.aim(divided)

    @property
    def host_bytes(self) -> int:
        """See `Stepper.host_bytes`."""
        return sum(stepper.host_bytes for stepper in self._steppers.values())

    # Gradients --------------------------------------------------------------------------------------------------

    def accumulate(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.accumulate`."""
        self._divisions.keep_whole(self._chunk_of[record.index])
        self._stepper(record).accumulate(record, gradient)

    def hold(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """See `Stepper.hold`."""
        if self._room is not None:
            self._room.observe(record.index)
        self._note_fire(record)
        self._divisions.keep_whole(self._chunk_of[record.index])
        self._stepper(record).hold(record, gradient)

    def step_early(self, record: ParamRecord, gradient: torch.Tensor, rows: Rows) -> None:
        """See `Stepper.step_early`. A step's first update, of whatever placement, sets streamed state in motion."""
        if not self._is_underway:
            self._is_underway = True
            if self._stream is not None:
                streamed = {c for c, p in self._placement.items() if p is Placement.STREAM}
                self._stream.expect(streamed, self._divisions.expected)
        self._note_fire(record)
        if self._room is not None:
            self._room.enter(record.index)
        chunk = self._chunk_of[record.index]
        parts = None if self._speculative else self._divisions.step(chunk)
        if parts is None or self._stream is None:
            self._stepper(record).step_early(record, gradient, rows)
        else:  # the host comes last: see `step_rest`
            self._stream.step_early(record, gradient, rows, parts.streamed)
            self._host.step_early(record, gradient, rows, parts.host)
        if self._departs:
            self._note_arrived(chunk)

    @property
    def stepped_early(self) -> list[str]:
        """See `Stepper.stepped_early`."""
        names = {name for stepper in self._steppers.values() for name in stepper.stepped_early}
        return [name for _, name in sorted(self._names.items()) if name in names]

    # The step ---------------------------------------------------------------------------------------------------

    def begin_step(self, *, speculative: bool) -> None:
        """See `Stepper.begin_step`; streamed and device state is not updated before the verdict of a speculative step."""
        self._speculative = speculative
        for stepper in self._steppers.values():
            stepper.begin_step(speculative=speculative)

    def commit(self) -> list[int]:
        """See `Stepper.commit`."""
        moved = [param for stepper in self._steppers.values() for param in stepper.commit()]
        for chunk in dict.fromkeys(self._chunk_of[param] for param in moved):
            if self._departs and not self._left.get(chunk, 1):  # all of it: `step_rest` has nothing to add
                self._marks[chunk] = self._mark(self._sides(chunk), chunk)
        return moved

    def roll_back(self, *, restore: bool) -> None:
        """See `Stepper.roll_back`."""
        for stepper in self._steppers.values():
            stepper.roll_back(restore=restore)

    def measure(self) -> None:
        """See `Stepper.measure`."""
        self._is_reached = True
        for stepper in self._steppers.values():
            stepper.measure()

    def step_rest(self, rows: Rows) -> None:
        """See `Stepper.step_rest`. The host comes last: its queue is bounded, and would hold the others up."""
        self._rest_stepped = self._is_reached = True
        for placement in (Placement.STREAM, Placement.DEVICE, Placement.HOST):
            if placement in self._steppers:
                self._steppers[placement].step_rest(rows)

    def block_sums(self, chunk: int) -> BlockSums:
        """See `Stepper.block_sums`. Of a chunk that both may step they are one array of both."""
        return self._steppers[self._placement[chunk]].block_sums(chunk)

    def finish(self) -> None:
        """See `Stepper.finish`."""
        self._time_ends()
        for stepper in self._steppers.values():
            stepper.finish()
        self._note_ends()

    def depart(self) -> Mapping[int, Mark]:
        """See `Departing.depart`. Chunks that were complete in backward, or committed, have been marked there."""
        rest: dict[tuple[Placement, ...], Mark] = {}
        for index in self._placement:
            if index not in self._marks:
                sides = self._sides(index)
                if sides not in rest:
                    rest[sides] = self._mark(sides)
                self._marks[index] = rest[sides]
        if self._stream is not None:
            self._stream.reap_later()
        self._time_ends()
        return dict(self._marks)

    def settle(self) -> None:
        """See `Departing.settle`."""
        self._host.finish()
        if self._stream is not None:
            self._stream.settle()
        self._note_ends()

    def _sides(self, chunk: int) -> tuple[Placement, ...]:
        """Who writes the chunk's weights in this step."""
        if self._divisions.is_stepped(chunk):
            return Placement.HOST, Placement.STREAM
        return (self._placement[chunk],)

    def _mark(self, sides: Collection[Placement], chunk: int | None = None) -> Mark:
        return Mark([self._parts[side].mark(chunk) for side in sides], self._worker, self._timeout_s)

    def _note_arrived(self, chunk: int) -> None:
        """Mark a chunk that is complete; what a speculative step wrote may be written again, so not before the verdict."""
        left = self._left[chunk] = self._left.get(chunk, self._members[chunk]) - 1
        if not left and not self._speculative:
            self._marks[chunk] = self._mark(self._sides(chunk), chunk)

    def _time_ends(self) -> None:
        """Have both sides tell when they are done with what they have."""
        if self._balancer is not None and self._is_underway and self._stream is not None:
            streamed = self._stream.settle_later()
            self._settling = time.perf_counter(), self._host.settle_later(), streamed

    def _note_ends(self) -> None:
        if self._settling is not None:
            start, *ends = self._settling
            late = (end.result(self._timeout_s) - start for end in ends)
            held = (now - before for now, before in zip(self._waits(), self._waited, strict=True))
            host_s, stream_s = (each + wait for each, wait in zip(late, held, strict=True))
            self._ends, self._settling = (host_s, stream_s), None

    def _waits(self) -> tuple[float, float]:
        return self._worker.waited_s, 0.0 if self._stream is None else self._stream.waited_s

    def end_step(self, keep_held: Collection[int]) -> None:
        """See `Stepper.end_step`."""
        if self._room is not None:
            self._room.end_step(is_dropped=not self._is_reached)
        for stepper in self._steppers.values():
            stepper.end_step(keep_held)
        if self._balancer is not None and self._ends is not None:
            self._num_streamed = self._balancer.note(*self._ends)
        if self._rest_stepped:
            self._observed.clear()
            self._rebalance(self._num_streamed)
        self._rest_stepped = self._is_reached = False
        self._is_underway, self._ends, self._settling = False, None, None
        self._waited = self._waits()
        self._divisions.end_step()
        self._marks.clear()
        self._left.clear()

    def _rebalance(self, num_streamed: int) -> None:
        """Stream the first so many of the movable chunks, taken in an order in which neighbours are far apart."""
        indices = list(self._movable)
        spread = sorted(indices, key=lambda index: _bit_reversed(indices.index(index)))
        for position, index in enumerate(spread):
            placement = Placement.STREAM if position < num_streamed else Placement.HOST
            if placement is not self._placement[index]:
                logger.info("%s: from now on %s", self._names[index], placement.value)
                self._placement[index] = placement
                self._host.aim(self._movable[index])
                if self._stream is not None:
                    self._stream.aim(self._movable[index])

    def close(self) -> None:
        """See `Stepper.close`. First whoever may still be using memory: the worker, the stream's thread, its copies."""
        self._worker.close()
        with ExitStack() as stack:
            for placement in (
                Placement.DEVICE,
                Placement.HOST,
                Placement.STREAM,
            ):  # the last one is closed first
                if placement in self._steppers:
                    stack.callback(self._steppers[placement].close)

    # Routes -----------------------------------------------------------------------------------------------------

    def _note_fire(self, record: ParamRecord) -> None:
        """Streamed state keeps the order of backward, also of chunks that the host steps for now."""
        chunk = self._chunk_of[record.index]
        if self._stream is not None and (chunk in self._movable or chunk in self._divisions):
            self._stream.note_fire(record.index)

    def _planned_for(self, chunk: Chunk) -> Placement:
        return self._planned[chunk.index] if chunk.index < len(self._planned) else Placement.HOST

    def _stepper(self, record: ParamRecord) -> Stepper:
        return self._steppers[self._placement[self._chunk_of[record.index]]]

    def _split(self, records: Sequence[ParamRecord]) -> Iterator[tuple[Stepper, list[ParamRecord]]]:
        for stepper in self._steppers.values():
            mine = [record for record in records if self._stepper(record) is stepper]
            if mine:
                yield stepper, mine


def _bit_reversed(number: int) -> int:
    return int(f"{number:0{BITS}b}"[::-1], 2)
