"""Slabs: exact size, right views, registration that never leaks. CUDA's part is played by a fake runtime."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch

from offload.errors import ClosedError, ConfigError, DeadlineError, MemoryBudgetError, PinningError
from offload.transfer import pinned, slabs
from offload.transfer.mapping import HUGE_PAGE_BYTES
from offload.transfer.pinned import Slab, allocate, is_pinned, mapped_bytes, pinned_bytes
from offload.transfer.slabs import SlabMaker, Wanted, close_all

MIB = 1 << 20


class FakeRuntime:
    """The four calls of ``torch.cuda.cudart()`` that slabs make, with a log and a limit."""

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert address not in self.registered
        if self.refuse:
            return 2
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        ctypes.string_at(address, 1)  # crashes unless still mapped
        return 0 if self.registered.pop(address, None) is not None else 1

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return "out of memory"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(pinned, "_clear_last_error", lambda: None)
    monkeypatch.setattr(pinned, "_fallback_warned", False)
    return fake


@pytest.fixture(autouse=True)
def _nothing_leaks() -> object:
    gc.collect()
    before = mapped_bytes(), pinned_bytes()
    yield
    gc.collect()
    assert (mapped_bytes(), pinned_bytes()) == before


def test_views_share_memory_and_start_on_a_huge_page() -> None:
    slab = Slab(1000, name="views")
    assert slab.array(np.uint8).ctypes.data % HUGE_PAGE_BYTES == 0
    assert not slab.array(np.uint8).any()
    slab.tensor(torch.bfloat16, start_bytes=4, count=2).fill_(-2.0)
    np.testing.assert_array_equal(slab.array(np.uint16, 4, 3), np.array([0xC000, 0xC000, 0], np.uint16))
    slab.array(np.float32, 8)[:] = 3.0
    assert slab.tensor(torch.float32, 8).sum() == 3.0 * 248
    assert slab.tensor(torch.float32, 1000).numel() == slab.array(np.float32, 4, 0).size == 0
    slab.close()


@pytest.mark.parametrize(("start_bytes", "count"), [(2, 1), (-4, 1), (1004, 0), (0, 251), (996, 2), (0, -1)])
def test_views_beyond_the_slab_are_refused(start_bytes: int, count: int) -> None:
    slab = Slab(1000, name="bounds")
    with pytest.raises(ConfigError, match="'bounds'"):
        slab.array(np.float32, start_bytes, count)
    with pytest.raises(ConfigError, match="'bounds'"):
        slab.tensor(torch.float32, start_bytes, count)
    slab.close()


def test_an_empty_slab_works() -> None:
    slab = allocate(0, name="empty", pin=False, fallback_pageable=False)
    assert slab.array(np.float32).size == slab.tensor(torch.bfloat16).numel() == 0
    slab.close()


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        Slab(-1, name="negative")
    with pytest.raises(MemoryBudgetError, match=r"'vast'.*host_budget"):
        Slab(1 << 60, name="vast")


def test_views_outlive_close_and_the_memory_goes_with_the_last() -> None:
    before = mapped_bytes()
    slab = Slab(MIB, name="outlived")
    view = slab.tensor(torch.float32)
    view.fill_(5.0)
    slab.close()
    slab.close()
    assert mapped_bytes() == before + MIB
    assert (view == 5.0).all()
    del view
    gc.collect()
    assert mapped_bytes() == before


def test_a_closed_slab_gives_no_views() -> None:
    slab = Slab(64, name="shut")
    slab.close()
    with pytest.raises(ClosedError, match="'shut'"):
        slab.array(np.uint8)
    assert "closed" in repr(slab)


@pytest.mark.parametrize("num_bytes", [128 * MIB + 1, 64 * 1024 + 1])
def test_memory_grows_by_what_was_asked_and_comes_back(num_bytes: int) -> None:
    """F41, F43, for the unregistered part: no rounding to a power of two, nor a small slab to a huge page."""
    process = psutil.Process()
    before = process.memory_info().rss
    slab = allocate(num_bytes, name="exact", pin=False, fallback_pageable=False)
    grown = process.memory_info().rss - before
    assert 0.97 * num_bytes - MIB / 4 < grown < 1.03 * num_bytes + MIB / 4
    slab.close()
    assert process.memory_info().rss - before < MIB / 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="smaps is Linux's")
def test_huge_pages_come_where_the_kernel_has_them() -> None:
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        pytest.skip("no transparent huge pages in this kernel")
    if "[never]" in setting:
        pytest.skip("transparent huge pages are off")
    slab = Slab(16 * MIB + 4096, name="huge")
    assert slab.huge_bytes() == 0
    slab.array(np.uint8).fill(1)
    huge = slab.huge_bytes()
    assert huge is not None
    assert 0 < huge <= 16 * MIB
    small = Slab(16 * MIB, name="small", huge_pages=False)
    small.array(np.uint8).fill(1)
    assert slab.huge_bytes() == huge  # a neighbour's pages are not counted
    slab.close()
    small.close()


def test_pinning_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs CUDA"):
        Slab(64, name="no-cuda", pin=True)


def test_register_is_exact_and_close_undoes_it_before_unmapping(runtime: FakeRuntime) -> None:
    slab = allocate(5 * MIB + 4096, name="reg", pin=True, fallback_pageable=False)
    assert slab.pinned
    slab.register()
    assert list(runtime.registered.values()) == [5 * MIB + 4096] == [pinned_bytes()]
    view = slab.array(np.uint8)
    slab.close()
    assert not runtime.registered
    assert "closed" in repr(slab)
    assert not view.any()


def test_an_address_is_pinned_while_its_slab_is_registered(runtime: FakeRuntime) -> None:
    before = allocate(8192, name="before", pin=False, fallback_pageable=False)
    slab = allocate(8192, name="test", pin=True, fallback_pageable=False)
    first = slab.array(np.uint8).ctypes.data
    assert [is_pinned(first + byte) for byte in (-1, 0, 8191, 8192)] == [False, True, True, False]
    assert not is_pinned(before.array(np.uint8).ctypes.data)
    slab.close()
    assert not is_pinned(first)


def test_dropping_a_slab_without_close_unregisters_it(runtime: FakeRuntime) -> None:
    slab = allocate(4096, name="dropped", pin=True, fallback_pageable=False)
    view = slab.array(np.uint8)
    del slab
    gc.collect()
    assert not runtime.registered
    assert view.size == 4096


def test_a_refused_pin_is_a_clear_error_and_leaks_nothing(runtime: FakeRuntime) -> None:
    """F42."""
    before = mapped_bytes()
    runtime.refuse = True
    with pytest.raises(PinningError, match=r"'greedy'.*4096 bytes.*out of memory.*ulimit -l.*pinned_budget"):
        allocate(4096, name="greedy", pin=True, fallback_pageable=False)
    assert mapped_bytes() == before
    assert pinned_bytes() == 0


def test_a_refused_pin_may_fall_back_and_warns_once(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    """F42."""
    runtime.refuse = True
    with caplog.at_level(logging.WARNING, "offload"):
        slabs = [allocate(4096, name="meek", pin=True, fallback_pageable=True) for _ in range(3)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'meek'" in caplog.text
    for slab in slabs:
        assert not slab.pinned
        slab.array(np.uint8).fill(1)
        slab.close()


def test_a_failing_touch_leaks_nothing(runtime: FakeRuntime) -> None:
    def fail(data: npt.NDArray[np.uint8]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        allocate(4096, name="touchy", pin=True, fallback_pageable=True, touch=fail)
    assert not runtime.registered


def test_touch_comes_before_register(runtime: FakeRuntime) -> None:
    seen: list[tuple[int, int]] = []
    slab = allocate(
        8192,
        name="order",
        pin=True,
        fallback_pageable=False,
        touch=lambda data: seen.append((data.size, len(runtime.registered))),
    )
    assert seen == [(8192, 0)]
    slab.close()


# Several slabs, by a team -------------------------------------------------------------------------------------------

TIMEOUT_S = 60.0
DEVICE = torch.device("cuda:0")


def wanted(*names: str, num_bytes: int = 4096, pin: bool = True) -> list[Wanted]:
    return [Wanted(num_bytes, name, pin) for name in names]


def test_each_slab_is_touched_and_then_pinned(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    touch, register = slabs._touch, runtime.cudaHostRegister

    def noting(data: npt.NDArray[np.uint8]) -> None:
        touch(data)
        touched.append(data.ctypes.data)

    def checking(address: int, num_bytes: int, flags: int) -> int:
        assert address in touched
        return register(address, num_bytes, flags)

    monkeypatch.setattr(slabs, "_touch", noting)
    monkeypatch.setattr(runtime, "cudaHostRegister", checking)
    made = SlabMaker(device=DEVICE).make_all([*wanted("a", "b"), *wanted("c", pin=False)])
    assert [(slab.name, slab.pinned) for slab in made] == [("a", True), ("b", True), ("c", False)]
    close_all(made)
    assert not made


def test_one_is_pinned_while_the_next_is_touched(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, the touch of the second would wait in vain."""
    pinning, touching = threading.Event(), threading.Event()
    touch, register = slabs._touch, runtime.cudaHostRegister
    number = iter(range(2))

    def slow_touch(data: npt.NDArray[np.uint8]) -> None:
        if next(number) == 1:
            touching.set()
            assert pinning.wait(TIMEOUT_S)
        touch(data)

    def slow_register(*arguments: int) -> int:
        pinning.set()
        assert touching.wait(TIMEOUT_S)
        return register(*arguments)

    monkeypatch.setattr(slabs, "_touch", slow_touch)
    monkeypatch.setattr(runtime, "cudaHostRegister", slow_register)
    close_all(SlabMaker(device=DEVICE).make_all(wanted("a", "b")))


