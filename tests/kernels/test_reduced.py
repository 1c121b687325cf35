"""Moments in BF16 and 8 bits against the naive oracle, bit for bit; what rounding by chance promises; nothing by timing."""

from __future__ import annotations

import dataclasses
import platform
import re
from typing import Any

import numpy as np
import pytest

from offload.kernels import asm, rounding
from offload.kernels.backend import TileArrays, Variant
from offload.kernels.blocks import BLOCK, make_blocks
from offload.kernels.jit import jit_disabled
from offload.kernels.rule import ADAMW_RULES
from tests import oracles
from tests.kernels import workload
from tests.kernels.conftest import FULL, PLAIN, REDUCED_VARIANTS

KINDS = ["bf16", "int8"]
SIZES = [1, 15, 1024, 1025, 3000]
KEY = 0x12345678
OUT_OF_PLACE = Variant(new_state=True)
#: Moments that only special care keeps: see `workload.SPECIAL`, and a whole block of zeros, and one of denormals.
ORDINARY, ZERO, DENORMAL = range(3)


def counters(sizes: list[int]) -> dict[int, tuple[int, int]]:
    """Keys, and the index of each parameter's first element less its place in the tile; the second begins at 7000."""
    _, spans = workload.layout(sizes)
    return {row: (KEY + row, (7000 if row == 1 else 0) - start) for start, _, row in spans}


def first_element(row: int) -> int:
    return 7000 if row == 1 else 0


def make_tile(seed: int, kind: str, variant: Variant, content: int = ORDINARY) -> TileArrays:
    """A tile with moments as they are stored; gaps hold values that must not change."""
    rng = np.random.default_rng(seed)
    tile = workload.make_tile(rng, SIZES, variant, special=True)
    m, v = tile.moments
    if content != ORDINARY:
        value = np.float32(0.0 if content == ZERO else 3e-42)
        m[:], v[:] = value, value
        tile.grad[:] = 0
        if tile.acc is not None:
            tile.acc[:] = 0
    numel = m.size
    if kind == "bf16":
        stored: tuple[np.ndarray, ...] = (oracles.float_to_bf16(m), oracles.float_to_bf16(v))
    else:
        packed = [
            [oracles.quantize(values[start : start + 1024], 1 << 19, signed=signed) for start in range(0, numel, 1024)]
            for values, signed in ((m, True), (v, False))
        ]  # fmt: skip
        codes = [np.concatenate([block for block, _ in blocks]) for blocks in packed]
        scales = [np.array([scale for _, scale in blocks], np.float32) for blocks in packed]
        stored = (*codes, *scales)
    blocks = rounding.with_counters(tile.blocks, counters(SIZES))
    return dataclasses.replace(tile, moments=stored, blocks=blocks)


def expected_state(
    tile: TileArrays, kind: str, group: dict[str, Any], step: int, coef: float, select: np.ndarray
) -> list[np.ndarray]:
    """Master and moments as stored after one step, by the oracle, a norm block at a time."""
    master, *moments = [array.copy() for array in (tile.master, *tile.moments)]
    for start, stop, row in ((s, e, r) for s, e, r in workload.layout(SIZES)[1] if select[r]):
        words = oracles.random_words(KEY + row, step, first_element(row), stop - start)
        for first in range(start, stop, 1024):
            part, block = slice(first, min(first + 1024, stop)), first // 1024
            noise = words[part.start - start : part.stop - start]
            acc = None if tile.acc is None else tile.acc[part]
            old = [array[part] for array in moments[:2]]
            if kind == "bf16":
                m, v = (oracles.bf16_to_float(bits) for bits in old)
            else:
                m, v = (
                    oracles.dequantize(codes, moments[2 + i][block], signed=i == 0)
                    for i, codes in enumerate(old)
                )
            p, m, v = oracles.adamw(group, step, tile.grad[part], acc, master[part], m, v, coef=coef)
            master[part] = p
            if kind == "bf16":
                moments[0][part] = oracles.float_to_bf16_at_random(m, noise & 0xFFFF)
                moments[1][part] = oracles.float_to_bf16_at_random(v, noise >> 16)
            else:
                moments[0][part], moments[2][block] = oracles.quantize(m, noise & 0xFFFFF, signed=True)
                moments[1][part], moments[3][block] = oracles.quantize(v, noise >> 12, signed=False)
    return [master, *moments]


