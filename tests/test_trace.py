"""Traces: rows, times, files. Spans of a row follow each other or nest; nothing is written, and little paid, when off."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plot_results
import pytest
import torch

import offload
from offload import trace
from offload.errors import ConfigError, StateError
from offload.report import StageClock
from offload.trace import VARIABLE, Trace
from offload.transfer.host import LaneTransport
from offload.transfer.transport import Copy, Transfer
from tests.training import (
    adamw,
    assert_same_snapshot,
    batches,
    loss_of,
    make_decoder,
    snapshot,
    train,
    use_lanes,
)

MICROSECOND = 1e-6
HOST_ROWS = {"backward hooks", "issue copies", "D2H", "H2D", "kernel", "verdict", "step()", "waits"}
STATE_ROWS = {"issue copies", "D2H state", "H2D state", "device step", "verdict", "step()", "waits"}
HYBRID = {"mode": "hybrid", "config": {"stream_share": 0.5}}

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def no_trace_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@contextmanager
def training(**options: Any) -> Iterator[tuple[torch.nn.Module, offload.AdamW]]:
    model = make_decoder()
    masters = offload.cast_compute_weights(model)
    with adamw(model, masters=masters, **options) as optimizer:
        yield model, optimizer


def record(path: Path, *, steps: int = 3, **options: Any) -> tuple[Rows, list[offload.StepReport]]:
    """Train inside a profile, after a step that is not in it."""
    reports = []
    with training(**options) as (model, optimizer):
        train(model, optimizer, batches(1))
        with optimizer.profile(path):
            for ids in batches(steps):
                train(model, optimizer, [ids])
                reports.append(optimizer.last_step)
    return read(path), reports


def read(path: Path) -> Rows:
    """Complete events by row, in the file's order; a title that several rows have is an error."""
    events = json.loads(path.read_text())["traceEvents"]
    titles = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(set(titles.values())) == len(titles)
    rows: Rows = {title: [] for title in titles.values()}
    for event in events:
        if event["ph"] == "X":
            rows[titles[event["tid"]]].append(event)
    return rows


def kinds(rows: Rows) -> set[str]:
    return {title.partition(" (")[0] for title in rows}


def named(rows: Rows, name: str) -> list[dict[str, Any]]:
    return [event for events in rows.values() for event in events if event["name"] == name]


def seconds(events: list[dict[str, Any]]) -> float:
    return math.fsum(event["dur"] for event in events) * MICROSECOND


