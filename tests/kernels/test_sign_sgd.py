from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offload.kernels.rule import SignSGDRule
from tests import oracles
from tests.kernels import workload
from tests.kernels.conftest import FP32, FULL

SIZES = [3, 1024, 2049, 40000]


@pytest.mark.parametrize("kind", ["numba", "torch"])
@pytest.mark.parametrize("variant", [FULL, FP32], ids=["bf16, acc", "fp32"])
@pytest.mark.parametrize("maximize", [False, True])
def test_bits_are_the_oracles(start_backend: Any, kind: str, variant: Any, maximize: bool) -> None:
    backend = start_backend(SignSGDRule, kind=kind, flush=False)
    group = {**workload.GROUP, "maximize": maximize}
    tile = workload.make_tile(np.random.default_rng(1), SIZES, variant, num_moments=0)
    expected = tile.master.copy()
    select = np.array([1, 0, 1, 1], np.uint8)
    for start, stop, row in tile.blocks.tolist():
        part = slice(start, stop)
        if select[row]:
            acc = None if tile.acc is None else tile.acc[part]
            expected[part] = oracles.sign_sgd(group, tile.grad[part], acc, expected[part], coef=0.5)
    backend.update(tile, workload.make_rows(backend.rule, group, 1, 4, 0.5), select)
    assert oracles.same_bits(tile.master, expected)
    assert tile.weight is not None
    for start, stop, row in tile.blocks.tolist():
        part = slice(start, stop)
        if select[row]:
            rounded = expected[part] if variant is FP32 else oracles.float_to_bf16(expected[part])
            assert oracles.same_bits(tile.weight[part], rounded)


def test_signs(start_backend: Any) -> None:
    backend = start_backend(SignSGDRule, flush=False)
    tile = workload.make_tile(np.random.default_rng(1), [6], FP32, num_moments=0)
    tile.grad[:6] = [0.0, -0.0, 1e-45, -np.inf, np.nan, 2.0]
    tile.master[:6] = 1.0
    backend.update(tile, np.array([[1.0, -0.25, 1.0]], np.float32), np.ones(1, np.uint8))
    assert tile.master[:4].tolist() == [1.0, 1.0, 0.75, 1.25]
    assert np.isnan(tile.master[4])
    assert tile.master[5] == 0.75