@pytest.mark.parametrize("content", [ORDINARY, ZERO, DENORMAL], ids=["ordinary", "zero", "denormal"])
@pytest.mark.parametrize("variant", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_oracles(start_backend: Any, kind: str, variant: Variant, content: int) -> None:
    rule = ADAMW_RULES[kind]
    backend = start_backend(rule, flush=False)
    tile = make_tile(1, kind, variant, content)
    select = np.array([1, 1, 1, 0, 1], np.uint8)
    for step, betas in ((1, (0.9, 0.95)), (2, (0.5, 0.999)), (70_000, (0.0, 0.0))):
        group = {**workload.GROUP, "betas": betas}
        expected = expected_state(tile, kind, group, step, float(np.float32(0.3)), select)
        backend.update(tile, workload.make_rows(rule, group, step, len(SIZES), 0.3), select)
        for actual, reference in zip((tile.master, *tile.moments), expected, strict=True):
            assert oracles.same_bits(actual, reference)
        assert tile.weight is not None
        for start, stop, row in workload.layout(SIZES)[1]:
            if select[row]:
                assert oracles.same_bits(
                    tile.weight[start:stop], oracles.float_to_bf16(tile.master[start:stop])
                )


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_place_has_the_same_bits_and_keeps_the_old_state(start_backend: Any, kind: str) -> None:
    rule = ADAMW_RULES[kind]
    backend = start_backend(rule, flush=True)
    backend.prepare(OUT_OF_PLACE)
    in_place, tile = make_tile(2, kind, PLAIN), make_tile(2, kind, PLAIN)
    old = [array.copy() for array in (tile.master, *tile.moments)]
    new = tuple(workload.aligned(array) for array in old)
    rows, select = (
        workload.make_rows(rule, workload.GROUP, 3, len(SIZES)),
        np.array([1, 0, 1, 1, 1], np.uint8),
    )
    backend.update(in_place, rows, select)
    backend.update(dataclasses.replace(tile, new_state=new), rows, select)
    for before, after in zip(old, (tile.master, *tile.moments), strict=True):
        assert oracles.same_bits(after, before)
    for there, here in zip(new, (in_place.master, *in_place.moments), strict=True):
        assert oracles.same_bits(there, here)


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_parameter_is_cut_changes_no_bit(start_backend: Any, kind: str) -> None:
    """One tile, or two that end in the middle of a parameter."""
    rule, numel, cut = ADAMW_RULES[kind], 3000, 2048
    backend, rng = start_backend(rule), np.random.default_rng(3)
    master = rng.standard_normal(3072).astype(np.float32)
    grad = oracles.float_to_bf16(rng.standard_normal(3072).astype(np.float32))

    def state() -> list[np.ndarray]:
        return [master.copy(), *(np.zeros(3072 // array.per, array.dtype) for array in rule.stored)]

    def step(arrays: list[np.ndarray], first: int, last: int, number: int) -> None:
        padded = -(-last // 1024) * 1024
        tile_master, *moments = (
            array[first // (3072 // array.size) : padded // (3072 // array.size)] for array in arrays
        )
        blocks = rounding.with_counters(make_blocks([(0, last - first, 0)]), {0: (KEY, first)})
        weight = np.zeros(padded - first, np.uint16)
        tile = TileArrays(grad[first:padded], None, tile_master, tuple(moments), weight, None, None, blocks)
        backend.update(tile, workload.make_rows(rule, workload.GROUP, number, 1), np.ones(1, np.uint8))

    whole, parts = state(), state()
    for number in (1, 2, 3):
        step(whole, 0, numel, number)
        step(parts, cut, numel, number)
        step(parts, 0, cut, number)
    for one, other in zip(whole, parts, strict=True):
        assert oracles.same_bits(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_what_is_read_is_stored_with_the_same_bits(start_backend: Any, kind: str, name: str) -> None:
    rule = ADAMW_RULES[kind]
    backend, index = start_backend(rule), rule.state_names.index(name)
    rng = np.random.default_rng(4)
    values = workload.special_values(rng, 9 * 1024 + 33)
    values[:1024], values[1024:2048] = 0, 5e-42
    values[2048:3072] = rng.standard_normal(1024) * 10.0 ** rng.integers(-30, 30, 1024)
    if index:
        values = np.abs(values)
    numel = values.size
    stored = [
        np.full(-(-numel // array.per), 77, array.dtype)
        for array in rule.stored[index :: len(rule.state_names)]
    ]
    backend.pack(name, values, tuple(stored))
    read, again = np.empty(numel, np.float32), [np.zeros_like(array) for array in stored]
    backend.unpack(name, tuple(stored), read)
    if kind == "int8":
        for first in range(0, numel, 1024):
            part = slice(first, min(first + 1024, numel))
            codes, scale = oracles.quantize(values[part], 1 << 19, signed=not index)
            assert oracles.same_bits(stored[0][part], codes)
            assert stored[1][first // 1024] == scale
            assert oracles.same_bits(read[part], oracles.dequantize(codes, scale, signed=not index))
    else:
        assert oracles.same_bits(stored[0], oracles.float_to_bf16(values))
    backend.pack(name, read, tuple(again))
    reread = np.empty_like(read)
    backend.unpack(name, tuple(again), reread)
    assert oracles.same_bits(reread, read)
    np.testing.assert_array_equal(np.isnan(read), np.isnan(values))
    assert np.isinf(read[np.isinf(values)]).all()
    if kind == "int8" and index:
        assert (read[values != 0] != 0).all()


def decayed(start_backend: Any, kind: str, steps: int, numel: int = BLOCK) -> np.ndarray:
    """Second moments of 1.0 after `steps` of zero gradients with ``beta2 = 0.999``; a first one stays at its scale."""
    rule = ADAMW_RULES[kind]
    backend = start_backend(rule)
    moments = [np.zeros(numel // array.per, array.dtype) for array in rule.stored]
    backend.pack("exp_avg_sq", np.ones(numel, np.float32), tuple(moments[1::2]))
    blocks = rounding.with_counters(make_blocks([(0, numel, 0)]), {0: (KEY, 0)})
    grad, master = np.zeros(numel, np.uint16), np.ones(numel, np.float32)
    grad[::1024] = 0x3F80  # keeps the scale of each block where it is, so that the others must be rounded
    tile = TileArrays(grad, None, master, tuple(moments), np.zeros(numel, np.uint16), None, None, blocks)
    group = {**workload.GROUP, "betas": (0.9, 0.999)}
    for step in range(1, steps + 1):
        backend.update(tile, workload.make_rows(rule, group, step, 1), np.ones(1, np.uint8))
    values = np.empty(numel, np.float32)
    backend.unpack("exp_avg_sq", tuple(moments[1::2]), values)
    return np.delete(values, slice(None, None, 1024))


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_unbiased(start_backend: Any, kind: str) -> None:
    """The mean over many elements decays as in FP32. The bits are fixed, so that the bound cannot be missed by chance."""
    steps, numel = (8, 1024 * 2) if jit_disabled() else (300, BLOCK)
    values = decayed(start_backend, kind, steps, numel)
    expected, deviation = 0.999**steps, values.std() / np.sqrt(values.size)
    assert deviation > 0
    assert abs(values.mean() - expected) < 5 * deviation
    assert abs(values.mean() / expected - 1) < 0.01


def test_rounding_to_nearest_would_stall() -> None:
    """Why rounding is by chance: ``beta2 = 0.999`` is less than half a step of BF16, and of 8 bits."""
    value = np.array([1.0, 1.25, 1.9921875], np.float32)
    after = (value * np.float32(0.999)).astype(np.float32)
    assert oracles.same_bits(oracles.float_to_bf16(after), oracles.float_to_bf16(value))
    codes, scale = oracles.quantize(value, 1 << 19, signed=False)
    again, _ = oracles.quantize(np.append(after[:2], value[2:]), 1 << 19, signed=False)
    assert oracles.same_bits(again, codes)
    assert scale == value[2]


def test_second_moments_do_not_become_zero(start_backend: Any) -> None:
    values = np.array([1.0, 1e-9, 1e-12, 1e-30, 1e-44, 0.0], np.float32)
    codes, scales = np.zeros(6, np.uint8), np.zeros(1, np.float32)
    start_backend(ADAMW_RULES["int8"]).pack("exp_avg_sq", values, (codes, scales))
    assert (codes[:5] > 0).all()
    assert codes[5] == 0


def test_random_words_are_uniform_and_unlike() -> None:
    """Each bit of 2^14 words is set half of the time, and words of neighbours, steps and parameters share no bit more."""
    numel = 1 << 14
    words = {
        (key, step): oracles.random_words(key, step, 0, numel)
        for key in (KEY, KEY + 1)
        for step in (1, 2, 65537)
    }
    bound = 5 * 0.5 / np.sqrt(numel)
    several = list(words.values())
    for one in several:
        bits = one[:, None] >> np.arange(32, dtype=np.uint32) & 1
        assert (abs(bits.mean(axis=0) - 0.5) < bound).all()
        assert (abs((bits[1:] ^ bits[:-1]).mean(axis=0) - 0.5) < bound).all()
        for other in several:
            if other is not one:
                assert (
                    abs(((one ^ other)[:, None] >> np.arange(32, dtype=np.uint32) & 1).mean() - 0.5) < bound
                )


def test_steps_are_told_apart_beyond_what_float32_counts() -> None:
    assert rounding.step_columns(70_000) == (70_000 - 65_536, 1.0)
    assert len({rounding.step_columns(step) for step in (2**24, 2**24 + 1, 2**31)}) == 3


@pytest.mark.skipif(jit_disabled(), reason="NUMBA_DISABLE_JIT: nothing is compiled")
@pytest.mark.skipif(platform.machine() not in asm.VECTOR_INSTRUCTIONS, reason="unknown instruction set")
@pytest.mark.parametrize("kind", KINDS)
def test_every_variant_is_vectorized(kind: str) -> None:
    assemblies = workload.fresh_assembly(ADAMW_RULES[kind], REDUCED_VARIANTS)
    hashing = {"x86_64": r"\bvpmulld\b.*%[yz]mm", "aarch64": r"\bmul\b\s+v\d+\.4s"}[platform.machine()]
    assert len(assemblies) >= 2
    for signature, assembly in assemblies.items():
        counts = asm.count_instructions(assembly)
        for name in ("sqrt", "divide", "fma", "stream"):
            assert counts[name] > 0, f"no vector {name} in {signature}: {counts}"
        assert len(re.findall(hashing, assembly)) >= 2, f"random words are computed one by one in {signature}"
