"""Hyperparameters as the kernels take them, and the check that they stay what they are within a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from offload.errors import HyperparameterChangedError
from offload.kernels.rule import Rule
from offload.layout import Chunk
from offload.parameters import ParamRecord
from offload.schedule.stepper import Rows

__all__ = ["HYPERPARAMETERS", "HyperRows", "make_rows"]

HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "maximize")
"""What rules read of a param group. Other keys are the user's own, or a scheduler's, and may change at any time."""


class HyperRows:
    """The rows with which a step is applied early: fixed at its first update, see `check`."""

    def __init__(self, rule: Rule, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord]) -> None:
        self._rule, self._records = rule, records
        self._before = _values(records)
        self.rows = dict(make_rows(rule, chunks, records))

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Rows of chunks that come between backward and ``step()``."""
        self.rows |= make_rows(self._rule, chunks, self._records)

    def check(self, applied: str) -> None:
        """Raise where a param group is not what it was; `applied` names what was updated with the old values.

        Raises:
            HyperparameterChangedError: names the hyperparameter, the old and the new value.
        """
        for index, now in _values(self._records).items():
            before = self._before.get(index, now)  # parameters that came later are not applied early
            if before is now or before == now:
                continue
            key = next(key for key in now if before.get(key) != now[key])
            raise HyperparameterChangedError(
                f"{key} changed from {before.get(key)!r} to {now[key]!r} after parts of this step were applied "
                f"during backward ({applied}); change hyperparameters after step() or before backward"
            )


def make_rows(
    rule: Rule, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord], coefficient: float = 1.0
) -> Rows:
    """Rows for each parameter's next step, as the param groups stand now.

    Args:
        coefficient: what gradients are multiplied with: the verdict's.
    """
    return {chunk.index: _chunk_rows(rule, chunk, records, coefficient) for chunk in chunks}


def _chunk_rows(
    rule: Rule, chunk: Chunk, records: Mapping[int, ParamRecord], coefficient: float
) -> np.ndarray:
    members = [records[span.param] for span in chunk.spans]
    rows = [rule.row(record.group, record.num_steps + 1, coefficient) for record in members]
    return np.array(rows, np.float32).reshape(len(rows), rule.num_columns)


def _values(records: Mapping[int, ParamRecord]) -> dict[int, dict[str, Any]]:
    """By parameter, the hyperparameters of its group now; parameters of one group share one dict."""
    groups = {id(record.group): record.group for record in records.values()}
    by_group = {
        key: {name: _plain(group[name]) for name in HYPERPARAMETERS if name in group}
        for key, group in groups.items()
    }
    return {index: by_group[id(record.group)] for index, record in records.items()}


def _plain(value: Any) -> Any:
    """By value: tensors, arrays and lists may be changed in place."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
