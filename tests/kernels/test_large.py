"""Arrays of more than 2^31 elements: once, on a machine that holds them (34 GiB)."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch

from offload.kernels.backend import TileArrays, Variant
from offload.kernels.blocks import make_blocks
from offload.kernels.jit import jit_disabled
from offload.kernels.numba_backend import NumbaBackend
from offload.kernels.rule import AdamWRule
from tests.kernels.conftest import InWorker

NUMEL = 2**31 + 5
MAPPED = 2**31 + 1024
NEEDED_BYTES = 40 * 2**30


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(jit_disabled(), reason="NUMBA_DISABLE_JIT: would take days")
@pytest.mark.skipif(
    psutil.virtual_memory().available < NEEDED_BYTES, reason="needs 40 GiB of free host memory"
)
def test_f34_both_ends_of_more_than_two_to_the_31_elements() -> None:
    variant = Variant(grad="bf16", weight="bf16")
    backend = InWorker(
        NumbaBackend(
            AdamWRule,
            num_threads=psutil.cpu_count() or 1,
            flush_denormals=True,
            variants=[variant],
            cache_dir=None,
        )
    )
    try:
        master, *moments = (np.zeros(MAPPED, np.float32) for _ in range(3))
        tile = TileArrays(
            grad=np.full(MAPPED, 0x3F80, np.uint16),  # 1.0
            acc=None,
            master=master,
            moments=tuple(moments),
            weight=np.zeros(MAPPED, np.uint16),
            sums=None,
            nonfinite=None,
            blocks=make_blocks([(0, NUMEL, 0)]),
            new_state=None,
        )
        group = torch.optim.AdamW(
            [torch.zeros(1, requires_grad=True)], lr=0.5, weight_decay=0.0
        ).param_groups[0]
        rows = np.array([AdamWRule.row(group, 1)], np.float32)
        backend.update(tile, rows, np.ones(1, np.uint8))
        for place in (0, 1, 2**31 - 1, 2**31, NUMEL - 1):
            assert master[place] == pytest.approx(-0.5)
            assert tile.weight[place] == 0xBF00
        assert (master[:NUMEL] == master[0]).all()
        assert not master[NUMEL:].any()
    finally:
        backend.stop()
