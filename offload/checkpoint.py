"""State dicts: what goes out is cloned, what comes in is checked before anything is changed.

The format is torch's: per parameter ``step``, ``exp_avg``, ``exp_avg_sq``, and ``master`` where the compute weight is
BF16 (an FP32 weight is its own master and is saved with the model). Loading is not left to the base class, which casts
floating state to the parameter's dtype and device before any hook could stop it.

Note [Stale masters]. Other optimizers carry a ``master`` that they were given along and never update it. Plain
``torch.optim.AdamW`` casts it to the parameter's dtype: a BF16 ``master`` is none, and is left out. Beside an FP32
weight it is taken only where the weight is its FP32 or BF16 value. Beside a BF16 weight it wins, since loading the
optimizer before the model is usual, and a warning tells of the difference.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.distributed import local_shard, matching_shard, shard_like
from offload.errors import CheckpointError, ParameterError
from offload.parameters import ParamRecord

__all__ = ["IncomingState", "check_form", "export_state", "read_state", "rounds_to"]

logger = logging.getLogger(__name__)

REFUSED_FLAGS = ("amsgrad", "capturable", "differentiable")


@dataclass
class IncomingState:
    """A checked state dict.

    Attributes:
        steps, tensors: by parameter index, the step count and the local tensors that were there.
        waiting: entries of parameters that are not trained now, as clones on the host.
    """

    steps: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    waiting: dict[torch.Tensor, dict[str, torch.Tensor]] = field(default_factory=dict)


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
    check_form(state_dict)
    _check_fit(state_dict, groups)
    labels = [label for group in state_dict["param_groups"] for label in group["params"]]
    incoming, losses = IncomingState(), _Losses()
    for (parameter, name), label in zip(_named(groups), labels, strict=True):
        entry = state_dict["state"].get(label, {})
        record = records.get(parameter)
        tensors = _checked_tensors(name if record is None else record.name, parameter, entry, moments)
        steps = _checked_step(name if record is None else record.name, entry.get("step", 0))
        if record is not None:
            losses.note(record, tensors)
            incoming.tensors[record.index], incoming.steps[record.index] = tensors, steps
        elif entry:
            kept = {key: shard_like(parameter, _on_host(tensor)) for key, tensor in tensors.items()}
            incoming.waiting[parameter] = {"step": torch.tensor(float(steps)), **kept}
    losses.warn()
    _warn_of_strangers(state_dict["state"].keys() - set(labels))
    _warn_of_order(state_dict["param_groups"], groups)
    return incoming


def check_form(state_dict: Any) -> None:
    """Raise where `state_dict` is none of any optimizer.

    Raises:
        CheckpointError: see above.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError("this is no optimizer state dict: it has no 'state' and 'param_groups'")
    if not _are_mappings([state_dict["state"]]) or not _are_mappings(state_dict["param_groups"], "params"):
        raise CheckpointError(
            "this is no optimizer state dict: expected dicts in 'state' and groups with 'params'"
        )


class _Losses:
    """Of which parameters bits are missing in the state dict, or do not agree with the weights."""

    def __init__(self) -> None:
        self._no_master: list[str] = []
        self._low_moments: list[str] = []
        self._stale: list[str] = []
        self._differ: list[str] = []

    def note(self, record: ParamRecord, tensors: dict[str, torch.Tensor]) -> None:
        """Look at what came for `record`; drops a ``master`` that is none, see Note [Stale masters]."""
        if any(_is_low(tensor) for name, tensor in tensors.items() if name != "master"):
            self._low_moments.append(record.name)
        if "master" in tensors and _is_low(tensors["master"]):
            del tensors["master"]
        bf16 = record.kind.weight == "bf16"
        if "master" not in tensors:
            self._no_master += [record.name] if bf16 else []
        elif not rounds_to(tensors["master"], local_shard(record.param)):
            if bf16:
                self._differ.append(record.name)
            else:
                self._stale.append(record.name)
                del tensors["master"]

    def warn(self) -> None:
        """One line for each kind."""
        self._log(
            self._no_master,
            "the state dict has no FP32 masters for %d BF16 parameter(s) (%s ...): they are taken from the "
            "weights, whose lower 16 bits are lost",
        )
        self._log(
            self._low_moments,
            "the state dict has 16-bit moments for %d parameter(s) (%s ...): their lower bits were lost where it was "
            "saved (plain torch.optim.AdamW keeps them in the parameter's dtype)",
        )
        self._log(
            self._stale,
            "the state dict has masters for %d FP32 parameter(s) (%s ...) that do not round to the weights: they are "
            "left out, the weights stay",
        )
        self._log(
            self._differ,
            "the masters of %d parameter(s) (%s ...) do not round to the weights, which are written anew from them; "
            "if the weights were meant, load them after the optimizer, or take 'master' out of the state dict",
        )

    @staticmethod
    def _log(names: list[str], message: str) -> None:
        if names:
            logger.warning(message, len(names), ", ".join(names[:3]))


