"""Norm, clip coefficient, skip: against torch and against arithmetic done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offload.schedule.verdict import NORM_EPSILON, Verdict, clip_coefficient, judge, total_norm

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("square_sums", "norm"),
    [([], 0.0), ([9.0, 16.0], 5.0), ([1e300, 1e300], math.sqrt(2e300)), ([1.0, INF], INF), ([NAN, 1.0], NAN)],
)
def test_total_norm(square_sums: list[float], norm: float) -> None:
    assert total_norm(iter(square_sums)) == pytest.approx(norm, rel=0, abs=0, nan_ok=True)


def test_total_norm_adds_in_the_given_order() -> None:
    assert total_norm([1e16, 1.0, 1.0]) == math.sqrt(1e16)
    assert total_norm([1.0, 1.0, 1e16]) == math.sqrt(1e16 + 2.0)


@pytest.mark.parametrize(
    ("norm", "max_norm", "coefficient"),
    [
        (5.0, None, 1.0),
        (5.0, 1.0, float(np.float32(1.0 / (5.0 + NORM_EPSILON)))),
        (0.5, 1.0, 1.0),
        (0.0, 1.0, 1.0),
        (1.0, 1.0, float(np.float32(1.0 / (1.0 + 1e-6)))),
        (INF, 1.0, 0.0),
        (INF, None, 1.0),
        (NAN, 1.0, NAN),
        (NAN, None, 1.0),
        (5.0, INF, 1.0),
    ],
)
def test_clip_coefficient(norm: float, max_norm: float | None, coefficient: float) -> None:
    assert clip_coefficient(norm, max_norm) == pytest.approx(coefficient, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("norm", [0.0, 1e-20, 0.3, 0.999999, 1.0, 1.0000001, 7.7, 1e30, INF, NAN])
def test_clip_coefficient_is_torchs(norm: float) -> None:
    gradient = torch.tensor([1.0], dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = gradient
    torch.nn.utils.clip_grads_with_norm_([parameter], 1.0, torch.tensor(norm, dtype=torch.float64))
    expected = float(np.float32(gradient.item()))
    assert clip_coefficient(norm, 1.0) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_coefficient_is_a_float32_value() -> None:
    for norm in np.linspace(1.0, 50.0, 97):
        coefficient = clip_coefficient(float(norm), 1.0)
        assert float(np.float32(coefficient)) == coefficient


@pytest.mark.parametrize(
    ("nonfinite", "skip_nonfinite", "expected"),
    [
        (False, False, Verdict(4.0, 0.25)),
        (False, True, Verdict(4.0, 0.25)),
        (True, False, Verdict(4.0, 0.25)),
        (True, True, Verdict(4.0, 1.0, skip=True)),
    ],
)
def test_judge(nonfinite: bool, skip_nonfinite: bool, expected: Verdict) -> None:
    verdict = judge(4.0, nonfinite=nonfinite, max_norm=1.000001 - 7.5e-7, skip_nonfinite=skip_nonfinite)
    assert (verdict.norm, verdict.skip) == (expected.norm, expected.skip)
    assert verdict.coefficient == pytest.approx(expected.coefficient, rel=1e-6)


@pytest.mark.parametrize(("coefficient", "clipped"), [(0.0, True), (0.5, True), (1.0, False)])
def test_clipped(coefficient: float, clipped: bool) -> None:
    assert Verdict(1.0, coefficient).clipped == clipped
