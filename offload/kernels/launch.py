"""Launches of a compiled CUDA kernel for microseconds.

The launcher that comes with ``torch.cuda._compile_kernel`` opens the driver's library anew and builds the argument list
from nothing at every call: 0.2 ms of Python on an idle core, 0.3-0.5 beside backward, where a step makes hundreds of
them. Here each thread writes addresses into an argument list that it has already.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from offload.driver import NO_CONTEXT, driver
from offload.errors import KernelError

__all__ = ["Launcher"]

Launch = Callable[..., int]


class Launcher:
    """One kernel whose arguments are all pointers.

    Args:
        function: the driver's handle of the kernel (``CUfunction``).
        num_arguments: how many pointers it takes.
        threads: threads of a block.
        owner: kept alive as long as the launcher: what the handle belongs to.
        launch: stands in for the driver's ``cuLaunchKernel``, in tests.
    """

    def __init__(
        self,
        function: int,
        num_arguments: int,
        threads: int,
        *,
        owner: object = None,
        launch: Launch | None = None,
    ) -> None:
        self._function, self._num_arguments, self._threads = function, num_arguments, threads
        self._owner = owner
        self._launch = launch or driver().launch
        self._lists = threading.local()

    def __call__(
        self,
        grid: tuple[int, int],
        stream: int,
        addresses: Sequence[int],
        bind: Callable[[], Any] | None = None,
    ) -> None:
        """Enqueue the kernel on ``stream`` (a ``CUstream``); the driver copies the addresses before it returns.

        `bind` makes the device's context current: called where the thread has none, since it may never have used CUDA.

        Raises:
            KernelError: the driver refused.
        """
        values, pointers = self._argument_list()
        values[:] = addresses
        arguments = (self._function, *grid, 1, self._threads, 1, 1, 0, stream, pointers, None)
        code = self._launch(*arguments)
        if code == NO_CONTEXT and bind is not None:
            bind()
            code = self._launch(*arguments)
        if code:
            raise KernelError(f"the CUDA driver did not launch the update kernel: error {code}, grid {grid}")

    def _argument_list(self) -> tuple[Any, Any]:
        """The thread's own: while the driver reads one thread's list, the interpreter may run another thread."""
        try:
            return self._lists.value  # type: ignore[no-any-return]
        except AttributeError:
            values = (ctypes.c_void_p * self._num_arguments)()
            size, base = ctypes.sizeof(ctypes.c_void_p), ctypes.addressof(values)
            places = (base + index * size for index in range(self._num_arguments))
            self._lists.value = values, (ctypes.c_void_p * self._num_arguments)(*places)
            return self._lists.value  # type: ignore[no-any-return]
