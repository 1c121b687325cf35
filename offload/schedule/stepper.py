"""The protocol between the engine, which decides when, and the steppers, which know where.

A stepper owns the state of the chunks of one placement. The engine calls it from gradient hooks (`accumulate`,
`hold`, `step_early`) and from ``step()`` (`measure`, `step_rest`, `finish`); it never touches a gradient itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt
import torch

from offload.kernels.rule import Rule
from offload.layout import Chunk
from offload.parameters import ParamRecord

__all__ = ["BlockSums", "Rows", "Stepper"]

Rows = Mapping[int, npt.NDArray[Any]]
"""Hyperparameters by chunk index: float32 ``[params of the chunk, columns of the rule]``."""


class BlockSums(NamedTuple):
    """Squared sums (float64) and non-finite flags (uint8), one per block of `layout.ALIGN` elements of a chunk."""

    sums: npt.NDArray[Any]
    nonfinite: npt.NDArray[Any]


class Stepper(Protocol):
    """State and updates of the chunks of one placement.

    Made with ``fused_sums``: whether updates take the squared sums on their way, or `measure` has taken them before.
    """

    @property
    def rule(self) -> Rule:
        """Makes the rows that `step_early` and `step_rest` take."""

    def add_chunks(
        self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord], masters: Mapping[int, torch.Tensor]
    ) -> None:
        """Allocate state; masters come from `masters` (by parameter index) or from the compute weights.

        Raises:
            ParameterError: a given master does not round to its compute weight.
        """

    def state(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """Flat FP32 views of a parameter's state: ``master`` and the moments."""

    def begin_step(self, *, speculative: bool) -> None:
        """At a step's first gradient, before the first `hold`, `accumulate` or `step_early`.

        Args:
            speculative: early updates must be such that `roll_back` undoes them, bit for bit.
        """

    def accumulate(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """Add a flat gradient to the parameter's FP32 accumulator."""

    def hold(self, record: ParamRecord, gradient: torch.Tensor) -> None:
        """Keep a flat gradient until ``step()``; one that is held already is accumulated first."""

    def step_early(self, record: ParamRecord, gradient: torch.Tensor, rows: Rows) -> None:
        """Take a parameter's last gradient; tiles that are complete with it are updated."""

    @property
    def stepped_early(self) -> list[str]:
        """Names of chunks of which some tile was updated since the last ``end_step``."""

    def measure(self) -> None:
        """Take squared sums of all that is held and accumulated."""

    def commit(self) -> list[int]:
        """Keep what early updates of a speculative step did. Called after `measure` and `finish`, before `step_rest`.

        Returns:
            Indices of the parameters whose `state` consists of other tensors now.
        """

    def roll_back(self, *, restore: bool) -> None:
        """Undo what early updates of a speculative step did; their gradients are held then. Called after `finish`.

        Args:
            restore: compute weights too, because no `step_rest` will write them.
        """

    def step_rest(self, rows: Rows) -> None:
        """Update all tiles that have gradients and were not updated early."""

    def block_sums(self, chunk: int) -> BlockSums:
        """The sums that the last `measure`, or the updates themselves, took. Valid after `finish`."""

    def finish(self) -> None:
        """Block until state and weights are complete and readable by anybody."""

    def end_step(self, keep_held: Collection[int]) -> None:
        """Forget all gradients; memory of held ones stays mapped for the chunks in `keep_held`."""

    def load_weights(self, records: Sequence[ParamRecord], *, force: bool = False) -> set[int]:
        """Take masters anew from weights that they do not round to, or from all where `force`; the indices taken."""

    def store_weights(self, records: Sequence[ParamRecord]) -> None:
        """Write weights anew from the masters."""

    @property
    def host_bytes(self) -> int:
        """Host memory mapped for state, gradients and rings."""

    def close(self) -> None:
        """Release everything. Safe to call twice."""
