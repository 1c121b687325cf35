"""Tiles to run kernels on, and a probe that runs a fixed amount of work and prints a digest of every bit of it.

``python -m tests.kernels.workload`` is the probe: tests start it under other environments and compare what it prints.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offload.kernels.backend import TileArrays, Variant
from offload.kernels.blocks import make_blocks
from offload.kernels.jit import Kernel
from offload.kernels.numba_backend import NumbaBackend
from offload.kernels.rule import RULES, AdamWRule, KernelRule
from tests import oracles

GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
PROBE_VARIANTS = {"adamw": Variant(acc=True, sums=True), "sign_sgd": Variant(weight="fp32", sums=True)}
#: Values that catch shortcuts: signed zeros, the least and greatest denormal, overflow, inf, NaN, BF16 ties.
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1.1754942e-38,
        1.1754944e-38,
        3.4e38,
        -3.4e38,
        np.inf,
        -np.inf,
        np.nan,
        1.00390625,
        1.01171875,
    ],
    np.float32,
)


def fresh_assembly(rule: KernelRule, variants: Sequence[Variant]) -> dict[Any, str]:
    """By types of arguments, of updates compiled for this: those of the process may come from a cache, without assembly."""
    kernel = Kernel(rule.kernel.python)
    backend = NumbaBackend(rule, num_threads=1, variants=variants)
    for variant in variants:
        for called, arguments in backend._hot_calls(variant):
            if called is rule.kernel:
                kernel.compile(arguments)
    return kernel.assembly()


def special_values(rng: np.random.Generator, numel: int, scale: float = 1.0) -> np.ndarray:
    """Normal float32 of mixed magnitudes with special values strewn in."""
    values = (rng.standard_normal(numel) * scale * 10.0 ** rng.integers(-3, 3, numel)).astype(np.float32)
    chosen = rng.integers(0, max(numel, 1), numel // 50)
    values[chosen] = rng.choice(SPECIAL, len(chosen))
    return values


def layout(sizes: list[int]) -> tuple[int, list[tuple[int, int, int]]]:
    """Place parameters of these sizes on 1 Ki boundaries: (tile length, spans)."""
    spans, start = [], 0
    for row, numel in enumerate(sizes):
        spans.append((start, start + numel, row))
        start += -(-numel // 1024) * 1024
    return start, spans


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a 64-byte aligned address, which is where weights are streamed past the caches."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    copy = raw[offset : offset + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def make_tile(
    rng: np.random.Generator, sizes: list[int], variant: Variant, num_moments: int = 2, special: bool = True
) -> TileArrays:
    """A tile of parameters; the gaps between them hold values that must neither count nor change."""
    numel, spans = layout(sizes)

    def values(scale: float = 1.0) -> np.ndarray:
        return special_values(rng, numel, scale) if special else rng.standard_normal(numel).astype(np.float32)

    grad = values()
    moments = [values(1e-2), np.abs(values(1e-3))][:num_moments]
    weight = {"bf16": np.full(numel, 0x1234, np.uint16), "fp32": np.full(numel, 7.0, np.float32), None: None}
    target = weight[variant.weight]
    return TileArrays(
        grad=oracles.float_to_bf16(grad) if variant.grad == "bf16" else grad,
        acc=values() if variant.acc else None,
        master=values(),
        moments=tuple(moments),
        weight=None if target is None else aligned(target),
        sums=np.full(numel // 1024, -1.0) if variant.sums else None,
        nonfinite=np.full(numel // 1024, 9, np.uint8) if variant.sums else None,
        blocks=make_blocks(spans),
    )


def arrays_of(tile: TileArrays) -> list[np.ndarray]:
    """What a kernel may write."""
    outputs = (tile.master, *tile.moments, tile.weight, tile.sums, tile.nonfinite)
    return [array for array in outputs if array is not None]


def copy_tile(tile: TileArrays) -> TileArrays:
    def copy(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else aligned(array)

    return TileArrays(
        grad=tile.grad,
        acc=tile.acc,
        master=tile.master.copy(),
        moments=tuple(moment.copy() for moment in tile.moments),
        weight=copy(tile.weight),
        sums=copy(tile.sums),
        nonfinite=copy(tile.nonfinite),
        blocks=tile.blocks,
    )


def make_rows(rule: Any, group: dict[str, Any], step: int, num_rows: int, coef: float = 1.0) -> np.ndarray:
    return np.array([rule.row(group, step, coef)] * num_rows, np.float32)


def same_tiles(actual: TileArrays, expected: TileArrays) -> bool:
    return all(oracles.same_bits(a, b) for a, b in zip(arrays_of(actual), arrays_of(expected), strict=True))


def digest(arrays: list[np.ndarray]) -> str:
    """A hash of the bits of arrays, in which all NaNs are one."""
    hasher = hashlib.sha256()
    for array in arrays:
        if array.dtype.kind == "f":
            array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
        hasher.update(array.tobytes())
    return hasher.hexdigest()


def probe(cache_dir: str | None = None, rules: Sequence[str] = ("adamw", "sign_sgd")) -> tuple[str, str]:
    """Run every kernel a little; returns (name of the team, digest of all results)."""
    sizes, results, team = [1030, 5, 2048, 777], [], ""
    select = np.array([1, 1, 0, 1], np.uint8)
    for name in rules:
        rule, variant = RULES[name], PROBE_VARIANTS[name]
        backend = NumbaBackend(rule, num_threads=2, variants=[variant], cache_dir=cache_dir)
        backend.start()
        team = backend.team.name
        rng = np.random.default_rng(7)
        tile = make_tile(rng, sizes, variant, len(rule.state_names))
        for step in (1, 2):
            backend.update(tile, make_rows(rule, GROUP, step, 4, coef=0.7), select)
        results += arrays_of(tile)
        total = np.zeros_like(tile.master)
        backend.accumulate(tile.grad, total, True)
        if tile.acc is not None:
            backend.accumulate(tile.grad, total, False)
        backend.square_sums(tile.grad, tile.acc, tile.sums, tile.nonfinite, tile.blocks, select)
        results += [total, tile.sums, tile.nonfinite]
        backend.close()
    return team, digest(results)


def small_probe() -> tuple[str, str]:
    """As `probe`, with the one kernel that compiles fastest."""
    backend = NumbaBackend(AdamWRule, num_threads=2, variants=())
    backend.start()
    team = backend.team.name
    array = np.ones(100_000, np.float32)
    backend.fill_zero(array)
    backend.close()
    return team, digest([array])


def in_thread(function: Callable[..., Any], **options: Any) -> Any:
    """Run ``function`` in a thread of its own, so that the main thread never touches a thread team."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(**options)))
    thread.start()
    thread.join()
    return results[0]


if __name__ == "__main__":
    cached: dict[str, Any] = {"cache_dir": sys.argv[1], "rules": ["sign_sgd"]} if len(sys.argv) > 1 else {}
    sys.stdout.write(" ".join(in_thread(probe, **cached)))
