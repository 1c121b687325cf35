"""What this machine does per second: the planner's measured input.

Measured when first asked for, in less than a second, and kept for the life of the process; `override` replaces it, for
tests and for machines that are known better than a short measurement can.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from offload.transfer.pinned import allocate

__all__ = ["UPDATE_BYTES", "Rates", "known", "measure_host_bytes", "measured", "override"]

logger = logging.getLogger(__name__)

UPDATE_BYTES = 28
"""Host memory that an AdamW update moves per element: master and moments in and out, a BF16 gradient and weight."""

HOST_NUMEL = 96 * 2**20
"""Elements of each of the two arrays with which host memory is measured: more than any cache holds."""

PARTS_PER_THREAD = 4
"""So that a thread whose core is busy with something else leaves the rest to the others, as in the kernels."""

LINK_BYTES = 64 * 2**20
REPEATS = 3


@dataclass(frozen=True)
class Rates:
    """Per second, for one device and the host memory next to it."""

    kernel_numel: float
    """Elements that the host kernels update."""

    host_bytes: float
    """Host memory: two reads and a write, in place."""

    to_device_bytes: float
    """Pinned host memory to the device, with the other direction idle."""

    to_host_bytes: float
    """The device to pinned host memory, with the other direction idle."""

    duplex_bytes: float
    """Each direction while both are busy."""

    device_bytes: float
    """Device memory: reads and writes together."""


_known: dict[torch.device, Rates] = {}


def known(device: torch.device) -> Rates | None:
    """The rates of `device`, where they were measured or given before."""
    return _known.get(device)


def override(device: torch.device, rates: Rates | None) -> None:
    """Use `rates` for `device` from now on; None: measure when asked next."""
    _known.pop(device, None)
    if rates is not None:
        _known[device] = rates


def measured(device: torch.device, num_threads: int) -> Rates:
    """The rates of a CUDA device, measured unless known.

    Args:
        num_threads: of the host kernels.
    """
    rates = _known.get(device)
    if rates is None:
        start = time.perf_counter()
        rates = _known[device] = _measure(device, num_threads)
        logger.info("rates of %s, measured in %.2f s: %s", device, time.perf_counter() - start, rates)
    return rates


def _measure(device: torch.device, num_threads: int) -> Rates:
    host = measure_host_bytes(num_threads)
    to_device, to_host, duplex, memory = _measure_link(device)
    return Rates(host / UPDATE_BYTES, host, to_device, to_host, duplex, memory)


def measure_host_bytes(num_threads: int, numel: int = HOST_NUMEL) -> float:
    """Bytes per second of two reads and a write to where one of them came from, which the host kernels reach.

    In place as the kernels' state: other stores read first what they overwrite, a quarter less on an H200's host. By
    threads of our own: torch's count is often one, since torchrun sets OMP_NUM_THREADS.
    """
    left, right = (np.empty(numel, np.float32) for _ in range(2))
    num_parts = PARTS_PER_THREAD * num_threads
    bounds = [numel * part // num_parts for part in range(num_parts + 1)]
    parts = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def add(part: slice) -> None:
        np.add(left[part], right[part], out=left[part])

    def touch(part: slice) -> None:
        left[part] = right[part] = 0.0

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(touch, parts))
        return 12 * numel / _best(lambda: list(threads.map(add, parts)))


def _measure_link(device: torch.device) -> tuple[float, float, float, float]:
    """To the device, to the host, each with both busy; device memory."""
    slab = allocate(2 * LINK_BYTES, name="link measurement", pin=True, fallback_pageable=True, device=device)
    try:
        up, down = (slab.tensor(torch.uint8, part * LINK_BYTES, LINK_BYTES) for part in range(2))
        sink, source = torch.zeros(2, LINK_BYTES, dtype=torch.uint8, device=device)
        streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

        def copy(*, to_device: bool, to_host: bool) -> None:
            with torch.cuda.stream(streams[0]):
                for _ in range(4 * to_device):
                    sink.copy_(up, non_blocking=True)
            with torch.cuda.stream(streams[1]):
                for _ in range(4 * to_host):
                    down.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        def copy_on_device() -> None:
            for _ in range(4):
                sink.copy_(source)
            torch.cuda.synchronize(device)

        moved = 4 * LINK_BYTES
        torch.cuda.synchronize(device)
        return (
            moved / _best(lambda: copy(to_device=True, to_host=False)),
            moved / _best(lambda: copy(to_device=False, to_host=True)),
            moved / _best(lambda: copy(to_device=True, to_host=True)),
            2 * moved / _best(copy_on_device),
        )
    finally:
        torch.cuda.synchronize(device)
        slab.close()


def _best(function: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls, after one that warms up."""
    function()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
