"""Moments that are kept in less than FP32: how they are read, written and told apart.

Whoever sees them from outside sees FP32 copies: there is no FP32 memory of which a view could be given. They are made and
taken in by the worker, after everything that was submitted before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from offload.distributed import shard_start
from offload.host_state import ChunkState, Counters
from offload.kernels.rounding import parameter_key
from offload.kernels.rule import Rule
from offload.layout import Span
from offload.parameters import ParamRecord

__all__ = ["Reduced", "counters_of", "stored_parts"]


class Reduced(Protocol):
    """What a stepper whose moments are reduced does beside `offload.schedule.stepper.Stepper`."""

    def read_moments(self, record: ParamRecord, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Moments as FP32 copies, flat in memory order."""

    def write_moments(self, record: ParamRecord, values: Mapping[str, torch.Tensor]) -> None:
        """Take moments, FP32 and flat in memory order, rounded to nearest: what was read comes back with the same bits."""


def counters_of(records: Mapping[int, ParamRecord]) -> Counters:
    """What the random bits of each parameter's rounding count from: its name, and where its shard starts in the whole.

    So the bits survive another layout, and for shards of the first dimension other shards too.
    """
    return {
        index: (parameter_key(record.name), shard_start(record.param)) for index, record in records.items()
    }


def stored_parts(chunk: ChunkState, span: Span, moment: int, rule: Rule) -> tuple[np.ndarray, ...]:
    """The arrays of one moment of one parameter, by position in ``rule.state_names``: its elements, and scales if any."""
    parts = []
    for number in range(moment, len(rule.stored), len(rule.state_names)):
        per = rule.stored[number].per
        stop = -(-(span.start + span.numel) // per)
        parts.append(chunk.moments[number].numpy()[span.start // per : stop])
    return tuple(parts)
