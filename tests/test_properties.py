"""Any parameters, any groups, any order of arrival: the bits of fused torch, in every mode and with every clip policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import offload
from offload import assembly
from offload.config import CLIP_POLICIES, MODES
from tests.training import KERNEL_CACHE, Reference, assert_matches_reference, random_delays, use_lanes

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (1023,), (1025,), (33, 65), (5, 4, 3, 2), (1, 2050), (64, 64)]
STEPS = 4


@dataclass(frozen=True)
class Weight:
    """A parameter: its shape, dtype, the order of its dimensions in memory, and the group it belongs to."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    group: int

    def make(self) -> nn.Parameter:
        base = torch.randn([self.shape[i] for i in self.order])
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return nn.Parameter(base.permute(inverse).to(self.dtype))


@st.composite
def weights(draw: st.DrawFn) -> Weight:
    shape = draw(st.sampled_from(SHAPES))
    return Weight(
        shape,
        draw(st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32])),
        tuple(draw(st.permutations(range(len(shape))))),
        draw(st.integers(0, 2)),
    )


groups = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1, 0.0]),
        "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.95), (0.3, 0.9)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "maximize": st.booleans(),
    }
)

options = st.fixed_dictionaries(
    {
        "mode": st.sampled_from([mode for mode in MODES if mode != "auto"]),
        "clip": st.sampled_from(CLIP_POLICIES),
        "max_grad_norm": st.sampled_from([None, None, 0.5, 1e4]),
        "nonfinite": st.sampled_from(["propagate", "skip", "raise"]),
        "accumulation_steps": st.integers(1, 3),
    }
)

configs = st.builds(
    offload.OffloadConfig,
    tile_numel=st.sampled_from([1024, 2048, 8192]),
    ring_slots=st.sampled_from([2, 3, 8]),
    backlog_tiles=st.sampled_from([1, 2, 32]),
    threads=st.sampled_from([1, 2]),
    device_budget=st.sampled_from([None, 0]),
    timeout_s=st.just(240.0),
    kernel_cache_dir=st.just(KERNEL_CACHE),
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    kinds=st.lists(weights(), min_size=1, max_size=7),
    hyper=st.tuples(groups, groups, groups),
    options=options,
    config=configs,
    late=st.booleans(),
    cut=st.booleans(),
    data=st.data(),
)
def test_f18_any_run_has_the_bits_of_fused_torch(
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[Weight],
    hyper: tuple[dict[str, Any], ...],
    options: dict[str, Any],
    config: offload.OffloadConfig,
    late: bool,
    cut: bool,
    data: st.DataObject,
) -> None:
    """`cut`: a hybrid has a chunk for each parameter, and divides the last one where it has tiles enough."""
    torch.manual_seed(len(kinds))
    model = nn.ParameterDict({f"w{index}": kind.make() for index, kind in enumerate(kinds)})
    reference = Reference({name: p.detach().float() for name, p in model.items()})
    group_of = {f"w{index}": hyper[kind.group] for index, kind in enumerate(kinds)}
    params = [
        {
            "params": [(f"w{i}", model[f"w{i}"]) for i, kind in enumerate(kinds) if kind.group == number],
            **each,
        }
        for number, each in enumerate(hyper)
    ]
    with monkeypatch.context() as patch:
        if late:
            use_lanes(patch, delay=random_delays(len(kinds), most_s=5e-4))
        if cut:
            patch.setattr(assembly, "HYBRID_CHUNK_NUMEL", 1024)
            patch.setattr(assembly, "DIVIDED_NUMEL", 1024)
        optimizer = offload.AdamW([g for g in params if g["params"]], config=config, **options)
    with optimizer:
        for _ in range(STEPS):
            gradients: dict[str, list[torch.Tensor]] = {}
            for _ in range(options["accumulation_steps"]):
                order = data.draw(st.permutations(sorted(model)), label="order of arrival")
                missing = data.draw(st.integers(0, max(0, len(order) - 1)), label="missing")
                backward(model, order[missing:], gradients)
            optimizer.step()
            check_report(optimizer.last_step, gradients, options["max_grad_norm"])
            reference.step(gradients, group_of, optimizer.last_step.clip_coefficient)
            optimizer.zero_grad()
        assert_matches_reference(model, optimizer, reference)
    reference.close()


def backward(model: nn.ParameterDict, order: list[str], gradients: dict[str, list[torch.Tensor]]) -> None:
    """One backward pass with random gradients, which arrive in `order`."""
    loss = torch.zeros(())
    for name in reversed(order):  # what was made last comes first
        gradient = torch.randn_like(model[name])
        gradients.setdefault(name, []).append(gradient)
        loss = loss + (model[name] * gradient).float().sum()
    loss.backward()


def check_report(
    report: offload.StepReport, gradients: dict[str, list[torch.Tensor]], limit: float | None
) -> None:
    """The norm is that of the sums in float64, and the coefficient torch's."""
    total = 0.0
    for first, *others in gradients.values():
        summed = first.float()
        for other in others:
            summed = summed + other.float()
        total += summed.double().square().sum().item()
    norm = math.sqrt(total)
    assert report.grad_norm == pytest.approx(norm, rel=1e-6)
    expected = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
    assert report.clip_coefficient == pytest.approx(expected, rel=1e-6)
