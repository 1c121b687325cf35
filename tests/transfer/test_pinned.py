"""Slabs: exact size, right views, registration that never leaks. CUDA's part is played by a fake runtime."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch

from offload.errors import ClosedError, ConfigError, MemoryBudgetError, PinningError
from offload.transfer import pinned
from offload.transfer.mapping import HUGE_PAGE_BYTES
from offload.transfer.pinned import Slab, allocate, is_pinned, mapped_bytes, pinned_bytes

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
