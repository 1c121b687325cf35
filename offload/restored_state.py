"""State that was saved goes into the engine's memory: a state dict that was checked, or what a frozen parameter waited with.

Copied into tensors that stay where they are; `checkpoint` has made local tensors of it. Nothing passes through the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from offload.checkpoint import IncomingState, rounds_to
from offload.distributed import local_shard
from offload.parameters import ParamRecord
from offload.schedule.engine import Engine
from offload.schedule.state_views import StateViews

__all__ = ["add_with_state", "restore"]


def restore(engine: Engine, members: Sequence[ParamRecord], incoming: IncomingState) -> None:
    """Overwrite all state and all step counts, which ends what `Engine.begin_loading` began.

    Moments that did not come are zeros. Weights are written anew from masters that came, other masters from the weights.
    """
    for record in members:
        tensors = incoming.tensors[record.index]
        record.num_steps = incoming.steps[record.index]
        engine.views.write_moments(record, {name: tensors.get(name) for name in engine.views.copied_names})
        for name, view in engine.views.state(record).items():
            if name in tensors:
                local_shard(view).copy_(tensors[name])
            elif name != "master":
                local_shard(view).zero_()
    engine.take_masters([record for record in members if "master" in incoming.tensors[record.index]])


def add_with_state(
    engine: Engine,
    records: Sequence[ParamRecord],
    masters: Mapping[int, torch.Tensor],
    waiting: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Add `records` to the engine; each goes on with the state that was loaded while its parameter was frozen.

    Args:
        masters: see `Engine.add`.
        waiting: what ``optimizer.state`` has for each; empty where nothing was loaded.
    """
    for record, state in zip(records, waiting, strict=True):
        record.num_steps = int(state.get("step", 0))  # the engine makes rows for this very step
    engine.add(records, masters)
    for record, state in zip(records, waiting, strict=True):
        _take_waiting(engine.views, record, state)


def _take_waiting(views: StateViews, record: ParamRecord, waiting: Mapping[str, torch.Tensor]) -> None:
    """No master over weights that were changed since."""
    if copied := [name for name in views.copied_names if name in waiting]:
        views.write_moments(record, {name: local_shard(waiting[name]) for name in copied})
    for name, view in views.state(record).items():
        if name not in waiting:
            continue
        saved = local_shard(waiting[name])
        is_master = record.kind.weight == "bf16" and rounds_to(saved, local_shard(record.param))
        if name != "master" or is_master:
            local_shard(view).copy_(saved)