def ends(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def assert_each_row_is_in_order(rows: Rows) -> None:
    """An event begins after the one before it has ended, or lies within it."""
    for title, events in rows.items():
        around: list[dict[str, Any]] = []
        for event in events:
            assert event["dur"] >= 0
            while around and ends(around[-1]) <= event["ts"] + 1e-3:
                around.pop()
            assert not around or ends(event) <= ends(around[-1]) + 1e-3, f"{title}: {around[-1]} and {event}"
            assert not around or title.partition(" (")[0] not in ("D2H", "H2D", "kernel", "D2H state")
            around.append(event)


# Rows and times ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"mode": "wavefront"}, HOST_ROWS),
        ({"mode": "wavefront", "max_grad_norm": 1e-3, "clip": "speculate"}, HOST_ROWS),
        ({"mode": "wavefront", "overlap_forward": True}, HOST_ROWS),
        ({"mode": "chunked-stream"}, STATE_ROWS | {"backward hooks"}),
        ({"mode": "chunked-sync"}, STATE_ROWS | {"backward hooks"}),
        (HYBRID, HOST_ROWS | STATE_ROWS),
    ],
    ids=["wavefront", "rolled-back", "overlapping", "chunked-stream", "chunked-sync", "hybrid"],
)
@pytest.mark.parametrize("lanes", [False, True], ids=["plain", "lanes"])
def test_rows_are_there_and_in_order(
    options: dict[str, Any], rows: set[str], lanes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lanes:
        use_lanes(monkeypatch, delay=lambda lane, index: 1e-4 * (index % 3))
    path = tmp_path / "trace.json"
    if options.get("overlap_forward"):
        model = make_decoder()
        with adamw(model, model=model, **options) as optimizer, optimizer.profile(path):
            train(model, optimizer, batches(3))
        taken = read(path)
    else:
        taken, reports = record(path, **options)
        moved = {"D2H": "bytes_to_host", "H2D": "bytes_to_device"}
        for direction, field in moved.items():
            copies = named(taken, direction) + named(taken, f"state {direction}")
            assert sum(copy["args"]["bytes"] for copy in copies) == sum(getattr(r, field) for r in reports)
    assert kinds(taken) == rows
    assert_each_row_is_in_order(taken)
    assert ("roll back" in {e["name"] for e in taken["verdict"]}) == ("max_grad_norm" in options)


@pytest.mark.parametrize("options", [{"mode": "wavefront"}, HYBRID], ids=["wavefront", "hybrid"])
def test_stages_take_as_long_as_the_report_says(options: dict[str, Any], tmp_path: Path) -> None:
    rows, reports = record(tmp_path / "trace.json", **options)
    for stage, name in {"kernel": "kernel", "wait_gradient": "wait_gradient", "hook": "hook"}.items():
        events = named(rows, name)
        assert seconds(events) == pytest.approx(
            sum(report.timings[stage] for report in reports), abs=2e-9 * len(events)
        )
    assert seconds(named(rows, "issue D2H")) > 0


def test_times_are_those_of_perf_counter(tmp_path: Path) -> None:
    start = time.perf_counter()
    rows, _ = record(tmp_path / "trace.json", steps=1, mode="wavefront")
    for event in (event for events in rows.values() for event in events):
        assert start < event["ts"] * MICROSECOND
        assert ends(event) * MICROSECOND < time.perf_counter()


def test_hooks_say_whose_they_are(tmp_path: Path) -> None:
    rows, _ = record(tmp_path / "trace.json", steps=1, mode="wavefront")
    hooks = [event["args"]["parameter"] for event in rows["backward hooks"]]
    assert sorted(hooks) == sorted(name for name, _ in make_decoder().named_parameters())


def test_a_copy_lasts_until_its_end_is_seen_and_no_longer_than_a_later_one(tmp_path: Path) -> None:
    """Note [Times of copies]: three are issued, and waited for in another order."""
    sources = [torch.ones(4) for _ in range(3)]
    writer, lanes = Trace(tmp_path / "trace.json"), LaneTransport()
    lanes.hold("to_host")
    transfers: list[Transfer] = []
    for source in sources:
        start = time.perf_counter()
        transfers.append(lanes.issue_to_host([Copy(torch.zeros(4), source)], []))
        writer.follow("D2H", transfers[-1], start)
    lanes.release("to_host")
    for index in (1, 0, 2):
        lanes.wait(transfers[index])
    lanes.close()
    writer.write()
    first, second, third = read(tmp_path / "trace.json")["D2H"]
    tick = 1e-3  # what a sum of a start and a duration may be off by
    assert ends(first) <= ends(second) + tick
    assert ends(second) < ends(third)
    assert first["ts"] <= ends(first) <= second["ts"] + 1e-3
    assert ends(second) <= third["ts"] + 1e-3
    assert first["dur"] > 0
    assert first["args"] == {"bytes": 16}


def test_tracing_changes_no_bit(tmp_path: Path) -> None:
    def end(*, traced: bool) -> Any:
        with training(mode="wavefront") as (model, optimizer):
            if traced:
                with optimizer.profile(tmp_path / "trace.json"):
                    train(model, optimizer, batches(4))
            else:
                train(model, optimizer, batches(4))
            return snapshot(model, optimizer)

    assert_same_snapshot(end(traced=True), end(traced=False))


def test_an_overlapping_step_is_whole_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is still under way when the block's last line has run: its weights take their time."""
    use_lanes(monkeypatch, delay=lambda lane, index: 0.01 * (lane == "to_device"))
    path = tmp_path / "trace.json"
    model = make_decoder()
    with adamw(model, mode="wavefront", overlap_forward=True, model=model) as optimizer:
        train(model, optimizer, batches(2))
        with optimizer.profile(path):
            for ids in batches(2):
                loss_of(model, ids).backward()
                optimizer.step()
        rows = read(path)
        assert named(rows, "wait_weights")  # of the first step, in the second forward
        assert sum(e["args"]["bytes"] for e in rows["H2D"]) == 2 * optimizer.last_step.bytes_to_device


# Files ------------------------------------------------------------------------------------------------------


def test_nothing_is_written_when_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened: list[Any] = []
    monkeypatch.setattr(trace.Trace, "__init__", lambda *args, **named: opened.append(args))
    with training(mode="wavefront") as (model, optimizer):
        train(model, optimizer, batches(2))
    assert opened == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing/trace.json", "folder"])
def test_a_path_that_cannot_be_written_is_refused_at_entry(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with training(mode="wavefront") as (model, optimizer):
        profile = optimizer.profile(tmp_path / name)
        with pytest.raises(ConfigError, match=r"profile\(path\): no trace can be written to .*" + name):
            profile.__enter__()
        train(model, optimizer, batches(1))
        with optimizer.profile(tmp_path / "trace.json"):
            pass
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "trace.json"]


def test_an_exception_inside_still_writes_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def fail() -> None:
        with optimizer.profile(path):
            train(model, optimizer, batches(1))
            raise KeyError("mine")

    with training(mode="wavefront") as (model, optimizer):
        with pytest.raises(KeyError, match="mine"):
            fail()
        train(model, optimizer, batches(1))
    assert kinds(read(path)) == HOST_ROWS
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_closing_inside_writes_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with training(mode="wavefront") as (model, optimizer), optimizer.profile(path):
        train(model, optimizer, batches(1))
        optimizer.close()
        assert kinds(read(path)) == HOST_ROWS


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(trace.json, "dump", fail)
    with (
        training(mode="wavefront") as (_, optimizer),
        pytest.raises(OSError, match="disk full"),
        optimizer.profile(path),
    ):
        pass
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_the_file_is_as_readable_as_any_other(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    Trace(tmp_path / "trace.json").write()
    assert stat.S_IMODE((tmp_path / "trace.json").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_one_trace_of_an_optimizer_at_a_time(tmp_path: Path) -> None:
    with training(mode="wavefront") as (_, optimizer), optimizer.profile(tmp_path / "outer.json"):
        inner = optimizer.profile(tmp_path / "inner.json")
        with pytest.raises(StateError, match="traced already"):
            inner.__enter__()
    assert [file.name for file in tmp_path.iterdir()] == ["outer.json"]


def test_two_optimizers_have_a_trace_each(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    with (
        training(mode="wavefront") as (one, first),
        training(**HYBRID) as (other, second),
        first.profile(paths[0]),
        second.profile(paths[1]),
    ):
        for ids in batches(2):
            train(one, first, [ids])
            train(other, second, [ids])
        with pytest.raises(ConfigError, match="another trace"):
            Trace(paths[0])
    taken = [read(path) for path in paths]
    assert [kinds(rows) for rows in taken] == [HOST_ROWS, HOST_ROWS | STATE_ROWS]
    assert [len(named(rows, "step")) for rows in taken] == [2, 2]
    for rows in taken:
        assert_each_row_is_in_order(rows)


def test_the_environment_traces_from_construction_to_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "trace.json"))
    with training(mode="wavefront") as (model, first), training(mode="chunked-stream") as (other, second):
        train(model, first, batches(2))
        train(other, second, batches(1))
        assert not list(tmp_path.glob("*.json"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace-2.json", "trace.json"]
    assert [len(named(read(tmp_path / f), "step")) for f in ("trace.json", "trace-2.json")] == [2, 1]


def test_the_environment_s_path_is_checked_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing" / "trace.json"))
    with pytest.raises(ConfigError, match="OFFLOAD_TRACE: no trace can be written"), training():
        pass


def test_ranks_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_rank", lambda: (1, 4))
    writer = Trace(tmp_path / "trace.json")
    with writer.span("step"):
        pass
    writer.write()
    (event,) = read(tmp_path / "trace-rank1.json")["step()"]
    assert event["pid"] == 1


def test_a_program_that_ends_without_close_has_its_trace(tmp_path: Path) -> None:
    program = (
        "import torch, offload\n"
        "weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))\n"
        "optimizer = offload.AdamW([weight], backend='torch', mode='wavefront')\n"
        "weight.sum().backward(); optimizer.step()\n"
    )
    path = tmp_path / "trace.json"
    environment = {**os.environ, VARIABLE: str(path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    assert len(named(read(path), "step")) == 1


def test_a_full_trace_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "MAX_SPANS", 3)
    writer = Trace(tmp_path / "trace.json")
    for _ in range(5):
        writer.add("kernel", 0.0, 1.0)
    writer.write()
    taken = json.loads((tmp_path / "trace.json").read_text())
    assert taken["otherData"]["spans_left_out"] == 2
    assert len(read(tmp_path / "trace.json")["kernel"]) == 3
    assert [r.getMessage() for r in caplog.records if "full (3 spans)" in r.getMessage()]


# Cost and plots ---------------------------------------------------------------------------------------------


def test_off_it_costs_below_one_percent(tmp_path: Path) -> None:
    """What a step pays: all places of all its spans at the price of the dearest kind, against its fastest time."""
    clock = StageClock()
    transfer = Transfer([], LaneTransport().record_ready(), 0)

    def dearest() -> None:
        with clock.span("kernel"):
            clock.follow("D2H", transfer, time.perf_counter())

    def seconds_of(action: Any) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    each = min(seconds_of(lambda: [dearest() for _ in range(2000)]) for _ in range(20)) / 2000
    with training(mode="wavefront", config={"tile_numel": 2**16}) as (model, optimizer):
        (ids,) = batches(1)
        train(model, optimizer, [ids] * 2)
        fastest = min(seconds_of(lambda: train(model, optimizer, [ids])) for _ in range(10))
        with optimizer.profile(tmp_path / "trace.json"):
            train(model, optimizer, [ids])
    places = sum(len(events) for events in read(tmp_path / "trace.json").values())
    assert places > 50
    assert places * each < 0.01 * fastest


def test_the_timeline_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.json"
    rows, _ = record(path, **HYBRID)
    pyplot = plot_results.load_matplotlib()
    figure = plot_results.timeline(json.loads(path.read_text()), pyplot)
    labels = {label.get_text() for label in figure.axes[0].get_yticklabels()}
    pyplot.close(figure)
    assert labels == set(rows)
