"""Which way events go to the driver, with a driver, streams and events that only note what is asked of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from offload.transfer import cuda
from offload.transfer.cuda import _PooledEvent

HANDLE = 77


class Stream:
    """A stream of one of several devices; the default stream of each has handle 0."""

    def __init__(self, device: int, handle: int = 0) -> None:
        self.device, self.cuda_stream = torch.device("cuda", device), handle


class Event:
    """Torch's, of device 1: its calls switch to the stream's device."""

    cuda_event = HANDLE
    device = torch.device("cuda", 1)

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def record(self, stream: Stream) -> None:
        self._calls.append(("torch records", stream.device.index))

    def wait(self, stream: Stream) -> None:
        self._calls.append(("torch waits", stream.device.index))


class Driver:
    """Takes a stream's handle 0 for the default stream of the current device."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def record(self, event: int, stream: int) -> int:
        self._calls.append(("driver records", event, stream))
        return 0

    def hold_back(self, stream: int, event: int, flags: int) -> int:
        self._calls.append(("driver waits", stream, event))
        return 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    driver = Driver(calls)
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: Stream(device.index if device else 0)
    )
    return calls


def pooled(calls: list[Any]) -> Any:
    event: Any = Event(calls)
    return _PooledEvent(event, deque())


def test_the_default_stream_of_another_device_is_not_taken_for_that_of_the_current_one(
    calls: list[Any],
) -> None:
    """``model.to("cuda:1")`` without ``set_device``: ``step()`` runs on a thread whose device is 0."""
    event, stream = pooled(calls), Stream(1)
    event.record(stream)
    event.hold_back(stream)
    assert calls == [("torch records", 1), ("torch waits", 1)]


def test_streams_with_a_handle_of_their_own_go_to_the_driver_on_any_device(calls: list[Any]) -> None:
    event, stream = pooled(calls), Stream(1, handle=5)
    event.record(stream)
    event.hold_back(stream)
    event.hold_back(Stream(0))
    assert calls == [("driver records", HANDLE, 5), ("driver waits", 5, HANDLE), ("driver waits", 0, HANDLE)]


def test_the_stream_that_waits_is_one_of_the_event_s_device(calls: list[Any]) -> None:
    """A forward gate waits on a thread whose device may be another one than the model's."""
    pooled(calls).wait()
    assert calls == [("torch waits", 1)]
