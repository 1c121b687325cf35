"""Which foreign optimizers can be stepped in parts, on which parameters, and which of their steps are none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from offload.distributed import local_shard
from offload.errors import ConfigError, ParameterError, UnsupportedDtypeError

__all__ = ["STATE_MODES", "check_base", "check_devices", "common_device", "is_rehearsal", "reset_step_counts"]

STATE_MODES = ("all-at-once", "chunked-sync", "chunked-stream")

REFUSED: Mapping[str, str] = {
    "LBFGS": "it evaluates its closure many times in a step and keeps one state for all parameters",
    "OffloadOptimizer": "it offloads its state itself; choose its own mode",
    "CPUOffloadOptimizer": "it offloads its state already",
}
"""Optimizers, by the name of their class or of a base class, that cannot be stepped from outside."""

ACROSS_PARAMETERS = (
    "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "FusedLAMB", "Lamb", "Prodigy",
)  # fmt: skip
"""Optimizers whose update of one parameter depends on others: they are stepped whole or not at all."""

Groups = Sequence[Mapping[str, Any]]


def check_base(base: torch.optim.Optimizer, mode: str) -> None:
    """Raise `ConfigError` where `base` cannot be stepped in `mode`."""
    if not isinstance(base, torch.optim.Optimizer):
        raise ConfigError(
            f"base is a {type(base).__name__}: pass an instance of torch.optim.Optimizer, already built"
        )
    names = [cls.__name__ for cls in type(base).__mro__]
    for name in names:
        if name in REFUSED:
            raise ConfigError(f"base is a {name}, which cannot be offloaded: {REFUSED[name]}")
        if name in ACROSS_PARAMETERS and mode != "all-at-once":
            raise ConfigError(
                f"base is a {name}, whose update of one parameter depends on all others, and mode={mode!r} "
                'steps a chunk at a time; use mode="all-at-once"'
            )
    if any(group.get("differentiable") for group in base.param_groups):
        raise ConfigError(
            "base was built with differentiable=True: a step that autograd records cannot be offloaded"
        )


def common_device(groups: Groups) -> torch.device:
    """The device of all parameters.

    Raises:
        ParameterError: there are several, or none.
    """
    devices = list(dict.fromkeys(param.device for group in groups for param in group["params"]))
    if not devices:
        raise ParameterError("base has no parameters: there is nothing to offload")
    if len(devices) > 1:
        raise ParameterError(
            f"base has parameters on {', '.join(map(str, devices))}; make one optimizer for each device"
        )
    if devices[0].type == "meta":
        raise UnsupportedDtypeError(
            "base's parameters are on the meta device and have no data; materialize the model first"
        )
    device: torch.device = devices[0]
    return device


def check_devices(params: Iterable[torch.Tensor], device: torch.device) -> None:
    """Raise `ParameterError` where a parameter is not on `device`."""
    for index, param in enumerate(params):
        if param.device != device:
            raise ParameterError(
                f"parameter #{index} of shape {tuple(param.shape)} is on {param.device}, this optimizer was "
                f"built for {device}; build it after the model was moved"
            )


def is_rehearsal(groups: Groups) -> bool:
    """Whether this is the step that `torch.distributed.checkpoint` takes on a fresh optimizer to make its state.

    It sets all gradients to zero and every lr to 0. Such a step must not count, nor leave buffers that start from zero
    where they would start from the first gradient: so its state serves until the next step or load.
    """
    if any("lr" not in group or group["lr"] != 0 for group in groups):
        return False
    params = [param for group in groups for param in group["params"] if param.requires_grad]
    return bool(params) and not any(_has_gradient(param) for param in params)


def reset_step_counts(entries: Iterable[Any]) -> None:
    """Let states that a rehearsal has made say that no step was taken."""
    for entry in entries:
        step = entry.get("step") if isinstance(entry, dict) else None
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif isinstance(step, int | float):
            entry["step"] = type(step)(0)


def _has_gradient(param: torch.Tensor) -> bool:
    """Other than zeros; a missing gradient counts as one, since a rehearsal makes them all."""
    gradient = param.grad
    return gradient is None or gradient.layout is not torch.strided or bool(local_shard(gradient).any())
