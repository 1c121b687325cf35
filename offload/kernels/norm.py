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
from numba import types
from numba.core import cgutils
from numba.extending import overload

from offload.kernels.accumulate import line_numel, load_gradient, take_gradient
from offload.kernels.blocks import NORM_BLOCK
from offload.kernels.buffers import make_buffer
from offload.kernels.denormals import restore_mode, set_flush
from offload.kernels.jit import Kernel, in_llvm, inner
from offload.kernels.shares import items

__all__ = ["add_blocks", "square_sums_of_rows", "square_sums_of_tile", "write_sums"]

#: Float64 partial sums per norm block; one warp on a device.
LANES = 32
LARGEST = np.finfo(np.float64).max
HALF_WIDTH = np.uint32(16)


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
    """The squared sum (float64) of one norm block, float32[1024] or uint16[1024] (BF16 bits)."""
    if gradient.dtype == np.uint16:
        gradient = (gradient.astype(np.uint32) << HALF_WIDTH).view(np.float32)
    return square_sums_of_rows(gradient[np.newaxis])[0]


@in_llvm(square_sum)
def _square_sum(typing_context, gradient):
    """`square_sum` with the lanes in vector registers. A loop over an array of lanes would keep them in memory."""
    is_bf16 = gradient.dtype == types.uint16

    def codegen(context, builder, signature, arguments):
        floats, doubles = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.DoubleType(), LANES)
        halves, words = (ir.VectorType(ir.IntType(width), LANES) for width in (16, 32))
        data = context.make_array(gradient)(context, builder, arguments[0]).data
        rows = builder.bitcast(data, (halves if is_bf16 else floats).as_pointer())
        lanes = cgutils.alloca_once_value(builder, doubles(None))
        kind = ir.FunctionType(doubles, [doubles] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f64")
        with cgutils.for_range(builder, context.get_constant(types.intp, NORM_BLOCK // LANES)) as loop:
            row = builder.load(builder.gep(rows, [loop.index]), align=2 if is_bf16 else 4)
            if is_bf16:
                shift = words([ir.Constant(ir.IntType(32), 16)] * LANES)
                row = builder.bitcast(builder.shl(builder.zext(row, words), shift), floats)
            values = builder.fpext(row, doubles)
            # A float32's square is exact in float64, so this rounds as a product and a sum do.
            builder.store(builder.call(fma, [values, values, builder.load(lanes)]), lanes)
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


@inner
def has_nonfinite(total):
    """1 (uint8) if any element of a norm block with this squared sum (float64) is inf or NaN, else 0.

    Exact: 1024 squares of the largest float32 make 1e80, and float64 ends at 1e308.
    """
    return np.uint8(0) if total <= LARGEST else np.uint8(1)


def write_sums_of_line(gradient, sums, nonfinite, start, buffer):
    """`write_sums` where there are sums. The norm block at a parameter's end is made whole in ``buffer``."""
    for first in range(0, gradient.size, NORM_BLOCK):
        block, entry = gradient[first : first + NORM_BLOCK], (start + first) // NORM_BLOCK
        if block.size == NORM_BLOCK:
            total = square_sum(block)
        else:
            load_gradient(block, None, 0, block.size, buffer)
            total = square_sum(buffer)
        sums[entry], nonfinite[entry] = total, has_nonfinite(total)


def write_sums(gradient: Any, sums: Any, nonfinite: Any, start: Any, buffer: Any) -> None:
    """Fill the entries of the norm blocks from element ``start`` of the tile on, or do nothing where there are no sums.

    gradient: float32[n] or uint16[n] (BF16 bits), at most a line; buffer: float32[1024], which may begin with `gradient`.
    """
    if sums is not None:
        write_sums_of_line(gradient, sums, nonfinite, start, buffer)


@overload(write_sums)
def _write_sums_overload(gradient, sums, nonfinite, start, buffer):
    if isinstance(sums, types.NoneType):
        return lambda gradient, sums, nonfinite, start, buffer: None
    return write_sums_of_line


@inner
def square_sums_of_block(block, grad, acc, sums, nonfinite, blocks, select, flush):
    """Work item ``block`` of `square_sums_of_tile`."""
    start, stop, row = blocks[block, 0], blocks[block, 1], blocks[block, 2]
    if select[row] == 0:
        return
    mode = set_flush(flush)
    gradient = make_buffer()
    line = line_numel(acc)
    for first in range(start, stop, line):
        values = take_gradient(grad, acc, first, min(first + line, stop), gradient)
        write_sums(values, sums, nonfinite, first, gradient)
    restore_mode(mode)


@Kernel
def square_sums_of_tile(worker, call):
    """The squared norm of every norm block of a tile; nothing else is read or written.

    grad: uint16[n] (BF16 bits) or float32[n]; acc: float32[n] or None; the gradient is ``round(acc + grad)``.
    sums: float64[n // 1024], out; nonfinite: uint8[n // 1024], out: 1 where an element is inf or NaN.
    blocks: int64[k, 3]; select: uint8[r], only rows that are not 0 are processed; flush: bool, denormals count as 0.
    """
    shares, grad, acc, sums, nonfinite, blocks, select, flush = call[0]
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
