"""AdamW against the naive oracle and against fused torch, bit for bit."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch

from offload.errors import KernelError
from offload.kernels.backend import TileArrays, Variant
from offload.kernels.blocks import BLOCK, make_blocks
from offload.kernels.rule import ADAMW_RULES, AdamWRule, KernelRule, SignSGDRule
from tests import oracles
from tests.kernels import workload
from tests.kernels.conftest import FP32, FP32_MASTER, FULL, PLAIN

SIZES = [1, 15, 1024, 1025, 3000, BLOCK + 77]
VARIANTS = {"plain": PLAIN, "full": FULL, "fp32": FP32, "fp32 master": FP32_MASTER}
GROUPS = {
    "usual": {},
    "far lerp": {"betas": (0.3, 0.95)},
    "half lerp": {"betas": (0.5, 0.999), "weight_decay": 0.0},
    "maximize": {"maximize": True},
    "large": {"lr": 0.1, "weight_decay": 0.5, "eps": 1e-3},
    "tiny eps": {"eps": 1e-30, "weight_decay": 0.0, "betas": (0.0, 0.0)},
}

torch_cpu = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch has other bits without its vector kernels",
)


def make_group(name: str) -> dict[str, Any]:
    return {**workload.GROUP, **GROUPS[name]}


def update_by_oracle(
    tile: TileArrays, group: dict[str, Any], step: int, coef: float, select: np.ndarray
) -> TileArrays:
    """A new tile, stepped block by block by the naive reference. Its sums are left alone."""
    result = workload.copy_tile(tile)
    for start, stop, row in tile.blocks.tolist():
        if not select[row]:
            continue
        part = slice(start, stop)
        acc = None if tile.acc is None else tile.acc[part]
        state = (tile.master[part], *(moment[part] for moment in tile.moments))
        new = oracles.adamw(group, step, tile.grad[part], acc, *state, coef=coef)
        result.master[part], result.moments[0][part], result.moments[1][part] = new
        if result.weight is not None:
            bf16 = result.weight.dtype == np.uint16
            result.weight[part] = oracles.float_to_bf16(new[0]) if bf16 else new[0]
    return result


def same_state(actual: TileArrays, expected: TileArrays) -> bool:
    names = ("master", "weight")
    pairs = [(getattr(actual, name), getattr(expected, name)) for name in names]
    pairs += list(zip(actual.moments, expected.moments, strict=True))
    return all(oracles.same_bits(a, b) for a, b in pairs if a is not None)


@pytest.mark.parametrize("kind", ["numba", pytest.param("torch", marks=torch_cpu)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("group_name", GROUPS)
def test_bits_are_the_oracles(start_backend: Any, kind: str, variant: str, group_name: str) -> None:
    backend = start_backend(kind=kind, flush=False)
    group, coef = make_group(group_name), 1.0 if group_name == "usual" else 0.3
    tile = workload.make_tile(np.random.default_rng(1), SIZES, VARIANTS[variant])
    select = np.array([1, 1, 1, 0, 1, 1], np.uint8)
    for step in (1, 2, 3):
        expected = update_by_oracle(tile, group, step, float(np.float32(coef)), select)
        rows = workload.make_rows(backend.rule, group, step, len(SIZES), coef)
        backend.update(tile, rows, select)
        # Every element: gaps between parameters and rows that are not selected keep what they held.
        assert same_state(tile, expected)


def fused_torch_in_fresh_thread(
    master: np.ndarray, grads: list[np.ndarray], group: dict[str, Any], flush: bool
) -> list[np.ndarray]:
    """Torch's result after all ``grads``. A fresh thread, because a warm OpenMP team keeps its denormal mode."""
    result: list[np.ndarray] = []

    def run() -> None:
        torch.set_flush_denormal(flush)
        parameter = torch.nn.Parameter(torch.from_numpy(master.copy()))
        optimizer = torch.optim.AdamW([parameter], fused=True, **group)
        for grad in grads:
            parameter.grad = torch.from_numpy(oracles.bf16_to_float(grad))
            optimizer.step()
        state = optimizer.state[parameter]
        tensors = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
        result.extend(tensor.numpy() for tensor in tensors)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result


@torch_cpu
@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("group_name", GROUPS)
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-37], ids=["normal", "small", "denormal"])
def test_bits_are_fused_torchs(start_backend: Any, flush: bool, group_name: str, scale: float) -> None:
    group, numel = make_group(group_name), 1 << 16
    rng = np.random.default_rng(2)
    grads = [oracles.float_to_bf16((rng.standard_normal(numel) * scale).astype(np.float32)) for _ in range(4)]
    grads[2][:] = 0  # moments decay, some into denormals
    master = (rng.standard_normal(numel) * (scale if scale < 1e-30 else 1.0)).astype(np.float32)
    expected = fused_torch_in_fresh_thread(master, grads, group, flush)

    moments = (np.zeros(numel, np.float32), np.zeros(numel, np.float32))
    state, weight = master.copy(), np.zeros(numel, np.uint16)
    for step, grad in enumerate(grads, start=1):
        tile = TileArrays(grad, None, state, moments, weight, None, None, make_blocks([(0, numel, 0)]))
        rows = workload.make_rows(AdamWRule, group, step, 1)
        start_backend(flush=flush).update(tile, rows, np.ones(1, np.uint8))
    for actual, reference in zip((state, *moments), expected, strict=True):
        assert oracles.same_bits(actual, reference)
    assert oracles.same_bits(weight, oracles.float_to_bf16(expected[0]))


