"""Calls of the CUDA driver that keep the interpreter's lock.

Torch's bindings, and ctypes by default, give the lock away for each call of the driver, microseconds long, and then stand
in line for it behind a program that runs backward, which stands in the same line. A step makes thousands of such calls:
copies, events and launches for hundreds of tiles. With the lock given away, backward's own thread took 24-29 ms for a
layer that it can leave after 14 ms; with the lock kept, and half as many tiles, 15-20 ms (a 4 G model on an H200).

What waits for the device must not be called from here. Copies from and to pageable memory do wait; `Driver.slow_copy` is
for those.

Handles and addresses are plain integers. Functions return the driver's code; `check` raises for it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

from offload.errors import KernelError

__all__ = ["NOT_READY", "NO_CONTEXT", "Driver", "check", "driver"]

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread has not used CUDA yet
NOT_READY = 600  # CUDA_ERROR_NOT_READY

Call = Callable[..., int]


class Driver:
    """The functions that are used, with their argument types.

    Args:
        name: of the library.
    """

    def __init__(self, name: str) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        keeping, giving = ctypes.PyDLL(name), ctypes.CDLL(name)

        def function(name: str, *types: object, library: ctypes.CDLL = keeping) -> Call:
            call = getattr(library, name)
            call.argtypes, call.restype = types, ctypes.c_int
            return call  # type: ignore[no-any-return]

        #: destination, source, bytes, stream
        self.copy = function("cuMemcpyAsync", pointer, pointer, size, pointer)
        #: the same without the lock
        self.slow_copy = function("cuMemcpyAsync", pointer, pointer, size, pointer, library=giving)
        #: event, stream
        self.record = function("cuEventRecord", pointer, pointer)
        #: stream, event, flags (0)
        self.hold_back = function("cuStreamWaitEvent", pointer, pointer, number)
        #: event
        self.query = function("cuEventQuery", pointer)
        #: function, grid (3), block (3), shared bytes, stream, arguments, extra
        self.launch = function("cuLaunchKernel", pointer, *[number] * 7, pointer, pointer, pointer)


@functools.cache
def driver() -> Driver:
    """The driver that torch has loaded.

    Raises:
        KernelError: there is none.
    """
    try:
        return Driver("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise KernelError(
            f"the CUDA driver's library cannot be opened: {error} (GPUs of other makers are not supported)"
        ) from error


def check(code: int, what: str) -> None:
    """Raise for a driver's code.

    Raises:
        RuntimeError: the call failed, or an earlier one that was asynchronous.
    """
    if code:
        raise RuntimeError(
            f"the CUDA driver refused {what}: error {code} (cuda.h names it); it may come from a kernel that ran before"
        )
