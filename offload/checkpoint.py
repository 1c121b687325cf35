"""State dicts: what goes out is cloned, what comes in is checked before anything is changed.

The format is torch's: per parameter ``step``, ``exp_avg``, ``exp_avg_sq``, and ``master`` where the compute weight is
BF16 (an FP32 weight is its own master and is saved with the model). Loading is not left to the base class, which casts
floating state to the parameter's dtype and device before any hook could stop it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.distributed import local_shard, shard_like
from offload.errors import CheckpointError
from offload.parameters import ParamRecord

__all__ = ["IncomingState", "export_state", "read_state"]

logger = logging.getLogger(__name__)

REFUSED_FLAGS = ("amsgrad", "capturable", "differentiable")


@dataclass
class IncomingState:
    """A checked state dict: by parameter index, the step count and the local tensors that were there."""

    steps: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


def export_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same state dict with CPU clones: slabs go on changing, and saving a view would save its whole slab."""
    state = {
        index: {name: _clone(value) for name, value in entry.items()}
        for index, entry in state_dict["state"].items()
    }
    groups = [{key: _clone(value) for key, value in group.items()} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}


def read_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    records: Mapping[torch.Tensor, ParamRecord],
    moments: Sequence[str],
) -> IncomingState:
    """Check `state_dict` against the optimizer's parameters.

    Args:
        groups: the optimizer's param groups, frozen parameters included.
        records: of the trainable ones.
        moments: names of the state tensors beside ``master``.

    Raises:
        CheckpointError: entries, groups, shapes or flags do not fit.
    """
    _check_form(state_dict, groups)
    ordered = [parameter for group in groups for parameter in group["params"]]
    saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    incoming = IncomingState()
    without_master, frozen = [], 0
    for parameter, saved_id in zip(ordered, saved_ids, strict=True):
        record = records.get(parameter)
        entry = state_dict["state"].get(saved_id, {})
        if record is None:
            frozen += bool(entry)
            continue
        tensors = {
            name: _checked(record, name, entry[name]) for name in ("master", *moments) if name in entry
        }
        missing = [name for name in ("step", *moments) if entry and name not in entry]
        if missing:
            raise CheckpointError(
                f"{record.name}: the state dict has no {', '.join(missing)} for it (it has "
                f"{', '.join(entry) or 'nothing'}); was it saved by another kind of optimizer?"
            )
        incoming.tensors[record.index] = tensors
        incoming.steps[record.index] = _checked_step(record, entry.get("step", 0))
        if "master" not in tensors and record.kind.weight == "bf16":
            without_master.append(record.name)
    _warn_of_missing_masters(without_master)
    if frozen:
        logger.warning(
            "the state dict has state of %d parameter(s) that were frozen when the optimizer was built: it is left out, and "
            "they will begin anew when unfrozen; to keep it, freeze after loading",
            frozen,
        )
    return incoming


def _check_form(state_dict: Mapping[str, Any], own_groups: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError("this is no optimizer state dict: it has no 'state' and 'param_groups'")
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not _are_mappings([state]) or not _are_mappings(state.values()) or not _are_mappings(groups, "params"):
        raise CheckpointError(
            "this is no optimizer state dict: expected dicts in 'state' and groups with 'params'"
        )
    for group in groups:
        for flag in REFUSED_FLAGS:
            if group.get(flag):
                raise CheckpointError(
                    f"the state dict was saved with {flag}=True, which is not supported here"
                )
    saved, own = ([len(group["params"]) for group in each] for each in (groups, own_groups))
    if saved != own:
        raise CheckpointError(f"the state dict has groups of {saved} parameters, this optimizer of {own}")


def _are_mappings(values: Any, *keys: str) -> bool:
    if not isinstance(values, Iterable):
        return False
    return all(isinstance(value, Mapping) and value.keys() >= set(keys) for value in values)


def _checked_step(record: ParamRecord, value: Any) -> int:
    try:
        step = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        step = -1
    if step < 0:
        raise CheckpointError(f"{record.name}: step is {value!r}, expected one number, 0 or more")
    return step


def _checked(record: ParamRecord, name: str, value: Any) -> torch.Tensor:
    expected = local_shard(record.param).shape
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{record.name}: {name} is a {type(value).__name__}, expected a tensor")
    local = local_shard(value)
    if local.shape != expected:
        raise CheckpointError(
            f"{record.name}: {name} has shape {tuple(local.shape)}, expected {tuple(expected)}; sharded "
            "state is resharded by torch.distributed.checkpoint, not by load_state_dict"
        )
    if not local.is_floating_point() or local.layout is not torch.strided or local.device.type == "meta":
        raise CheckpointError(
            f"{record.name}: {name} is {local.dtype}, {local.layout}, on {local.device}; expected "
            "floating point, dense, with data"
        )
    return local


def _warn_of_missing_masters(names: Sequence[str]) -> None:
    if names:
        logger.warning(
            "the state dict has no FP32 masters for %d BF16 parameter(s) (%s ...): they are taken from the "
            "weights, whose lower 16 bits are lost",
            len(names),
            ", ".join(names[:3]),
        )


def _clone(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    local = local_shard(value).to("cpu", copy=True)
    return shard_like(value, local)
