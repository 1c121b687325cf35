"""The fakes: that they are asynchronous, ordered and merciless to a forgotten wait."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import ClosedError, ConfigError, DeadlineError
from offload.transfer.host import HostTransport, LaneTransport
from offload.transfer.pinned import Slab
from offload.transfer.ring import Ring, Slot
from offload.transfer.transport import Copy, Transfer, TransferState, Transport

Issue = Callable[[Transport, list[Copy]], Transfer]


def to_host(transport: Transport, copies: list[Copy]) -> Transfer:
    return transport.issue_to_host(copies, [transport.record_ready()])


def to_device(transport: Transport, copies: list[Copy]) -> Transfer:
    return transport.issue_to_device(copies, [transport.record_ready()])


@pytest.fixture
def lanes() -> Iterator[LaneTransport]:
    transport = LaneTransport(timeout_s=20.0)
    yield transport
    transport.close()


def pair(value: float, numel: int = 64, dtype: torch.dtype = torch.bfloat16) -> Copy:
    return Copy(dst=torch.zeros(numel, dtype=dtype), src=torch.full((numel,), value, dtype=dtype))


@pytest.mark.parametrize("issue", [to_host, to_device])
def test_host_transport_copies_inline(issue: Issue) -> None:
    transport: Transport = HostTransport()
    copies = [pair(1.0), pair(2.0, 3, torch.float32)]
    transfer = issue(transport, copies)
    assert transport.device == torch.device("cpu")
    assert transport.is_done(transfer)
    assert transfer.num_bytes == 64 * 2 + 3 * 4
    transport.wait_on_stream(transfer)
    transport.wait(transfer)
    transport.wait(transfer)
    assert all(torch.equal(dst, src) for dst, src in copies)
    transport.synchronize()
    transport.close()
    transport.close()
    with pytest.raises(ClosedError):
        issue(transport, copies)


@pytest.mark.parametrize("issue", [to_host, to_device])
def test_a_weight_that_requires_a_gradient_may_be_the_destination(issue: Issue, lanes: LaneTransport) -> None:
    for transport in (HostTransport(), lanes):
        weight = torch.nn.Parameter(torch.zeros(8))
        version = weight._version
        transport.wait(issue(transport, [Copy(weight, torch.ones(8))]))
        assert (weight == 1).all()
        assert weight._version > version
        assert weight.grad_fn is None


@pytest.mark.parametrize(
    "copy",
    [
        Copy(torch.zeros(4), torch.zeros(1)),
        Copy(torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)),
        Copy(torch.zeros(2, 2), torch.zeros(2, 2)),
        Copy(torch.zeros(8)[::2], torch.zeros(4)),
    ],
    ids=["broadcast", "cast", "2-D", "strided"],
)
def test_anything_but_a_plain_copy_is_refused(copy: Copy, lanes: LaneTransport) -> None:
    for transport in (HostTransport(), lanes):
        with pytest.raises(ConfigError):
            transport.issue_to_host([copy], [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_destination_is_nan_until_its_copy_ran(dtype: torch.dtype, lanes: LaneTransport) -> None:
    """The point of the fake: whoever reads before waiting sees garbage, every time."""
    lanes.hold("to_host")
    copy = pair(3.0, dtype=dtype)
    transfer = to_host(lanes, [copy])
    assert copy.dst.isnan().all()
    assert not lanes.is_done(transfer)
    assert repr(transfer) == f"Transfer(issued, {copy.src.nbytes} bytes)"
    lanes.release("to_host")
    lanes.wait(transfer)
    assert (copy.dst == 3.0).all()
    assert lanes.is_done(transfer)
    assert transfer.state is TransferState.DONE
    lanes.wait(transfer)


def test_weights_are_poisoned_only_on_demand(lanes: LaneTransport) -> None:
    strict = LaneTransport(poison=("to_host", "to_device"))
    for transport, is_poisoned in ((lanes, False), (strict, True)):
        transport.hold("to_device")
        copy = pair(3.0)
        transfer = to_device(transport, [copy])
        assert bool(copy.dst.isnan().all()) is is_poisoned
        transport.release("to_device")
        transport.wait_on_stream(transfer)
        assert (copy.dst == 3.0).all()
        transport.wait(transfer)
    strict.close()
    with pytest.raises(ConfigError, match="unknown lanes"):
        LaneTransport(poison=("to_moon",))  # type: ignore[arg-type]


def test_a_source_is_read_when_the_copy_runs_not_at_issue(lanes: LaneTransport) -> None:
    """So that overwriting a source too early shows (F15)."""
    lanes.hold("to_host")
    copy = pair(3.0)
    transfer = to_host(lanes, [copy])
    copy.src.fill_(4.0)
    lanes.release("to_host")
    lanes.wait(transfer)
    assert (copy.dst == 4.0).all()


def test_tensors_live_until_wait_and_no_longer(lanes: LaneTransport) -> None:
    lanes.hold("to_host")
    copy = pair(3.0)
    dst, source = copy.dst, weakref.ref(copy.src)
    transfer = to_host(lanes, [copy])
    del copy
    gc.collect()
    assert source() is not None
    lanes.release("to_host")
    lanes.wait_on_stream(transfer)
    assert source() is not None
    lanes.wait(transfer)
    lanes.synchronize()  # the lane's thread drops its own reference before it calls itself empty
    gc.collect()
    assert source() is None
    assert (dst == 3.0).all()


def test_a_wait_may_leave_the_tensors_to_whoever_finishes(lanes: LaneTransport) -> None:
    seen: list[Transfer] = []
    dst, src = pair(3.0)
    alive = weakref.ref(src)
    transfer = to_host(lanes, [Copy(dst, src)])
    transfer.on_end = seen.append
    del src
    lanes.wait(transfer, release=False)
    assert seen == [transfer]
    assert transfer.state is TransferState.ISSUED
    assert alive() is not None
    transfer.finish()
    gc.collect()
    assert alive() is None
    assert seen == [transfer]


def test_lanes_are_ordered_within_and_independent_between(lanes: LaneTransport) -> None:
    lanes.hold("to_host")
    first, second = to_host(lanes, [pair(1.0)]), to_host(lanes, [pair(2.0)])
    lanes.wait(to_device(lanes, [pair(3.0)]))
    lanes.release("to_host", 1)
    lanes.wait(first)
    assert not lanes.is_done(second)
    lanes.release("to_host")
    lanes.wait(second)


def test_a_wait_has_a_deadline_and_keeps_the_tensors() -> None:
    lanes = LaneTransport(timeout_s=0.05)
    lanes.hold("to_host")
    copy = pair(3.0)
    transfer = to_host(lanes, [copy])
    for wait in (lanes.wait, lanes.wait_on_stream):
        with pytest.raises(DeadlineError, match=r"to_host.*0\.05 s.*held"):
            wait(transfer)
    with pytest.raises(DeadlineError):
        lanes.synchronize()
    assert transfer.state is TransferState.ISSUED
    lanes.close()  # lifts the gate
    lanes.wait(transfer)
    assert (copy.dst == 3.0).all()


def test_a_failed_copy_raises_at_wait_once() -> None:
    def fail(lane: str, index: int) -> BaseException | None:
        return OSError("bus") if (lane, index) == ("to_host", 1) else None

    lanes = LaneTransport(fail=fail)
    copies = [pair(float(i)) for i in range(3)]
    transfers = [to_host(lanes, [copy]) for copy in copies]
    lanes.wait(transfers[0])
    with pytest.raises(OSError, match="bus"):
        lanes.wait_on_stream(transfers[1])
    with pytest.raises(OSError, match="bus"):
        lanes.wait(transfers[1])
    lanes.wait(transfers[1])
    lanes.wait(transfers[2])
    assert copies[1].dst.isnan().all()
    assert (copies[2].dst == 2.0).all()
    lanes.close()


def test_delays_are_asked_for_by_lane_and_index_and_close_cuts_them_short() -> None:
    asked: list[tuple[str, int]] = []

    def delay(lane: str, index: int) -> float:
        asked.append((lane, index))
        return 3600.0

    lanes = LaneTransport(delay=delay, timeout_s=20.0)
    copies = [pair(1.0), pair(2.0), pair(3.0)]
    transfers = [to_host(lanes, copies[:1]), to_host(lanes, copies[1:2]), to_device(lanes, copies[2:])]
    assert asked == [("to_host", 0), ("to_host", 1), ("to_device", 0)]
    assert not any(lanes.is_done(transfer) for transfer in transfers)
    lanes.close()
    for transfer, copy in zip(transfers, copies, strict=True):
        lanes.wait(transfer)
        assert torch.equal(copy.dst, copy.src)


def test_close_ends_the_threads_and_refuses_more() -> None:
    before = set(threading.enumerate())
    lanes = LaneTransport()
    ours = set(threading.enumerate()) - before
    assert {thread.name for thread in ours} == {"offload-lane-to_host", "offload-lane-to_device"}
    lanes.close()
    lanes.close()
    assert not any(thread.is_alive() for thread in ours)
    with pytest.raises(ClosedError):
        to_host(lanes, [pair(1.0)])


def test_many_threads_may_issue_and_wait(lanes: LaneTransport) -> None:
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            for step in range(50):
                copy = pair(float(seed * 64 + step))
                transfer = (to_host, to_device)[step % 2](lanes, [copy])
                lanes.wait(transfer)
                assert torch.equal(copy.dst, copy.src)
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def consume_through_ring(
    transport: Transport, sources: list[torch.Tensor], num_slots: int, *, wait: bool = True
) -> list[torch.Tensor]:
    """What the worker does: issue ahead as far as the ring goes, consume the oldest, reuse its slot."""
    numel = max(source.numel() for source in sources)
    slab = Slab(Ring.required_bytes(num_slots, 4 * numel), name="pipeline")
    ring = Ring(slab, num_slots, 4 * numel)
    under_way: list[tuple[Transfer, torch.Tensor, Slot]] = []
    results: list[torch.Tensor] = []

    def consume() -> None:
        transfer, tile, slot = under_way.pop(0)
        if wait:
            transport.wait(transfer)
        results.append(tile.clone())
        ring.release(slot)

    for source in sources:
        while (slot := ring.try_acquire()) is None:
            consume()
        tile = slot.tensor(torch.float32, source.numel())
        under_way.append((to_host(transport, [Copy(tile, source)]), tile, slot))
    while under_way:
        consume()
    slab.close()
    return results


@settings(max_examples=25, deadline=None)
@given(num_slots=st.integers(1, 4), numels=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_small_ring_gives_what_an_unlimited_one_gives(num_slots: int, numels: list[int]) -> None:
    """F17."""
    sources = [torch.full((numel,), float(i)) for i, numel in enumerate(numels)]
    lanes = LaneTransport(delay=lambda lane, index: 0.0005 * (index % 3 == 0))
    results = consume_through_ring(lanes, sources, num_slots)
    lanes.close()
    assert all(torch.equal(result, source) for result, source in zip(results, sources, strict=True))


def test_two_hundred_parameters_through_two_slots(lanes: LaneTransport) -> None:
    """F17."""
    sources = [torch.full((16,), float(i)) for i in range(200)]
    results = consume_through_ring(lanes, sources, 2)
    assert all(torch.equal(result, source) for result, source in zip(results, sources, strict=True))


def test_the_same_pipeline_without_its_wait_is_caught() -> None:
    """The control: it shows that the two tests above can fail."""
    lanes = LaneTransport()
    lanes.hold("to_host")
    sources = [torch.full((16,), float(i)) for i in range(20)]
    results = consume_through_ring(lanes, sources, 2, wait=False)
    lanes.close()
    assert all(result.isnan().all() for result in results)
