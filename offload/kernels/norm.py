"""Squared norms whose bits depend on nothing but the gradient.

Every 1 Ki block, counted from its parameter's start, is summed in 32 fixed float64 lanes: lane ``j`` takes elements
``j, j + 32, ...`` in order, then the lanes are added pairwise (16, 8, 4, 2, 1 apart). So the sum is the same whatever
the vector width, the number of threads, the tile or the device. Squares of float32 are exact in float64, and a block's
sum is accurate to about 1e-15. float32 lanes would overflow at 2e19.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from offload.kernels.accumulate import gradient
from offload.kernels.bits import bits_from_float
from offload.kernels.blocks import NORM_BLOCK
from offload.kernels.denormals import restore_mode, set_flush
from offload.kernels.jit import Kernel, inner

__all__ = ["LANES", "add_blocks", "make_lanes", "square_sums_of_tile", "sum_squares"]

#: Float64 partial sums per norm block; one warp on a device.
LANES = 32
EXPONENT = np.uint32(0x7F800000)


@inner
def lane_squares(grad, acc, first, last, lanes):
    """Add the squares of elements ``[first, last)`` to their lanes (float64[32]); ``last - first`` <= 32."""
    for lane in range(last - first):
        value = np.float64(gradient(grad, acc, first + lane))
        lanes[lane] += value * value


@inner
def block_square_sum(grad, acc, first, last, lanes):
    """The squared sum (float64) of elements ``[first, last)``, at most one norm block; ``lanes`` is scratch."""
    lanes[:] = 0.0
    whole = first + (last - first) // LANES * LANES
    for row in range(first, whole, LANES):
        for lane in range(LANES):  # a constant count, so that all lanes advance in vector registers
            value = np.float64(gradient(grad, acc, row + lane))
            lanes[lane] += value * value
    lane_squares(grad, acc, whole, last, lanes)
    width = LANES // 2
    while width > 0:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@inner
def block_nonfinite(grad, acc, first, last):
    """1 (uint8) if any element of ``[first, last)`` is inf or NaN, by its exponent bits; else 0."""
    top = np.uint32(0)
    for i in range(first, last):
        top = max(top, np.uint32(bits_from_float(gradient(grad, acc, i)) & EXPONENT))
    return np.uint8(1) if top == EXPONENT else np.uint8(0)


@inner
def sum_squares_of_span(grad, acc, sums, nonfinite, first, last, lanes):
    """Fill the entries of ``sums`` and ``nonfinite`` for elements ``[first, last)``, ``first`` on a norm block."""
    for start in range(first, last, NORM_BLOCK):
        stop = min(start + NORM_BLOCK, last)
        sums[start // NORM_BLOCK] = block_square_sum(grad, acc, start, stop, lanes)
        nonfinite[start // NORM_BLOCK] = block_nonfinite(grad, acc, start, stop)


def make_lanes(sums: Any) -> Any:
    """Scratch for `sum_squares`, or None where the variant has no sums."""
    return None if sums is None else np.empty(LANES, np.float64)


@overload(make_lanes)
def _make_lanes_overload(sums):
    if isinstance(sums, types.NoneType):
        return lambda sums: None
    return lambda sums: np.empty(LANES, np.float64)


def sum_squares(grad: Any, acc: Any, sums: Any, nonfinite: Any, first: Any, last: Any, lanes: Any) -> None:
    """`sum_squares_of_span`, or nothing where the variant has no sums."""
    if sums is not None:
        sum_squares_of_span(grad, acc, sums, nonfinite, first, last, lanes)


@overload(sum_squares)
def _sum_squares_overload(grad, acc, sums, nonfinite, first, last, lanes):
    if isinstance(sums, types.NoneType):
        return lambda grad, acc, sums, nonfinite, first, last, lanes: None
    return lambda grad, acc, sums, nonfinite, first, last, lanes: sum_squares_of_span(
        grad, acc, sums, nonfinite, first, last, lanes
    )


@inner
def square_sums_of_block(block, grad, acc, sums, nonfinite, blocks, select, flush):
    """Work item ``block`` of `square_sums_of_tile`."""
    start, stop, row = blocks[block, 0], blocks[block, 1], blocks[block, 2]
    if select[row] != 0:
        mode = set_flush(flush)
        sum_squares_of_span(grad, acc, sums, nonfinite, start, stop, make_lanes(sums))
        restore_mode(mode)


@Kernel
def square_sums_of_tile(first, last, grad, acc, sums, nonfinite, blocks, select, flush):
    """The squared norm of every norm block of a tile; nothing else is read or written.

    grad: uint16[n] (BF16 bits) or float32[n]; acc: float32[n] or None; the gradient is ``round(acc + grad)``.
    sums: float64[n // 1024], out; nonfinite: uint8[n // 1024], out: 1 where an element is inf or NaN.
    blocks: int64[k, 3]; select: uint8[r], only rows that are not 0 are processed; flush: bool, denormals count as 0.
    """
    for block in prange(first, last):
        square_sums_of_block(block, grad, acc, sums, nonfinite, blocks, select, flush)


def add_blocks(sums: np.ndarray, first: int = 0, last: int | None = None) -> float:
    """Add ``sums[first:last]`` from left to right: the squared norm of those norm blocks, always the same bits."""
    chosen = sums[first:last]
    # cumsum is sequential by definition; np.sum is pairwise, in an order that may change with its version.
    return float(np.cumsum(chosen)[-1]) if len(chosen) else 0.0
