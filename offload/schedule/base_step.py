"""A foreign optimizer's own ``step``, run on some of its parameters at a time, as if on all of them at once.

For each part the optimizer gets param groups that hold only the part's parameters, copied from the user's: same order,
same options, groups without a parameter in the part left out. Whatever else it counts (numbers in a group, on itself, or
in a state that belongs to no parameter) is handed to every part as it was before the step; what the last part that
changed it has made of it is written back once, at the end. So a counter advances by one, whatever the number of parts.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["BaseStep", "hooks_set_aside", "inner_step"]

PER_PARAM = ("params", "param_names")
"""Keys of a group whose values are lists over its parameters."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Numbers = dict[Any, Any]


class BaseStep:
    """One step of `base` in parts. Use as a context manager; leaving it puts everything back but what `commit` wrote.

    Args:
        base: the optimizer.
        kwargs: for its ``step``, besides the closure.
        rehearse: leave parameters as they were.
    """

    def __init__(
        self, base: torch.optim.Optimizer, kwargs: Mapping[str, Any], *, rehearse: bool = False
    ) -> None:
        self.base = base
        self.groups = base.param_groups
        self._step = inner_step(base)
        self._kwargs = kwargs
        self._rehearse = rehearse
        self._changes: list[dict[str, Any]] = [{} for _ in self.groups]
        self._loose = [_Counters(target) for target in self._loose_targets()]
        self._hooks: Any = None

    def __enter__(self) -> BaseStep:
        self._hooks = hooks_set_aside(self.base, STEP_HOOKS)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.base.param_groups = self.groups
        for counters in self._loose:
            counters.reset()
        self._hooks.__exit__(*exception)

    def run(self, params: Collection[torch.Tensor]) -> None:
        """Step `params`. Whatever happens, the user's groups are back afterwards."""
        chosen = set(params)
        parts = [(index, _Part(group, chosen)) for index, group in enumerate(self.groups)]
        parts = [(index, part) for index, part in parts if part.group["params"]]
        for counters in self._loose:
            counters.reset()
        before = [param.detach().clone() for param in params] if self._rehearse else []
        self.base.param_groups = [part.group for _, part in parts]
        try:
            self._step(self.base, **self._kwargs)
        finally:
            self.base.param_groups = self.groups
            with torch.no_grad():
                for param, value in zip(params, before, strict=False):
                    param.copy_(value)
        for index, part in parts:
            self._changes[index] |= part.changes()
        for counters in self._loose:
            counters.note()

    def commit(self) -> None:
        """Write back what the parts have counted."""
        for group, changes in zip(self.groups, self._changes, strict=True):
            for key, value in changes.items():
                _assign(group, key, value)
        for counters in self._loose:
            counters.commit()

    def _loose_targets(self) -> list[dict[Any, Any]]:
        entries = [entry for key, entry in self.base.state.items() if not isinstance(key, torch.Tensor)]
        return [vars(self.base), *(entry for entry in entries if isinstance(entry, dict))]


class _Part:
    """A copy of a group with some of its parameters; tensors and containers in it are copies too."""

    def __init__(self, group: Mapping[str, Any], chosen: set[torch.Tensor]) -> None:
        self._given = {key: _private(value) for key, value in group.items() if key not in PER_PARAM}
        self._original = group
        self._versions = {k: v._version for k, v in self._given.items() if isinstance(v, torch.Tensor)}
        kept = [param in chosen for param in group["params"]]
        lists = {
            key: [v for v, keep in zip(group[key], kept, strict=True) if keep]
            for key in PER_PARAM
            if key in group
        }
        self.group: dict[str, Any] = {**self._given, **lists}

    def changes(self) -> dict[str, Any]:
        """What the step wrote into it."""
        return {
            key: value
            for key, value in self.group.items()
            if key not in PER_PARAM and self._changed(key, value)
        }

    def _changed(self, key: str, value: Any) -> bool:
        if key not in self._given or value is not self._given[key]:
            return True
        if isinstance(value, torch.Tensor):
            return value._version != self._versions[key]
        return isinstance(value, dict | list | set) and value != self._original[key]


class _Counters:
    """Numbers in a dict that is no group: reset before each part, written back once."""

    def __init__(self, target: dict[Any, Any]) -> None:
        self._target = target
        self._before = self._numbers()
        self._after: Numbers = {}

    def reset(self) -> None:
        self._target.update(self._before)

    def note(self) -> None:
        self._after |= {
            k: v for k, v in self._numbers().items() if k not in self._before or v != self._before[k]
        }

    def commit(self) -> None:
        self._before |= self._after
        self.reset()

    def _numbers(self) -> Numbers:
        return {
            k: v
            for k, v in self._target.items()
            if v is None or isinstance(v, bool | int | float | complex | str)
        }


def inner_step(base: torch.optim.Optimizer) -> Callable[..., Any]:
    """The ``step`` of the base's class without what torch wraps around it: hooks and the profiler's range."""
    step: Callable[..., Any] = type(base).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


@contextmanager
def hooks_set_aside(base: torch.optim.Optimizer, names: Collection[str]) -> Iterator[None]:
    """Let no hook of these kinds fire inside, also where a subclass calls its parent's wrapped method."""
    hooks = {name: getattr(base, name) for name in names}
    vars(base).update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        vars(base).update(hooks)


def _private(value: Any) -> Any:
    """A copy of what could be changed in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _assign(group: dict[str, Any], key: str, value: Any) -> None:
    """Set ``group[key]``; a tensor that others may hold keeps its identity."""
    old = group.get(key)
    if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
        with torch.no_grad():
            old.copy_(value)
    else:
        group[key] = value
