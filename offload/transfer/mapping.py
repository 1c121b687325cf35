"""Private anonymous memory with huge pages: the raw material of slabs.

Note [Why not torch's pinned allocator]
Torch's allocator rounds a request up to a power of two and pins untouched memory page by page, 0.5-0.7 s/GiB.
A mapping of exactly the asked size, on huge pages and touched first, registers in 0.03 s/GiB.

Note [Fork]
A registered page must not become copy-on-write: the parent's next write would move it away from under the
device. So mappings are advised ``MADV_DONTFORK``, and a forked child has a hole where the parent has the
slab. The child may map something else there; it must therefore never unmap an inherited mapping, not even in
garbage collection.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.errors import ConfigError, MemoryBudgetError

__all__ = ["HUGE_PAGE_BYTES", "Mapping", "mapped_bytes"]

#: Size and alignment of a transparent huge page on x86-64, and on aarch64 with 4 KiB pages.
HUGE_PAGE_BYTES = 2 << 20

#: Every mapping that still exists, with the bytes that were asked for; one whose views outlive it counts
#: until they go.
_live: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
#: In a forked child: the parent's mappings, kept for ever. See Note [Fork].
_inherited: list[mmap.mmap] = []


def mapped_bytes() -> int:
    """Bytes of all mappings of this process that are not yet unmapped."""
    return sum(list(_live.values()))


def _keep_inherited() -> None:
    _inherited.extend(list(_live))
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_inherited)


class Mapping:
    """``num_bytes`` of zeroed private memory that start on a huge-page boundary. Nothing is touched yet."""

    def __init__(self, num_bytes: int, *, name: str, huge_pages: bool) -> None:
        """Map, and advise the kernel. ``name`` is for messages."""
        if num_bytes < 0:
            raise ConfigError(f"slab {name!r}: num_bytes is {num_bytes}, must not be negative")
        self.num_bytes = num_bytes
        # Address space for the alignment, never touched: it costs no memory.
        mapping = _map(num_bytes + HUGE_PAGE_BYTES, name)
        self._mapping: mmap.mmap | None = mapping
        _live[mapping] = num_bytes
        whole: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE_BYTES
        self.data = whole[start : start + num_bytes]
        self.address: int = self.data.ctypes.data
        if num_bytes:
            self._advise(mapping, start, huge_pages)

    def _advise(self, mapping: mmap.mmap, start: int, huge_pages: bool) -> None:
        """Advise exactly the used pages: the last, partial huge page stays on small ones."""
        num_bytes = -(-self.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        names = ["MADV_DONTFORK"] + (["MADV_HUGEPAGE"] if huge_pages else [])
        for advice in (getattr(mmap, name) for name in names if hasattr(mmap, name)):
            # A kernel built without it refuses: then nothing is lost but speed, or fork right after a pin.
            with contextlib.suppress(OSError):
                mapping.madvise(advice, start, num_bytes)

    def huge_bytes(self) -> int | None:
        """Bytes that lie on huge pages, as the kernel counts them; None where it does not tell."""
        try:
            with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as lines:
                return sum(_huge_bytes_within(lines, self.address, self.address + self.num_bytes))
        except OSError:
            return None

    def close(self) -> None:
        """Unmap now, or with the last view of it. Closing twice is fine."""
        mapping, self._mapping = self._mapping, None
        self.data = self.data[:0].copy()  # our own view would keep the mapping open
        if mapping is None or mapping not in _live:  # the second: inherited through fork
            return
        try:
            mapping.close()
        except BufferError:  # views exist: unmapping under them would crash, so the last one unmaps
            return
        _live.pop(mapping, None)


def _map(num_bytes: int, name: str) -> mmap.mmap:
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            # Python's default is MAP_SHARED: such memory is tmpfs and gets no huge pages.
            return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError) as error:
        raise MemoryBudgetError(
            f"slab {name!r}: the system refused to map {num_bytes} bytes ({error}): "
            "lower host_budget or offload less, and look at `ulimit -v` and vm.overcommit_memory"
        ) from error


def _huge_bytes_within(smaps: Any, start: int, end: int) -> Iterator[int]:
    """``AnonHugePages`` of every area of ``smaps`` that begins within [start, end)."""
    inside = False
    for line in smaps:
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):  # an area's first line: "7f00-7f80 rw-p ..."
            inside = start <= int(key.partition("-")[0], 16) < end
        elif inside and key == "AnonHugePages:":
            yield int(rest.split()[0]) * 1024
