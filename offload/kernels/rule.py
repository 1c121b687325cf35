"""Update rules: what differs between optimizers, as the backends see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from offload.kernels import adamw, sign_sgd
from offload.kernels.jit import Kernel

__all__ = ["RULES", "AdamWRule", "Rule", "SignSGDRule"]


class Rule(Protocol):
    """The hyperparameters and state of one optimizer's update."""

    @property
    def name(self) -> str: ...

    @property
    def state_names(self) -> tuple[str, ...]:
        """The moments, FP32, beside the master."""

    @property
    def num_columns(self) -> int:
        """Of ``rows``."""

    def row(self, group: Mapping[str, Any], step: int, coef: float = 1.0) -> tuple[float, ...]:
        """One parameter's row of ``rows`` (float32[r, num_columns]) at ``step`` (from 1), clipped by ``coef``."""


@dataclass(frozen=True)
class KernelRule:
    """A rule with a kernel of this package."""

    name: str
    state_names: tuple[str, ...]
    num_columns: int
    kernel: Kernel
    hyper_row: Any

    def row(self, group: Mapping[str, Any], step: int, coef: float = 1.0) -> tuple[float, ...]:
        row: tuple[float, ...] = self.hyper_row(group, step, coef)
        return row


AdamWRule = KernelRule(
    "adamw", ("exp_avg", "exp_avg_sq"), adamw.NUM_COLUMNS, adamw.update_tile, adamw.hyper_row
)
SignSGDRule = KernelRule("sign_sgd", (), sign_sgd.NUM_COLUMNS, sign_sgd.update_tile, sign_sgd.hyper_row)

RULES = {rule.name: rule for rule in (AdamWRule, SignSGDRule)}
