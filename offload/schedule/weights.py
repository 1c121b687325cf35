"""Between masters and compute weights, for the placements that are stepped on the device.

A master may lie on the device or on the host. Both sides are 1-D and of one size; a piece at a time is moved, so that
the device needs no second copy of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from offload.errors import ParameterError
from offload.parameters import ParamRecord

__all__ = ["check_given_master", "load_weight", "store_weight"]

PIECE_NUMEL = 16 * 1024 * 1024


def load_weight(master: torch.Tensor, weight: torch.Tensor, *, force: bool) -> bool:
    """Take `master` anew where it does not round to `weight`, or anyway where `force`; whether it was."""
    if not force and _rounds_to(master, weight):
        return False
    for part, source in _pieces(master, weight):
        part.copy_(source.float())
    return True


def store_weight(weight: torch.Tensor, master: torch.Tensor) -> None:
    """Round `master` to `weight`."""
    for source, target in _pieces(master, weight):
        target.copy_(source.to(target.device))


def check_given_master(record: ParamRecord, master: torch.Tensor) -> None:
    """Raise where a master that the user gave belongs to other weights.

    Raises:
        ParameterError: it does not round to the compute weight.
    """
    if not _rounds_to(master, record.weight()):
        raise ParameterError(
            f"masters= of {record.name} do not round to the model's weights: the weights were changed after "
            "cast_compute_weights; cast again, or leave masters out to start from the weights"
        )


def _rounds_to(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """By bits, so that a NaN agrees with itself."""
    bits = torch.int16 if weight.dtype == torch.bfloat16 else torch.int32
    return all(
        torch.equal(source.to(target.device).to(target.dtype).view(bits), target.view(bits))
        for source, target in _pieces(master, weight)
    )


def _pieces(master: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if master.data_ptr() == weight.data_ptr():  # an FP32 weight that is its own master
        return iter(())
    return zip(master.split(PIECE_NUMEL), weight.split(PIECE_NUMEL), strict=True)
