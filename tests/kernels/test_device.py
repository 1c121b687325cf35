"""The device kernel gives the host kernels' bits: weights, state, norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offload.kernels.backend import TileArrays, Variant
from offload.kernels.blocks import BLOCK
from offload.kernels.device import DeviceBackend, TileTensors, is_available
from offload.kernels.rule import AdamWRule, SignSGDRule
from tests import oracles
from tests.kernels import workload
from tests.kernels.conftest import ADAMW_VARIANTS, SIGN_SGD_VARIANTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_available(), reason="no CUDA device that torch can compile for"),
]

SIZES = [1, 33, 1024, 1025, BLOCK + 77, 3 * BLOCK]
CASES = [(AdamWRule, variant) for variant in ADAMW_VARIANTS]
CASES += [(SignSGDRule, variant) for variant in SIGN_SGD_VARIANTS]
GROUPS = {
    "usual": workload.GROUP,
    "far lerp": {**workload.GROUP, "betas": (0.3, 0.95), "maximize": True, "weight_decay": 0.0},
}


def to_device(array: np.ndarray | None) -> torch.Tensor | None:
    if array is None:
        return None
    tensor = torch.from_numpy(array.copy()).cuda()
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def to_host(tensor: torch.Tensor | None) -> np.ndarray | None:
    if tensor is None:
        return None
    bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.cpu().numpy()


def tensors_of(tile: TileArrays) -> TileTensors:
    values: dict[str, Any] = {
        name: to_device(value) for name, value in vars(tile).items() if name not in ("moments", "new_state")
    }
    return TileTensors(**values, moments=tuple(to_device(moment) for moment in tile.moments))


def assert_same(on_device: TileTensors, on_host: TileArrays) -> None:
    for name in ("master", "weight", "sums", "nonfinite"):
        expected = getattr(on_host, name)
        if expected is not None:
            actual = to_host(getattr(on_device, name))
            assert oracles.same_bits(actual, expected), name
    for actual, expected in zip(on_device.moments, on_host.moments, strict=True):
        assert oracles.same_bits(to_host(actual), expected)


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(("rule", "variant"), CASES, ids=lambda case: getattr(case, "name", str(case)))
def test_bits_are_the_hosts(
    start_backend: Any, rule: Any, variant: Variant, group: dict[str, Any], flush: bool
) -> None:
    host, device = start_backend(rule, flush=flush), DeviceBackend(rule, flush_denormals=flush)
    tile = workload.make_tile(np.random.default_rng(1), SIZES, variant, len(rule.state_names))
    tensors = tensors_of(tile)
    select = np.array([1, 1, 1, 0, 1, 1], np.uint8)
    for step in (1, 2, 3):
        rows = workload.make_rows(rule, group, step, len(SIZES), 0.3)
        host.update(tile, rows, select)
        device.update(tensors, torch.from_numpy(rows).cuda(), torch.from_numpy(select).cuda())
    assert_same(tensors, tile)


@pytest.mark.parametrize("flush", [True, False])
def test_denormals(start_backend: Any, flush: bool) -> None:
    variant = Variant(acc=True, sums=True)
    tile = workload.make_tile(np.random.default_rng(2), [2 * BLOCK], variant, special=False)
    for array in (tile.acc, tile.master, *tile.moments):
        assert array is not None
        array *= np.float32(1e-37)
    tile.grad[:] = oracles.float_to_bf16(oracles.bf16_to_float(tile.grad) * np.float32(1e-38))
    tensors, device = tensors_of(tile), DeviceBackend(AdamWRule, flush_denormals=flush)
    rows = workload.make_rows(AdamWRule, {**workload.GROUP, "eps": 1e-30}, 1, 1)
    start_backend(flush=flush).update(tile, rows, np.ones(1, np.uint8))
    device.update(tensors, torch.from_numpy(rows).cuda(), torch.ones(1, dtype=torch.uint8, device="cuda"))
    assert_same(tensors, tile)


@pytest.mark.parametrize("flush", [True, False])
def test_square_sums(start_backend: Any, flush: bool) -> None:
    tile = workload.make_tile(np.random.default_rng(3), SIZES, Variant(acc=True, sums=True))
    tensors, device = tensors_of(tile), DeviceBackend(AdamWRule, flush_denormals=flush)
    select = np.array([1, 0, 1, 1, 1, 1], np.uint8)
    start_backend(flush=flush).square_sums(
        tile.grad, tile.acc, tile.sums, tile.nonfinite, tile.blocks, select
    )
    device.square_sums(tensors, torch.from_numpy(select).cuda())
    assert_same(tensors, tile)


def test_a_stream_of_the_callers(start_backend: Any) -> None:
    tile = workload.make_tile(np.random.default_rng(4), SIZES, Variant())
    tensors, device = tensors_of(tile), DeviceBackend(AdamWRule)
    device.warm(Variant())
    rows, select = workload.make_rows(AdamWRule, workload.GROUP, 1, len(SIZES)), np.ones(len(SIZES), np.uint8)
    device_rows, device_select = torch.from_numpy(rows).cuda(), torch.from_numpy(select).cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    device.update(tensors, device_rows, device_select, stream)
    stream.synchronize()
    start_backend().update(tile, rows, select)
    assert_same(tensors, tile)
