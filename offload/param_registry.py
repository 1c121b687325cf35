"""The parameters that an optimizer trains: one record each, and which of them stand in its param groups now.

Param groups belong to the user, who may remove, replace and rearrange them between steps, and may unfreeze parameters
that stand in them. A record is made once, whatever becomes of the group that it came with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.errors import ConfigError
from offload.parameters import ParamRecord, make_record

__all__ = ["ParamRegistry"]


class ParamRegistry:
    """Records by parameter. They are made here, and added when the engine has them."""

    def __init__(self) -> None:
        self._records: dict[torch.Tensor, ParamRecord] = {}
        self._next_index = 0  # of records: param groups may be rearranged by the user

    @property
    def by_param(self) -> Mapping[torch.Tensor, ParamRecord]:
        """All records, also of parameters whose group was removed."""
        return self._records

    @property
    def members(self) -> list[ParamRecord]:
        """Of the parameters that stand in a group."""
        return [record for record in self._records.values() if record.active]

    def make_records(self, group: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[ParamRecord]:
        """Records of the group's trainable parameters that have none yet; they are not added.

        Args:
            groups: all param groups: messages count their parameters, frozen ones too.

        Raises:
            ConfigError: a parameter stands twice in the group.
            ParameterError: a parameter cannot be offloaded.
        """
        names = group.get("param_names") or [None] * len(group["params"])
        positions = {p: index for index, p in enumerate(p for each in groups for p in each["params"])}
        records: list[ParamRecord] = []
        made: set[torch.Tensor] = set()
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter.requires_grad and parameter not in self._records:
                if parameter in made:
                    raise ConfigError(
                        f"{name or f'parameter #{positions[parameter]}'} stands twice in one param group"
                    )
                records.append(make_record(self._next_index, name, parameter, group))
                self._next_index += 1
                made.add(parameter)
        return records

    def make_unfrozen(self, groups: Sequence[dict[str, Any]]) -> Iterator[list[ParamRecord]]:
        """For each group, records of parameters that were frozen when they came and have a gradient now, where there are
        any. Add them before the next are asked for.
        """
        for group in groups:
            fresh = [record for record in self.make_records(group, groups) if record.param.grad is not None]
            if fresh:
                yield fresh

    def add(self, record: ParamRecord) -> None:
        """Keep `record`, whose parameter stands in a group, from now on. Adding it again is fine."""
        self._records[record.param] = record
        record.active = True

    def set_aside(self, records: Iterable[ParamRecord]) -> None:
        """Keep `records`, whose parameters could not be trained for some reason, for the day when they stand in a group."""
        for record in records:
            self._records[record.param] = record
            record.active = False

    def follow(self, groups: Sequence[dict[str, Any]]) -> tuple[list[ParamRecord], list[ParamRecord]]:
        """Let each record name its parameter's group among `groups`.

        A parameter without a group is left alone, as torch does; its state is kept for the day when it is back.

        Returns:
            Records of parameters without a group, and of those that are back in one: `add` them.
        """
        by_param = {parameter: group for group in groups for parameter in group["params"]}
        outside: list[ParamRecord] = []
        back: list[ParamRecord] = []
        for parameter, record in self._records.items():
            group = by_param.get(parameter)
            if group is None:
                record.active = False
                outside.append(record)
                continue
            record.group = group
            if not record.active:
                back.append(record)
        return outside, back