def test_a_team_touches_every_page_from_bound_threads() -> None:
    bound: list[threading.Thread] = []
    num_bytes = 5 * slabs.PART_BYTES + 4096 + 1
    maker = SlabMaker(num_threads=3, bind=lambda: bound.append(threading.current_thread()))
    before = psutil.Process().memory_info().rss
    slab = maker.make(num_bytes, "large")
    assert psutil.Process().memory_info().rss - before > 0.9 * num_bytes
    assert not slab.array(np.uint8).any()
    assert 1 < len(bound) <= 3
    assert threading.current_thread() not in bound
    assert not any(thread.is_alive() for thread in bound)
    slab.close()


def test_parts_are_all_of_it_and_share_no_huge_page() -> None:
    whole = slabs.PART_BYTES
    for num_threads, size in itertools.product((1, 2, 3, 16), (0, 1, 4096, whole, 2 * whole + 1, 9 * whole)):
        parts = slabs._parts(np.empty(size, np.uint8), num_threads)
        assert sum(part.size for part in parts) == size
        assert len(parts) <= slabs.PARTS_PER_THREAD * num_threads
        assert all(part.size % HUGE_PAGE_BYTES == 0 for part in parts[:-1])


def test_f42_a_refused_pin_of_several_is_pageable_and_the_others_are_not(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register = runtime.cudaHostRegister
    monkeypatch.setattr(
        runtime,
        "cudaHostRegister",
        lambda address, size, flags: 2 if size == 8192 else register(address, size, flags),
    )
    made = SlabMaker(device=DEVICE).make_all([*wanted("a"), *wanted("b", num_bytes=8192), *wanted("c")])
    assert [slab.pinned for slab in made] == [True, False, True]
    assert "'b'" in caplog.text
    close_all(made)


@pytest.mark.parametrize("stage", ["map", "touch", "pin"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_f42_an_error_of_any_slab_leaves_none(
    stage: str, number: int, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while an earlier one is being pinned, which ends first: it must not be unmapped under the driver."""
    calls = itertools.count()
    owner, name = {
        "map": (slabs, "Slab"),
        "touch": (slabs, "_touch"),
        "pin": (runtime, "cudaHostRegister"),
    }[stage]
    real = getattr(owner, name)

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)
    threads, before = threading.active_count(), mapped_bytes()
    with pytest.raises(KeyboardInterrupt):
        SlabMaker(num_threads=2, device=DEVICE).make_all(wanted("a", "b", "c"))
    assert not runtime.registered
    assert (threading.active_count(), mapped_bytes()) == (threads, before)


def test_an_error_waits_for_the_pin_that_is_under_way(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinning, touched = threading.Event(), threading.Event()
    touch, register = slabs._touch, runtime.cudaHostRegister
    number = iter(range(2))

    def failing_touch(data: npt.NDArray[np.uint8]) -> None:
        if next(number) == 1:
            assert pinning.wait(TIMEOUT_S)
            touched.set()
            raise MemoryError("no more")
        touch(data)

    def slow_register(address: int, num_bytes: int, flags: int) -> int:
        pinning.set()
        assert touched.wait(TIMEOUT_S)
        ctypes.string_at(address, 1)  # crashes unless still mapped
        return register(address, num_bytes, flags)

    monkeypatch.setattr(slabs, "_touch", failing_touch)
    monkeypatch.setattr(runtime, "cudaHostRegister", slow_register)
    with pytest.raises(MemoryError, match="no more"):
        SlabMaker(device=DEVICE).make_all(wanted("a", "b"))
    assert not runtime.registered


@pytest.mark.parametrize("stage", ["touch", "pin"])
def test_f42_what_hangs_is_given_up_and_stays_mapped(
    stage: str, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unmapped under a thread that uses it, it would crash the process; it goes when that has ended."""
    released, ended = threading.Event(), threading.Event()
    touch, register = slabs._touch, runtime.cudaHostRegister

    def hanging_touch(data: npt.NDArray[np.uint8]) -> None:
        released.wait(TIMEOUT_S)
        touch(data)
        ended.set()

    def hanging_register(address: int, num_bytes: int, flags: int) -> int:
        released.wait(TIMEOUT_S)
        code = register(address, num_bytes, flags)
        ended.set()
        return code

    if stage == "touch":
        monkeypatch.setattr(slabs, "_touch", hanging_touch)
    else:
        monkeypatch.setattr(slabs, "_touch", lambda data: None)  # else it may be what is late
        monkeypatch.setattr(runtime, "cudaHostRegister", hanging_register)
    monkeypatch.setattr("offload.transfer.helpers.END_S", 0.01)
    before, others = mapped_bytes(), set(threading.enumerate())
    maker = SlabMaker(num_threads=2, device=DEVICE, timeout_s=0.05)
    with pytest.raises(DeadlineError, match=r"did not end within timeout_s=0\.05 s"):
        maker.make(4 * slabs.PART_BYTES, "slow", pin=True)
    assert mapped_bytes() > before
    released.set()
    assert ended.wait(TIMEOUT_S)
    for thread in set(threading.enumerate()) - others:
        thread.join(TIMEOUT_S)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MADV_DONTFORK is Linux's")
def test_a_forked_child_never_unmaps_what_it_did_not_inherit() -> None:
    """F39. The child maps memory of its own where the parent's slab was; dropping the slab must spare it."""
    script = """
        import ctypes, gc, mmap, os
        import numpy as np
        from offload.transfer.pinned import Slab, mapped_bytes

        slab = Slab(8 << 20, name="fork")
        slab.array(np.uint8).fill(1)
        start = slab.array(np.uint8).ctypes.data
        child = os.fork()
        if child == 0:
            assert mapped_bytes() == 0
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            args = ctypes.c_void_p(start), ctypes.c_size_t(8 << 20), 3, flags, -1, ctypes.c_long(0)
            assert libc.mmap(*args) == start, "the hole is not where the slab was"
            ctypes.memset(start, 7, 8 << 20)
            slab.close()
            del slab
            gc.collect()
            assert ctypes.string_at(start + 12345, 1) == b"\\x07"
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) == 0
        assert slab.array(np.uint8).all()
        slab.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
