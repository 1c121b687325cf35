"""Host memory for the state of a foreign optimizer: one slab per chunk, registered with CUDA as far as the budget goes."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from offload.config import OffloadConfig
from offload.errors import MemoryBudgetError
from offload.transfer.pinned import Slab, allocate

__all__ = ["HostMemory"]

logger = logging.getLogger(__name__)


class HostMemory:
    """Hands out slabs and keeps to ``host_budget`` and ``pinned_budget``."""

    def __init__(self, device: torch.device, config: OffloadConfig) -> None:
        self._device = device
        self._config = config
        self._slabs: dict[Slab, bool] = {}
        self._warned = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of those that were to be pinned."""
        return sum(slab.num_bytes for slab, pin in self._slabs.items() if pin)

    def allocate(self, num_bytes: int, name: str) -> Slab:
        """A slab, pinned where the parameters are on a GPU.

        Raises:
            MemoryBudgetError: ``host_budget`` or the machine does not hold it.
        """
        budget = self._config.host_budget
        if budget is not None and self.num_bytes + num_bytes > budget:
            raise MemoryBudgetError(
                f"{name}: {num_bytes} bytes beside the {self.num_bytes} that are mapped are more than "
                f"config.host_budget={budget}; raise it, or offload fewer parameters"
            )
        pin = self._device.type == "cuda" and self._may_pin(num_bytes)
        device = self._device if pin else None
        slab = allocate(
            num_bytes, name=name, pin=pin, fallback_pageable=True, touch=_fill_zeros, device=device
        )
        self._slabs[slab] = pin
        return slab

    def release(self, slab: Slab) -> None:
        """Unpin and unmap; views that are still out keep the memory."""
        self._slabs.pop(slab, None)
        slab.close()

    def close(self) -> None:
        """Release everything."""
        for slab in list(self._slabs):
            self.release(slab)

    def _may_pin(self, num_bytes: int) -> bool:
        budget = self._config.pinned_budget
        fits = budget is None or self.pinned_bytes + num_bytes <= budget
        if not fits and not self._warned:
            self._warned = True
            logger.warning(
                "config.pinned_budget=%d is reached: further state is pageable, and about 7 times slower to move",
                budget,
            )
        return fits


def _fill_zeros(data: npt.NDArray[np.uint8]) -> None:
    """By torch's threads: a single one touches fresh memory far more slowly than it can be registered."""
    torch.from_numpy(data).zero_()
