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

__all__ = ["HyperRows", "make_rows"]


class HyperRows:
    """The rows with which a step is applied early: fixed at its first update, see `check`."""

    def __init__(self, rule: Rule, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord]) -> None:
        self._rule, self._records = rule, records
        self._before = _groups(records)
        self.rows = dict(make_rows(rule, chunks, records))

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Rows of chunks that come between backward and ``step()``."""
        self.rows |= make_rows(self._rule, chunks, self._records)

    def check(self, applied: str) -> None:
        """Raise where a param group is not what it was; `applied` names what was updated with the old values.

        Raises:
            HyperparameterChangedError: names the hyperparameter, the old and the new value.
        """
        for before, now in zip(self._before, _groups(self._records), strict=False):
            for key in before.keys() & now.keys():
                if before[key] != now[key]:
                    raise HyperparameterChangedError(
                        f"{key} changed from {before[key]!r} to {now[key]!r} after parts of this step were applied "
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


def _groups(records: Mapping[int, ParamRecord]) -> list[dict[str, Any]]:
    groups = {id(record.group): record.group for record in records.values()}
    return [
        {key: _value(value) for key, value in group.items() if key != "params"} for group in groups.values()
    ]


def _value(value: Any) -> Any:
    """Tensors by value: they are changed in place."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
