"""One way to make the optimizer of a mode: torch's own for ``resident``, the library's for all others."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from typing import Any

from _baseline import ResidentAdamW
from torch import Tensor, nn

BASELINE = "resident"
LIBRARY_RESIDENT = "offload-resident"  # the library's own resident mode, beside the baseline
BASELINE_OPTIONS = {"lr", "betas", "eps", "weight_decay", "maximize", "max_grad_norm"}


def make_optimizer(
    mode: str,
    model: nn.Module,
    *,
    masters: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An AdamW over all parameters of ``model``; ``config`` holds fields of ``offload.OffloadConfig``."""
    if mode == BASELINE:
        known = {name: value for name, value in options.items() if name in BASELINE_OPTIONS}
        return ResidentAdamW(model.named_parameters(), masters=masters, **known)
    offload = importlib.import_module("offload")
    if options.get("overlap_forward"):
        options["model"] = model
    return offload.AdamW(
        model.named_parameters(),
        masters=masters,
        mode="resident" if mode == LIBRARY_RESIDENT else mode,
        config=offload.OffloadConfig(**(config or {})),
        **options,
    )


def pinned_bytes(mode: str) -> int:
    """Host memory that the optimizer of this process has pinned; torch's own pins none."""
    if mode == BASELINE:
        return 0
    return int(importlib.import_module("offload.transfer.pinned").pinned_bytes())


def parse_assignments(texts: list[str]) -> dict[str, Any]:
    """``["tile_numel=4194304", "clip=defer"]`` as a dict; values are Python literals where they can be."""
    return {name.strip(): _literal(value) for name, _, value in (text.partition("=") for text in texts)}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
