"""Naive NumPy references for the kernels: whole arrays, one rounding per line, nothing shared with the code under test.

All arithmetic is float32 but for the norm's float64 lanes and the fused multiply-add, which is exact by construction.
Denormals are kept, unless the calling thread flushes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

F32 = np.float32


def same_bits(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Equal bit patterns, so that -0 is not 0; NaNs are compared by position only."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if actual.dtype == np.uint16:
        actual_nan, expected_nan = is_bf16_nan(actual), is_bf16_nan(expected)
    elif actual.dtype.kind == "f":
        actual_nan, expected_nan = np.isnan(actual), np.isnan(expected)
    else:
        return bool(np.array_equal(actual, expected))
    bits = f"u{actual.dtype.itemsize}"
    equal = (actual.view(bits) == expected.view(bits)) | (actual_nan & expected_nan)
    return bool(equal.all())


def is_bf16_nan(bits: np.ndarray) -> np.ndarray:
    return (bits & 0x7FFF) > 0x7F80


def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << 16).view(F32)


def float_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest BF16 (uint16 bits), ties to even: the two neighbours are compared by distance."""
    bits = np.ascontiguousarray(values, F32).view(np.uint32)
    below = bits >> 16
    remainder = bits & 0xFFFF
    up = (remainder > 0x8000) | ((remainder == 0x8000) & (below % 2 == 1))
    rounded = (below + up).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def exact_fma(a: float, b: float, c: float) -> np.float32:
    """``a * b + c`` of three finite float32 by rational arithmetic, rounded once to nearest even."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:  # only the IEEE rules of signed zero are left
        return F32(float(a) * float(b) + float(c))
    magnitude = abs(exact)
    exponent = math.floor(math.log2(magnitude.numerator) - math.log2(magnitude.denominator))
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)  # the distance of neighbours; fixed among denormals
    rounded = round(magnitude / unit) * unit  # Python rounds a Fraction half to even
    with np.errstate(over="ignore"):
        result = F32(np.inf) if rounded >= Fraction(2) ** 128 else F32(float(rounded))
    if exact < 0:
        result = -result
    return F32(result)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` of float32 arrays with one rounding (double, rounded to odd; checked against `exact_fma`)."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    even = total.view(np.int64) % 2 == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    inexact = np.isfinite(total) & (error != 0) & even
    return np.where(inexact, np.nextafter(total, toward), total).astype(F32)


def whole_gradient(grad: np.ndarray, acc: np.ndarray | None) -> np.ndarray:
    """``round(acc + last)`` in float32; ``grad`` is BF16 bits or float32."""
    last = bf16_to_float(grad) if grad.dtype == np.uint16 else grad
    return last if acc is None else acc + last


def adamw(
    group: Mapping[str, Any],
    step: int,
    grad: np.ndarray,
    acc: np.ndarray | None,
    master: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    coef: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One AdamW step; returns the new (master, exp_avg, exp_avg_sq)."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    c1, c2 = F32(1 - beta1), F32(1 - beta2)
    decay = F32(1 - lr * group["weight_decay"])
    step_size, debias = F32(-lr / (1 - beta1**step)), F32(math.sqrt(1 - beta2**step))
    with np.errstate(all="ignore"):
        g = whole_gradient(grad, acc) * F32(coef)
        g = -g if group["maximize"] else g
        slope, base = (c1, exp_avg) if c1 < 0.5 else (c1 - F32(1), g)
        m = fma(np.full_like(g, slope), g - exp_avg, base)
        v = fma(c2 * g, g, exp_avg_sq * F32(beta2))
        denominator = np.sqrt(v) / debias + F32(group["eps"])
        p = master * decay + (step_size * m) / denominator
    return p, m, v


def sign_sgd(
    group: Mapping[str, Any], grad: np.ndarray, acc: np.ndarray | None, master: np.ndarray, coef: float = 1.0
) -> np.ndarray:
    """One sign SGD step; returns the new master."""
    lr = float(group["lr"])
    with np.errstate(all="ignore"):
        g = whole_gradient(grad, acc) * F32(coef)
        g = -g if group["maximize"] else g
        return master * F32(1 - lr * group["weight_decay"]) + F32(-lr) * np.sign(g)


def square_sum(gradient: np.ndarray) -> float:
    """The squared sum of one norm block (at most 1024 float32) in 32 float64 lanes, added pairwise."""
    lanes = [0.0] * 32
    for i, value in enumerate(gradient.tolist()):
        lanes[i % 32] += value * value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


def is_nonfinite(gradient: np.ndarray) -> bool:
    return not bool(np.isfinite(gradient).all())


# Reduced moments -----------------------------------------------------------------------------------------------------

SEED = 0x6F666C64
WORD = 0xFFFFFFFF


def murmur_final(word: int) -> int:
    """The finalizer of MurmurHash3 for one 32-bit word, in Python integers."""
    word ^= word >> 16
    word = word * 0x85EBCA6B & WORD
    word ^= word >> 13
    word = word * 0xC2B2AE35 & WORD
    return word ^ word >> 16


def random_words(key: int, step: int, first: int, numel: int) -> np.ndarray:
    """The random words (uint32[numel]) of elements ``first`` to ``first + numel`` of parameter ``key`` at ``step``."""
    base = murmur_final(key ^ SEED)
    base = murmur_final(base + (step & 0xFFFF) & WORD)
    base = murmur_final(base + (step >> 16) & WORD)
    return np.array([murmur_final(base ^ (first + i & WORD)) for i in range(numel)], np.uint32)


def float_to_bf16_at_random(values: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """float32 to BF16 bits: to the neighbour farther from zero where ``noise`` (below 2^16) and the distance say so."""
    bits = values.view(np.uint32)
    distance = (bits & 0xFFFF).astype(np.int64)  # from the neighbour nearer to zero, in 1/2^16 of the spacing
    farther = noise.astype(np.int64) >= (1 << 16) - distance
    rounded = ((bits >> 16) + farther).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def code_values(number: int) -> np.ndarray:
    """What codes 0 to ``number`` stand for, as shares of the scale: the last is 1, each power of two has 8 steps."""
    values = [0.0]
    for code in range(1, number + 1):
        octave, step = divmod(code - number + 127 * 8, 8)
        values.append((1 + step / 8) * 2.0 ** (octave - 127))
    return np.array(values)


def quantize(values: np.ndarray, noise: np.ndarray | int, *, signed: bool) -> tuple[np.ndarray, np.float32]:
    """Codes (uint8) and scale of one block of float32; ``noise``: below 2^20, or 2^19 throughout for to nearest."""
    top = 126 if signed else 253
    shares = code_values(top)
    finite = np.isfinite(values)
    scale = F32(np.abs(values[finite]).max(initial=0))
    codes = np.zeros(values.size, np.uint8)
    for i, value in enumerate(values):
        chance = int(np.broadcast_to(noise, values.shape)[i])
        negative = bool(np.signbit(value))
        if np.isnan(value) or (not signed and value < 0):
            codes[i] = 128 if signed else 255
            continue
        if np.isinf(value):
            code = top + 1
        elif value == 0:
            code = 0
        else:
            ratio = float(F32(abs(value)) / scale)
            if ratio < shares[1]:
                limit = F32(ratio) * F32(2**20 / shares[1])
                code = int(limit > F32(chance)) if signed else 1
            else:
                code = int(np.searchsorted(shares, ratio, side="right")) - 1
                if code < top:
                    # The last step below a power of two is as wide as those before it.
                    width = 2.0 ** (math.floor(math.log2(shares[code])) - 3)
                    code += (ratio - shares[code]) / width * 2**20 + chance >= 2**20
        codes[i] = code + 128 * (signed and negative and code > 0)
    return codes, scale


def dequantize(codes: np.ndarray, scale: np.float32, *, signed: bool) -> np.ndarray:
    """float32 values of one block's codes."""
    top = 126 if signed else 253
    magnitudes = codes & 127 if signed else codes
    shares = np.append(code_values(top), [np.inf, np.nan])[np.minimum(magnitudes, top + 2)].astype(F32)
    with np.errstate(invalid="ignore"):
        values = np.where(magnitudes > top, shares, shares * scale)
        values = np.where(magnitudes == 0, F32(0), values)
    if signed:
        values = np.where(codes & 128, -values, values)
        values = np.where(codes == 128, F32(np.nan), values)
    return values.astype(F32)