@pytest.mark.parametrize("seed", range(4))
def test_random_layouts_are_the_torch_backends(start_backend: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(numel) for numel in rng.integers(1, 9000, rng.integers(1, 8))]
    select = rng.integers(0, 2, len(sizes)).astype(np.uint8)
    tile = workload.make_tile(rng, sizes, FULL)
    other = workload.copy_tile(tile)
    for step in (7, 8):
        for kind, mine in (("numba", tile), ("torch", other)):
            backend = start_backend(kind=kind)
            rows = workload.make_rows(backend.rule, workload.GROUP, step, len(sizes), 0.5)
            backend.update(mine, rows, select)
    assert workload.same_tiles(tile, other)


def test_rows_have_their_own_hyperparameters(start_backend: Any) -> None:
    backend = start_backend(flush=False)
    tile = workload.make_tile(np.random.default_rng(9), [100, 100], PLAIN)
    groups = [make_group("usual"), make_group("large")]
    expected = tile
    for row, group in enumerate(groups):
        expected = update_by_oracle(expected, group, 5 + row, 1.0, np.eye(2, dtype=np.uint8)[row])
    rows = np.array([AdamWRule.row(group, 5 + row) for row, group in enumerate(groups)], np.float32)
    backend.update(tile, rows, np.ones(2, np.uint8))
    assert same_state(tile, expected)


def test_unaligned_weights_have_the_same_bits(start_backend: Any) -> None:
    backend = start_backend()
    tile = workload.make_tile(np.random.default_rng(10), SIZES, PLAIN)
    assert tile.weight is not None
    shifted = workload.aligned(np.zeros(tile.weight.size + 1, np.uint16))[1:]
    shifted[:] = tile.weight
    other = TileArrays(**{**vars(workload.copy_tile(tile)), "weight": shifted})
    for mine in (tile, other):
        rows = workload.make_rows(AdamWRule, workload.GROUP, 1, len(SIZES))
        backend.update(mine, rows, np.ones(len(SIZES), np.uint8))
    assert workload.same_tiles(tile, other)


@pytest.mark.parametrize("kind", ["numba", "torch"])
@pytest.mark.parametrize("rule", [AdamWRule, SignSGDRule], ids=lambda rule: rule.name)
def test_out_of_place_has_the_same_bits_and_keeps_the_old_state(
    start_backend: Any, kind: str, rule: Any
) -> None:
    backend, variant = start_backend(rule, kind=kind), Variant(sums=True, new_state=True)
    backend.prepare(variant)
    tile = workload.make_tile(np.random.default_rng(11), SIZES, variant, len(rule.state_names))
    backend.prepare(dataclasses.replace(variant, new_state=False))
    state = (tile.master, *tile.moments)
    new_state = tuple(workload.aligned(np.full_like(array, 7.0)) for array in state)
    kept = workload.copy_tile(tile)
    in_place = workload.copy_tile(tile)
    rows, select = (
        workload.make_rows(backend.rule, workload.GROUP, 3, len(SIZES)),
        np.array([1, 1, 1, 0, 1, 1], np.uint8),
    )
    backend.update(dataclasses.replace(tile, new_state=new_state), rows, select)
    backend.update(in_place, rows, select)
    for old, before in zip(state, (kept.master, *kept.moments), strict=True):
        assert oracles.same_bits(old, before)
    written = np.zeros(tile.master.size, bool)
    for start, stop, row in tile.blocks.tolist():
        written[start:stop] = select[row]
    for new, expected in zip(new_state, (in_place.master, *in_place.moments), strict=True):
        assert oracles.same_bits(new[written], expected[written])
        assert (new[~written] == 7.0).all()
    assert tile.weight is not None
    assert oracles.same_bits(tile.weight, in_place.weight)


def test_a_tensor_lr_is_read_as_a_float() -> None:
    assert AdamWRule.row({**workload.GROUP, "lr": torch.tensor(0.5)}, 3) == AdamWRule.row(
        {**workload.GROUP, "lr": 0.5}, 3
    )


def test_maximizing_only_negates_the_coefficient() -> None:
    usual, maximize = (AdamWRule.row(make_group(name), 3, 0.5) for name in ("usual", "maximize"))
    assert maximize == (*usual[:-1], -0.5)


def test_a_nan_coefficient_stays() -> None:
    assert np.isnan(AdamWRule.row(make_group("usual"), 1, float("nan"))[-1])


def test_what_was_not_compiled_raises(start_backend: Any) -> None:
    tile = workload.make_tile(np.random.default_rng(0), [10], Variant(grad="bf16", acc=True, weight="fp32"))
    rows = workload.make_rows(AdamWRule, workload.GROUP, 1, 1)
    if start_backend().team.name == "python":
        pytest.skip("nothing is compiled with the JIT off")
    with pytest.raises(KernelError, match=r"adamw\.update_tile was not compiled"):
        start_backend().update(tile, rows, np.ones(1, np.uint8))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("rule", [*ADAMW_RULES.values(), SignSGDRule])
def test_numpy_hyperparameters_mean_their_value(rule: KernelRule, kind: Any) -> None:
    """Two of them are multiplied in their own precision: a float16's is a thousandth."""
    numbers = {"lr": 0.1, "weight_decay": 0.3, "eps": 1e-3}
    of_numpy = {name: kind(number) for name, number in numbers.items()}
    exact = {name: float(number) for name, number in of_numpy.items()}
    betas = kind(0.9), kind(0.95)
    row = rule.row({**of_numpy, "betas": betas}, 3)
    assert [float(number) for number in row] == [*rule.row({**exact, "betas": [*map(float, betas)]}, 3)]
