"""Copies on their own CUDA streams.

One for each direction, because PCIe carries both at once (96 GB/s against 55 for either alone), or two that take turns.
Copies and events go to the driver without torch, see `offload.driver`: a copy leaves the version of its destination as
it is.

Note [Who keeps a crossing tensor alive]
A gradient is freed in its hook while the copy stream still reads it, and the caching allocator, which knows
only the stream of allocation, would hand the memory to the next kernel. ``record_stream`` would prevent that,
but the allocator looks at its events only when it allocates again: memory comes back late, by an amount that
changes from run to run, and cannot be bounded by the ring. So the :class:`Transfer` holds the tensors, and
they go, by plain reference counting, when the host has seen the copy end: with that, memory in flight is
bounded by what was issued.

Note [Deadlines]
The host cannot wait for a CUDA event with a deadline, other than by polling. ``wait`` therefore has none. It
is called on the worker, and the public calls that wait for the worker have the deadline. ``synchronize`` and
``close``, which are called on the user's thread, wait on a helper thread and so do have one (and stay open to
Ctrl-C).

Note [Turns]
A copy engine stays with a stream until it has no copy that can begin: whatever other streams have for the same direction
waits for the end of the burst, however small it is. State that is streamed comes in bursts of gigabytes, and behind them
waited gradients and weights of the host's chunks, and, in the middle of backward, the pointers that FSDP2's kernels get
by a copy: the device's computation stood still for it. So a direction may have two streams that take turns: after
`TURN_BYTES` the other one goes on, when the event of the first has passed. At that moment the engine has nothing of
ours that can begin, and others get in. Order stays what it was, and so does the rate, within 2 % (``bench_turns.py``).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from offload.driver import NO_CONTEXT, NOT_READY, check, driver
from offload.errors import ClosedError, ConfigError
from offload.streams import queue_advice
from offload.transfer.deadline import run_within
from offload.transfer.pinned import is_pinned
from offload.transfer.transport import Copy, Ready, Signal, Transfer, check_copies, record_time

__all__ = ["TURN_BYTES", "CudaTransport"]

logger = logging.getLogger(__name__)

TURN_BYTES = 32 * 2**20
"""What a stream copies before another one gets its turn: 0.6 ms of a PCIe 5 link."""


class CudaTransport:
    """The real transport: device-to-host and host-to-device streams, and pools of events.

    Host sides should be slab views that are registered: from pageable memory CUDA copies through a buffer of
    its own, at 7 GB/s, and blocks the issuing thread; the result is right all the same.
    """

    def __init__(self, device: torch.device | str | int, timeout_s: float = 600.0) -> None:
        """Create the streams, once.

        Args:
            device: A CUDA device; one without an index is the current one.
            timeout_s: Longest wait of ``synchronize`` and ``close``. See Note [Deadlines] for ``wait``.
        """
        self.device = _with_index(device)
        if advice := queue_advice():
            _warn_once(advice)
        self._timeout_s = timeout_s
        self._ready_events = _EventPool(blocking=False)
        self._to_host = _Lane(self.device, self._ready_events)
        self._to_device = _Lane(self.device, self._ready_events)
        # Blocking events sleep in the driver; others spin on a core that the update kernel needs.
        self._end_events = _EventPool(blocking=True)
        self._attached_threads: frozenset[int] = frozenset()
        self._closed = False
        #: Whether transfers get `Transfer.times`, which cost two more events each.
        self.is_timing = False

    def attach_thread(self) -> None:
        """Make the calling thread one that issues and waits, tile after tile, and does nothing else on the device.

        Its device then belongs to this transport, which saves the guards around each call; and it checks no copies, as the
        host transports do under the same schedule.
        """
        torch.cuda.set_device(self.device)
        # Setting the device need not bind its context to the thread, a call of the runtime does.
        self._to_host.stream.query()
        self._attached_threads |= {threading.get_ident()}

    def take_turns(self) -> None:
        """From now on large copies let those of other streams in between. See Note [Turns]."""
        self._to_host.take_turns()
        self._to_device.take_turns()

    def record_ready(self) -> Ready:
        """Mark the present end of the calling thread's current stream on the device."""
        ready = self._ready_events.take()
        ready.record(torch.cuda.current_stream(self.device))
        return ready

    def issue_to_host(self, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        """Start device-to-host copies behind ``after``; earlier transfers of this direction end first."""
        return self._issue(self._to_host, copies, after)

    def issue_to_device(self, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        """Start host-to-device copies behind ``after``; earlier transfers of this direction end first."""
        return self._issue(self._to_device, copies, after)

    def _issue(self, lane: _Lane, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        if self._closed:
            raise ClosedError("the transport was closed: no copy can be issued any more")
        if threading.get_ident() in self._attached_threads:
            with lane.lock:
                return self._enqueue(lane, copies, after)
        check_copies(copies)
        with lane.lock, torch.cuda.stream(lane.stream):
            lane.stream.query()  # a call of the runtime makes the context current, which the driver needs
            return self._enqueue(lane, copies, after)

    def _enqueue(self, lane: _Lane, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        """Waits, copies and the end's event."""
        num_bytes = 0
        end = self._end_events.take()
        for ready in after:
            _own(ready).hold_back(lane.stream)
        begun = record_time(lane.stream) if self.is_timing else None
        for dst, src in copies:
            if src.nbytes:
                to, source = dst.data_ptr(), src.data_ptr()
                fast = is_pinned(to if lane is self._to_host else source)
                copy = driver().copy if fast else driver().slow_copy
                for start, length in lane.pieces(src.nbytes):
                    check(copy(to + start, source + start, length, lane.stream.cuda_stream), "a copy")
                    lane.note(length)
                num_bytes += src.nbytes
        times = None if begun is None else (begun, record_time(lane.stream))
        end.record(lane.stream)
        transfer = Transfer(copies, end, num_bytes)
        transfer.times = times
        return transfer

    def is_done(self, transfer: Transfer) -> bool:
        """Whether the copies have ended. Never blocks."""
        signal = transfer.signal
        with torch.cuda.device(self.device):
            return signal is None or signal.query()

    def wait(self, transfer: Transfer, *, release: bool = True) -> None:
        """Block the calling thread, without the GIL, until the copies have ended; then drop the tensors, or leave them
        to ``finish``."""
        signal = transfer.signal
        if signal is None:
            return
        if threading.get_ident() in self._attached_threads:
            _block_on(signal)
        else:
            # The guard, because a thread's first CUDA call would else open a context on GPU 0, 0.5 GB per rank.
            with torch.cuda.device(self.device):
                _block_on(signal)
        transfer.note_end()
        if release:
            transfer.finish()

    def wait_on_stream(self, transfer: Transfer) -> None:
        """Make the current stream wait. The tensors stay with ``transfer`` until ``wait``."""
        if (signal := transfer.signal) is not None:
            _own(signal).hold_back(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Block until both streams are empty, at most ``timeout_s``."""

        def drain() -> None:
            with torch.cuda.device(self.device):
                for stream in (*self._to_host.streams, *self._to_device.streams):
                    stream.synchronize()

        run_within(self._timeout_s, drain, f"copies on {self.device}")

    def close(self) -> None:
        """Drain the streams. Closing twice is fine; transfers issued before can still be waited for."""
        if self._closed:
            return
        self._closed = True
        self.synchronize()


class _Lane:
    """One direction: a stream, or two that take turns, of which one waits for the other at any time. See Note [Turns].

    `lock` is held while copies are issued: each turn is passed on by whoever issued the copy that ended it.
    """

    def __init__(self, device: torch.device, events: _EventPool) -> None:
        self.streams = [torch.cuda.Stream(device)]
        self.lock = threading.Lock()
        self._device, self._events = device, events
        self._turn = self._num_bytes = 0

    @property
    def stream(self) -> torch.cuda.Stream:
        """The one whose turn it is: behind all that was issued before."""
        return self.streams[self._turn]

    def take_turns(self) -> None:
        """See `CudaTransport.take_turns`."""
        if len(self.streams) == 1:
            self.streams.append(torch.cuda.Stream(self._device))

    def pieces(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Where to cut a copy: starts and lengths in bytes."""
        longest = num_bytes if len(self.streams) == 1 else TURN_BYTES
        return ((start, min(longest, num_bytes - start)) for start in range(0, num_bytes, longest))

    def note(self, num_bytes: int) -> None:
        """So much was issued on `stream`: pass the turn on, if it was long enough."""
        self._num_bytes += num_bytes
        if len(self.streams) > 1 and self._num_bytes >= TURN_BYTES:
            passed = self._events.take()
            passed.record(self.stream)
            # First: whatever ends this here, an error of the driver or Ctrl-C, no turn goes to a stream that does not wait.
            passed.hold_back(self.streams[1 - self._turn])
            self._turn, self._num_bytes = 1 - self._turn, 0


class _PooledEvent:
    """An event on loan from its pool: it goes back when the last reference to the loan goes.

    So it cannot go back twice, nor while some thread still waits for it. Recording it anew is safe once the
    waits are *enqueued*: a stream waits for the recording that was current at that moment.
    """

    __slots__ = ("_event", "_handle", "_pool")

    def __init__(self, event: torch.cuda.Event, pool: deque[torch.cuda.Event]) -> None:
        self._event = event
        self._handle = event.cuda_event  # 0 before torch has recorded it once
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append(self._event)

    def record(self, stream: torch.cuda.Stream) -> None:
        direct = self._handle and _is_told_apart(stream)
        code = driver().record(self._handle, stream.cuda_stream) if direct else NO_CONTEXT
        if code == NO_CONTEXT:
            self._event.record(stream)
            self._handle = self._event.cuda_event
        else:
            check(code, "an event")

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for the event."""
        direct = _is_told_apart(stream)
        code = driver().hold_back(stream.cuda_stream, self._handle, 0) if direct else NO_CONTEXT
        if code == NO_CONTEXT:
            self._event.wait(stream)
        else:
            check(code, "a wait")

    def query(self) -> bool:
        code = driver().query(self._handle)
        if code == NO_CONTEXT:
            return bool(self._event.query())
        if code != NOT_READY:
            check(code, "a query")
        return code != NOT_READY

    def synchronize(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        self.hold_back(
            torch.cuda.current_stream(self._event.device)
        )  # the thread's device may be another one


class _EventPool:
    """Events of one kind. Making one costs a driver call; hooks must not pay for it each time."""

    def __init__(self, *, blocking: bool) -> None:
        self._blocking = blocking
        # A deque's append and popleft are atomic: loans end on whatever thread drops them.
        self._idle: deque[torch.cuda.Event] = deque()

    def take(self) -> _PooledEvent:
        try:
            event = self._idle.popleft()
        except IndexError:
            event = torch.cuda.Event(blocking=self._blocking)
        return _PooledEvent(event, self._idle)


@functools.cache
def _warn_once(advice: str) -> None:
    logger.warning("%s", advice)


def _is_told_apart(stream: torch.cuda.Stream) -> bool:
    """Whether its handle says to the driver which stream it is: a default stream's is 0 on every device."""
    return stream.cuda_stream != 0 or stream.device.index == torch.cuda.current_device()


def _block_on(signal: Signal) -> None:
    if not signal.query():  # often it has ended by now: then no system call
        signal.synchronize()


def _own(signal: object) -> _PooledEvent:
    if not isinstance(signal, _PooledEvent):
        raise ConfigError(
            f"{type(signal).__name__} does not come from a CudaTransport: transports must not be mixed"
        )
    return signal


def _with_index(device: torch.device | str | int) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        raise ConfigError(f"CudaTransport needs a CUDA device, got {device}: use HostTransport for the CPU")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
