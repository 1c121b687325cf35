"""Param groups of a state dict: what of them is taken, and what they become here.

Known keys are the optimizer's hyperparameters, what schedulers of torch keep, and what the user has put into the group
in their place. Others would be saved again, and flattened DCP checkpoints would then fit no optimizer but this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from offload.errors import CheckpointError, ConfigError

__all__ = ["read_groups"]

logger = logging.getLogger(__name__)

Group = dict[str, Any]

IGNORED_KEYS = ("fused", "foreach")
"""How another optimizer is implemented: of no meaning here."""

SCHEDULER_KEYS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
"""What schedulers of torch keep in param groups."""


def read_groups(
    saved_groups: Sequence[Mapping[str, Any]],
    own_groups: Sequence[Mapping[str, Any]],
    known: Collection[str],
    check_group: Callable[[Mapping[str, Any]], None],
) -> list[Group]:
    """What the optimizer's groups become; nothing is changed. Keys that are left out are told.

    Args:
        saved_groups: of a state dict, as many as `own_groups`, which give what those lack.
        known: the optimizer's hyperparameters.
        check_group: raises where a value is out of range.

    Raises:
        CheckpointError: a value cannot be used.
    """
    groups: list[Group] = []
    strange: set[str] = set()
    for saved, own in zip(saved_groups, own_groups, strict=True):
        group, left_out = _read_group(saved, own, known)
        strange.update(left_out)
        try:
            check_group(group)
        except (ConfigError, TypeError, ValueError) as error:
            raise CheckpointError(f"a param group of the state dict cannot be used: {error}") from error
        groups.append(group)
    if strange:
        logger.warning(
            "the state dict's param groups have keys that mean nothing here and are left out: %s",
            ", ".join(sorted(strange)),
        )
    return groups


def _read_group(
    saved: Mapping[str, Any], own: Mapping[str, Any], known: Collection[str]
) -> tuple[Group, list[str]]:
    group = {key: own[key] for key in known}
    group["params"] = saved["params"]
    strange = []
    for key, value in saved.items():
        if key in IGNORED_KEYS:
            continue
        if key in group or key in own or key in SCHEDULER_KEYS or key == "param_names":
            group[key] = value
        else:
            strange.append(str(key))
    return group, strange
