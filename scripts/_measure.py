"""Measuring and reporting for the scripts: memory, step times without extra waits, tables, JSON."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

GIB = 1 << 30


class PhaseClock:
    """Times the phases of consecutive steps without ever waiting for the device.

    ``mark(name)`` says that phase ``name`` begins now. On CUDA a mark is an event on the current stream:
    synchronizing between forward, backward and step would forbid the overlap that is to be measured.
    The time of a step is the time from its first mark to the next step's first mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        self._marks.append((name, self._now()))

    def durations(self) -> dict[str, list[float]]:
        """Seconds of each phase, in order; call it after the device is synchronized."""
        out: dict[str, list[float]] = {}
        for (name, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False):
            out.setdefault(name, []).append(self._seconds(start, stop))
        return out

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) / 1e3 if self._cuda else stop - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_bytes() -> int:
    """Resident set of this process, pinned memory included."""
    return psutil.Process().memory_info().rss


def huge_page_bytes() -> int | None:
    """Of this process's memory, what lies on huge pages; None where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def peak_host_bytes() -> int | None:
    """Largest resident set so far; None where the platform does not say."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_bytes(device: torch.device) -> dict[str, int | None]:
    """The allocator's peaks since they were last reset."""
    if device.type != "cuda":
        return {"peak_device_bytes": None, "peak_reserved_bytes": None}
    return {
        "peak_device_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def stage_medians(reports: Iterable[Any]) -> dict[str, float]:
    """Median of every number in a run of ``StepReport``s, by dotted name; the step's own number is left out."""
    columns: dict[str, list[float]] = {}
    for report in reports:
        for name, value in _numbers(report):
            columns.setdefault(name, []).append(value)
    columns.pop("step", None)
    return {name: statistics.median(values) for name, values in columns.items()}


def stage_rows(stages: Mapping[str, float]) -> list[tuple[str, str]]:
    """Names and values of `stage_medians` for a table, in units that suit them."""
    return [(name.removeprefix("timings."), _in_unit(name, value)) for name, value in stages.items()]


def format_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; all but the first are set to the right."""
    table = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(headers))]
    lines = [
        "| " + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(cells)) + " |"
        for cells in (list(zip(row, widths, strict=True)) for row in table)
    ]
    rule = (
        "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]])


def in_gib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _in_unit(name: str, value: float) -> str:
    if name.startswith("timings."):
        return f"{value * 1e3:.2f} ms"
    if name.startswith("bytes_"):
        return f"{value / 1e6:.2f} MB"
    return f"{value:.4g}"


def _numbers(value: Any, name: str = "") -> Iterable[tuple[str, float]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (int, float)):
        yield name, float(value)
