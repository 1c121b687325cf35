"""State as ``optimizer.state`` shows it: entries that name the engine's tensors, and go on naming the current ones.

An entry holds ``step``, the moments, and ``master`` where the weight is not FP32: an FP32 weight is its own master.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.parameters import ParamRecord
from offload.schedule.engine import Engine
from offload.schedule.state_views import StateViews
from offload.state_entry import CopiedEntry, StateEntry

__all__ = ["EntryMaker", "follow_step"]

State = Mapping[torch.Tensor, Any]
"""What ``optimizer.state`` is: entries by parameter."""


class EntryMaker:
    """Makes the entries of one optimizer. They warn once, together, where something moves state to a device."""

    def __init__(self) -> None:
        self._moved_to: set[torch.device] = set()

    def make(self, record: ParamRecord, views: StateViews) -> StateEntry:
        """An entry that names the parameter's tensors as they are now."""
        step = torch.tensor(float(record.num_steps), dtype=torch.float32)
        tensors = {"step": step, **_shown(record, views)}
        if not views.copied_names:
            return StateEntry(tensors, record.name, self._moved_to)
        read = functools.partial(views.read_moments, record)
        return CopiedEntry(tensors, record.name, self._moved_to, copied=views.copied_names, read=read)


def follow_step(state: State, members: Iterable[ParamRecord], engine: Engine) -> None:
    """After a step: entries name current tensors, where it has exchanged them, and hold the new step counts.

    Args:
        members: parameters that stand in a group: another's entry is made when it is back.
    """
    moved = set(engine.take_moved())
    for record in members:
        entry = state[record.param]
        if record.index in moved:
            entry.exchange(_shown(record, engine.views))
        entry["step"].fill_(record.num_steps)


def _shown(record: ParamRecord, views: StateViews) -> dict[str, torch.Tensor]:
    state = views.state(record)
    if record.kind.weight == "fp32":
        state = {name: tensor for name, tensor in state.items() if name != "master"}
    return state
