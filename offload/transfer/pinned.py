"""Slabs: host memory that is mapped, touched, then registered with CUDA once, at construction.

Never in a hook: a pin inside an FSDP hook waits for the device while its peers spin in NCCL, which is a
distributed deadlock. Whoever frees a slab first waits for every transfer from or to it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from offload.errors import ClosedError, ConfigError, PinningError
from offload.transfer.mapping import Mapping, mapped_bytes

__all__ = ["Slab", "Touch", "allocate", "is_pinned", "mapped_bytes", "pin_slab", "pinned_bytes"]

logger = logging.getLogger(__name__)

#: Writes every byte of a fresh slab, so that its pages lie where the writing threads run.
Touch = Callable[[npt.NDArray[np.uint8]], None]

#: cudaHostRegisterPortable: pinned for every device of the process.
_PORTABLE = 1

#: Address → bytes of everything registered. A dict, because a finalizer may change it at any moment and
#: single dict operations are atomic, while a lock could be taken twice by one thread.
_registered: dict[int, int] = {}


def pinned_bytes() -> int:
    """Bytes of all slabs that are registered with CUDA now."""
    return sum(list(_registered.values()))


def is_pinned(address: int) -> bool:
    """Whether the byte at ``address`` lies in a slab that is registered with CUDA now."""
    return any(start <= address < start + size for start, size in list(_registered.items()))


class Slab:
    """One contiguous piece of host memory, from which NumPy and torch views are cut.

    Views keep the memory mapped, also beyond :meth:`close`; they do not keep it pinned. Whatever leaves the
    library (a state dict, an export) must be a clone: ``torch.save`` of a view writes the whole slab. The
    memory does not exist in forked children.
    """

    def __init__(self, num_bytes: int, *, name: str, pin: bool = False, huge_pages: bool = True) -> None:
        """Map ``num_bytes``, zeroed and untouched.

        Args:
            num_bytes: Exact size; nothing is rounded up but to the 4 KiB page.
            name: For messages and logs.
            pin: Whether :meth:`register` will be called. Needs CUDA.
            huge_pages: Advise transparent huge pages.
        """
        if pin and not torch.cuda.is_available():
            raise ConfigError(
                f"slab {name!r}: pin=True needs CUDA, which torch does not see here; pass pin=False"
            )
        self.name = name
        self.num_bytes = num_bytes
        self._pin = pin
        self._mapping = Mapping(num_bytes, name=name, huge_pages=huge_pages)
        self._unregister: weakref.finalize[..., Slab] | None = None
        self._closed = False

    @property
    def pinned(self) -> bool:
        """Whether the memory is registered with CUDA at this moment."""
        return self._unregister is not None and self._unregister.alive

    def array(self, dtype: npt.DTypeLike, start_bytes: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """A 1-D view of ``count`` elements (all that follow, if None) from ``start_bytes`` on."""
        wanted = np.dtype(dtype)
        return self._span(start_bytes, count, wanted.itemsize).view(wanted)

    def tensor(self, dtype: torch.dtype, start_bytes: int = 0, count: int | None = None) -> torch.Tensor:
        """The same as a tensor; also of dtypes that NumPy lacks, such as bfloat16."""
        return torch.from_numpy(self._span(start_bytes, count, dtype.itemsize)).view(dtype)

    def _span(self, start_bytes: int, count: int | None, itemsize: int) -> npt.NDArray[np.uint8]:
        if self._closed:
            raise ClosedError(f"slab {self.name!r} was closed: no new views of it")
        if start_bytes % itemsize or not 0 <= start_bytes <= self.num_bytes:
            raise ConfigError(
                f"slab {self.name!r} of {self.num_bytes} bytes: start_bytes={start_bytes} must lie within "
                f"and be a multiple of the {itemsize} bytes of an element"
            )
        fits = (self.num_bytes - start_bytes) // itemsize
        count = fits if count is None else count
        if not 0 <= count <= fits:
            raise ConfigError(
                f"slab {self.name!r}: {count} elements from byte {start_bytes} on, only {fits} fit"
            )
        return self._mapping.data[start_bytes : start_bytes + count * itemsize]

    def register(self, device: torch.device | None = None) -> None:
        """Pin the memory, which was touched before (else this is 10 times slower). Again: does nothing.

        Args:
            device: Whose context does the call; any device can use the memory then. The current one, if None:
                on a rank that has not set it, this opens a context on GPU 0.

        Raises:
            PinningError: The system refused. The slab stays usable, pageable.
        """
        if self._closed:
            raise ClosedError(f"slab {self.name!r} was closed: it cannot be pinned")
        if not self._pin:
            raise ConfigError(f"slab {self.name!r} was made with pin=False")
        if self.pinned or not self.num_bytes:
            return
        with torch.cuda.device(device):
            error = _host_register(self._mapping.address, self.num_bytes)
            device_index = torch.cuda.current_device()
        if error is not None:
            raise PinningError(_refusal(self.name, self.num_bytes, error))
        _registered[self._mapping.address] = self.num_bytes
        self._unregister = weakref.finalize(
            self, _unregister, self._mapping.address, device_index, os.getpid()
        )
        # A process that exits gives its pins back by itself; here it would only wait for the device.
        self._unregister.atexit = False

    def huge_bytes(self) -> int | None:
        """Bytes on huge pages; None where the system does not tell. Walks page tables: not for hot paths."""
        return None if self._closed else self._mapping.huge_bytes()

    def close(self) -> None:
        """Unregister, then unmap (with the last view, if views are still out). Closing twice is fine."""
        self._closed = True
        if self._unregister is not None:
            self._unregister()  # before unmapping: the driver must not hold addresses that are gone
        self._mapping.close()

    def __repr__(self) -> str:
        """Name, size and kind, for messages."""
        kind = "closed" if self._closed else "pinned" if self.pinned else "pageable"
        return f"Slab({self.name!r}, {self.num_bytes} bytes, {kind})"


def allocate(
    num_bytes: int,
    *,
    name: str,
    pin: bool,
    fallback_pageable: bool,
    touch: Touch | None = None,
    device: torch.device | None = None,
) -> Slab:
    """Map, touch, register: a slab ready for use.

    Args:
        num_bytes: Exact size.
        name: For messages and logs.
        pin: Register with CUDA.
        fallback_pageable: Where pinning is refused, log a warning and return the slab pageable instead of
            raising.
        touch: Writes all bytes; a fill with zeros by this thread, if None.
        device: As for :meth:`Slab.register`.

    Raises:
        PinningError: Pinning was refused and ``fallback_pageable`` is False. Nothing stays allocated.
    """
    slab = Slab(num_bytes, name=name, pin=pin)
    try:
        (touch or _fill_zeros)(slab.array(np.uint8))
        if pin:
            pin_slab(slab, device, fallback_pageable=fallback_pageable)
    except BaseException:
        slab.close()
        raise
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%r allocated, %s bytes on huge pages", slab, slab.huge_bytes())
    return slab


def _fill_zeros(data: npt.NDArray[np.uint8]) -> None:
    data.fill(0)


#: Whether the fallback was already logged as a warning.
_fallback_warned = False


def pin_slab(slab: Slab, device: torch.device | None, *, fallback_pageable: bool) -> None:
    """Register a slab, which was touched before; arguments and errors as for `allocate`."""
    global _fallback_warned
    try:
        slab.register(device)
    except PinningError as error:
        if not fallback_pageable:
            raise
        level = logging.INFO if _fallback_warned else logging.WARNING
        _fallback_warned = True
        logger.log(level, "%s. Going on with pageable memory: copies are about 7 times slower.", error)


def _host_register(address: int, num_bytes: int) -> str | None:
    """Register with CUDA; None, or the driver's reason for refusing."""
    cudart = torch.cuda.cudart()
    code = cudart.cudaHostRegister(address, num_bytes, _PORTABLE)
    if int(code) == 0:
        return None
    _clear_last_error()
    return f"{cudart.cudaGetErrorString(code)} (cudaHostRegister returned {int(code)})"


