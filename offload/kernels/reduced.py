"""AdamW on one tile with moments in BF16 or 8 bits: less host memory, and less of it read and written a step.

A norm block at a time, moments are widened into the L1 cache, updated there by the very loop of `offload.kernels.adamw` in
FP32, and rounded stochastically when they are stored (`offload.kernels.rounding`). The weight is updated with the moments
as they are before that. Both moments of an element are rounded by one random word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from offload.kernels import adamw
from offload.kernels.accumulate import take_gradient
from offload.kernels.adamw import update_span
from offload.kernels.bits import HALF_WIDTH, float_from_bf16
from offload.kernels.blocks import NORM_BLOCK, part
from offload.kernels.buffers import make_buffer, make_stage
from offload.kernels.denormals import restore_mode, set_flush
from offload.kernels.jit import Kernel, inner
from offload.kernels.norm import write_sums
from offload.kernels.quantized import (
    NOISE_MASK,
    scale_of,
    signed_code,
    unpack_signed,
    unpack_unsigned,
    unsigned_code,
)
from offload.kernels.rounding import ELEMENT, KEY, bf16_at_random, random_bits, step_columns, step_key
from offload.kernels.shares import items
from offload.kernels.stream import drain, fence

__all__ = ["NUM_COLUMNS", "hyper_row", "update_bf16_tile", "update_int8_tile"]

# Columns of ``rows`` beyond those of `offload.kernels.adamw`.
STEP_LOW, STEP_HIGH = adamw.NUM_COLUMNS, adamw.NUM_COLUMNS + 1
NUM_COLUMNS = adamw.NUM_COLUMNS + 2

HALF_MASK = np.uint32(0xFFFF)
UPPER_NOISE = np.uint32(12)


def hyper_row(group: Mapping[str, Any], step: int, coef: float = 1.0) -> tuple[float, ...]:
    """As `offload.kernels.adamw.hyper_row`, with the step's number for the random bits."""
    return (*adamw.hyper_row(group, step, coef), *step_columns(step))


def load_moments(exp_avg: Any, exp_avg_sq: Any, scale: Any, scale_sq: Any, m: Any, v: Any) -> None:
    """One norm block of both moments as float32[n] into ``m`` and ``v``.

    exp_avg, exp_avg_sq: uint16[n] (BF16 bits), with the scales None; or uint8[n] (codes), with scales: float32[1].
    """
    if scale is None:
        widen_span(exp_avg, exp_avg_sq, m, v)
    else:
        unpack_signed(exp_avg, scale[0], m)
        unpack_unsigned(exp_avg_sq, scale_sq[0], v)


@overload(load_moments)
def _load_moments_overload(exp_avg, exp_avg_sq, scale, scale_sq, m, v):
    if isinstance(scale, types.NoneType):
        return lambda exp_avg, exp_avg_sq, scale, scale_sq, m, v: widen_span(exp_avg, exp_avg_sq, m, v)

    def unpack(exp_avg, exp_avg_sq, scale, scale_sq, m, v):
        unpack_signed(exp_avg, scale[0], m)
        unpack_unsigned(exp_avg_sq, scale_sq[0], v)

    return unpack


def store_moments(
    m: Any, v: Any, exp_avg: Any, exp_avg_sq: Any, scale: Any, scale_sq: Any, key: Any, element: Any
) -> None:
    """The reverse, rounded stochastically. key: of `step_key`; element: int64, the index of the block's first one."""
    if scale is None:
        round_span(m, v, exp_avg, exp_avg_sq, key, element)
    else:
        scale[0], scale_sq[0] = scale_of(m), scale_of(v)
        quantize_span(m, v, exp_avg, exp_avg_sq, scale[0], scale_sq[0], key, element)


@overload(store_moments)
def _store_moments_overload(m, v, exp_avg, exp_avg_sq, scale, scale_sq, key, element):
    if isinstance(scale, types.NoneType):

        def round_both(m, v, exp_avg, exp_avg_sq, scale, scale_sq, key, element):
            round_span(m, v, exp_avg, exp_avg_sq, key, element)

        return round_both

    def quantize_both(m, v, exp_avg, exp_avg_sq, scale, scale_sq, key, element):
        scale[0], scale_sq[0] = scale_of(m), scale_of(v)
        quantize_span(m, v, exp_avg, exp_avg_sq, scale[0], scale_sq[0], key, element)

    return quantize_both


def first_given(new: Any, old: Any) -> Any:
    """``new`` where this variant has it, else ``old``."""
    return old if new is None else new


@overload(first_given)
def _first_given_overload(new, old):
    if isinstance(new, types.NoneType):
        return lambda new, old: old
    return lambda new, old: new


@inner
def widen_span(exp_avg, exp_avg_sq, m, v):
    """BF16 bits to float32; exact."""
    for i in range(m.size):
        m[i] = float_from_bf16(exp_avg[i])
        v[i] = float_from_bf16(exp_avg_sq[i])


