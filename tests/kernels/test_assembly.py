"""Every compiled update is vectorized: a silent scalar loop would pass all other tests, four times slower."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest

from offload.kernels import asm
from offload.kernels.jit import jit_disabled
from offload.kernels.rule import AdamWRule
from tests.kernels import workload
from tests.kernels.conftest import ADAMW_VARIANTS

pytestmark = [
    pytest.mark.skipif(jit_disabled(), reason="NUMBA_DISABLE_JIT: nothing is compiled"),
    pytest.mark.skipif(platform.machine() not in asm.VECTOR_INSTRUCTIONS, reason="unknown instruction set"),
]


@pytest.fixture(scope="module")
def assemblies() -> dict[Any, str]:
    return workload.fresh_assembly(AdamWRule, ADAMW_VARIANTS)


def test_every_variant_is_vectorized(assemblies: dict[Any, str]) -> None:
    assert len(assemblies) >= 4
    for signature, assembly in assemblies.items():
        counts = asm.count_instructions(assembly)
        for name in ("sqrt", "divide", "fma"):
            assert counts[name] > 0, f"no vector {name} in {signature}: {counts}"


def test_variants_with_a_weight_stream_it(assemblies: dict[Any, str]) -> None:
    for signature, assembly in assemblies.items():
        has_weight = signature[8] is not None
        assert (asm.count_instructions(assembly)["stream"] > 0) == has_weight, signature


def test_a_scalar_loop_would_be_noticed() -> None:
    scalar = (
        "\tvsqrtss %xmm0, %xmm1, %xmm2\n\tvdivss %xmm0, %xmm1, %xmm2\n\tvfmadd213ss %xmm0, %xmm1, %xmm2\n"
    )
    vector = "\tvsqrtps %ymm0, %ymm1\n\tvdivps %zmm0, %zmm1, %zmm2\n\tvfmadd213ps %ymm0, %ymm1, %ymm2\n"
    assert set(asm.count_instructions(scalar, "x86_64").values()) == {0}
    assert asm.count_instructions(vector, "x86_64") == {"sqrt": 1, "divide": 1, "fma": 1, "stream": 0}


def test_streamed_lines_end_where_the_parameter_ends(start_backend: Any) -> None:
    from tests.kernels.conftest import PLAIN

    tile = workload.make_tile(np.random.default_rng(0), [1000, 33, 31], PLAIN)
    weight = tile.weight
    assert weight is not None
    assert weight.ctypes.data % 64 == 0
    backend = start_backend()
    backend.update(tile, workload.make_rows(backend.rule, workload.GROUP, 1, 3), np.ones(3, np.uint8))
    for start, stop, _ in tile.blocks.tolist():
        assert (weight[start:stop] != 0x1234).any()
        assert (weight[stop : -(-stop // 1024) * 1024] == 0x1234).all()
