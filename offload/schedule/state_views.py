"""State as the outside sees it: views shaped as the parameters are, and copies of moments that have no FP32 memory; where
it lies, and what it takes.

Owns the views. They name memory that stays where it is, so each is made once and given out again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offload.parameters import ParamRecord
from offload.schedule.hybrid_stepper import HybridStepper
from offload.schedule.mode_costs import Placement
from offload.schedule.reduced_state import Reduced
from offload.schedule.stepper import Stepper

__all__ = ["StateViews"]


class StateViews:
    """Of one stepper's state.

    Args:
        reduced: the stepper again, where moments are kept in less than FP32.
    """

    def __init__(self, stepper: Stepper, reduced: Reduced | None) -> None:
        self._stepper, self._reduced = stepper, reduced
        self._views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def state(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """The parameter's FP32 state as views shaped, strided and sharded as the parameter is.

        Without moments where these are reduced: `read_moments` gives copies of them.
        """
        flat = self._stepper.state(record)
        key = (record.index, flat["master"].data_ptr())  # of two sets, where speculative steps exchange them
        if key not in self._views:
            self._views[key] = {name: record.shaped(tensor) for name, tensor in flat.items()}
        return dict(self._views[key])

    @property
    def copied_names(self) -> tuple[str, ...]:
        """Moments that are not in `state`, because they are reduced."""
        return () if self._reduced is None else self._stepper.rule.state_names

    def read_moments(self, record: ParamRecord, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Reduced moments as FP32 copies, shaped, strided and sharded as the parameter is."""
        if self._reduced is None:
            return {}
        flat = self._reduced.read_moments(record, names)
        return {name: record.shaped(values) for name, values in flat.items()}

    def write_moments(self, record: ParamRecord, values: Mapping[str, torch.Tensor | None]) -> None:
        """Take reduced moments, shaped as the local shard, rounded to nearest; None: zeros."""
        if self._reduced is None:
            return
        flat = {name: torch.zeros(record.numel) for name in values if name in self.copied_names}
        for name, target in flat.items():
            value = values[name]
            if value is not None:
                record.local(target).copy_(value)
        self._reduced.write_moments(record, flat)

    @property
    def placements(self) -> Mapping[int, Placement]:
        """Where chunks are stepped now, by index, where that may change."""
        return self._stepper.placements if isinstance(self._stepper, HybridStepper) else {}

    @property
    def host_bytes(self) -> int:
        """Host memory that the optimizer maps."""
        return self._stepper.host_bytes

    def clear(self) -> None:
        """Let go of the views: the memory that they name is about to be released."""
        self._views.clear()
