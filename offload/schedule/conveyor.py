"""Tiles of host state on their way through a few device buffers: in, work, out.

What overlaps is decided by two things that are given: the transport, whose copies are on streams of their own or in
line with the work, and the slots, of which several let the next tiles come in while one is worked on and the one
before it leaves. The calling thread only enqueues; it never waits for the device before `Conveyor.finish`.

Three orders hold for every slot, each by one wait of a stream:

* work begins when the tile has come in (``wait_on_stream``);
* a tile leaves when its work is done (the ready point that is recorded after it);
* the next tile comes in when the last one has left (``Slot.free``).

Tiles that will probably be worked on can be named before their trips exist (`Conveyor.expect`): they come in as slots
allow, so that inside backward the link does not stand still until a gradient is there. An expectation that fails costs
a copy, never a bit: a tile leaves only when it was worked on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from offload.report import StageClock
from offload.schedule.device_slots import Slot, Slots, SlotView
from offload.schedule.step_books import TileKey
from offload.schedule.stream_tiles import StreamTile
from offload.transfer.transport import Ready, Transfer, Transport

__all__ = ["Conveyor", "Trip"]


class Trip(NamedTuple):
    """One tile's way.

    `work` enqueues kernels on the current stream, once `after` has happened. `moves_state`: state comes in and leaves;
    `moves_sums`: squared sums leave. What `work` holds is kept alive until all has ended.
    """

    tile: StreamTile
    work: Callable[[SlotView], None]
    moves_state: bool
    moves_sums: bool
    after: Sequence[Ready] = ()


class _Inside(NamedTuple):
    """A tile in its slot, and its state's way there."""

    slot: Slot
    view: SlotView
    coming: Transfer | None


class _Travelling(NamedTuple):
    """What a tile has under way, and what must stay alive until it has ended."""

    coming: Transfer | None
    done: Ready | None
    leaving: Transfer | None
    trip: Trip | None


class Conveyor:
    """Takes tiles through the slots, in order. Used by one thread at a time.

    Args:
        stream: a CUDA stream for the work, or None for the calling thread's current one.
    """

    def __init__(
        self,
        transport: Transport,
        slots: Slots,
        clock: StageClock,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._transport, self._slots, self._clock, self._stream = transport, slots, clock, stream
        self._travelling: deque[_Travelling] = deque()
        self._expected: deque[StreamTile] = deque()
        self._early: dict[TileKey, _Inside] = {}
        self._seen: set[TileKey] = set()

    def fit(self, numel: int, num_arrays: int) -> None:
        """See `Slots.fit`. Call `finish` first."""
        self._slots.fit(numel, num_arrays)

    def expect(self, tiles: Iterable[StreamTile]) -> None:
        """Trips that move the state of `tiles` will come, probably in this order: bring them in as slots allow."""
        self._expected = deque(tiles)
        self._seen.clear()
        self._bring_expected()

    def run(self, trips: Iterable[Trip]) -> None:
        """Start all of `trips`; as many as slots allow come in before the first is worked on."""
        inside: deque[tuple[Trip, _Inside]] = deque()
        for trip in trips:
            inside.append((trip, self._bring(trip)))
            if len(inside) == self._slots.ahead:
                self._work(*inside.popleft())
        while inside:
            self._work(*inside.popleft())

    def mark(self) -> Ready:
        """The point at which the work of all trips so far is done."""
        with self._on_stream():
            return self._transport.record_ready()

    def reap(self, most: int) -> None:
        """Forget trips that have ended, and wait for the oldest until at most `most` are left."""
        while self._travelling:
            leaving = self._travelling[0].leaving
            if len(self._travelling) <= most and (leaving is None or not self._transport.is_done(leaving)):
                return
            self._wait_for_oldest()

    def finish(self) -> None:
        """Until all that was started has ended. In order, so that only the last one is really waited for."""
        while self._travelling:
            self._wait_for_oldest()
        self._forget_expected()
        while self._travelling:
            self._wait_for_oldest()
        self._slots.rewind()

    def recover(self) -> None:
        """Come to rest after an error; transfers that failed are forgotten."""
        self._transport.synchronize()
        self._forget_expected()
        self._travelling.clear()
        self._slots.release()
        self._slots.rewind()

    def close(self) -> None:
        """Free all buffers; the transport must be at rest."""
        self._forget_expected()
        self._travelling.clear()
        self._slots.clear()

    def _bring(self, trip: Trip) -> _Inside:
        if not trip.moves_state:
            return self._enter(trip.tile, moves_state=False)
        self._seen.add(trip.tile.key)
        inside = self._early.pop(trip.tile.key, None)
        return self._enter(trip.tile, moves_state=True) if inside is None else inside

    def _bring_expected(self) -> None:
        """One slot stays idle, for a tile that nobody expected."""
        while self._expected and self._slots.num_idle > 1:
            tile = self._expected.popleft()
            if tile.key not in self._seen and tile.key not in self._early:
                self._early[tile.key] = self._enter(tile, moves_state=True)

    def _enter(self, tile: StreamTile, *, moves_state: bool) -> _Inside:
        if not self._slots.num_idle:
            self._evict()
        slot = self._slots.take(tile)
        view = slot.view(tile)
        coming = None
        if moves_state and view.copies_in:
            start_s = time.perf_counter()
            with self._clock.span("issue H2D"):
                coming = self._transport.issue_to_device(view.copies_in, [slot.free])
            self._clock.count("bytes_to_device", coming.num_bytes)
            self._clock.follow("state H2D", coming, start_s)
        return _Inside(slot, view, coming)

    def _evict(self) -> None:
        """Give the slot of the tile that was expected last to another one; its state on the host is untouched."""
        _, (slot, _, coming) = self._early.popitem()
        if coming is not None:
            slot.free = coming.signal or slot.free
            self._travelling.append(_Travelling(coming, None, None, None))
        self._slots.give(slot)

    def _forget_expected(self) -> None:
        """What has come in for nothing leaves no trace; its copies are waited for like all others."""
        self._expected.clear()
        while self._early:
            self._evict()

    def _work(self, trip: Trip, inside: _Inside) -> None:
        slot, view, coming = inside
        with self._on_stream():
            if coming is not None:
                self._transport.wait_on_stream(coming)
            else:
                slot.free.wait()
            for ready in trip.after:
                ready.wait()
            with self._clock.span("device step", on_device=True):
                trip.work(view)
            done = self._transport.record_ready()
        copies = (*(view.copies_out if trip.moves_state else ()), *(view.sums_out if trip.moves_sums else ()))
        slot.free, leaving = done, None
        if copies:
            start_s = time.perf_counter()
            with self._clock.span("issue D2H"):
                leaving = self._transport.issue_to_host(copies, [done])
            self._clock.count("bytes_to_host", leaving.num_bytes)
            self._clock.follow("state D2H", leaving, start_s)
            slot.free = leaving.signal or done
        self._travelling.append(_Travelling(coming, done, leaving, trip))
        self._slots.give(slot)
        self._bring_expected()

    def _wait_for_oldest(self) -> None:
        coming, done, leaving, _ = self._travelling[0]
        with self._clock.span("wait_trip"):
            if (
                leaving is None and done is not None
            ):  # nothing leaves, and what the work reads must outlive it all the same
                done.synchronize()
            for transfer in (coming, leaving):
                if transfer is not None:
                    self._transport.wait(transfer)
        self._travelling.popleft()

    def _on_stream(self) -> AbstractContextManager[object]:
        stream = self._stream
        is_current = stream is None or stream == torch.cuda.current_stream(stream.device)
        return nullcontext() if is_current else torch.cuda.stream(stream)
