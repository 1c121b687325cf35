"""Traces on a GPU: copies and device steps have the device's own times, between the host's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.trace import Trace
from offload.transfer.cuda import CudaTransport
from offload.transfer.transport import Copy
from tests.test_trace import (
    HOST_ROWS,
    HYBRID,
    MICROSECOND,
    STATE_ROWS,
    Rows,
    assert_each_row_is_in_order,
    ends,
    kinds,
    named,
    read,
)
from tests.training import adamw, assert_same_snapshot, batches, make_decoder, snapshot, train

pytestmark = pytest.mark.gpu

CLOCKS_S = 1e-3
"""By which the device's times may lie beyond the host's."""

CYCLES = 20_000_000
"""Of `torch.cuda._sleep`: about 10 ms."""


def record(path: Path, *, traced: bool = True, **options: Any) -> tuple[Rows, list[offload.StepReport], Any]:
    model = make_decoder(device="cuda")
    masters = offload.cast_compute_weights(model)
    reports = []
    with adamw(model, masters=masters, **options) as optimizer:
        data = batches(3, device="cuda")
        train(model, optimizer, data[:1])
        if not traced:
            train(model, optimizer, data)
            return {}, [], snapshot(model, optimizer)
        with optimizer.profile(path):
            for ids in data:
                train(model, optimizer, [ids])
                reports.append(optimizer.last_step)
        end = snapshot(model, optimizer)
    return read(path), reports, end


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"mode": "wavefront"}, HOST_ROWS),
        ({"mode": "chunked-stream"}, STATE_ROWS),
        ({"mode": "chunked-sync"}, STATE_ROWS),
        (HYBRID, HOST_ROWS | STATE_ROWS),
        ({"mode": "resident"}, {"device step", "step()", "verdict"}),
    ],
    ids=["wavefront", "chunked-stream", "chunked-sync", "hybrid", "resident"],
)
def test_rows_order_bytes_and_bits(options: dict[str, Any], rows: set[str], tmp_path: Path) -> None:
    start = time.perf_counter()
    taken, reports, end = record(tmp_path / "trace.json", **options)
    stop = time.perf_counter()
    assert kinds(taken) >= rows
    assert_each_row_is_in_order(taken)
    for direction, field in {"D2H": "bytes_to_host", "H2D": "bytes_to_device"}.items():
        copies = named(taken, direction) + named(taken, f"state {direction}")
        assert sum(copy["args"]["bytes"] for copy in copies) == sum(getattr(r, field) for r in reports)
    for event in (event for events in taken.values() for event in events):
        assert start - CLOCKS_S < event["ts"] * MICROSECOND
        assert ends(event) * MICROSECOND < stop + CLOCKS_S
    _, _, plain = record(tmp_path / "trace.json", traced=False, **options)
    assert_same_snapshot(end, plain)


def test_a_copy_begins_when_the_device_begins_it(tmp_path: Path) -> None:
    """It waits for 10 ms of work that was enqueued before, and then takes far less."""
    transport, writer = (
        CudaTransport("cuda"),
        Trace(tmp_path / "trace.json", device=torch.device("cuda", torch.cuda.current_device())),
    )
    transport.is_timing = True
    source, target = torch.ones(1024, device="cuda"), torch.zeros(1024).pin_memory()
    for _ in range(2):  # the first one pays for what is loaded late
        start = time.perf_counter()
        torch.cuda._sleep(CYCLES)
        transfer = transport.issue_to_host([Copy(target, source)], [transport.record_ready()])
        writer.follow("D2H", transfer, start)
        transport.wait(transfer)
    writer.write()
    transport.close()
    copy = read(tmp_path / "trace.json")["D2H"][-1]
    waited = time.perf_counter() - start
    assert copy["ts"] * MICROSECOND - start > 3e-3
    assert copy["dur"] * MICROSECOND < waited / 3


def test_the_device_is_not_asked_for_times_when_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event with times is made outside of a trace."""
    made: list[bool] = []
    real = torch.cuda.Event

    def make(*, enable_timing: bool = False, **options: Any) -> torch.cuda.Event:
        made.append(enable_timing)
        return real(enable_timing=enable_timing, **options)

    monkeypatch.setattr(torch.cuda, "Event", make)
    record(tmp_path / "trace.json", traced=False, mode="wavefront")
    assert made
    assert not any(made)
    record(tmp_path / "trace.json", mode="wavefront")
    assert any(made)
