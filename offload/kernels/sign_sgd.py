"""Sign SGD on one tile.

Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems" (2018), with decoupled weight decay, in plain
FP32, each operation rounded once::

    g = round(round(acc + last) * coef)
    p = p * decay + step_size * sign(g)       # step_size = -lr; sign(±0) = 0, sign(NaN) = NaN
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from offload.kernels.accumulate import line_numel, read, take_gradient, write
from offload.kernels.blocks import part
from offload.kernels.buffers import make_buffer, make_stage
from offload.kernels.denormals import restore_mode, set_flush
from offload.kernels.jit import Kernel, inner
from offload.kernels.norm import write_sums
from offload.kernels.shares import items
from offload.kernels.stream import drain, fence, put

__all__ = ["NUM_COLUMNS", "hyper_row", "update_tile"]

# Columns of ``rows``, one row per parameter.
DECAY, STEP_SIZE, COEF = range(3)
NUM_COLUMNS = 3

ZERO = np.float32(0.0)


def hyper_row(group: Mapping[str, Any], step: int, coef: float = 1.0) -> tuple[float, ...]:
    """The scalars of one parameter's update, in double; storing them in ``rows`` rounds each once to float32.

    ``group`` has lr (a float or a one-element tensor), weight_decay, maximize; ``step`` is not used.
    """
    lr = float(group["lr"])
    weight_decay = float(group["weight_decay"])  # a NumPy scalar would multiply in its own precision
    return (1 - lr * weight_decay, -lr, -coef if group.get("maximize") else coef)


@inner
def sign(value):
    """-1, 0, 1 or NaN (float32) without a branch, so that loops around it vectorize."""
    return np.float32(value > ZERO) - np.float32(value < ZERO) if value == value else value  # noqa: PLR0124


@inner
def update_span(gradient, master, new_master, weight, rows, row):
    """The update loop, over arrays of equal length that all belong to parameter ``row``; gradient: see `take_gradient`.

    Without ``new_master``, the master is changed in place.
    """
    decay, step_size, coef = rows[row, DECAY], rows[row, STEP_SIZE], rows[row, COEF]
    for i in range(master.size):
        p = master[i] * decay + step_size * sign(read(gradient, i) * coef)
        put(new_master, master, i, p)
        write(weight, i, p)


# One line per group of arguments reads better here than one line per argument.
# fmt: off
@inner
def update_block(block, grad, acc, master, new_master, weight, sums, nonfinite, blocks, rows, select, flush):
    """Work item ``block`` of `update_tile`: a line at a time."""
    start, stop, row = blocks[block, 0], blocks[block, 1], blocks[block, 2]
    if select[row] == 0:
        return
    mode = set_flush(flush)
    gradient = make_buffer()
    weight_stage, master_stage = make_stage(weight), make_stage(new_master)
    line = line_numel(acc)
    for first in range(start, stop, line):
        last = min(first + line, stop)
        numel = last - first
        values = take_gradient(grad, acc, first, last, gradient)
        write_sums(values, sums, nonfinite, first, gradient)
        update_span(
            values,
            master[first:last],
            part(master_stage, 0, numel),
            part(weight_stage, 0, numel),
            rows,
            row,
        )
        drain(weight_stage, weight, first, last)
        drain(master_stage, new_master, first, last)
    fence()
    restore_mode(mode)


@Kernel
def update_tile(worker, call):
    """One step of the selected parameters of a tile; all arrays have the tile's length n.

    grad: uint16[n] (BF16 bits) or float32[n], the last micro-batch; acc: float32[n] or None, the ones before it.
    master: float32[n]; in place, or left as it is where new_master: float32[n], out, is given.
    weight: uint16[n] (BF16 bits), float32[n] or None, out.
    sums: float64[n // 1024], nonfinite: uint8[n // 1024], out, or both None: see `offload.kernels.norm`; of the gradient
    before ``coef``. blocks: int64[k, 3]; rows: float32[r, 3]; select: uint8[r]; flush: bool, denormals are 0.
    """
    shares, grad, acc, master, new_master, weight, sums, nonfinite, blocks, rows, select, flush = call[0]
    for block in items(shares, worker):
        update_block(
            block, grad, acc, master, new_master, weight, sums, nonfinite, blocks, rows, select, flush
        )


# fmt: on