def _unregister(address: int, device_index: int, owner_pid: int) -> None:
    """Undo :func:`_host_register`. Never raises: it also runs in garbage collection."""
    _registered.pop(address, None)
    if os.getpid() != owner_pid:  # a forked child has neither the memory nor a usable CUDA context
        return
    with torch.cuda.device(device_index):
        code = torch.cuda.cudart().cudaHostUnregister(address)
        if int(code) == 0:
            return
        _clear_last_error()
        logger.error("cudaHostUnregister of %#x returned %d", address, int(code))


def _clear_last_error() -> None:
    """Take the failed call's code out of the runtime, else torch reports it at the next kernel launch."""
    try:
        torch.ones(1, device="cuda")
    except RuntimeError:
        logger.debug("cleared the CUDA runtime's last error")


def _refusal(name: str, num_bytes: int, reason: str) -> str:
    """What was refused, in which circumstances, and what to do about it."""
    return (
        f"slab {name!r}: could not pin {num_bytes} bytes ({num_bytes / 2**30:.2f} GiB): {reason}. "
        f"Memory available {psutil.virtual_memory().available / 2**30:.2f} GiB, already pinned here "
        f"{pinned_bytes() / 2**30:.2f} GiB, lockable (ulimit -l) {_memlock_limit()}. "
        "Raise `ulimit -l` (in containers --ulimit memlock=-1), or lower pinned_budget"
    )


def _memlock_limit() -> str:
    try:
        import resource
    except ImportError:  # Windows
        return "unknown"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
