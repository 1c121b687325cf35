"""Gradients and weights between BF16 and FP32, elementwise over a whole tile.

Sums over micro-batches are FP32: ``acc = f32(grad)`` first, then ``acc = acc + f32(grad)``; the last micro-batch is added
inside the update kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from offload.kernels.bits import bf16_from_float, float_from_bf16
from offload.kernels.blocks import BLOCK, LINE, NORM_BLOCK, part
from offload.kernels.denormals import restore_mode, set_flush
from offload.kernels.jit import Kernel, inner
from offload.kernels.shares import items

__all__ = [
    "accumulate_next",
    "expand",
    "fill_zero",
    "line_numel",
    "load_gradient",
    "read",
    "round_weights",
    "take_gradient",
    "write",
]


def read(array: Any, i: Any) -> Any:
    """Element ``i`` as float32, of uint16 (BF16 bits) or float32; exact."""
    return float_from_bf16(array[i]) if array.dtype == np.uint16 else array[i]


@overload(read)
def _read_overload(array, i):
    if array.dtype == types.uint16:
        return lambda array, i: float_from_bf16(array[i])
    return lambda array, i: array[i]


def write(array: Any, i: Any, value: Any) -> None:
    """Store a float32 as element ``i`` of uint16 (BF16 bits, rounded to nearest even), float32 or None (nothing)."""
    if array is not None:
        array[i] = bf16_from_float(value) if array.dtype == np.uint16 else value


@overload(write)
def _write_overload(array, i, value):
    if isinstance(array, types.NoneType):
        return lambda array, i, value: None
    if array.dtype == types.uint16:

        def write_bf16(array, i, value):
            array[i] = bf16_from_float(value)

        return write_bf16

    def write_fp32(array, i, value):
        array[i] = value

    return write_fp32


def gradient(grad: Any, acc: Any, i: Any) -> Any:
    """Element ``i`` of the whole step's gradient: ``round(acc + last)``, or ``last`` alone without an accumulator."""
    return read(grad, i) if acc is None else acc[i] + read(grad, i)


@overload(gradient)
def _gradient_overload(grad, acc, i):
    if isinstance(acc, types.NoneType):
        return lambda grad, acc, i: read(grad, i)
    return lambda grad, acc, i: acc[i] + read(grad, i)


@inner
def gradient_span(grad, acc, gradient_out):
    """``gradient_out = round(acc + grad)``."""
    for i in range(gradient_out.size):
        gradient_out[i] = gradient(grad, acc, i)


@inner
def load_gradient(grad, acc, first, last, gradient_out):
    """The whole step's gradient of one norm block into ``gradient_out`` (float32[1024]), zero above its end.

    It stays in the L1 cache, for the norm and the update to read.
    """
    gradient_span(part(grad, first, last), part(acc, first, last), gradient_out[: last - first])
    gradient_out[last - first :] = np.float32(0.0)


def line_numel(acc: Any) -> Any:
    """Elements that an update takes at a time: `LINE`, or a norm block where `take_gradient` fills a buffer."""
    return LINE if acc is None else NORM_BLOCK


@overload(line_numel)
def _line_numel_overload(acc):
    if isinstance(acc, types.NoneType):
        return lambda acc: LINE
    return lambda acc: NORM_BLOCK


def take_gradient(grad: Any, acc: Any, first: Any, last: Any, buffer: Any) -> Any:
    """What the update reads of ``[first, last)``, at most `line_numel` elements, as float32 or BF16 bits (see `read`).

    ``grad`` itself where nothing is added; else ``buffer`` (float32[1024]), after `load_gradient`.
    """
    if acc is None:
        return grad[first:last]
    load_gradient(grad, acc, first, last, buffer)
    return buffer[: last - first]


@overload(take_gradient)
def _take_gradient_overload(grad, acc, first, last, buffer):
    if isinstance(acc, types.NoneType):
        return lambda grad, acc, first, last, buffer: grad[first:last]

    def load(grad, acc, first, last, buffer):
        load_gradient(grad, acc, first, last, buffer)
        return buffer[: last - first]

    return load


@inner
def convert_span(source, target):
    """``target = source``, each uint16 (BF16 bits) or float32."""
    for i in range(target.size):
        write(target, i, read(source, i))


@inner
def add_span(grad, acc):
    """``acc = round(acc + grad)``."""
    for i in range(acc.size):
        acc[i] += read(grad, i)


@inner
def accumulate_block(block, grad, acc, flush):
    """Work item ``block`` of `accumulate_next`."""
    start, stop = block * BLOCK, min(block * BLOCK + BLOCK, acc.size)
    mode = set_flush(flush)
    add_span(grad[start:stop], acc[start:stop])
    restore_mode(mode)


@Kernel
def accumulate_next(worker, call):
    """Add a later micro-batch: ``acc = acc + f32(grad)``.

    grad: uint16[n] (BF16 bits) or float32[n]; acc: float32[n], in place; flush: bool, denormals are 0.
    """
    shares, grad, acc, flush = call[0]
    for block in items(shares, worker):
        accumulate_block(block, grad, acc, flush)


@Kernel
def expand(worker, call):
    """``target = f32(source)``, exact: the first micro-batch into its accumulator, or weights into masters.

    source: uint16[n] (BF16 bits) or float32[n]; target: float32[n], out.
    """
    shares, source, target = call[0]
    for block in items(shares, worker):
        start, stop = block * BLOCK, min(block * BLOCK + BLOCK, target.size)
        convert_span(source[start:stop], target[start:stop])


@Kernel
def round_weights(worker, call):
    """``weight = bf16(master)`` to nearest even, NaN as 0x7fc0; or a copy where the weight is FP32.

    master: float32[n]; weight: uint16[n] (BF16 bits) or float32[n], out.
    """
    shares, master, weight = call[0]
    for block in items(shares, worker):
        start, stop = block * BLOCK, min(block * BLOCK + BLOCK, weight.size)
        convert_span(master[start:stop], weight[start:stop])


@Kernel
def fill_zero(worker, call):
    """``array = 0`` by the team, so that each page is first touched by the thread that will use it. Any dtype."""
    shares, array = call[0]
    for block in items(shares, worker):
        array[block * BLOCK : min(block * BLOCK + BLOCK, array.size)] = 0