def _named(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[torch.Tensor, str]]:
    index = 0
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for parameter, name in zip(group["params"], names, strict=True):
            yield parameter, name or f"parameter #{index}"
            index += 1


def _check_fit(state_dict: Mapping[str, Any], own_groups: Sequence[Mapping[str, Any]]) -> None:
    if not _are_mappings(state_dict["state"].values()):
        raise CheckpointError("this is no optimizer state dict of this kind: expected dicts in 'state'")
    groups = state_dict["param_groups"]
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


def _checked_step(owner: str, value: Any) -> int:
    try:
        step = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        step = -1
    if step < 0:
        raise CheckpointError(f"{owner}: step is {value!r}, expected one number, 0 or more")
    return step


def _checked_tensors(
    owner: str, parameter: torch.Tensor, entry: Mapping[str, Any], moments: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The local tensors of an entry. Unflattening in torch leaves ``{}`` where a name was not saved."""
    there = {name: value for name, value in entry.items() if not (isinstance(value, Mapping) and not value)}
    missing = [name for name in ("step", *moments) if there and name not in there]
    if missing:
        raise CheckpointError(
            f"{owner}: the state dict has no {', '.join(missing)} for it (it has "
            f"{', '.join(there)}); was it saved by another kind of optimizer?"
        )
    return {
        name: _checked(owner, parameter, name, there[name]) for name in ("master", *moments) if name in there
    }


def _checked(owner: str, parameter: torch.Tensor, name: str, value: Any) -> torch.Tensor:
    """The part of `value` that belongs to the local shard of `parameter`."""
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{owner}: {name} is a {type(value).__name__}, expected a tensor")
    if value.shape != parameter.shape:
        raise CheckpointError(
            f"{owner}: {name} has shape {tuple(value.shape)}, expected {tuple(parameter.shape)}"
        )
    if not value.is_floating_point() or value.layout is not torch.strided or value.device.type == "meta":
        raise CheckpointError(
            f"{owner}: {name} is {value.dtype}, {value.layout}, on {value.device}; expected "
            "floating point, dense, with data"
        )
    try:
        local = matching_shard(value, parameter)
    except ParameterError as error:
        raise CheckpointError(f"{owner}: {name}: {error}") from error
    if local is None:
        raise CheckpointError(
            f"{owner}: {name} is sharded in another way than the parameter; give load_state_dict full tensors, or "
            "reshard with torch.distributed.checkpoint (docs/checkpoints.md)"
        )
    return local


def _is_low(tensor: torch.Tensor) -> bool:
    return tensor.element_size() < 4


def rounds_to(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the weight has the bits of `master`, or of its BF16 value. On the host, for `master` is there."""
    master, weight = master.detach().cpu().float(), weight.cpu()
    rounded = master.bfloat16()
    if weight.dtype == torch.bfloat16:
        return torch.equal(rounded.view(torch.int16), weight.view(torch.int16))
    bits = weight.view(torch.int32)
    return any(torch.equal(each.view(torch.int32), bits) for each in (master, rounded.float()))


def _warn_of_strangers(labels: Collection[Any]) -> None:
    if labels:
        logger.warning(
            "the state dict has state for %d parameter(s) that are in none of its groups (%s ...): it is left out",
            len(labels),
            ", ".join(sorted(map(str, labels))[:3]),
        )


def _warn_of_order(saved: Iterable[Mapping[str, Any]], own: Iterable[Mapping[str, Any]]) -> None:
    there, here = (
        [name for group in each for name in group.get("param_names") or ()] for each in (saved, own)
    )
    if there != here and sorted(there) == sorted(here):
        logger.warning(
            "the state dict has the same parameters in another order (%s ... there, %s ... here): state is matched by "
            "position, as torch does; put them in the same order, or go through torch.distributed.checkpoint",
            ", ".join(there[:3]),
            ", ".join(here[:3]),
        )


def _clone(value: Any) -> Any:
    return shard_like(value, _on_host(local_shard(value))) if isinstance(value, torch.Tensor) else value


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
