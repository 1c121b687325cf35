"""What all integrations ask of an optimizer."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import offload

__all__ = ["OFFLOAD_OPTIMIZERS", "OffloadOptimizer", "require_same_clipping", "unwrap"]

OFFLOAD_OPTIMIZERS = (offload.AdamW, offload.SignSGD)
"""Optimizers that take gradients away in backward. `CPUOffloadOptimizer` leaves them where frameworks look for them."""

OffloadOptimizer: TypeAlias = offload.AdamW | offload.SignSGD


def unwrap(optimizer: Any) -> OffloadOptimizer | None:
    """The optimizer of ours inside `optimizer`, which may be wrapped several times; None if there is none."""
    while optimizer is not None and not isinstance(optimizer, OFFLOAD_OPTIMIZERS):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def require_same_clipping(optimizer: OffloadOptimizer, max_norm: float | None, where: str) -> None:
    """Raise unless `optimizer` clips to the norm that the framework was told to clip to.

    Args:
        max_norm: as the framework has it; None, 0 and infinity mean that it does not clip.
        where: the setting's name, for the message.

    Raises:
        offload.ConfigError: they differ.
    """
    wanted = None if not max_norm or math.isinf(max_norm) else float(max_norm)
    if wanted != optimizer.max_grad_norm:
        raise offload.ConfigError(
            f"{where} is {max_norm!r}, but the optimizer was built with max_grad_norm={optimizer.max_grad_norm!r}. Its "
            "gradients leave in backward, so it alone can clip them: build it with max_grad_norm="
            f"{wanted!r}, or set {where} to {optimizer.max_grad_norm!r}"
        )
