"""Masters that the caller gave along: FP32 values from before the model was cast, where the weights have lost bits.

Those of parameters that the optimizer begins with are taken at once, and copied. Those of frozen parameters, and of
parameters that come in a later param group, wait for the day when these are trained.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from offload.checkpoint import rounds_to
from offload.config import sample
from offload.distributed import local_shard
from offload.errors import ConfigError, ParameterError
from offload.parameters import ParamRecord
from offload.prepare import Masters, was_cast

__all__ = ["GivenMasters"]

logger = logging.getLogger(__name__)


class GivenMasters:
    """What ``masters=`` holds and nobody has taken yet; None: nothing was given."""

    def __init__(self, masters: Masters | None) -> None:
        if not (masters is None or isinstance(masters, Masters)):
            raise ConfigError(
                f"masters is a {type(masters).__name__}: expected what offload.cast_compute_weights returned, or None "
                "to start from the weights"
            )
        self._waiting = masters

    def of_first(self, records: Sequence[ParamRecord]) -> dict[int, torch.Tensor]:
        """Masters by parameter index, as far as there are any, for the parameters that an optimizer begins with.

        The engine, which is built next, compares them with the weights.

        Raises:
            ConfigError: they are those of other parameters, and some of these have lost bits and have no name.
        """
        given = self._of(records)
        if self._waiting and not given:
            _refuse_lost(self._waiting, records)
        if self._waiting is None:
            _warn_of_left_out([record.name for record in records if was_cast(record.param)])
        return given

    def of_later(self, records: Sequence[ParamRecord]) -> dict[int, torch.Tensor]:
        """The same for parameters that are trained from now on.

        Raises:
            ParameterError: a weight was changed since the cast.
        """
        given = self._of(records)
        for record in records:
            if record.index in given:
                _check(record, given[record.index])
        return given

    def let_go(self, records: Iterable[ParamRecord]) -> None:
        """Those of `records` were copied, so that the caller may drop them."""
        if self._waiting is not None:
            self._waiting = self._waiting.without([record.param for record in records])

    def _of(self, records: Iterable[ParamRecord]) -> dict[int, torch.Tensor]:
        if self._waiting is None:
            return {}
        return {
            record.index: master
            for record in records
            if (master := self._waiting.of(record.param, record.name)) is not None
        }


def _refuse_lost(masters: Masters, records: Sequence[ParamRecord]) -> None:
    """Masters of none of the parameters: of others, which may come later, or of those that these have replaced.

    Names tell: they would have been found by theirs. Where sharding has replaced them they might have other names.
    """
    lost = [r.name for r in records if r.kind.weight != "fp32" and not r.has_name]
    if lost or any(isinstance(record.param, DTensor) for record in records):
        raise ConfigError(
            f"masters= holds values of none of these parameters: it has {sample(list(masters))}, the optimizer was given "
            f"{sample(lost or [record.name for record in records])}. Were they replaced after cast_compute_weights "
            "(fully_shard, a copy of the model)? Pass model.named_parameters(), so that they are found by name, or leave "
            "masters out to start from the weights"
        )
    logger.info("masters= holds values of none of these parameters; their masters are taken from the weights")


def _warn_of_left_out(names: Sequence[str]) -> None:
    """The likeliest slip of all: casting, and dropping what that returned."""
    if names:
        logger.warning(
            "masters= was left out, though cast_compute_weights has cast %d of these parameters (%s): training starts from "
            "their BF16 values, without what the cast rounded away. Pass on what it returned, unless a checkpoint is loaded "
            "next",
            len(names),
            sample(names),
        )


def _check(record: ParamRecord, master: torch.Tensor) -> None:
    """Ahead of the engine's own check, which comes when memory is allocated already."""
    weight = local_shard(record.param)
    if master.shape != weight.shape or not rounds_to(master, weight):
        raise ParameterError(
            f"masters= of {record.name}, {tuple(master.shape)}, do not round to the model's weights, "
            f"{tuple(weight.shape)}: the weights were changed after cast_compute_weights; cast again, or leave masters "
            "out to start from the weights"
        )
