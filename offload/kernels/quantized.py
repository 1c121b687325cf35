"""Moments in 8 bits: a code per element, a scale per block.

Block-wise quantization after Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022): blocks of 1024
elements, counted from each parameter's start, each with the largest finite magnitude in it as its float32 scale. As their
dynamic map, ours is finer near zero; other than theirs it is a small floating-point format, so that rounding is one
addition to a float's bits, and no table is looked up:

==========  =======================  ==========================  ===========================================
moment      code                     value                       codes beyond
==========  =======================  ==========================  ===========================================
signed      sign, magnitude c below  2^-16 to 1 of the scale, 8  0: zero; 127: infinity; 128: NaN
            127                      steps to each power of two
unsigned    c below 254              2^-32 to 1 of the scale, 8  0: zero; 254: infinity; 255: NaN
                                     steps to each power of two
==========  =======================  ==========================  ===========================================

A magnitude c stands for the float32 whose bits are ``(c + base) << 20``. The largest element is always exact. Below the
least value, signed ones become that or zero by chance; unsigned ones never become zero, since the second moment divides.
What has been quantized is left as it is by quantizing it to nearest once more: the spacing is far wider than the rounding of
``value / scale`` and ``code * scale``.
"""

from __future__ import annotations

import numpy as np

from offload.kernels.bits import bits_from_float, float_from_bits
from offload.kernels.blocks import BLOCK, NORM_BLOCK
from offload.kernels.jit import Kernel, inner
from offload.kernels.shares import items

__all__ = [
    "NOISE_MASK",
    "pack_codes",
    "pack_signed",
    "pack_unsigned",
    "scale_of",
    "signed_code",
    "unpack_codes",
]
__all__ += ["unpack_signed", "unpack_unsigned", "unsigned_code"]

ZERO, ONE = np.uint32(0), np.uint32(1)
SHIFT = np.uint32(20)
NOISE_MASK = np.uint32(0xFFFFF)
#: Half of the spacing: the "noise" that rounds to nearest.
NEAREST = np.uint32(0x80000)
MAGNITUDE, EXPONENT, SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x80000000)
#: ``1.0`` without its lower 20 bits.
UNIT = 127 << 3
SIGN_CODE, TO_SIGN_CODE = np.uint32(0x80), np.uint32(24)

SIGNED_TOP = 126
SIGNED_BASE = np.uint32(UNIT - SIGNED_TOP)
SIGNED_INF, SIGNED_NAN = np.uint32(127), np.uint32(0x80)
SIGNED_LEAST = np.uint32((UNIT - SIGNED_TOP + 1) << 20).view(np.float32)
#: Makes of a ratio below the least value the noise below which it is rounded up.
SIGNED_CHANCE = np.float32(float(1 << 20) / float(SIGNED_LEAST))

UNSIGNED_TOP = 253
UNSIGNED_BASE = np.uint32(UNIT - UNSIGNED_TOP)
UNSIGNED_INF, UNSIGNED_NAN = np.uint32(254), np.uint32(255)
UNSIGNED_LEAST = np.uint32((UNIT - UNSIGNED_TOP + 1) << 20).view(np.float32)


@inner
def scale_of(values):
    """The largest finite magnitude (float32) in float32[n]; 0 where there is none."""
    top = np.uint32(0)
    for i in range(values.size):
        magnitude = np.uint32(bits_from_float(values[i]) & MAGNITUDE)
        top = max(top, magnitude if magnitude < EXPONENT else ZERO)
    return float_from_bits(top)


@inner
def signed_code(value, scale, noise):
    """The code (uint8) of a float32, rounded by ``noise``: uint32 below 2^20, uniform, or `NEAREST`."""
    bits = bits_from_float(value)
    magnitude = np.uint32(bits & MAGNITUDE)
    ratio = float_from_bits(magnitude) / scale  # NaN where the scale is 0
    code = np.uint32(np.uint32(np.uint32(bits_from_float(ratio) + noise) >> SHIFT) - SIGNED_BASE)
    chance = ONE if ratio * SIGNED_CHANCE > np.float32(np.int32(noise)) else ZERO
    code = code if ratio >= SIGNED_LEAST else chance
    code = SIGNED_INF if magnitude == EXPONENT else code
    sign = np.uint32(np.uint32(bits >> TO_SIGN_CODE) & SIGN_CODE)
    code = ZERO if code == ZERO else np.uint32(code | sign)
    return np.uint8(SIGNED_NAN if magnitude > EXPONENT else code)


