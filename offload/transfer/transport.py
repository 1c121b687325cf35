"""The protocol behind which all copies between device and host happen.

Verbs come in pairs: ``issue_*`` returns a :class:`Transfer`, ``wait`` consumes it. A lifecycle::

    ready = transport.record_ready()                            # in the hook: the gradient is there
    transfer = transport.issue_to_host(copies, after=[ready])   # on the worker: asynchronous
    transport.wait(transfer)                                    # only now may destinations be read

Rules for callers, the same for every transport:

* Sources are not written, and destinations neither read nor written, between issue and wait.
* ``after`` names everything on the device that must have happened first: whatever computes a source and, for
  a device destination, its allocation and the last reader of its old content. The end of an earlier transfer
  (``Transfer.signal``) may be among it.
* Copies of one direction run in the order of their issue; the two directions are not ordered with each other.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from offload.errors import ConfigError

__all__ = [
    "Copy",
    "Ready",
    "Signal",
    "Transfer",
    "TransferState",
    "Transport",
    "check_copies",
    "have_passed",
    "record_time",
]


class Copy(NamedTuple):
    """One copy of a whole tensor: both sides 1-D, contiguous, of one dtype and size."""

    dst: torch.Tensor
    src: torch.Tensor


class Ready(Protocol):
    """A point on a compute stream, from ``record_ready``. Opaque; may be used in many issues."""

    def query(self) -> bool:
        """Whether the stream has passed this point. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the stream has passed this point."""
        ...

    def wait(self) -> None:
        """Make the current stream wait for this point; the calling thread goes on."""
        ...


def have_passed(points: Sequence[Ready]) -> bool:
    """Whether the device has passed all of them; an error belongs to the work that follows, which raises it."""
    try:
        return all(point.query() for point in points)
    except Exception:  # noqa: BLE001
        return True


class Signal(Protocol):
    """The end of a transfer. Has the shape of ``torch.cuda.Event``, which fakes imitate."""

    def query(self) -> bool:
        """Whether the transfer has ended, well or not. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the end; raise what made the transfer fail."""
        ...

    def wait(self) -> None:
        """Make the current stream wait for the end; the calling thread goes on."""
        ...


class TransferState(enum.Enum):
    """Lifecycle of a :class:`Transfer`. Only :meth:`Transfer.finish` changes it."""

    #: The copies may be running. Both sides are kept alive, neither may be touched.
    ISSUED = "issued"
    #: ``wait`` returned (or raised the transfer's error): references are gone, the transfer is inert.
    DONE = "done"


class Transfer:
    """The one owner of the tensors that are crossing.

    Holds both sides until waited for, so that no allocator can hand their memory to somebody else while the
    copy runs (see Note [Who keeps a crossing tensor alive] in ``cuda.py``).
    """

    __slots__ = ("_copies", "_signal", "num_bytes", "on_end", "times")

    def __init__(self, copies: Sequence[Copy], signal: Signal, num_bytes: int) -> None:
        """Take ownership of ``copies``, whose end ``signal`` tells."""
        self._copies: tuple[Copy, ...] = tuple(copies)
        self._signal: Signal | None = signal
        self.num_bytes = num_bytes
        #: Called once, with the transfer, when the host has seen its end: for whoever watches copies.
        self.on_end: Callable[[Transfer], None] | None = None
        #: CUDA events with times before and after the copies, where the transport was asked for them.
        self.times: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @property
    def state(self) -> TransferState:
        """Where in its life the transfer is."""
        return TransferState.DONE if self._signal is None else TransferState.ISSUED

    @property
    def signal(self) -> Signal | None:
        """What tells the end, for transports and for ``after`` of other issues; None once DONE."""
        return self._signal

    def note_end(self) -> None:
        """The host has seen the end. For transports, in ``wait``. May be repeated."""
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self)

    def finish(self) -> None:
        """ISSUED → DONE: let go of tensors and signal. After the end; may be repeated."""
        self.note_end()
        self._signal = None
        self._copies = ()

    def __repr__(self) -> str:
        """State and size, for messages."""
        return f"Transfer({self.state.value}, {self.num_bytes} bytes)"


class Transport(Protocol):
    """Asynchronous copies between one device and the host. Every method may be called from any thread."""

    @property
    def device(self) -> torch.device:
        """The device side."""
        ...

    def attach_thread(self) -> None:
        """Tell that the calling thread does nothing on the device but through this transport: calls are cheaper then."""
        ...

    def record_ready(self) -> Ready:
        """Mark the present end of the calling thread's current stream. Costs microseconds: made for hooks."""
        ...

    def issue_to_host(self, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        """Start copying device sources to host destinations, once all of ``after`` has happened."""
        ...

    def issue_to_device(self, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        """Start copying host sources to device destinations, once all of ``after`` has happened."""
        ...

    def is_done(self, transfer: Transfer) -> bool:
        """Whether ``wait`` would return (or raise) at once. Never blocks, releases nothing."""
        ...

    def wait(self, transfer: Transfer, *, release: bool = True) -> None:
        """Block the calling thread until the end, then release the references. Waiting again does nothing.

        Args:
            release: False leaves that to `Transfer.finish`. Destroying a tensor gives the interpreter's lock away, and a
                thread that has a kernel to start gets it back only when somebody else has had it.
        """
        ...

    def wait_on_stream(self, transfer: Transfer) -> None:
        """Make the current stream wait for the end. The references are kept until ``wait``."""
        ...

    def synchronize(self) -> None:
        """Block until all that was issued has ended. Consumes no transfer and raises no transfer's error."""
        ...

    def close(self) -> None:
        """Let everything issued end, then release streams and threads. Closing twice is fine."""
        ...


def record_time(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The present end of `stream`, as an event that tells its time: for `Transfer.times`."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def check_copies(copies: Sequence[Copy]) -> int:
    """Total bytes of ``copies``, or :class:`ConfigError` at the first that is not a plain copy.

    ``Tensor.copy_`` would broadcast or cast without a word.
    """
    num_bytes = 0
    for dst, src in copies:
        if dst.dtype != src.dtype or dst.shape != src.shape or dst.dim() != 1:
            raise ConfigError(
                f"a copy needs two 1-D tensors of one dtype and size, got {src.dtype} {tuple(src.shape)} → "
                f"{dst.dtype} {tuple(dst.shape)}: pass flat views"
            )
        if not (dst.is_contiguous() and src.is_contiguous()):
            raise ConfigError(f"a copy needs contiguous tensors, got strides {src.stride()} → {dst.stride()}")
        num_bytes += src.nbytes
    return num_bytes
