"""AdamW on one tile, with the bits of ``torch.optim.AdamW(fused=True)`` on the CPU.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), in plain FP32 and exactly this order, where
``fma`` rounds once and every other operation once each::

    g = round(round(acc + last) * coef)
    m = fma(c1, g - m, m)                     # where c1 >= 0.5: fma(c1 - 1, g - m, g), as torch's lerp has it
    v = fma(c2 * g, g, v * beta2)
    p = p * decay + (a * m) / (sqrt(v) / b + eps)

The scalars are `hyper_row`'s. Deviations from torch: the gradient is read as BF16 or FP32, summed over micro-batches
and scaled on the way in; the compute weight is rounded on the way out; NaN is written to BF16 as 0x7fc0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from offload.kernels.accumulate import line_numel, read, take_gradient, write
from offload.kernels.arithmetic import fma, sqrt
from offload.kernels.blocks import part
from offload.kernels.buffers import make_buffer, make_stage
from offload.kernels.denormals import restore_mode, set_flush
from offload.kernels.jit import Kernel, inner
from offload.kernels.norm import write_sums
from offload.kernels.shares import items
from offload.kernels.stream import drain, fence, put

__all__ = ["NUM_COLUMNS", "hyper_row", "update_tile"]

# Columns of ``rows``, one row per parameter.
LERP, SQUARE, BETA2, DECAY, STEP_SIZE, DEBIAS, EPS, COEF = range(8)
NUM_COLUMNS = 8

HALF = np.float32(0.5)
ONE = np.float32(1.0)


def hyper_row(group: Mapping[str, Any], step: int, coef: float = 1.0) -> tuple[float, ...]:
    """The scalars of one parameter's update, in double; storing them in ``rows`` rounds each once to float32.

    ``group`` has lr (a float or a one-element tensor), betas, eps, weight_decay, maximize; ``step`` counts from 1;
    ``coef`` is the clipping coefficient. Maximizing negates the gradient, which is exact.
    """
    lr, (beta1, beta2) = float(group["lr"]), (float(beta) for beta in group["betas"])
    return (
        1 - beta1,
        1 - beta2,
        beta2,
        1 - lr * float(group["weight_decay"]),  # a NumPy scalar would multiply in its own precision
        -lr / (1 - beta1**step),
        math.sqrt(1 - beta2**step),
        group["eps"],
        -coef if group.get("maximize") else coef,
    )


@inner
def update_span(
    gradient, master, exp_avg, exp_avg_sq, new_master, new_exp_avg, new_exp_avg_sq, weight, rows, row
):
    """The update loop, over arrays of equal length that all belong to parameter ``row``; gradient: see `take_gradient`.

    Without the three ``new_`` arrays, the state is changed in place.
    """
    lerp, square, beta2, decay = rows[row, LERP], rows[row, SQUARE], rows[row, BETA2], rows[row, DECAY]
    step_size, debias, eps, coef = rows[row, STEP_SIZE], rows[row, DEBIAS], rows[row, EPS], rows[row, COEF]
    near = lerp < HALF
    slope = lerp if near else lerp - ONE
    for i in range(master.size):
        g = read(gradient, i) * coef
        m = exp_avg[i]
        m = fma(slope, g - m, m if near else g)
        v = fma(square * g, g, exp_avg_sq[i] * beta2)
        p = master[i] * decay + (step_size * m) / (sqrt(v) / debias + eps)
        put(new_exp_avg, exp_avg, i, m)
        put(new_exp_avg_sq, exp_avg_sq, i, v)
        put(new_master, master, i, p)
        write(weight, i, p)


# One line per group of arguments reads better here than one line per argument.
# fmt: off
@inner
def update_block(
    block, grad, acc, master, exp_avg, exp_avg_sq, new_master, new_exp_avg, new_exp_avg_sq, weight,
    sums, nonfinite, blocks, rows, select, flush,
):
    """Work item ``block`` of `update_tile`: a line at a time."""
    start, stop, row = blocks[block, 0], blocks[block, 1], blocks[block, 2]
    if select[row] == 0:
        return
    mode = set_flush(flush)
    gradient = make_buffer()
    weight_stage, master_stage = make_stage(weight), make_stage(new_master)
    exp_avg_stage, exp_avg_sq_stage = make_stage(new_exp_avg), make_stage(new_exp_avg_sq)
    line = line_numel(acc)
    for first in range(start, stop, line):
        last = min(first + line, stop)
        numel = last - first
        values = take_gradient(grad, acc, first, last, gradient)
        write_sums(values, sums, nonfinite, first, gradient)
        update_span(
            values, master[first:last], exp_avg[first:last], exp_avg_sq[first:last],
            part(master_stage, 0, numel), part(exp_avg_stage, 0, numel), part(exp_avg_sq_stage, 0, numel),
            part(weight_stage, 0, numel), rows, row,
        )
        drain(weight_stage, weight, first, last)
        drain(master_stage, new_master, first, last)
        drain(exp_avg_stage, new_exp_avg, first, last)
        drain(exp_avg_sq_stage, new_exp_avg_sq, first, last)
    fence()
    restore_mode(mode)


@Kernel
def update_tile(worker, call):
    """One AdamW step of the selected parameters of a tile; all arrays have the tile's length n.

    grad: uint16[n] (BF16 bits) or float32[n], the last micro-batch; acc: float32[n] or None, the ones before it.
    master, exp_avg, exp_avg_sq: float32[n]; in place, or left as they are where new_master, new_exp_avg, new_exp_avg_sq:
    float32[n], out, are given (all or none). weight: uint16[n] (BF16 bits), float32[n] or None, out.
    sums: float64[n // 1024], nonfinite: uint8[n // 1024], out, or both None: see `offload.kernels.norm`; of the gradient
    before ``coef``. blocks: int64[k, 3]; rows: float32[r, 8]; select: uint8[r]; flush: bool, denormals are 0.
    """
    (
        shares, grad, acc, master, exp_avg, exp_avg_sq, new_master, new_exp_avg, new_exp_avg_sq, weight,
        sums, nonfinite, blocks, rows, select, flush,
    ) = call[0]
    for block in items(shares, worker):
        update_block(
            block, grad, acc, master, exp_avg, exp_avg_sq, new_master, new_exp_avg, new_exp_avg_sq, weight,
            sums, nonfinite, blocks, rows, select, flush,
        )


# fmt: on
