"""State dicts of a foreign optimizer: clones go out; what comes in keeps its dtypes and never sees the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from offload.distributed import local_shard, shard_like
from offload.schedule.state_chunks import StateChunk

__all__ = ["attach_saved", "clone_state_dict", "expect_loaded"]

Groups = Sequence[Mapping[str, Any]]


def clone_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same with clones: state on the host, which goes on changing; group tensors on their own device."""
    state = _map_tensors(state_dict["state"], _on_host)
    groups = _map_tensors(state_dict["param_groups"], lambda tensor: tensor.detach().clone())
    return {**state_dict, "state": state, "param_groups": groups}


def attach_saved(saved: Mapping[str, Any], groups: Groups) -> dict[Any, Any]:
    """``saved["state"]`` keyed by the parameters of `groups`: containers are new, tensors are those of `saved`."""
    ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = dict(zip(ids, chain.from_iterable(group["params"] for group in groups), strict=True))
    return {
        params.get(key, key): _map_tensors(entry, lambda tensor: tensor)
        for key, entry in saved["state"].items()
    }


def expect_loaded(chunk: StateChunk, state: Mapping[Any, Any], groups: Groups) -> None:
    """Settle which of the tensors that were loaded go to the device when the chunk is stepped; the others become clones.

    Those go that went there before. For a parameter that had no state it is what torch's own loading sends there:
    everything, but ``step`` only where the group is fused or capturable.
    """
    steps_on_device = {p: bool(g.get("fused") or g.get("capturable")) for g in groups for p in g["params"]}
    fresh = {param for param in chunk.params if param not in chunk.paths}
    for place in chunk.all_places(state):
        param = chunk.params[place.param]
        if param in fresh and (place.key != "step" or steps_on_device[param] or chunk.device.type == "cpu"):
            chunk.paths.setdefault(param, set()).add(place.path)
        if not chunk.expects(place):
            place.put(_on_host(place.tensor))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return shard_like(detached, local_shard(detached).to("cpu", copy=True))


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """New dicts, lists and tuples with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map_tensors(item, change) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
