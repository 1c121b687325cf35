"""Bit patterns of FP32 and BF16, one element at a time.

Each function has two bodies with the same bits: the Python one below (also what runs with ``NUMBA_DISABLE_JIT=1``)
and, where Python cannot express it, an LLVM one that the compiler takes instead through ``@overload``.

A BF16 value travels as ``uint16`` (``_bits``): the upper half of the FP32 pattern.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from offload.kernels.jit import in_llvm, inner

__all__ = ["bf16_from_float", "bits_from_float", "float_from_bf16", "float_from_bits"]

BF16_NAN = np.uint16(0x7FC0)
HALF_WIDTH = np.uint32(16)
ROUNDING = np.uint32(0x7FFF)
ONE = np.uint32(1)


def float_from_bits(bits: Any) -> Any:
    """The float32 whose pattern is ``bits`` (uint32)."""
    return np.uint32(bits).view(np.float32)


def bits_from_float(value: Any) -> Any:
    """The pattern (uint32) of a float32."""
    return np.float32(value).view(np.uint32)


@in_llvm(float_from_bits)
def _float_from_bits(typing_context, bits):
    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@in_llvm(bits_from_float)
def _bits_from_float(typing_context, value):
    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@inner
def float_from_bf16(bits):
    """Widen BF16 bits (uint16) to float32; exact."""
    # Widened before the shift: NumPy would shift a uint16 out to 0.
    return float_from_bits(np.uint32(np.uint32(bits) << HALF_WIDTH))


@inner
def bf16_from_float(value):
    """Round a float32 to BF16 bits (uint16), to nearest, ties to even; every NaN becomes 0x7fc0.

    The carry of ``bits + 0x7fff + lowest kept bit`` is the rounding, overflow to infinity included. It would carry
    some NaNs into infinities or zeros, hence the select. LLVM's own ``fptrunc`` flushes denormals on AVX512-BF16.
    """
    bits = bits_from_float(value)
    odd = np.uint32(np.uint32(bits >> HALF_WIDTH) & ONE)
    rounded = np.uint32(np.uint32(bits + np.uint32(ROUNDING + odd)) >> HALF_WIDTH)
    return np.uint16(rounded) if value == value else BF16_NAN  # noqa: PLR0124 (false only for NaN)
