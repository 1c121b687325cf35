"""How the work items of a kernel call are handed out to the threads of a team.

Each thread begins with a share of its own, consecutive items, and then helps the others with theirs. With fixed shares
a call takes as long as its slowest thread, and on a host that trains there always is one: the thread whose core the
training loop runs on, or whose core shares its arithmetic with that one's (Blumofe and Leiserson, "Scheduling
Multithreaded Computations by Work Stealing", 1999). Who takes an item does not touch its bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from offload.kernels.jit import in_llvm, inner

__all__ = ["items", "make_shares"]

LINE = 8
"""int64 per row of shares: a cache line, so that threads do not disturb each other's."""

NEXT, STOP = 0, 1


def make_shares(count: int, num_workers: int) -> np.ndarray:
    """Items ``[0, count)`` in even parts: int64[num_workers, 8] rows (next item, end of the share, unused)."""
    shares: np.ndarray = _even_shares(count, num_workers).copy()
    return shares


@lru_cache(maxsize=64)  # tiles are of a few lengths
def _even_shares(count: int, num_workers: int) -> np.ndarray:
    bounds = np.arange(num_workers + 1) * count // num_workers
    shares = np.zeros((num_workers, LINE), np.int64)
    shares[:, NEXT], shares[:, STOP] = bounds[:-1], bounds[1:]
    return shares


@inner
def items(shares, worker):
    """Yield the items that ``worker`` gets: its own, then those of the next workers that nobody has taken yet."""
    for distance in range(len(shares)):
        share = (worker + distance) % len(shares)
        item = take(shares, share)
        while item < shares[share, STOP]:
            yield item
            item = take(shares, share)


def take(shares: Any, share: Any) -> Any:
    """The next item of a share, for this thread alone; at or above its end when none is left."""
    item = shares[share, NEXT]
    shares[share, NEXT] += 1
    return item


@in_llvm(take)
def _fetch_add(typing_context, shares, share):
    """`take`, atomic. Relaxed: the team's start and end order everything else."""

    def codegen(context, builder, signature, arguments):
        array, row = arguments
        first = context.make_array(signature.args[0])(context, builder, array).data
        counter = builder.gep(first, [builder.mul(row, ir.Constant(row.type, LINE))])
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(shares, types.intp), codegen
