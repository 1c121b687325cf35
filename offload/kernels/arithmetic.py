"""FP32 operations that round exactly once: ``fma`` and ``sqrt``.

Compiled, they are the LLVM intrinsics of the same name. The Python bodies, which run with ``NUMBA_DISABLE_JIT=1``,
give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from offload.kernels.jit import in_llvm

__all__ = ["fma", "sqrt"]


def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of float32 with one rounding.

    The product is exact in double; the sum is rounded *to odd* in double (Boldo and Melquiond, "Emulation of FMA and
    correctly rounded sums", 2008), so that the second rounding, to float32, never sees a false tie.
    """
    product = float(a) * float(b)
    addend = float(c)
    total = product + addend
    if not math.isfinite(total):
        return np.float32(total)
    # TwoSum (Knuth): total + error is exactly product + addend.
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    if error != 0.0 and not int(np.float64(total).view(np.int64)) & 1:
        total = math.nextafter(total, math.copysign(math.inf, error))
    return np.float32(total)


def sqrt(value: Any) -> Any:
    """The square root of a float32, correctly rounded; NaN below zero."""
    return np.sqrt(np.float32(value))


def _float_intrinsic(name: str, num_arguments: int) -> Any:
    """An LLVM intrinsic ``float(float, ...)`` as a Numba function."""

    def codegen(context, builder, signature, arguments):
        function = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * num_arguments)
        return builder.call(builder.module.declare_intrinsic(name, (ir.FloatType(),), function), arguments)

    return types.float32(*[types.float32] * num_arguments), codegen


@in_llvm(fma)
def _fma(typing_context, a, b, c):
    return _float_intrinsic("llvm.fma", 3)


@in_llvm(sqrt)
def _sqrt(typing_context, value):
    return _float_intrinsic("llvm.sqrt", 1)