@inner
def unsigned_code(value, scale, noise):
    """The same for a float32 that is not negative; a negative one has no square root and counts as NaN."""
    bits = bits_from_float(value)
    magnitude = np.uint32(bits & MAGNITUDE)
    ratio = float_from_bits(magnitude) / scale
    code = np.uint32(np.uint32(np.uint32(bits_from_float(ratio) + noise) >> SHIFT) - UNSIGNED_BASE)
    code = code if ratio >= UNSIGNED_LEAST else ONE
    code = ZERO if magnitude == ZERO else code
    code = UNSIGNED_INF if bits == EXPONENT else code
    return np.uint8(UNSIGNED_NAN if bits > EXPONENT and bits != SIGN else code)


@inner
def signed_value(code, scale):
    """The float32 that a code of `signed_code` stands for."""
    code = np.uint32(code)
    magnitude = np.uint32(code & SIGNED_INF)
    value = float_from_bits(np.uint32(np.uint32(magnitude + SIGNED_BASE) << SHIFT)) * scale
    bits = ZERO if magnitude == ZERO else bits_from_float(value)
    bits = EXPONENT if magnitude == SIGNED_INF else bits
    bits = np.uint32(bits | np.uint32(np.uint32(code & SIGN_CODE) << TO_SIGN_CODE))
    return float_from_bits(QUIET_NAN if code == SIGNED_NAN else bits)


@inner
def unsigned_value(code, scale):
    """The float32 that a code of `unsigned_code` stands for."""
    code = np.uint32(code)
    value = float_from_bits(np.uint32(np.uint32(code + UNSIGNED_BASE) << SHIFT)) * scale
    bits = ZERO if code == ZERO else bits_from_float(value)
    bits = EXPONENT if code == UNSIGNED_INF else bits
    return float_from_bits(QUIET_NAN if code == UNSIGNED_NAN else bits)


QUIET_NAN = np.uint32(0x7FC00000)


@inner
def unpack_signed(codes, scale, values):
    """One block: uint8[n] into float32[n]."""
    for i in range(values.size):
        values[i] = signed_value(codes[i], scale)


@inner
def unpack_unsigned(codes, scale, values):
    """One block: uint8[n] into float32[n]."""
    for i in range(values.size):
        values[i] = unsigned_value(codes[i], scale)


@inner
def pack_signed(values, codes):
    """One block to nearest: float32[n] into uint8[n]; returns its scale."""
    scale = scale_of(values)
    for i in range(codes.size):
        codes[i] = signed_code(values[i], scale, NEAREST)
    return scale


@inner
def pack_unsigned(values, codes):
    """One block to nearest: float32[n] into uint8[n]; returns its scale."""
    scale = scale_of(values)
    for i in range(codes.size):
        codes[i] = unsigned_code(values[i], scale, NEAREST)
    return scale


@inner
def unpack_block(block, codes, scales, signed, values):
    """Work item ``block`` of `unpack_codes`."""
    for first in range(block * BLOCK, min(block * BLOCK + BLOCK, values.size), NORM_BLOCK):
        last = min(first + NORM_BLOCK, values.size)
        if signed:
            unpack_signed(codes[first:last], scales[first // NORM_BLOCK], values[first:last])
        else:
            unpack_unsigned(codes[first:last], scales[first // NORM_BLOCK], values[first:last])


@inner
def pack_block(block, values, signed, codes, scales):
    """Work item ``block`` of `pack_codes`."""
    for first in range(block * BLOCK, min(block * BLOCK + BLOCK, values.size), NORM_BLOCK):
        last = min(first + NORM_BLOCK, values.size)
        if signed:
            scales[first // NORM_BLOCK] = pack_signed(values[first:last], codes[first:last])
        else:
            scales[first // NORM_BLOCK] = pack_unsigned(values[first:last], codes[first:last])


@Kernel
def unpack_codes(worker, call):
    """A parameter's moment as float32.

    codes: uint8[n]; scales: float32[ceil(n / 1024)]; signed: bool; values: float32[n], out.
    """
    shares, codes, scales, signed, values = call[0]
    for block in items(shares, worker):
        unpack_block(block, codes, scales, signed, values)


@Kernel
def pack_codes(worker, call):
    """The reverse of `unpack_codes`, rounded to nearest.

    values: float32[n]; signed: bool; codes: uint8[n], out; scales: float32[ceil(n / 1024)], out.
    """
    shares, values, signed, codes, scales = call[0]
    for block in items(shares, worker):
        pack_block(block, values, signed, codes, scales)
