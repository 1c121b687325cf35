"""Transports without a GPU: a plain one for parameters on the CPU, and the fake that proves races.

:class:`LaneTransport` is asynchronous like CUDA's streams, but its order and failures are in the hands of a
test: a destination holds garbage until its copy has run, and a held lane runs nothing until it is released. A
schedule that forgets a wait then computes with NaN every time, not once in a thousand runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch

from offload.errors import ClosedError, ConfigError
from offload.transfer.lane import Lane, PendingCopy
from offload.transfer.transport import Copy, Ready, Transfer, check_copies

__all__ = ["POISON_BYTE", "HostTransport", "LaneName", "LaneTransport"]

#: Every floating dtype of this library reads a run of these bytes as NaN.
POISON_BYTE = 0xFF

LaneName = Literal["to_host", "to_device"]
_LANE_NAMES: tuple[LaneName, ...] = ("to_host", "to_device")
_TO_HOST_ONLY: tuple[LaneName, ...] = ("to_host",)


class _Passed:
    """A signal that has always been given: on the CPU, what a thread has done is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def wait(self) -> None:
        return


_PASSED = _Passed()


class HostTransport:
    """Both sides are host memory: copies run at issue, so a transfer has ended before it is returned."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """``device`` is what :attr:`device` shows."""
        self.device = torch.device(device)
        self._closed = False

    def attach_thread(self) -> None:
        """Any thread is as good as another."""

    def record_ready(self) -> Ready:
        """Nothing to mark: the calling thread's work is done already."""
        return _PASSED

    def issue_to_host(self, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        """Copy now, "device" to host."""
        return self._issue("to_host", copies, after)

    def issue_to_device(self, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        """Copy now, host to "device"."""
        return self._issue("to_device", copies, after)

    def _issue(self, lane: LaneName, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        self._check_open()
        num_bytes = check_copies(copies)
        _run_copies(copies)
        return Transfer(copies, _PASSED, num_bytes)

    def is_done(self, transfer: Transfer) -> bool:
        """Whether ``wait`` would return at once."""
        signal = transfer.signal
        return signal is None or signal.query()

    def wait(self, transfer: Transfer, *, release: bool = True) -> None:
        """Block until the end, release the references unless told not to. A failed copy raises here, once."""
        signal = transfer.signal
        if signal is None:
            return
        try:
            signal.synchronize()
        except BaseException:
            if signal.query():  # not after a deadline: the copy may still run, so its tensors must live on
                transfer.finish()
            raise
        transfer.note_end()
        if release:
            transfer.finish()

    def wait_on_stream(self, transfer: Transfer) -> None:
        """The calling thread is the only "stream" here, so it blocks; the references are kept."""
        if (signal := transfer.signal) is not None:
            signal.wait()

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Refuse further issues. Closing twice is fine."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the transport was closed: no copy can be issued any more")


class LaneTransport(HostTransport):
    """A fake of CUDA's copy streams: one thread, a *lane*, per direction, asynchronous to the caller."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        delay: Callable[[str, int], float] | None = None,
        fail: Callable[[str, int], BaseException | None] | None = None,
        poison: Collection[LaneName] = _TO_HOST_ONLY,
        timeout_s: float = 30.0,
    ) -> None:
        """Start the two lanes.

        Args:
            device: What :attr:`device` shows.
            delay: ``(lane, index)`` → seconds to wait before that lane's ``index``-th transfer (from 0).
            fail: ``(lane, index)`` → the error with which that transfer ends instead of copying, or None. It
                is raised by ``wait`` and ``wait_on_stream``.
            poison: Lanes whose destinations are filled with :data:`POISON_BYTE` at issue. ``"to_device"`` may
                be added where nobody reads the old weights until the new ones are there.
            timeout_s: Longest wait, then :class:`DeadlineError`.
        """
        super().__init__(device)
        self._delay = delay
        self._fail = fail
        self._poison = frozenset(poison)
        if not self._poison <= set(_LANE_NAMES):
            raise ConfigError(f"poison={sorted(self._poison)} names unknown lanes: use {_LANE_NAMES}")
        self._lanes = {name: Lane(name, timeout_s) for name in _LANE_NAMES}
        self._counts = dict.fromkeys(_LANE_NAMES, 0)
        self._issuing = threading.Lock()

    def hold(self, lane: LaneName) -> None:
        """Start no further copy of ``lane`` until :meth:`release`: certain, where a delay is only likely."""
        self._lanes[lane].hold()

    def release(self, lane: LaneName, num_transfers: int | None = None) -> None:
        """Let a held lane run again: the next ``num_transfers`` transfers only, or freely if None."""
        self._lanes[lane].release(num_transfers)

    def _issue(self, lane: LaneName, copies: Sequence[Copy], after: Sequence[Ready]) -> Transfer:
        num_bytes = check_copies(copies)
        before = [ready for ready in after if isinstance(ready, PendingCopy)]
        with self._issuing:  # the index a test sees is the order in which the lane runs
            self._check_open()
            if lane in self._poison and all(copy.query() for copy in before):  # else somebody reads it still
                _fill_with_poison(copies)
            index = self._counts[lane]
            self._counts[lane] += 1
            delay_s = self._delay(lane, index) if self._delay else 0.0
            job = PendingCopy(self._runner(lane, index, copies, before), delay_s, self._lanes[lane])
            self._lanes[lane].put(job)
        return Transfer(copies, job, num_bytes)

    def _runner(
        self, lane: LaneName, index: int, copies: Sequence[Copy], before: Sequence[PendingCopy]
    ) -> Callable[[], None]:
        def run() -> None:
            for copy in before:
                copy.await_end()
            if self._fail and (error := self._fail(lane, index)) is not None:
                raise error
            _run_copies(copies)

        return run

    def synchronize(self) -> None:
        """Block until both lanes are empty, or :class:`DeadlineError`."""
        for lane in self._lanes.values():
            lane.synchronize()

    def close(self) -> None:
        """Run what was issued, held lanes included, without its delays; then end both threads."""
        with self._issuing:
            self._closed = True
        for lane in self._lanes.values():
            lane.close()


def _run_copies(copies: Sequence[Copy]) -> None:
    """Copy every pair, now. Without autograd: a destination may be a leaf that requires a gradient."""
    with torch.no_grad():
        for dst, src in copies:
            dst.copy_(src)


def _fill_with_poison(copies: Sequence[Copy]) -> None:
    with torch.no_grad():
        for dst, _ in copies:
            dst.detach().view(torch.uint8).fill_(POISON_BYTE)
