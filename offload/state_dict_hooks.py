"""Hooks that users registered on ``state_dict`` and ``load_state_dict``, run around what this library makes of them.

torch's own methods do a part of the work only, and would run the hooks around that part: on tensors that are no clones
yet, or on a state dict without state. So they are called with these hooks set aside, and the hooks are run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from offload.errors import CheckpointError
from offload.schedule.base_step import hooks_set_aside

__all__ = ["after_loading", "after_saving", "before_loading", "set_aside_for_loading", "set_aside_for_saving"]


def set_aside_for_saving(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Inside, torch's ``state_dict`` runs no post-hook. Pre-hooks it does: these get no state dict."""
    return hooks_set_aside(optimizer, ["_optimizer_state_dict_post_hooks"])


def after_saving(state_dict: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Run the post-hooks of ``state_dict``; what they made of it."""
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = post_hook(optimizer, state_dict) or state_dict
    return state_dict


def set_aside_for_loading(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Inside, torch's ``load_state_dict`` runs no hook."""
    return hooks_set_aside(
        optimizer, ["_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"]
    )


def before_loading(state_dict: Any, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Run the pre-hooks of ``load_state_dict``, of all `optimizers` in this order; what they made of a shallow copy, which
    is what torch hands to them, too.

    Raises:
        CheckpointError: it is no mapping.
    """
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"this is no optimizer state dict, but a {type(state_dict).__name__}")
    prepared = dict(state_dict)
    for optimizer in optimizers:
        for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            prepared = pre_hook(optimizer, prepared) or prepared
    return prepared


def after_loading(*optimizers: torch.optim.Optimizer) -> None:
    """Run the post-hooks of ``load_state_dict``, of all `optimizers` in this order."""
    for optimizer in optimizers:
        for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            post_hook(optimizer)
