"""What becomes of a step once all its gradients are known: apply, apply clipped, or skip. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

__all__ = ["Verdict", "clip_coefficient", "judge", "total_norm"]

NORM_EPSILON = 1e-6
"""Added to the norm before the division, as ``torch.nn.utils.clip_grad_norm_`` does."""


@dataclass(frozen=True)
class Verdict:
    """The global gradient norm (float64), the coefficient to multiply with (a float32 value), and whether to skip."""

    norm: float
    coefficient: float = 1.0
    skip: bool = False

    @property
    def clipped(self) -> bool:
        """Whether gradients are made smaller."""
        return self.coefficient < 1.0


def total_norm(square_sums: Iterable[float]) -> float:
    """Global L2 norm from squared sums per parameter, added in the given order."""
    total = 0.0
    for square_sum in square_sums:
        total += square_sum
    return math.sqrt(total) if total >= 0 else math.nan


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """``f32(min(1, max_norm / (norm + 1e-6)))``; a NaN stays one (Python's ``min(1.0, nan)`` would be 1)."""
    if max_norm is None:
        return 1.0
    ratio = max_norm / (norm + NORM_EPSILON)
    return float(np.float32(ratio if not ratio > 1.0 else 1.0))


def judge(norm: float, *, nonfinite: bool, max_norm: float | None, skip_nonfinite: bool) -> Verdict:
    """The verdict for a step with this gradient norm.

    Args:
        norm: global L2 norm.
        nonfinite: whether any gradient element is an inf or a NaN (tested on bits, not on the norm).
        max_norm: limit of the norm, or None for no clipping.
        skip_nonfinite: whether such a step is to be skipped.
    """
    if nonfinite and skip_nonfinite:
        return Verdict(norm, skip=True)
    return Verdict(norm, clip_coefficient(norm, max_norm))
