"""What can only be seen with the model at hand: a forward in mid-step, and parameters that were swapped for others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

from offload.errors import ParameterError
from offload.parameters import ParamRecord

__all__ = ["ModelWatch"]

NO_TASK = -1
"""What torch calls the running graph task outside backward."""


class ModelWatch:
    """Looks at a model for one optimizer, until `close`.

    Args:
        before_forward: called before each forward of the model outside backward, where a checkpoint may be recomputed
            from weights whose gradients are still to come. Should hold the optimizer weakly: the model owns the hook.
    """

    def __init__(self, model: torch.nn.Module, before_forward: Callable[[], object]) -> None:
        self._model = weakref.ref(model)
        self._members = _parameters(model)

        mine = self._model

        def check(module: torch.nn.Module, *_: object) -> None:  # a deep copy of the model has this hook too
            if module is mine() and torch._C._current_graph_task_id() == NO_TASK:
                before_forward()

        self._hook = model.register_forward_pre_hook(check)

    def require_same(self, records: Iterable[ParamRecord]) -> None:
        """Raise where a parameter that was the model's is its no more: the model would never be trained there.

        Sharded ones are FSDP's, which swaps them in every forward.

        Raises:
            ParameterError: names it.
        """
        model = self._model()
        if model is None:
            return
        now = _parameters(model)
        for record in records:
            mine = id(record.param)
            if mine in self._members and mine not in now and not isinstance(record.param, DTensor):
                raise ParameterError(
                    f"{record.name} was replaced in the model after the optimizer was built (by fully_shard, a wrapper or "
                    "an assignment), so it would not be trained; build the optimizer after that"
                )

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()


def _parameters(model: torch.nn.Module) -> set[int]:
    """By identity; the optimizer's records keep those alive that matter."""
    return {id(parameter) for parameter in model.parameters()}
