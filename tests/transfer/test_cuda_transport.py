"""Real streams. Every ordering test has a control that shows the wrong result when the wait is left out.

``torch.cuda._sleep`` keeps a stream busy for about 0.1 s: the window in which a missing wait shows.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

from offload.errors import ClosedError, ConfigError
from offload.transfer import cuda, pinned
from offload.transfer.cuda import TURN_BYTES, CudaTransport
from offload.transfer.pinned import Slab, allocate, mapped_bytes, pinned_bytes
from offload.transfer.ring import Ring
from offload.transfer.transport import Copy, TransferState
from tests.device_gate import DeviceGate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

MIB = 1 << 20
NUMEL = 1 << 20
#: About 0.1 s on current GPUs.
SLEEP_CYCLES = 200_000_000


@pytest.fixture(params=["one stream", "turns"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaTransport]:
    """Of the second kind with pieces so small that each copy of a test is cut, and changes streams several times."""
    torch.cuda.synchronize()
    transport = CudaTransport("cuda", timeout_s=60.0)
    if request.param == "turns":
        monkeypatch.setattr(cuda, "TURN_BYTES", 300_000)
        transport.take_turns()
    yield transport
    transport.close()


@pytest.fixture
def host() -> Iterator[torch.Tensor]:
    """A registered host buffer of NUMEL BF16 elements, full of -1."""
    slab = allocate(2 * NUMEL, name="test-host", pin=True, fallback_pageable=False)
    yield slab.tensor(torch.bfloat16).fill_(-1.0)
    torch.cuda.synchronize()
    slab.close()


def on_device(value: float) -> torch.Tensor:
    tensor = torch.full((NUMEL,), value, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    return tensor


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_gradient_is_copied_after_the_kernel_that_makes_it(
    transport: CudaTransport, host: torch.Tensor, is_ordered: bool
) -> None:
    """F13: the producer is a side stream, with a delay before its kernel."""
    grad = on_device(0.0)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        grad.fill_(7.0)
        ready = transport.record_ready()
    transfer = transport.issue_to_host([Copy(host, grad)], [ready] if is_ordered else [])
    if is_ordered:
        assert not transport.is_done(transfer)
        assert not ready.query()
        assert (host == -1.0).all()
    transport.wait(transfer)
    assert (host == (7.0 if is_ordered else 0.0)).all()


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_freed_gradient_is_not_overwritten_before_it_was_copied(
    transport: CudaTransport, host: torch.Tensor, is_kept: bool
) -> None:
    """F15. The control lets the transfer go of its tensors at once, as a forgotten reference would."""
    grad = on_device(7.0)
    address = grad.data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        gate = transport.record_ready()
    transfer = transport.issue_to_host([Copy(host, grad)], [gate])
    signal = transfer.signal
    assert signal is not None
    del grad
    if not is_kept:
        transfer.finish()
    heirs = [torch.full((NUMEL,), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    assert (address in [heir.data_ptr() for heir in heirs]) is not is_kept
    signal.synchronize()
    transport.wait(transfer)
    assert (host == 7.0).all() if is_kept else host.isnan().all()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_stream_that_waits_sees_the_new_weight(
    transport: CudaTransport, host: torch.Tensor, is_awaited: bool
) -> None:
    """F14."""
    weight = torch.nn.Parameter(on_device(0.0))
    host.fill_(5.0)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        gate = transport.record_ready()
    version = weight._version
    transfer = transport.issue_to_device([Copy(weight, host)], [gate])
    assert weight._version == version  # whoever submits the copy counts it
    reader = torch.cuda.Stream()
    with torch.cuda.stream(reader):
        if is_awaited:
            transport.wait_on_stream(transfer)
        seen = weight.detach().clone()
    reader.synchronize()
    assert (seen == (5.0 if is_awaited else 0.0)).all()
    assert transfer.state is TransferState.ISSUED
    transport.wait(transfer)
    assert transport.is_done(transfer)
    transport.wait(transfer)
    transport.wait_on_stream(transfer)
    assert (weight == 5.0).all()


def test_one_ready_may_serve_many_issues(transport: CudaTransport, host: torch.Tensor) -> None:
    grad = on_device(0.0)
    torch.cuda._sleep(SLEEP_CYCLES)
    grad.copy_(torch.arange(NUMEL, device="cuda") % 128)
    expected = (torch.arange(NUMEL) % 128).to(torch.bfloat16)
    ready = transport.record_ready()
    spans = list(zip(host.split(NUMEL // 16), grad.split(NUMEL // 16), strict=True))
    transfers = [transport.issue_to_host([Copy(*span)], [ready]) for span in spans]
    del ready
    for _ in range(32):  # events recorded anew must not disturb the waits that are enqueued
        transport.record_ready()
    for transfer in transfers:
        transport.wait(transfer)
    assert torch.equal(host, expected)


def test_a_ring_of_two_slots_under_load(transport: CudaTransport) -> None:
    """F17, F11: device to host and back through two slots, from a thread of its own as the worker does it."""
    slab = allocate(Ring.required_bytes(2, 2 * NUMEL), name="ring", pin=True, fallback_pageable=False)
    ring = Ring(slab, 2, 2 * NUMEL)
    results = [on_device(-1.0) for _ in range(20)]
    readies = []
    grads: list[torch.Tensor | None] = []
    for i in range(20):
        torch.cuda._sleep(SLEEP_CYCLES // 50)
        grads.append(torch.full((NUMEL,), float(i), dtype=torch.bfloat16, device="cuda"))
        readies.append(transport.record_ready())

    def work() -> None:
        for i, ready in enumerate(readies):
            slot = ring.try_acquire()
            assert slot is not None
            tile = slot.tensor(torch.bfloat16)
            source, grads[i] = grads[i], None
            assert source is not None
            transfer = transport.issue_to_host([Copy(tile, source)], [ready])
            del source
            transport.wait(transfer)
            tile.add_(1.0)
            back = transport.issue_to_device([Copy(results[i], tile)], [])
            transport.wait(back)
            ring.release(slot)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(60)
    assert not worker.is_alive()
    assert [float(result[0]) for result in results] == [i + 1.0 for i in range(20)]
    assert all((result == i + 1.0).all() for i, result in enumerate(results))
    slab.close()


def test_record_ready_is_cheap_enough_for_a_hook(transport: CudaTransport) -> None:
    def once() -> float:
        start = time.perf_counter()
        transport.record_ready()
        return time.perf_counter() - start

    assert statistics.median(once() for _ in range(2000)) < 50e-6


def test_close_drains_and_refuses_more(transport: CudaTransport, host: torch.Tensor) -> None:
    grad = on_device(3.0)
    torch.cuda._sleep(SLEEP_CYCLES)
    transfer = transport.issue_to_host([Copy(host, grad)], [transport.record_ready()])
    transport.close()
    transport.close()
    assert transport.is_done(transfer)
    transport.wait(transfer)
    assert (host == 3.0).all()
    with pytest.raises(ClosedError):
        transport.issue_to_host([Copy(host, grad)], [])


def test_wrong_devices_and_copies_are_refused(transport: CudaTransport, host: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="HostTransport"):
        CudaTransport("cpu")
    with pytest.raises(ConfigError, match="one dtype"):
        transport.issue_to_host([Copy(host, on_device(0.0).float())], [])


@pytest.mark.parametrize(
    "num_bytes", [128 * MIB + 4096, pytest.param(4096 * MIB + 4096, marks=pytest.mark.slow)]
)
def test_a_registered_slab_grows_by_what_was_asked_and_goes(num_bytes: int) -> None:
    """F41, F43."""
    allocate(4096, name="warm-up", pin=True, fallback_pageable=False).close()
    process = psutil.Process()
    before = process.memory_info().rss, mapped_bytes(), pinned_bytes()
    slab = allocate(num_bytes, name="grown", pin=True, fallback_pageable=False)
    grown = process.memory_info().rss - before[0]
    assert 0.97 * num_bytes < grown < 1.03 * num_bytes + 4 * MIB
    assert pinned_bytes() - before[2] == num_bytes
    view = slab.tensor(torch.float32, count=16)
    assert view.is_pinned()
    slab.close()
    assert not view.is_pinned()
    del view
    assert (mapped_bytes(), pinned_bytes()) == before[1:]
    assert process.memory_info().rss - before[0] < 0.03 * num_bytes + 4 * MIB


def test_a_refused_registration_leaves_no_error_behind_in_the_runtime() -> None:
    """F42: torch would report it at the next kernel launch."""
    slab = allocate(MIB, name="twice", pin=True, fallback_pageable=False)
    address = slab.array("uint8").ctypes.data
    reason = pinned._host_register(address, MIB)
    assert reason is not None
    assert "cudaHostRegister returned" in reason
    assert float(torch.ones(4, device="cuda").sum()) == 4.0
    slab.close()


def test_a_process_exits_promptly_with_slabs_and_copies_under_way() -> None:
    """F44."""
    script = """
        import torch
        from offload.transfer.cuda import CudaTransport
        from offload.transfer.pinned import allocate
        from offload.transfer.transport import Copy

        transport = CudaTransport("cuda")
        slab = allocate(64 << 20, name="exit", pin=True, fallback_pageable=False)
        grad = torch.ones(32 << 20, dtype=torch.bfloat16, device="cuda")
        torch.cuda._sleep(200_000_000)
        copy = Copy(slab.tensor(torch.bfloat16), grad)
        transfer = transport.issue_to_host([copy], [transport.record_ready()])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_slabs_that_were_not_asked_to_pin_stay_pageable() -> None:
    slab = Slab(4096, name="plain")
    with pytest.raises(ConfigError, match="pin=False"):
        slab.register()
    assert not slab.tensor(torch.float32).is_pinned()
    slab.close()


