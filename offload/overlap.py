"""What lets the next forward overlap with a step, where the plan's mode leaves something to overlap."""

from __future__ import annotations

import logging

import torch

from offload.layout import layer_namer
from offload.options import EARLY_MODES, Options
from offload.schedule.engine import Engine
from offload.schedule.forward_gates import ForwardGates

__all__ = ["make_gates"]

logger = logging.getLogger(__name__)


def make_gates(model: torch.nn.Module, engine: Engine, mode: str, options: Options) -> ForwardGates | None:
    """Gates for the steps of `engine`, not attached yet; None, with word of it, where steps end in ``step()``.

    Args:
        mode: of the plan, where ``options.mode`` may be auto.

    Raises:
        ConfigError: parts of the model are compiled already.
    """
    if mode not in EARLY_MODES:
        logger.info("overlap_forward has nothing to overlap: mode %s updates in step()", mode)
        return None
    return ForwardGates(
        model,
        layer_of=layer_namer(options.config.chunk_by),
        flight=lambda: engine.flight,
        land=engine.land,
        switch_off=engine.stop_departing,
        alone=lambda: engine.alone,
        fail=engine.fail,
    )
