"""Gradients that wait on the device until ``step()``: the books of the placements that are stepped there."""

from __future__ import annotations

import torch

from offload.streams import note_read

__all__ = ["DeviceGradients"]

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny

PIECE_NUMEL = 4 * 1024 * 1024
"""Elements that are added at a time: an embedding needs no temporaries of its own size."""


class DeviceGradients:
    """By parameter index: the gradient that came last, and the FP32 sum of those before it.

    The last one stays as it came, in its own dtype: the update kernel adds it to the sum. Sums have the bits of the
    host kernels, denormals included.

    Args:
        flush_denormals: as for the host kernels.
    """

    def __init__(self, *, flush_denormals: bool) -> None:
        self._flush = flush_denormals
        self._held: dict[int, torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}

    def accumulate(self, param: int, gradient: torch.Tensor) -> None:
        """Add a gradient after which others follow."""
        total = self._sums.get(param)
        if total is None:
            self._sums[param] = gradient.to(torch.float32, copy=True)
        elif self._flush:
            for part, fresh in zip(total.split(PIECE_NUMEL), gradient.split(PIECE_NUMEL), strict=True):
                _add_flushed(part, fresh.to(torch.float32, copy=True))
        else:
            total.add_(gradient)
        note_read(gradient)

    def hold(self, param: int, gradient: torch.Tensor) -> None:
        """Keep a gradient as the last one; one that is held already is accumulated first."""
        before = self._held.get(param)
        if before is not None:
            self.accumulate(param, before)
        self._held[param] = gradient

    def has(self, param: int) -> bool:
        """Whether there is something to be applied."""
        return param in self._held or param in self._sums

    def take(self, param: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient that a kernel reads, and the sum that it adds to it, if there is one; both stay."""
        held, total = self._held.get(param), self._sums.get(param)
        if held is not None:
            return held, total
        if total is None:
            raise KeyError(param)
        return total, None

    def forget(self, param: int) -> None:
        """Let go of a parameter's gradients."""
        self._held.pop(param, None)
        self._sums.pop(param, None)

    def clear(self) -> None:
        """Let go of all."""
        self._held.clear()
        self._sums.clear()


def _add_flushed(total: torch.Tensor, fresh: torch.Tensor) -> None:
    """``total += fresh``, with denormals as zeros before and after; `fresh` is changed too."""
    _flush_denormals(fresh)
    _flush_denormals(total)
    total.add_(fresh)
    _flush_denormals(total)


def _flush_denormals(tensor: torch.Tensor) -> None:
    """Denormals become zeros of their sign, in place; NaN stays."""
    tensor.mul_((tensor.abs() >= SMALLEST_NORMAL).to(tensor.dtype))
