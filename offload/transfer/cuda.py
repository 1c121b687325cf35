"""Copies on their own CUDA streams.

Two streams, one per direction, because PCIe carries both at once: 96 GB/s against 55 for either alone. Copies and events
go to the driver without torch, see `offload.driver`: a copy leaves the version of its destination as it is.

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
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from offload.driver import NO_CONTEXT, NOT_READY, check, driver
from offload.errors import ClosedError, ConfigError
from offload.transfer.deadline import run_within
from offload.transfer.pinned import is_pinned
from offload.transfer.transport import Copy, Ready, Signal, Transfer, check_copies, record_time

__all__ = ["CudaTransport"]


class CudaTransport:
    """The real transport: a device-to-host and a host-to-device stream, and pools of events.

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
        self._timeout_s = timeout_s
        self._to_host = torch.cuda.Stream(self.device)
        self._to_device = torch.cuda.Stream(self.device)
        self._ready_events = _EventPool(blocking=False)
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
        self._to_host.query()  # setting the device need not bind its context to the thread, a call of the runtime does
        self._attached_threads |= {threading.get_ident()}

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

    def _issue(self, stream: torch.cuda.Stream, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        if self._closed:
            raise ClosedError("the transport was closed: no copy can be issued any more")
        if threading.get_ident() in self._attached_threads:
            return self._enqueue(stream, copies, after)
        check_copies(copies)
        with torch.cuda.stream(stream):
            stream.query()  # a call of the runtime makes the context current, which the driver needs
            return self._enqueue(stream, copies, after)

    def _enqueue(self, stream: torch.cuda.Stream, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        """Waits, copies and the end's event."""
        handle, num_bytes = stream.cuda_stream, 0
        end = self._end_events.take()
        for ready in after:
            _own(ready).hold_back(stream)
        begun = record_time(stream) if self.is_timing else None
        for dst, src in copies:
            if src.nbytes:
                to, source = dst.data_ptr(), src.data_ptr()
                fast = is_pinned(to if stream is self._to_host else source)
                copy = driver().copy if fast else driver().slow_copy
                check(copy(to, source, src.nbytes, handle), "a copy")
                num_bytes += src.nbytes
        times = None if begun is None else (begun, record_time(stream))
        end.record(stream)
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
                self._to_host.synchronize()
                self._to_device.synchronize()

        run_within(self._timeout_s, drain, f"copies on {self.device}")

    def close(self) -> None:
        """Drain the streams. Closing twice is fine; transfers issued before can still be waited for."""
        if self._closed:
            return
        self._closed = True
        self.synchronize()


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
