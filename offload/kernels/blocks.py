"""How a tile is cut into the blocks that one thread takes at a time.

A *tile* is a slice of a chunk's flat range; each parameter starts on a multiple of ``NORM_BLOCK`` in it. A *block* is
at most ``BLOCK`` consecutive elements of one parameter. What lies between a parameter's end and the next boundary
belongs to no block: no kernel reads it into a norm or writes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from offload.errors import KernelError

__all__ = ["BLOCK", "LINE", "NORM_BLOCK", "make_blocks", "part"]

#: Elements per norm block, and the alignment of every parameter in a chunk. Also what the inner loops take at a time where
#: they read something twice: all its arrays stay in the L1 cache.
NORM_BLOCK = 1024
#: Elements that the inner loops take at a time where they read everything once; each time costs as much as some hundred
#: elements.
LINE = 4 * NORM_BLOCK
#: Elements per work item of the thread team: large enough to hide scheduling, small enough to balance.
BLOCK = 32 * NORM_BLOCK


def make_blocks(spans: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """Cut ``(start, stop, row)`` spans of a tile into blocks.

    Each span is what the tile holds of one parameter: elements ``[start, stop)`` of the tile, ``start`` a multiple of
    ``NORM_BLOCK``, ``row`` the parameter's index in the chunk. Returns int64[k, 3] rows (start, stop, row).
    """
    blocks = []
    for start, stop, row in spans:
        if start % NORM_BLOCK or stop < start or row < 0:
            raise KernelError(
                f"span ({start}, {stop}, {row}): start must be a multiple of {NORM_BLOCK}, "
                "stop not below it, row not negative"
            )
        blocks += [(first, min(first + BLOCK, stop), row) for first in range(start, stop, BLOCK)]
    return np.array(blocks, dtype=np.int64).reshape(-1, 3)


def part(array: Any, start: Any, stop: Any) -> Any:
    """``array[start:stop]``, or None where the array is absent from this variant."""
    return None if array is None else array[start:stop]


@overload(part)
def _part_overload(array, start, stop):
    if isinstance(array, types.NoneType):
        return lambda array, start, stop: None
    return lambda array, start, stop: array[start:stop]