@inner
def round_span(m, v, exp_avg, exp_avg_sq, key, element):
    """Float32 to BF16 bits, by the lower and the upper half of each element's random word."""
    start = np.uint32(element)
    for i in range(m.size):
        noise = random_bits(key, np.uint32(start + np.uint32(i)))
        exp_avg[i] = bf16_at_random(m[i], np.uint32(noise & HALF_MASK))
        exp_avg_sq[i] = bf16_at_random(v[i], np.uint32(noise >> HALF_WIDTH))


@inner
def quantize_span(m, v, exp_avg, exp_avg_sq, scale, scale_sq, key, element):
    """Float32 to codes, by the lower and the upper 20 bits of each element's random word."""
    start = np.uint32(element)
    for i in range(m.size):
        noise = random_bits(key, np.uint32(start + np.uint32(i)))
        exp_avg[i] = signed_code(m[i], scale, np.uint32(noise & NOISE_MASK))
        exp_avg_sq[i] = unsigned_code(v[i], scale_sq, np.uint32(noise >> UPPER_NOISE))


# One line per group of arguments reads better here than one line per argument.
# fmt: off
@inner
def update_block(
    block, grad, acc, master, exp_avg, exp_avg_sq, scale, scale_sq,
    new_master, new_exp_avg, new_exp_avg_sq, new_scale, new_scale_sq, weight,
    sums, nonfinite, blocks, rows, select, flush,
):
    """Work item ``block`` of both kernels: a norm block at a time, in the L1 cache."""
    start, stop, row = blocks[block, 0], blocks[block, 1], blocks[block, 2]
    if select[row] == 0:
        return
    mode = set_flush(flush)
    key = step_key(blocks[block, KEY], rows[row, STEP_LOW], rows[row, STEP_HIGH])
    gradient = make_buffer()
    m, v = make_buffer(), make_buffer()
    weight_stage, master_stage = make_stage(weight), make_stage(new_master)
    to_exp_avg, to_exp_avg_sq = first_given(new_exp_avg, exp_avg), first_given(new_exp_avg_sq, exp_avg_sq)
    to_scale, to_scale_sq = first_given(new_scale, scale), first_given(new_scale_sq, scale_sq)
    for first in range(start, stop, NORM_BLOCK):
        last = min(first + NORM_BLOCK, stop)
        numel, norm = last - first, first // NORM_BLOCK
        values = take_gradient(grad, acc, first, last, gradient)
        write_sums(values, sums, nonfinite, first, gradient)
        load_moments(
            exp_avg[first:last], exp_avg_sq[first:last], part(scale, norm, norm + 1), part(scale_sq, norm, norm + 1),
            m[:numel], v[:numel],
        )
        update_span(
            values, master[first:last], m[:numel], v[:numel],
            part(master_stage, 0, numel), None, None, part(weight_stage, 0, numel), rows, row,
        )
        store_moments(
            m[:numel], v[:numel], to_exp_avg[first:last], to_exp_avg_sq[first:last],
            part(to_scale, norm, norm + 1), part(to_scale_sq, norm, norm + 1),
            key, blocks[block, ELEMENT] + first - start,
        )
        drain(weight_stage, weight, first, last)
        drain(master_stage, new_master, first, last)
    fence()
    restore_mode(mode)


@Kernel
def update_bf16_tile(worker, call):
    """One AdamW step with moments in BF16. All as in `offload.kernels.adamw.update_tile`, but for these:

    exp_avg, exp_avg_sq, new_exp_avg, new_exp_avg_sq: uint16[n] (BF16 bits). blocks: int64[k, 5], see
    `offload.kernels.rounding.with_counters`; rows: float32[r, 10].
    """
    (
        shares, grad, acc, master, exp_avg, exp_avg_sq, new_master, new_exp_avg, new_exp_avg_sq, weight,
        sums, nonfinite, blocks, rows, select, flush,
    ) = call[0]
    for block in items(shares, worker):
        update_block(
            block, grad, acc, master, exp_avg, exp_avg_sq, None, None,
            new_master, new_exp_avg, new_exp_avg_sq, None, None, weight,
            sums, nonfinite, blocks, rows, select, flush,
        )


@Kernel
def update_int8_tile(worker, call):
    """One AdamW step with moments in 8 bits. All as in `update_bf16_tile`, but for these:

    exp_avg, exp_avg_sq, new_exp_avg, new_exp_avg_sq: uint8[n], codes of `offload.kernels.quantized`, signed and unsigned;
    scale, scale_sq, new_scale, new_scale_sq: float32[n // 1024], the scales of the blocks.
    """
    (
        shares, grad, acc, master, exp_avg, exp_avg_sq, scale, scale_sq,
        new_master, new_exp_avg, new_exp_avg_sq, new_scale, new_scale_sq, weight,
        sums, nonfinite, blocks, rows, select, flush,
    ) = call[0]
    for block in items(shares, worker):
        update_block(
            block, grad, acc, master, exp_avg, exp_avg_sq, scale, scale_sq,
            new_master, new_exp_avg, new_exp_avg_sq, new_scale, new_scale_sq, weight,
            sums, nonfinite, blocks, rows, select, flush,
        )


# fmt: on
