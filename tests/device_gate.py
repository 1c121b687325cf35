"""A gate for streams of a GPU: what is enqueued behind it waits until the host opens it, however slow the machine is.

A fixed sleep on the device is a race: on a busy host it has ended before the test looks.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.kernels.device import _no_toolkit_needed
from offload.kernels.launch import Launcher

SOURCE = """
extern "C" __global__ void wait_at_gate(const volatile int *opened) {
    const unsigned long long second = 1000000000ull;
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!*opened && now - begin < 20 * second);
}
"""
"""Ends after 20 s in any case: a test that forgets to open must fail, not hang the device."""


class DeviceGate:
    """Closed when made; used once."""

    def __init__(self) -> None:
        self._opened = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        with _no_toolkit_needed():
            kernel: Any = torch.cuda._compile_kernel(kernel_source=SOURCE, kernel_name="wait_at_gate")
        self._launch = Launcher(kernel.func.value, 1, 1, owner=kernel)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What is enqueued on `stream` from here on waits. From any thread."""
        self._launch((1, 1), stream.cuda_stream, [self._opened.data_ptr()], stream.query)

    def open(self) -> None:
        """Let everything pass."""
        self._opened[0] = 1