# Turns


@pytest.fixture(scope="module")
def burst() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both sides of 20 ms of copies, 32 turns."""
    slab = allocate(32 * TURN_BYTES, name="test-burst", pin=True, fallback_pageable=False)
    host = slab.tensor(torch.uint8)
    yield host, torch.zeros(host.numel(), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    slab.close()


@pytest.mark.parametrize("takes_turns", [True, False])
def test_others_get_their_turn_in_a_burst(
    burst: tuple[torch.Tensor, torch.Tensor], takes_turns: bool
) -> None:
    """A value that backward asks for does not wait for gigabytes of state; the control shows that it would."""
    host, card = burst
    host.fill_(1)
    card.zero_()
    transport = CudaTransport("cuda", timeout_s=60.0)
    if takes_turns:
        transport.take_turns()
    value, seen = torch.ones(1024, device="cuda"), torch.zeros(1024).pin_memory()
    gate, asking = DeviceGate(), torch.cuda.Stream()
    torch.cuda.synchronize()
    gate.hold(asking)
    with torch.cuda.stream(asking):
        ready = transport.record_ready()  # of both: the burst is enqueued as a whole, and begins first
        torch.cuda._sleep(SLEEP_CYCLES // 50)
        seen.copy_(value, non_blocking=True)
        asked = torch.cuda.Event()
        asked.record()
    transfer = transport.issue_to_host([Copy(host, card)], [ready])
    gate.open()
    asked.synchronize()
    is_over = transport.is_done(transfer)
    transport.wait(transfer)
    transport.close()
    assert not host.any()
    assert seen.all()
    assert is_over is not takes_turns


@pytest.mark.parametrize("to_host", [True, False])
def test_copies_of_one_direction_keep_their_order_over_turns(
    burst: tuple[torch.Tensor, torch.Tensor], to_host: bool
) -> None:
    """A large copy, then a small one over its end: the small one is what stays."""
    host, card = burst
    host.fill_(1)
    card.zero_()
    transport = CudaTransport("cuda", timeout_s=60.0)
    transport.take_turns()
    last = slice(-MIB, None)
    late_card = torch.full((MIB,), 2, dtype=torch.uint8, device="cuda")
    late_host = torch.full((MIB,), 2, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    if to_host:
        issue, copies = transport.issue_to_host, [Copy(host, card), Copy(host[last], late_card)]
    else:
        issue, copies = transport.issue_to_device, [Copy(card, host), Copy(card[last], late_host)]
    for transfer in [issue([copy], []) for copy in copies]:
        transport.wait(transfer)
    transport.close()
    target, first = (host, 0) if to_host else (card, 1)
    assert (target[last] == 2).all()
    assert (target[:-MIB] == first).all()


def test_too_few_hardware_queues_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver has read the variable long ago: only what is said is tested."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda._warn_once.cache_clear()
    for _ in range(2):
        CudaTransport("cuda").close()
    assert caplog.text.count("CUDA_DEVICE_MAX_CONNECTIONS=1") == 1
