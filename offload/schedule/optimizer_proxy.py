"""An optimizer that owns hooks and nothing else: groups, state and defaults are those of the optimizer behind it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from offload.errors import ClosedError, StateError
from offload.schedule.base_step import BaseStep

__all__ = ["OptimizerProxy"]


class OptimizerProxy(torch.optim.Optimizer):
    """A real ``torch.optim.Optimizer`` in front of `base`.

    Torch's constructor assigns groups, state and defaults, and calls ``add_param_group``; until `base` is known these
    assignments fall on nothing.
    """

    _base: torch.optim.Optimizer | None = None
    _running: BaseStep | None = None

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([{"params": []}], {})
        self._base = base

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that does the arithmetic."""
        if self._base is None:
            raise ClosedError(f"this {type(self).__name__} has no base optimizer: its construction failed")
        return self._base

    @property
    def state(self) -> Any:
        """The base's state. Between steps its tensors are on the host."""
        return self.base_optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._base is not None:
            self._base.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base's groups, as the user made them, also in mid-step, when the base sees a part of them."""
        return self._running.groups if self._running is not None else self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._base is not None:
            self._base.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The base's defaults."""
        return self.base_optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        if self._base is not None:
            self._base.defaults = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the base does."""
        self.base_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the base does; chunks follow at the next step."""
        if self._base is not None:
            self._base.add_param_group(param_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refused: streams and pinned memory cannot be copied."""
        raise StateError(
            f"{type(self).__name__} cannot be copied or pickled: it owns streams and host memory. Save state_dict() and "
            "load it into a new optimizer"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, as copying is."""
        self.__deepcopy__({})
