"""What ``offload doctor`` measures on the host: memory bandwidth, the update kernel, and the vectors that it uses."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from offload.cli.findings import Finding
from offload.kernels.backend import TileArrays, Variant
from offload.kernels.blocks import make_blocks
from offload.kernels.jit import jit_disabled
from offload.kernels.numba_backend import NumbaBackend
from offload.kernels.rule import AdamWRule
from offload.rates import HOST_NUMEL, UPDATE_BYTES, measure_host_bytes
from offload.threads import Budget, bind_current_thread
from offload.transfer.pinned import Slab

__all__ = ["KernelSpeed", "measure_kernel", "speed_findings", "vector_bits"]

REPEATS = 5
GOOD_SHARE = 0.7
"""Of the bandwidth of two reads and a write; the kernel reaches about all of it where nothing else runs."""

GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}


class KernelSpeed(NamedTuple):
    """Elements per second of the update, the team that ran it, and the width of its vectors in bits (None: not known)."""

    numel_per_s: float
    team: str
    num_threads: int
    vector_bits: int | None


def speed_findings(budget: Budget, numel: int = HOST_NUMEL) -> Iterator[Finding]:
    """Bandwidth, then the kernel, interleaved with nothing: a second or two.

    Args:
        numel: elements of each array.
    """
    section = "speed"
    if jit_disabled():
        return
    with ThreadPoolExecutor(1, thread_name_prefix="offload-doctor") as executor:
        # A thread of its own, as the optimizer has: binding, denormals and team are a thread's.
        executor.submit(bind_current_thread, budget.cpus).result()
        bandwidth = executor.submit(measure_host_bytes, budget.num_threads, numel).result()
        speed = executor.submit(measure_kernel, budget.num_threads, numel).result()
    yield Finding(section, "host memory", bandwidth, f"{bandwidth / 1e9:.1f} GB/s, two reads and a write")
    share = speed.numel_per_s * UPDATE_BYTES / bandwidth
    yield Finding(
        section,
        "update kernel",
        speed.numel_per_s,
        f"{speed.numel_per_s / 1e9:.2f} Gparam/s with {speed.num_threads} threads ({speed.team}), "
        f"{share:.0%} of that bandwidth",
        f"the kernel reaches {share:.0%} of the memory bandwidth, {GOOD_SHARE:.0%} or more is usual: look for other "
        "load on these CPUs, and at the advice above"
        if share < GOOD_SHARE
        else None,
    )
    yield Finding(
        section,
        "vectors",
        speed.vector_bits,
        "not known on this machine" if speed.vector_bits is None else f"{speed.vector_bits} bits",
        "the update was compiled to narrow or scalar instructions: unset NUMBA_CPU_NAME and NUMBA_CPU_FEATURES"
        if speed.vector_bits is not None and speed.vector_bits < 256
        else None,
    )


def measure_kernel(num_threads: int, numel: int) -> KernelSpeed:
    """The AdamW update of `numel` elements, BF16 in and out, in the thread that calls."""
    backend = NumbaBackend(AdamWRule, num_threads=num_threads)
    backend.start()
    slab = Slab(16 * numel, name="kernel measurement")
    try:
        state = [slab.array(np.float32, 4 * numel * index, numel) for index in range(3)]
        halves = [slab.array(np.uint16, 12 * numel + 2 * numel * index, numel) for index in range(2)]
        for array in (*state, *halves):
            backend.fill_zero(array)  # first touched by the team that uses it
        # Ordinary numbers, so that nothing is denormal: 1e-3, and its square for the second moment.
        for array, value in zip((*state, halves[0]), (1e-3, 1e-3, 1e-6, 0x3A83), strict=True):
            array.fill(value)
        tile = TileArrays(
            halves[0],
            None,
            state[0],
            (state[1], state[2]),
            halves[1],
            None,
            None,
            make_blocks([(0, numel, 0)]),
        )
        rows, select = np.array([AdamWRule.row(GROUP, 1)], np.float32), np.ones(1, np.uint8)
        backend.prepare(Variant())
        seconds = []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            backend.update(tile, rows, select)
            seconds.append(time.perf_counter() - start)
        team = backend.team
        width = vector_bits("\n".join(AdamWRule.kernel.assembly().values()))
        return KernelSpeed(numel / statistics.median(seconds[1:]), team.name, team.num_threads, width)
    finally:
        backend.close()
        slab.close()


def vector_bits(assembly: str) -> int | None:
    """Width of the vectors in which square roots are taken, the widest; None where none is found."""
    for bits, pattern in (
        (512, r"\bvsqrtps\b.*%zmm"),
        (256, r"\bvsqrtps\b.*%ymm"),
        (128, r"\bv?sqrtps\b.*%xmm|\bfsqrt\b\s+v\d+\.4s"),
        (32, r"\bv?sqrtss\b|\bfsqrt\b\s+s\d+"),
    ):
        if re.search(pattern, assembly):
            return bits
    return None
