"""Elementwise kernels, on every BF16 pattern and on float32 patterns around every rounding boundary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offload.kernels.blocks import BLOCK
from tests import oracles
from tests.kernels import workload

ALL_BF16 = np.arange(1 << 16, dtype=np.uint16)
KINDS = ["numba", "torch"]


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, start_backend: Any) -> Any:
    return start_backend(kind=request.param, flush=False)


def boundary_patterns() -> np.ndarray:
    """For each BF16 pattern the float32 at it, just beside it, and at and beside the middle to the next."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((ALL_BF16.astype(np.uint32)[:, None] << 16) | low).reshape(-1).view(np.float32)


def test_expand_is_exact(backend: Any) -> None:
    master = np.empty(ALL_BF16.size, np.float32)
    backend.expand(ALL_BF16, master)
    assert oracles.same_bits(master, oracles.bf16_to_float(ALL_BF16))


def test_round_weights_to_nearest_even(backend: Any) -> None:
    values = boundary_patterns()
    weight = np.empty(values.size, np.uint16)
    backend.round_weights(values, weight)
    assert np.array_equal(weight, oracles.float_to_bf16(values))  # NaN is 0x7fc0, to the bit


def test_fp32_weights_are_copied(backend: Any) -> None:
    values = boundary_patterns()
    weight = np.empty_like(values)
    backend.round_weights(values, weight)
    assert np.array_equal(weight.view(np.uint32), values.view(np.uint32))
    back = np.empty_like(values)
    backend.expand(weight, back)
    assert np.array_equal(back.view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("numel", [1, 1024, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_accumulate(backend: Any, numel: int, dtype: str) -> None:
    rng = np.random.default_rng(numel)
    grads = [workload.special_values(rng, numel) for _ in range(3)]
    if dtype == "bf16":
        grads = [oracles.float_to_bf16(grad) for grad in grads]
    acc = workload.special_values(rng, numel)
    with np.errstate(all="ignore"):
        expected = oracles.whole_gradient(grads[0], None)
        for grad in grads[1:]:
            expected = oracles.whole_gradient(grad, expected)
    for index, grad in enumerate(grads):
        backend.accumulate(grad, acc, index == 0)
    assert oracles.same_bits(acc, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.uint8])
def test_fill_zero(backend: Any, dtype: Any) -> None:
    array = np.ones(2 * BLOCK + 3, dtype)
    backend.fill_zero(array)
    assert not array.any()


def test_expanding_keeps_denormals_when_flushing(start_backend: Any) -> None:
    master = np.empty(ALL_BF16.size, np.float32)
    start_backend(flush=True).expand(ALL_BF16, master)
    assert oracles.same_bits(master, oracles.bf16_to_float(ALL_BF16))
