"""The Python bodies that run without the JIT, and the oracle's own arithmetic, against exact rational arithmetic."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.kernels.arithmetic import fma, sqrt
from offload.kernels.bits import bf16_from_float, bits_from_float, float_from_bf16, float_from_bits
from tests import oracles
from tests.kernels import workload

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
TIE_BREAKER = 2.0**-12  # (1 + t)**2 = 1 + 2t + t**2, whose last term decides ties of float32


@numba.njit
def fma_of_arrays(a, b, c, result):
    for i in range(result.size):
        result[i] = fma(a[i], b[i], c[i])


@numba.njit
def sqrt_of_array(values, result):
    for i in range(result.size):
        result[i] = sqrt(values[i])


def bits(value: object) -> int:
    return int(np.float32(value).view(np.uint32))  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(finite, finite, finite)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    with np.errstate(all="ignore"):
        expected = oracles.exact_fma(a, b, c)
        assert bits(fma(np.float32(a), np.float32(b), np.float32(c))) == bits(expected)
        arrays = (np.array([value], np.float32) for value in (a, b, c))
        assert bits(oracles.fma(*arrays)[0]) == bits(expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_fma_where_double_rounding_would_show(sign: float) -> None:
    # In double the sum rounds to the middle between two float32, and a second rounding then goes the wrong way.
    a = b = 1 + TIE_BREAKER
    c = sign * 2.0**-60
    expected = oracles.exact_fma(a, b, c)
    assert bits(fma(np.float32(a), np.float32(b), np.float32(c))) == bits(expected)
    assert bits(expected) != bits(np.float32(np.float64(a) * b + c)) or sign < 0


@pytest.mark.parametrize(
    ("a", "b", "c"), [(np.inf, 0.0, 1.0), (np.inf, 1.0, -np.inf), (np.nan, 1.0, 1.0), (0.0, 1.0, np.nan)]
)
def test_fma_of_invalid_operands_is_nan(a: float, b: float, c: float) -> None:
    assert np.isnan(fma(np.float32(a), np.float32(b), np.float32(c)))


def test_compiled_fma_and_sqrt() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (workload.special_values(rng, 5000, 1e-18) for _ in range(3))
    result = np.empty_like(a)
    fma_of_arrays(a, b, c, result)
    with np.errstate(all="ignore"):
        assert oracles.same_bits(result, oracles.fma(a, b, c))
        sqrt_of_array(a, result)
        assert oracles.same_bits(result, np.sqrt(a))
        assert oracles.same_bits(np.array([sqrt(value) for value in a[:500]]), np.sqrt(a[:500]))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_bf16_rounding_without_the_jit(pattern: int) -> None:
    round_in_python = getattr(bf16_from_float, "py_func", bf16_from_float)
    value = np.uint32(pattern).view(np.float32)
    with np.errstate(all="ignore"):
        assert round_in_python(value) == oracles.float_to_bf16(np.array([value]))[0]


def test_bit_casts() -> None:
    widen = getattr(float_from_bf16, "py_func", float_from_bf16)
    assert widen(np.uint16(0x3F80)) == np.float32(1)
    assert bits_from_float(np.float32(-2)) == np.uint32(0xC0000000)
    assert float_from_bits(np.uint32(0x40400000)) == np.float32(3)
