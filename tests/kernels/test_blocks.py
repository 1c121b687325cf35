from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import KernelError
from offload.kernels.blocks import BLOCK, NORM_BLOCK, make_blocks


@given(st.lists(st.integers(0, 3 * BLOCK), max_size=6))
def test_blocks_cover_each_span_once(sizes: list[int]) -> None:
    spans, start = [], 0
    for row, numel in enumerate(sizes):
        spans.append((start, start + numel, row))
        start += -(-numel // NORM_BLOCK) * NORM_BLOCK
    blocks = make_blocks(spans)
    assert blocks.dtype == np.int64
    assert blocks.shape[1:] == (3,)
    for span_start, stop, row in spans:
        mine = blocks[blocks[:, 2] == row]
        covered = [i for first, last, _ in mine.tolist() for i in (first, last)]
        bounds = [
            span_start,
            *(edge for edge in range(span_start + BLOCK, stop, BLOCK) for _ in range(2)),
            stop,
        ]
        assert covered == (bounds if stop > span_start else [])
        assert (mine[:, 0] % NORM_BLOCK == 0).all()


@pytest.mark.parametrize("span", [(5, 9, 0), (1024, 1023, 0), (0, 4, -1)])
def test_bad_spans_are_refused(span: tuple[int, int, int]) -> None:
    with pytest.raises(KernelError, match="span"):
        make_blocks([span])
