"""Copies without streams: what the modes that overlap nothing use, on a GPU too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.transfer.deadline import synchronize_device
from offload.transfer.host import HostTransport, LaneName
from offload.transfer.transport import Copy, Ready, Transfer, check_copies, record_time

__all__ = ["InlineTransport"]


class InlineTransport(HostTransport):
    """Copies on the calling thread's current stream, in line with all that is on it: no stream and no event of its own.

    On a CUDA device, pinned copies are asynchronous to the calling thread. Everything must be issued, computed and
    waited for on one stream.
    """

    def __init__(self, device: torch.device | str, timeout_s: float = 600.0) -> None:
        """``device``: any; on the CPU this is a :class:`HostTransport`. ``timeout_s``: longest wait for a GPU."""
        super().__init__(device)
        self._timeout_s = timeout_s
        self._num_issued = 0
        self._num_ended = 0
        #: See `CudaTransport.is_timing`.
        self.is_timing = False

    def _issue(self, lane: LaneName, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        if self.device.type != "cuda":
            return super()._issue(lane, copies, after)
        self._check_open()
        num_bytes = check_copies(copies)
        stream = torch.cuda.current_stream(self.device)
        begun = record_time(stream) if self.is_timing else None
        with torch.no_grad():
            for dst, src in copies:
                dst.copy_(src, non_blocking=True)
        self._num_issued += 1
        transfer = Transfer(copies, _InLine(self, self._num_issued), num_bytes)
        transfer.times = None if begun is None else (begun, record_time(stream))
        return transfer

    def has_ended(self, index: int) -> bool:
        """Whether the ``index``-th transfer is known to have ended."""
        return index <= self._num_ended

    def synchronize(self) -> None:
        """Block until the device is idle: then all that was issued has ended."""
        if self._num_ended < self._num_issued:
            synchronize_device(self.device, self._timeout_s)
            self._num_ended = self._num_issued

    def close(self) -> None:
        """Let everything end; then refuse further issues. Closing twice is fine."""
        self.synchronize()
        super().close()


class _InLine:
    """The end of one of `InlineTransport`'s transfers: seen when the device has been waited for."""

    __slots__ = ("_index", "_transport")

    def __init__(self, transport: InlineTransport, index: int) -> None:
        self._transport = transport
        self._index = index

    def query(self) -> bool:
        return self._transport.has_ended(self._index)

    def synchronize(self) -> None:
        if not self.query():
            self._transport.synchronize()

    def wait(self) -> None:
        """Whatever is enqueued next runs after the transfer anyway."""
