"""Stochastic rounding whose random bits are a function of where they are used, not of when.

Gupta et al., "Deep Learning with Limited Numerical Precision" (2015): a value between two neighbours of the narrow format
becomes the upper one with the probability of its distance from the lower one, so that the expected result is the value.
Rounding to nearest would not do: ``beta2 = 0.999`` changes ``exp_avg_sq`` by 1/1000 a step, less than half of BF16's spacing
(1/512 to 1/256 of the value), so that it would never decay. Error compensation was the alternative: its remainder has to be
stored, which is what the narrow format is to save.

The bits come from a counter through the finalizer of MurmurHash3 (Appleby, 2011): of the step, the parameter's key and the
element's index in the parameter. Tiles, threads, rings, chunks, timing and restarts are in none of these, so results have
the same bits whatever they are. Indices count modulo 2^32.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from offload.kernels.bits import BF16_NAN, HALF_WIDTH, bits_from_float
from offload.kernels.jit import inner

__all__ = [
    "ELEMENT",
    "KEY",
    "bf16_at_random",
    "parameter_key",
    "random_bits",
    "step_columns",
    "step_key",
    "with_counters",
]

#: Columns of ``blocks`` that `with_counters` adds to those of `offload.kernels.blocks.make_blocks`.
KEY, ELEMENT = 3, 4

SEED = np.uint32(0x6F666C64)
FIRST, SECOND = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
THIRTEEN, SIXTEEN = np.uint32(13), np.uint32(16)
LOW_WORD = 0xFFFFFFFF
HALF_WORD = 0xFFFF


@inner
def mix(bits):
    """The finalizer of MurmurHash3: uint32 to uint32, one to one; each bit of the result depends on all."""
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> SIXTEEN)) * FIRST)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> THIRTEEN)) * SECOND)
    return np.uint32(bits ^ np.uint32(bits >> SIXTEEN))


@inner
def step_key(key, step_low, step_high):
    """The key (uint32) of one parameter's step. key: int64, of `parameter_key`; the step: float32, of `step_columns`."""
    bits = mix(np.uint32(np.uint32(key) ^ SEED))
    bits = mix(np.uint32(bits + np.uint32(step_low)))
    return mix(np.uint32(bits + np.uint32(step_high)))


@inner
def random_bits(key, element):
    """32 random bits for an element (uint32 index) under a `step_key`."""
    return mix(np.uint32(key ^ element))


@inner
def bf16_at_random(value, noise):
    """Round a float32 to BF16 bits (uint16) stochastically; ``noise``: uint32 below 2^16, uniform.

    Adding noise to the 16 bits that go carries into those that stay with the right probability, overflow to infinity
    included. Infinities stay; every NaN becomes 0x7fc0.
    """
    rounded = np.uint32(np.uint32(bits_from_float(value) + noise) >> HALF_WIDTH)
    return np.uint16(rounded) if value == value else BF16_NAN  # noqa: PLR0124 (false only for NaN)


def parameter_key(name: str) -> int:
    """A parameter's key (32 bits) by its name, the same in every process."""
    return zlib.crc32(name.encode())


def step_columns(step: int) -> tuple[float, float]:
    """A step's number as two values that float32 holds exactly."""
    return float(step & HALF_WORD), float(step >> 16 & HALF_WORD)


def with_counters(blocks: np.ndarray, counters: Any) -> np.ndarray:
    """Blocks of a tile (int64[k, 3]) with each one's key and the index of its first element: int64[k, 5].

    counters: by row, the parameter's key and the index in the parameter of what would be element 0 of the tile (negative
    where the parameter starts later).
    """
    extended = np.zeros((len(blocks), 5), np.int64)
    extended[:, :3] = blocks
    for block in extended:
        key, origin = counters[int(block[2])]
        block[KEY], block[ELEMENT] = key, (origin + int(block[0])) & LOW_WORD
    return extended
