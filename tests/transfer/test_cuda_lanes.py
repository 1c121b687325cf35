"""Order of copies on one stream and on two that take turns, by a driver that notes what each stream was given."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
import torch

from offload.transfer import cuda
from offload.transfer.cuda import CudaTransport
from offload.transfer.transport import Copy

KIB = 1024


class Stream:
    """Never a default stream."""

    def __init__(self, device: Any = None) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = id(self)

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, **options: Any) -> None:
        self.cuda_event = id(self)
        self.device = torch.device("cuda", 0)


class Driver:
    """Knows of each stream which copies, by number, have ended when its last operation has. `refused`: calls that fail."""

    def __init__(self) -> None:
        self.done: dict[int, frozenset[int]] = {}
        self.marked: dict[int, frozenset[int]] = {}
        self.copies: list[tuple[int, int]] = []
        self.streams: list[int] = []
        self.refused: list[str] = []

    def by_stream(self) -> Iterable[tuple[int, Iterable[tuple[int, tuple[int, int]]]]]:
        """Copies that follow each other on one stream."""
        return groupby(zip(self.streams, self.copies, strict=True), key=itemgetter(0))

    def _refuses(self, name: str) -> bool:
        return bool(self.refused) and self.refused[0] == name and self.refused.pop(0) == name

    def copy(self, to: int, source: int, size: int, stream: int) -> int:
        if self._refuses("copy"):
            return 700
        before = self.done.get(stream, frozenset())
        missing = set(range(len(self.copies))) - before
        assert not missing, f"copy {len(self.copies)} may begin before {sorted(missing)} have ended"
        self.done[stream] = before | {len(self.copies)}
        self.copies.append((to, size))
        self.streams.append(stream)
        return 0

    slow_copy = copy

    def record(self, event: int, stream: int) -> int:
        if self._refuses("record"):
            return 700
        self.marked[event] = self.done.get(stream, frozenset())
        return 0

    def hold_back(self, stream: int, event: int, flags: int) -> int:
        if self._refuses("hold_back"):
            return 700
        self.done[stream] = self.done.get(stream, frozenset()) | self.marked[event]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "TURN_BYTES", 4 * KIB)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return driver


def make(*, turns: bool) -> CudaTransport:
    transport = CudaTransport("cuda:0")
    transport.attach_thread()
    if turns:
        transport.take_turns()
        transport.take_turns()  # is said once for all
    return transport


@pytest.mark.parametrize("turns", [False, True])
def test_copies_follow_each_other_whatever_their_sizes(driver: Driver, turns: bool) -> None:
    """Each is whole, and its end's event comes after all of it."""
    chosen = random.Random(5)
    transport = make(turns=turns)
    memory = torch.zeros(64 * KIB, dtype=torch.uint8)
    for _ in range(200):
        sizes = [
            chosen.choice([0, 1, KIB, 4 * KIB, 4 * KIB + 1, 11 * KIB]) for _ in range(chosen.randint(1, 3))
        ]
        first = len(driver.copies)
        transfer = transport.issue_to_host([Copy(memory[:size], memory[:size]) for size in sizes], [])
        sent = driver.copies[first:]
        assert sum(size for _, size in sent) == sum(sizes) == transfer.num_bytes
        for size in filter(None, sizes):
            reached = 0
            while reached < size:
                address, length = sent.pop(0)
                assert address == memory.data_ptr() + reached
                assert length <= 4 * KIB or not turns
                reached += length
        signal: Any = transfer.signal
        assert driver.marked[signal._handle] == frozenset(range(len(driver.copies)))
    bursts = [sum(size for _, (_, size) in burst) for _, burst in driver.by_stream()]
    assert len(bursts) > 100 if turns else len(bursts) == 1
    assert max(bursts) < 2 * 4 * KIB or not turns


@pytest.mark.parametrize("what", ["copy", "record", "hold_back"])
@pytest.mark.parametrize("sizes", [[4 * KIB], [9 * KIB]])
def test_order_holds_after_a_turn_that_was_not_passed_on(driver: Driver, what: str, sizes: list[int]) -> None:
    """Refused by the driver, or interrupted by Ctrl-C there: whatever copies next still comes behind the last one."""
    transport = make(turns=True)
    memory = torch.zeros(16 * KIB, dtype=torch.uint8)
    copies = [Copy(memory[:size], memory[:size]) for size in sizes]
    transport.issue_to_device(copies, [])
    driver.refused.append(what)
    with pytest.raises(RuntimeError, match="error 700"):
        transport.issue_to_device(copies, [])
    assert not driver.refused
    for _ in range(4):
        transport.issue_to_device(copies, [])
