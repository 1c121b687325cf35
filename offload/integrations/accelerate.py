"""Accelerate: ``accelerator = take_over(Accelerator(...))``, and the training loop stays as it is.

An accelerator that was not taken over still never goes wrong in silence: its ``clip_grad_norm_`` raises where the
gradient has left, and a second backward before ``step()`` has to be declared (``accumulation_steps=``). But on a GPU its
``prepare`` sends the whole optimizer state to the device and back, which is just what there is no room for.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType

import offload
from offload.integrations._common import OFFLOAD_OPTIMIZERS, OffloadOptimizer, require_same_clipping

__all__ = ["PreparedOptimizer", "require_plain_training", "take_over"]

logger = logging.getLogger(__name__)

MARK = "_offload_takeover"


def take_over(accelerator: Accelerator) -> Accelerator:
    """Teach `accelerator` what optimizers of this library need; return it.

    - ``prepare`` leaves their state in host memory (otherwise it passes through the device), and refuses FP16 loss
      scaling and more than one process.
    - ``backward`` tells them whether the step's last micro-batch has come (``with accelerator.accumulate(model):``).
    - ``clip_grad_norm_`` checks that the optimizer clips to the same norm, and returns None: the norm is known after
      the step (``optimizer.last_step.grad_norm``). ``clip_grad_value_`` is refused.
    - ``step_was_skipped`` is true after a step that ``nonfinite="skip"`` skipped, so prepared schedulers wait.

    Everything else goes to the accelerator's own methods, parameters of other optimizers included. Taking over twice is
    fine.

    Raises:
        offload.ConfigError: from these calls, as said.
    """
    if not hasattr(accelerator, MARK):
        takeover = _Takeover(accelerator)
        setattr(accelerator, MARK, takeover)
        for name in ("prepare_optimizer", "backward", "clip_grad_norm_", "clip_grad_value_"):
            setattr(accelerator, name, getattr(takeover, name))
    return accelerator


class PreparedOptimizer(AcceleratedOptimizer):
    """What ``accelerator.prepare`` makes of an optimizer of ours: ``last_step``, ``plan``, ``close()`` … are there too."""

    def __init__(self, optimizer: OffloadOptimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    @property
    def step_was_skipped(self) -> bool:
        """Whether non-finite gradients made the last step change nothing."""
        report = self.optimizer.last_step
        return report is not None and report.skipped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(self.optimizer, name)


class _Takeover:
    """The methods that replace those of one accelerator, and the originals behind them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._prepare_optimizer = accelerator.prepare_optimizer
        self._backward = accelerator.backward
        self._clip_grad_norm = accelerator.clip_grad_norm_
        self._clip_grad_value = accelerator.clip_grad_value_
        self._known: weakref.WeakSet[OffloadOptimizer] = weakref.WeakSet()

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, OFFLOAD_OPTIMIZERS):
            require_plain_training(self._accelerator)
            self._known.add(optimizer)
            optimizer = PreparedOptimizer(optimizer)
            optimizer._is_accelerate_prepared = True  # so that accelerate takes it as it is
        return self._prepare_optimizer(optimizer, device_placement=device_placement)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        with ExitStack() as stack:
            if not self._accelerator.sync_gradients:
                for optimizer in self._open:
                    stack.enter_context(optimizer.accumulate())
            self._backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        parameters = _as_list(parameters)
        optimizer = self._owner(parameters, "clip_grad_norm_")
        if optimizer is None:
            return self._clip_grad_norm(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise offload.ConfigError(
                f"clip_grad_norm_: norm_type={norm_type!r}: offload clips the L2 norm; use norm_type=2"
            )
        if not math.isinf(max_norm):  # infinity only asks for the norm
            require_same_clipping(optimizer, max_norm, "max_norm of clip_grad_norm_")
        return None

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> Any:
        parameters = _as_list(parameters)
        if self._owner(parameters, "clip_grad_value_") is None:
            return self._clip_grad_value(parameters, clip_value)
        raise offload.ConfigError(
            f"clip_grad_value_({clip_value!r}): gradients of an offload optimizer leave in backward and cannot be clipped "
            "by value; build the optimizer with max_grad_norm= to clip their norm"
        )

    @property
    def _open(self) -> list[OffloadOptimizer]:
        return [optimizer for optimizer in self._known if not optimizer.closed]

    def _owner(self, parameters: list[torch.Tensor], what: str) -> OffloadOptimizer | None:
        """The one optimizer of ours whose parameters these are, all of them; None if they are of no such optimizer."""
        asked = set(parameters)
        owners = {optimizer: _parameters_of(optimizer) for optimizer in self._open}
        owners = {optimizer: owned for optimizer, owned in owners.items() if owned & asked}
        if not owners:
            return None
        optimizer, owned = next(iter(owners.items()))
        strangers = [p for p in asked - owned if p.grad is not None]
        if len(owners) > 1 or strangers or owned - asked:
            raise offload.ConfigError(
                f"{what}: got {len(owned & asked)} of the {len(owned)} parameters of one offload optimizer, and "
                f"{len(strangers)} with gradients of others. Such an optimizer clips exactly its own parameters: call "
                f"{what} with these, and separately for the rest"
            )
        return optimizer


def require_plain_training(accelerator: Accelerator) -> None:
    """Raise where `accelerator` trains in a way that offload cannot.

    Raises:
        offload.ConfigError: FP16 loss scaling, or anything but one process.
    """
    if accelerator.scaler is not None:
        raise offload.ConfigError(
            f"mixed_precision={accelerator.mixed_precision!r} scales the loss, and offload takes BF16 or FP32 "
            "gradients, which need no scaling; use mixed_precision='bf16' or 'no'"
        )
    if accelerator.distributed_type != DistributedType.NO:
        raise offload.ConfigError(
            f"distributed_type={accelerator.distributed_type.value}: offload supports one process under accelerate; "
            "DDP, FSDP and DeepSpeed move gradients or parameters behind the optimizer's back"
        )


def _parameters_of(optimizer: OffloadOptimizer) -> set[torch.Tensor]:
    return {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def _as_list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
