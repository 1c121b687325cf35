"""Squared norms whose bits depend on nothing but the gradient.

Every norm block of 1 Ki elements, counted from its parameter's start, is summed in 32 fixed float64 lanes: lane ``j`` takes
elements ``j, j + 32, ...`` in order, then the lanes are added pairwise (16, 8, 4, 2, 1 apart). So the sum is the same
whatever the vector width, the number of threads, the tile or the device. Squares of float32 are exact in float64, and a
block's sum is accurate to about 1e-15. float32 lanes would overflow at 2e19.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from offload.kernels.accumulate import load_gradient
from offload.kernels.bits import bits_from_float
from offload.kernels.blocks import NORM_BLOCK
from offload.kernels.denormals import restore_mode, set_flush
from offload.kernels.jit import Kernel, inner
from offload.kernels.shares import items

__all__ = ["add_blocks", "square_sums_of_rows", "square_sums_of_tile", "write_sums"]

#: Float64 partial sums per norm block; one warp on a device.
LANES = 32
EXPONENT = np.uint32(0x7F800000)


def square_sums_of_rows(gradients: np.ndarray) -> np.ndarray:
    """The squared sum (float64[k]) of each row of float32[k, 1024], in NumPy: the definition, a row of lanes at a time."""
    squares = gradients.astype(np.float64).reshape(len(gradients), -1, LANES)
    squares *= squares
    lanes = np.zeros((len(gradients), LANES))
    for row in range(squares.shape[1]):
        lanes += squares[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def square_sum(gradient: Any) -> Any:
    """The squared sum (float64) of one norm block, float32[1024]."""
    return square_sums_of_rows(gradient[np.newaxis])[0]


@intrinsic
def _square_sum(typing_context, gradient):
    """`square_sum` with the lanes in vector registers. A loop over an array of lanes would keep them in memory."""

    def codegen(context, builder, signature, arguments):
        floats, doubles = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.DoubleType(), LANES)
        data = context.make_array(gradient)(context, builder, arguments[0]).data
        rows = builder.bitcast(data, floats.as_pointer())
        lanes = cgutils.alloca_once_value(builder, doubles(None))
        with cgutils.for_range(builder, context.get_constant(types.intp, NORM_BLOCK // LANES)) as loop:
            values = builder.fpext(builder.load(builder.gep(rows, [loop.index]), align=4), doubles)
            builder.store(builder.fadd(builder.load(lanes), builder.fmul(values, values)), lanes)
        return _add_lanes(builder, builder.load(lanes))

    return types.float64(gradient), codegen


def _add_lanes(builder: Any, lanes: Any) -> Any:
    """Add the upper half of a vector to the lower one, until one value is left."""
    width = LANES // 2
    while width:
        lower, upper = (_take(builder, lanes, range(first, first + width)) for first in (0, width))
        lanes = builder.fadd(lower, upper)
        width //= 2
    return builder.extract_element(lanes, ir.IntType(32)(0))


def _take(builder: Any, vector: Any, indices: range) -> Any:
    index = ir.IntType(32)
    mask = ir.VectorType(index, len(indices))([index(i) for i in indices])
    return builder.shuffle_vector(vector, vector, mask)


@overload(square_sum)
def _square_sum_overload(gradient):
    return lambda gradient: _square_sum(gradient)


@inner
def has_nonfinite(gradient):
    """1 (uint8) if any element of float32[n] is inf or NaN, by its exponent bits; else 0."""
    top = np.uint32(0)
    for i in range(gradient.size):
        top = max(top, np.uint32(bits_from_float(gradient[i]) & EXPONENT))
    return np.uint8(1) if top == EXPONENT else np.uint8(0)


def write_sums(gradient: Any, sums: Any, nonfinite: Any, start: Any) -> None:
    """Fill the entries of the norm block at element ``start`` of the tile, or do nothing where there are no sums.

    gradient: float32[1024], zero above the parameter's end.
    """
    if sums is not None:
        sums[start // NORM_BLOCK] = square_sum(gradient)
        nonfinite[start // NORM_BLOCK] = has_nonfinite(gradient)


@overload(write_sums)
def _write_sums_overload(gradient, sums, nonfinite, start):
    if isinstance(sums, types.NoneType):
        return lambda gradient, sums, nonfinite, start: None

    def write(gradient, sums, nonfinite, start):
        sums[start // NORM_BLOCK] = square_sum(gradient)
        nonfinite[start // NORM_BLOCK] = has_nonfinite(gradient)

    return write


@inner
def square_sums_of_block(block, grad, acc, sums, nonfinite, blocks, select, flush):
    """Work item ``block`` of `square_sums_of_tile`."""
    start, stop, row = blocks[block, 0], blocks[block, 1], blocks[block, 2]
    if select[row] == 0:
        return
    mode = set_flush(flush)
    gradient = np.empty(NORM_BLOCK, np.float32)
    for first in range(start, stop, NORM_BLOCK):
        load_gradient(grad, acc, first, min(first + NORM_BLOCK, stop), gradient)
        write_sums(gradient, sums, nonfinite, first)
    restore_mode(mode)


@Kernel
def square_sums_of_tile(first, last, shares, grad, acc, sums, nonfinite, blocks, select, flush):
    """The squared norm of every norm block of a tile; nothing else is read or written.

    grad: uint16[n] (BF16 bits) or float32[n]; acc: float32[n] or None; the gradient is ``round(acc + grad)``.
    sums: float64[n // 1024], out; nonfinite: uint8[n // 1024], out: 1 where an element is inf or NaN.
    blocks: int64[k, 3]; select: uint8[r], only rows that are not 0 are processed; flush: bool, denormals count as 0.
    """
    for worker in prange(first, last):
        for block in items(shares, worker):
            square_sums_of_block(block, grad, acc, sums, nonfinite, blocks, select, flush)


def add_blocks(sums: np.ndarray, first: int = 0, last: int | None = None) -> float:
    """Add ``sums[first:last]``, the squared norm of those norm blocks: always the same bits.

    The second half is added to the first one, element by element, until one number is left. ``np.sum`` adds in an order that
    may change with its version; from left to right it takes twice the time, 15 ms for a 4 G model.
    """
    left = np.array(sums[first:last])
    number = len(left)
    while number > 1:
        half = (number + 1) // 2
        left[: number - half] += left[half:number]
        number = half
    return float(left[0]) if number else 0.0
