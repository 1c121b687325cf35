"""Norms: the same bits fused and alone, in Numba and in torch, and only of what belongs to a parameter."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from offload.kernels.norm import add_blocks
from tests import oracles
from tests.kernels import workload
from tests.kernels.conftest import FP32, FULL

SIZES = [1, 31, 1024, 1025, 5000, 40000, 33]


def expected_sums(tile: Any, select: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sums, nonfinite = tile.sums.copy(), tile.nonfinite.copy()
    with np.errstate(all="ignore"):
        gradient = oracles.whole_gradient(tile.grad, tile.acc)
    for start, stop, row in tile.blocks.tolist():
        for first in range(start, stop, 1024):
            if select[row]:
                values = gradient[first : min(first + 1024, stop)]
                sums[first // 1024] = oracles.square_sum(values)
                nonfinite[first // 1024] = oracles.is_nonfinite(values)
    return sums, nonfinite


@pytest.mark.parametrize("kind", ["numba", "torch"])
@pytest.mark.parametrize("variant", [FULL, FP32], ids=["bf16, acc", "fp32"])
@pytest.mark.parametrize("special", [False, True])
def test_square_sums(start_backend: Any, kind: str, variant: Any, special: bool) -> None:
    tile = workload.make_tile(np.random.default_rng(3), SIZES, variant, special=special)
    select = np.array([1, 1, 0, 1, 1, 1, 1], np.uint8)
    sums, nonfinite = expected_sums(tile, select)
    start_backend(kind=kind, flush=False).square_sums(
        tile.grad, tile.acc, tile.sums, tile.nonfinite, tile.blocks, select
    )
    assert oracles.same_bits(tile.sums, sums)
    assert np.array_equal(tile.nonfinite, nonfinite)


@pytest.mark.parametrize("kind", ["numba", "torch"])
@pytest.mark.parametrize("flush", [False, True])
def test_the_update_writes_the_same_sums(start_backend: Any, kind: str, flush: bool) -> None:
    backend = start_backend(kind=kind, flush=flush)
    tile = workload.make_tile(np.random.default_rng(4), SIZES, FULL)
    select = np.array([1, 0, 1, 1, 1, 1, 1], np.uint8)
    sums, nonfinite = tile.sums.copy(), tile.nonfinite.copy()
    backend.square_sums(tile.grad, tile.acc, sums, nonfinite, tile.blocks, select)
    backend.update(tile, workload.make_rows(backend.rule, workload.GROUP, 1, 7, coef=0.25), select)
    assert oracles.same_bits(tile.sums, sums)
    assert np.array_equal(tile.nonfinite, nonfinite)
    assert tile.sums[1] == -1.0  # not selected, not written


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("position", [0, 17, 1023])
def test_nonfinite_is_seen_by_the_real_kernel(start_backend: Any, value: float, position: int) -> None:
    tile = workload.make_tile(np.random.default_rng(5), [1024, 1024], FP32, special=False)
    tile.grad[1024 + position] = value
    select = np.ones(2, np.uint8)
    start_backend().square_sums(tile.grad, None, tile.sums, tile.nonfinite, tile.blocks, select)
    assert tile.nonfinite.tolist() == [0, 1]


def test_an_overflowing_accumulator_is_nonfinite_but_large_squares_are_not(start_backend: Any) -> None:
    tile = workload.make_tile(np.random.default_rng(6), [64, 64], FULL, special=False)
    tile.grad[:] = oracles.float_to_bf16(np.full(2048, 3e38, np.float32))
    tile.acc[:1024], tile.acc[1024:] = 3e38, 0.0
    start_backend().square_sums(
        tile.grad, tile.acc, tile.sums, tile.nonfinite, tile.blocks, np.ones(2, np.uint8)
    )
    assert tile.nonfinite.tolist() == [1, 0]
    assert math.isinf(tile.sums[0])
    assert math.isfinite(tile.sums[1])


def test_the_sum_is_accurate(start_backend: Any) -> None:
    tile = workload.make_tile(np.random.default_rng(8), [200_000], FP32, special=False)
    start_backend().square_sums(tile.grad, None, tile.sums, tile.nonfinite, tile.blocks, np.ones(1, np.uint8))
    exact = math.fsum(float(value) ** 2 for value in tile.grad[:200_000])
    assert abs(add_blocks(tile.sums) - exact) <= 1e-15 * 200 * exact


def test_add_blocks_adds_halves() -> None:
    sums = np.array([1.0, 1e16, 1.0, -1e16, 3.0])
    before = sums.copy()
    assert add_blocks(sums) == ((1.0 - 1e16) + 1.0) + (1e16 + 3.0)
    assert add_blocks(sums, 3) == -1e16 + 3.0
    assert add_blocks(sums, 1, 2) == 1e16
    assert add_blocks(sums, 1, 1) == 0.0
    assert (sums == before).all()


def test_add_blocks_has_the_bits_of_its_definition() -> None:
    def halves(values: list[float]) -> float:
        while len(values) > 1:
            half = (len(values) + 1) // 2
            values = [a + b for a, b in itertools.zip_longest(values[:half], values[half:], fillvalue=0.0)]
        return values[0]

    generator = np.random.default_rng(3)
    for number in (1, 2, 3, 64, 1000, 1023):
        sums = generator.random(number) * 10.0 ** generator.integers(-8, 8, number)
        assert add_blocks(sums) == halves(sums.tolist())
