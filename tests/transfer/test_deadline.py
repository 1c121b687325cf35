"""Waits with a deadline, and who uses them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from offload.errors import DeadlineError, WorkerError
from offload.report import StageClock
from offload.schedule.device_slots import FixedSlots
from offload.schedule.device_stepper import DeviceStepper
from offload.schedule.stream_stepper import StreamStepper
from offload.schedule.worker import Worker
from offload.transfer.deadline import run_within, synchronize_device
from offload.transfer.host import HostTransport
from offload.transfer.inline import InlineTransport
from offload.transfer.slabs import SlabMaker

TIMEOUT_S = 0.05


def test_what_ends_in_time_has_been_run() -> None:
    done: list[int] = []
    run_within(60.0, lambda: done.append(1), "it")
    assert done == [1]


def test_an_error_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        run_within(60.0, lambda: 1 / 0, "it")


def test_what_does_not_end_is_left_behind() -> None:
    gate = threading.Event()
    with pytest.raises(DeadlineError, match=r"the copy did not end within timeout_s=0\.05"):
        run_within(TIMEOUT_S, lambda: gate.wait(60.0), "the copy")
    gate.set()


@pytest.fixture
def hanging_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that comes to rest only when the event is set."""
    gate = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: gate.wait(60.0))
    yield gate
    gate.set()


class Updater:
    """Nothing to compute with."""

    class rule:  # noqa: N801
        state_names = ()

    def start(self) -> None:
        return


def test_a_device_that_hangs_meets_the_deadline(hanging_device: threading.Event) -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(DeadlineError, match="cuda:0"):
        synchronize_device(device, TIMEOUT_S)
    stepper = DeviceStepper(
        device=device,
        updater=Updater(),  # type: ignore[arg-type]
        worker=None,  # type: ignore[arg-type]
        flush_denormals=True,
        fused_sums=True,
        clock=StageClock(),
        timeout_s=TIMEOUT_S,
    )
    with pytest.raises(DeadlineError, match="cuda:0"):
        stepper.finish()


def test_a_streaming_step_on_a_device_that_hangs_is_the_last(hanging_device: threading.Event) -> None:
    transport = HostTransport("cuda:0")
    worker = Worker("test", depth=2, timeout_s=TIMEOUT_S)
    stepper = StreamStepper(
        transport=transport,
        slabs=SlabMaker(),
        slots=FixedSlots(transport, 1),
        updater=Updater(),  # type: ignore[arg-type]
        worker=worker,
        stream=None,
        tile_numel=1024,
        trips_ahead=2,
        flush_denormals=True,
        fused_sums=True,
        clock=StageClock(),
    )
    with pytest.raises(DeadlineError, match="cuda:0"):
        stepper.finish()
    hanging_device.set()
    with pytest.raises(WorkerError, match="cuda:0"):
        worker.raise_error()
    stepper.close()


def test_inline_copies_on_a_device_that_hangs(hanging_device: threading.Event) -> None:
    transport = InlineTransport("cuda:0", TIMEOUT_S)
    transport._num_issued = 1  # as after a copy
    with pytest.raises(DeadlineError):
        transport.synchronize()
    hanging_device.set()
    transport.close()
