"""A trace of what happened when, in rows: JSON of the Chrome trace format, for ui.perfetto.dev or chrome://tracing.

`StageClock` passes on what it times. A row belongs to one kind of work on one thread, so that its spans follow each
other or nest; rows of copies belong to a direction. Times are ``time.perf_counter``'s, which all processes of a Linux
host share: traces of several ranks can be laid side by side.

Note [Times of copies]
The host knows when it issued a copy, and when it saw that it had ended. Copies of one direction run in the order of
their issue, so each begins no sooner than the one before it ended, and had ended when a later one was seen to have
ended; that is how they are drawn. CUDA transports have events with times around the copies of a traced step, and then
those are drawn.

The format: "Trace Event Format", Google, 2016: ``ph`` X is a complete event, M names rows; ``ts``, ``dur`` in µs.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import torch.distributed as dist

from offload.errors import ConfigError
from offload.transfer.transport import Transfer

__all__ = ["MAX_SPANS", "VARIABLE", "Trace"]

logger = logging.getLogger(__name__)

VARIABLE = "OFFLOAD_TRACE"
"""Environment variable: where a trace of everything from construction to ``close()`` is written."""

MAX_SPANS = 1_000_000
"""Spans that one trace keeps (about 200 bytes each); what comes later is counted only."""

RENEWAL_S = 10.0
"""CUDA tells times as float32 milliseconds since an event of ours, which must not be too long ago."""

ROW_OF = {
    "hook": "backward hooks",
    "issue D2H": "issue copies",
    "issue H2D": "issue copies",
    "issue": "issue copies",
    "D2H": "D2H",
    "H2D": "H2D",
    "state D2H": "D2H state",
    "state H2D": "H2D state",
    "kernel": "kernel",
    "norm": "kernel",
    "accumulate": "kernel",
    "device step": "device step",
    "verdict": "verdict",
    "roll back": "verdict",
    "step": "step()",
}
"""Row by name of a span, in the order in which rows are shown; names with ``wait`` have rows of their own."""

WAITS = "waits"
_ORDER = [*dict.fromkeys(ROW_OF.values()), WAITS]


_Lane = tuple[str, int]
"""Name and number of a thread or stream."""


class _Span(NamedTuple):
    """Seconds of ``time.perf_counter``; `lane`: None for copies, whose rows are directions.

    `issued`: 0 for what threads do; from 1 on for copies, in order; -1 for what a stream does.
    """

    name: str
    lane: _Lane | None
    start: float
    end: float
    issued: int
    details: dict[str, Any] | None


class Trace:
    """Spans from any thread, and the file they go to. The file is whole or absent.

    Args:
        path: of the file; among several ranks ``-rank1`` and so on is put before its suffix.
        device: what `span` may be asked to time; None: there is none.
        numbered: take ``-2``, ``-3``... where another trace of this process is being written to `path`.
        asked_by: who named the path, for messages.

    Raises:
        ConfigError: the file cannot be written, or another trace is being written to it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: torch.device | None = None,
        numbered: bool = False,
        asked_by: str = "profile(path)",
    ) -> None:
        self.rank, ranks = _rank()
        self._pid = os.getpid()
        wanted = Path(path).absolute()
        if ranks > 1:
            wanted = _with_ending(wanted, f"rank{self.rank}")
        self._aside: Path | None = None
        self.path = _reserve(wanted, numbered=numbered, asked_by=asked_by)
        try:
            self._aside = _open_aside(self.path, asked_by)
            self._timer = None if device is None or device.type != "cuda" else _DeviceTimer(device)
        except BaseException:
            self._give_up()
            raise
        self._spans: list[_Span] = []
        self._num_issued = 0
        self._num_left_out = 0
        self._on_device: deque[tuple[str, _Lane, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._counting = threading.Lock()

    def add(self, name: str, start: float, end: float, details: dict[str, Any] | None = None) -> None:
        """What the calling thread did from `start` to `end` (seconds of ``time.perf_counter``)."""
        lane = threading.current_thread().name, threading.get_ident()
        self._keep(_Span(name, lane, start, end, 0, details))

    @contextmanager
    def span(self, name: str, *, on_device: bool = False) -> Iterator[None]:
        """What the block does; `on_device`: what it enqueues on the current stream, where there is a GPU."""
        timer = self._timer if on_device else None
        begun = None if timer is None else timer.mark()
        start = time.perf_counter()
        try:
            yield
        finally:
            if timer is None or begun is None:
                self.add(name, start, time.perf_counter())
            else:
                self._on_device.append((name, timer.lane(), begun, timer.mark()))

    def follow(self, name: str, transfer: Transfer, start: float) -> None:
        """A copy was issued just now, from `start` on; its span is added when the host has seen its end."""
        with self._counting:
            self._num_issued += 1
            issued = self._num_issued
        num_bytes = transfer.num_bytes

        def end(done: Transfer) -> None:
            times = (start, time.perf_counter())
            if done.times is not None and self._timer is not None:
                first, last = done.times
                times = (self._timer.seconds(first), self._timer.seconds(last))
            self._keep(_Span(name, None, *times, issued, {"bytes": num_bytes}))

        signal = transfer.signal
        if (
            self._timer is None and signal is not None and signal.query()
        ):  # host copies: it runs while being issued
            end(transfer)
        else:
            transfer.on_end = end

    def settle(self) -> None:
        """Read the times of what the device has done by now. To be called now and then, by one thread at a time."""
        if self._timer is None:
            return
        while self._on_device and self._on_device[0][3].query():
            name, lane, start, end = self._on_device.popleft()
            self._keep(_Span(name, lane, self._timer.seconds(start), self._timer.seconds(end), -1, None))
        self._timer.renew()

    def write(self) -> None:
        """Put the file in place. What is still under way is not in it. A forked child writes nothing.

        Raises:
            OSError: the file could not be written; what was at its place is as it was.
        """
        if self._aside is None or os.getpid() != self._pid:
            return
        try:
            self.settle()
            with self._aside.open("w", encoding="utf-8") as file:
                json.dump(self._as_json(), file)
            self._aside.replace(self.path)
        finally:
            self._give_up()
        logger.info("trace of %d spans written to %s", len(self._spans), self.path)

    def _keep(self, span: _Span) -> None:
        if len(self._spans) < MAX_SPANS:
            self._spans.append(span)
            return
        with self._counting:
            self._num_left_out += 1
            is_first = self._num_left_out == 1
        if is_first:
            logger.warning("the trace to %s is full (%d spans): the rest is left out", self.path, MAX_SPANS)

    def _give_up(self) -> None:
        if self._aside is not None:
            self._aside.unlink(missing_ok=True)
            self._aside = None
        with _reserving:
            _reserved.discard(self.path)

    def _as_json(self) -> dict[str, Any]:
        rows = _rows(list(self._spans))
        names: list[dict[str, Any]] = [_metadata("process_name", self.rank, 0, name=f"rank {self.rank}")]
        events: list[dict[str, Any]] = []
        for tid, (title, spans) in enumerate(rows, start=1):
            names.append(_metadata("thread_name", self.rank, tid, name=title))
            names.append(_metadata("thread_sort_index", self.rank, tid, sort_index=tid))
            events += [_event(span, self.rank, tid) for span in spans]
        return {
            "traceEvents": names + events,
            "displayTimeUnit": "ms",
            "otherData": {"writer": "offload", "rank": self.rank, "spans_left_out": self._num_left_out},
        }


class _DeviceTimer:
    """Times of CUDA events as ``time.perf_counter`` has them, to some 20 µs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
        self._zero = self._take_zero()  # what a first event costs is not in the second one
        self._zero = self._take_zero()

    def mark(self) -> torch.cuda.Event:
        """A point on the calling thread's current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lane(self) -> _Lane:
        """That stream."""
        number = torch.cuda.current_stream(self._device).stream_id
        return f"stream {number}", number

    def seconds(self, event: torch.cuda.Event) -> float:
        """When it was reached; it must have been."""
        zero, seconds = self._zero
        return seconds + float(zero.elapsed_time(event)) / 1e3

    def renew(self) -> None:
        """Keep times precise in a long trace."""
        if time.perf_counter() - self._zero[1] > RENEWAL_S:
            self._zero = self._take_zero()

    def _take_zero(self) -> tuple[torch.cuda.Event, float]:
        zero = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            zero.record(self._stream)
            zero.synchronize()  # nothing else is ever on this stream
        return zero, time.perf_counter()


# Rows -------------------------------------------------------------------------------------------------------


def _rows(spans: list[_Span]) -> list[tuple[str, list[_Span]]]:
    """Titles and spans in order; a lane is named where its row's kind has several."""
    lanes: dict[str, dict[_Lane | None, list[_Span]]] = {}
    for span in spans:
        row = WAITS if "wait" in span.name else ROW_OF.get(span.name, span.name)
        lanes.setdefault(row, {}).setdefault(span.lane, []).append(span)
    kinds = sorted(lanes, key=lambda row: _ORDER.index(row) if row in _ORDER else len(_ORDER))
    return [
        (row if len(lanes[row]) == 1 or lane is None else f"{row} ({lane[0]})", _in_order(lanes[row][lane]))
        for row in kinds
        for lane in sorted(lanes[row], key=str)
    ]


def _in_order(spans: list[_Span]) -> list[_Span]:
    """Of one row: as they began, the outer before the inner; copies and work of a stream never overlap."""
    if not any(span.issued for span in spans):
        return sorted(spans, key=lambda span: (span.start, -span.end))
    spans = sorted(spans, key=lambda span: span.issued if span.lane is None else span.start)
    ended = float("inf")
    for index in reversed(range(len(spans))):
        ended = min(ended, spans[index].end)
        spans[index] = spans[index]._replace(end=ended)
    before = -float("inf")
    for index, span in enumerate(spans):
        start = max(span.start, before)
        spans[index] = span._replace(start=start, end=max(span.end, start))
        before = spans[index].end
    return spans


def _event(span: _Span, pid: int, tid: int) -> dict[str, Any]:
    """Both ends are rounded to ns alike, so that what follows does not overlap."""
    start, end = round(span.start * 1e9), round(span.end * 1e9)
    event: dict[str, Any] = {"name": span.name, "ph": "X", "pid": pid, "tid": tid}
    event |= {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return event if span.details is None else event | {"args": span.details}


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


# Files ------------------------------------------------------------------------------------------------------

_reserving = threading.Lock()
_reserved: set[Path] = set()
"""Files of this process's traces that are being taken."""


def _reserve(path: Path, *, numbered: bool, asked_by: str) -> Path:
    with _reserving:
        wanted, number = path, 1
        while numbered and path in _reserved:
            number += 1
            path = _with_ending(wanted, str(number))
        if path in _reserved:
            raise ConfigError(
                f"{asked_by}: another trace of this process is being written to {path}; name another file"
            )
        _reserved.add(path)
    return path


def _open_aside(path: Path, asked_by: str) -> Path:
    """An empty file beside `path`, so that what hinders writing is known before and not after hours of training."""
    aside = path.with_name(f"{path.name}.{uuid4().hex[:8]}.writing")
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        with aside.open("x", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{asked_by}: no trace can be written to {path} ({error}); name a file in a folder that exists and "
            "that you may write to"
        ) from error
    return aside


def _with_ending(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.stem}-{ending}{path.suffix}")


def _rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
