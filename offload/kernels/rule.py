"""Update rules: what differs between optimizers, as the backends see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from offload.kernels import adamw, reduced, sign_sgd
from offload.kernels.blocks import NORM_BLOCK
from offload.kernels.jit import Kernel

__all__ = ["ADAMW_RULES", "RULES", "AdamWRule", "Rule", "SignSGDRule", "StoredArray"]


@dataclass(frozen=True)
class StoredArray:
    """One array of the moments as they lie in memory: `dtype`, and how many elements of the tile an entry is for."""

    name: str
    dtype: Any
    per: int = 1

    def num_bytes(self, numel: int) -> int:
        """Of `numel` elements, a multiple of 1024."""
        return int(np.dtype(self.dtype).itemsize * numel // self.per)


class Rule(Protocol):
    """The hyperparameters and state of one optimizer's update."""

    @property
    def name(self) -> str:
        """Of the update, for messages and for backends that have a kernel of their own for it."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The moments, FP32, beside the master."""

    @property
    def stored(self) -> tuple[StoredArray, ...]:
        """The arrays in which moments are kept: those of all `state_names`, then their scales where there are any."""

    @property
    def is_reduced(self) -> bool:
        """Whether moments are kept in less than FP32; blocks then need `offload.kernels.rounding.with_counters`."""

    @property
    def num_columns(self) -> int:
        """Of ``rows``."""

    def row(self, group: Mapping[str, Any], step: int, coef: float = 1.0) -> tuple[float, ...]:
        """One parameter's row of ``rows`` (float32[r, num_columns]) at ``step`` (from 1), clipped by ``coef``."""


MOMENT_DTYPES = {"fp32": np.float32, "bf16": np.uint16, "int8": np.uint8}
"""What moments are kept in, by the word in `OffloadConfig.moments`."""


@dataclass(frozen=True)
class KernelRule:
    """A rule with a kernel of this package. `moments`: see `MOMENT_DTYPES`; arithmetic is FP32 with all."""

    name: str
    state_names: tuple[str, ...]
    num_columns: int
    kernel: Kernel
    hyper_row: Any
    moments: str = "fp32"

    @property
    def stored(self) -> tuple[StoredArray, ...]:
        """See `Rule.stored`."""
        codes = tuple(StoredArray(name, MOMENT_DTYPES[self.moments]) for name in self.state_names)
        if self.moments != "int8":
            return codes
        scales = (StoredArray(f"scales of {name}", np.float32, NORM_BLOCK) for name in self.state_names)
        return (*codes, *scales)

    @property
    def is_reduced(self) -> bool:
        """See `Rule.is_reduced`."""
        return bool(self.state_names) and self.moments != "fp32"

    def row(self, group: Mapping[str, Any], step: int, coef: float = 1.0) -> tuple[float, ...]:
        """See `Rule.row`; a double in each column, of which storing makes a float32."""
        row: tuple[float, ...] = self.hyper_row(group, step, coef)
        return row


AdamWRule = KernelRule(
    "adamw", ("exp_avg", "exp_avg_sq"), adamw.NUM_COLUMNS, adamw.update_tile, adamw.hyper_row
)
SignSGDRule = KernelRule("sign_sgd", (), sign_sgd.NUM_COLUMNS, sign_sgd.update_tile, sign_sgd.hyper_row)
ADAMW_RULES = {"fp32": AdamWRule} | {
    moments: KernelRule(
        f"adamw-{moments}", AdamWRule.state_names, reduced.NUM_COLUMNS, kernel, reduced.hyper_row, moments
    )
    for moments, kernel in (("bf16", reduced.update_bf16_tile), ("int8", reduced.update_int8_tile))
}
"""AdamW by how its moments are kept."""

RULES = {rule.name: rule for rule in (AdamWRule, SignSGDRule)}
