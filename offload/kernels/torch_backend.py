"""The host backend on PyTorch's own kernels, for parity and for hosts where Numba cannot run.

AdamW is ``torch._fused_adamw_``, so its bits are torch's by construction, and those of the Numba backend wherever torch
runs its vector code: not under ``ATEN_CPU_CAPABILITY=default``. Torch's scalar tail, the last elements of a tensor
whose size is no multiple of its vector, may differ by an ulp, so tails are padded to 16 elements.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload.errors import KernelError
from offload.kernels.backend import TileArrays, Variant
from offload.kernels.blocks import NORM_BLOCK
from offload.kernels.norm import square_sums_of_rows
from offload.kernels.rule import AdamWRule, Rule, SignSGDRule

__all__ = ["TorchAdamWRule", "TorchBackend", "fused_adamw"]

#: Elements that every vector width of torch divides.
PAD = 16
BF16_NAN_BITS = 0x7FC0

# Columns of the AdamW row: doubles in three float32 parts each, and the signed clipping coefficient.
PARTS = 3
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, STEP = range(6)
COEF = PARTS * 6


class TorchAdamWRule:
    """AdamW as ``torch._fused_adamw_`` takes it: hyperparameters in double, which ``rows`` (float32) holds in parts."""

    name = AdamWRule.name
    state_names = AdamWRule.state_names
    stored = AdamWRule.stored
    is_reduced = False
    num_columns = COEF + 1

    def row(self, group: Mapping[str, Any], step: int, coef: float = 1.0) -> tuple[float, ...]:
        """See `offload.kernels.rule.Rule.row`."""
        beta1, beta2 = group["betas"]
        values = (
            float(group["lr"]),
            float(beta1),
            float(beta2),
            group["eps"],
            group["weight_decay"],
            float(step),
        )
        signed = -coef if group.get("maximize") else coef
        return (*(part for value in values for part in split_double(value)), signed)


def split_double(value: float) -> tuple[float, ...]:
    """Three float32 whose sum in double is ``value``: 24 bits of its 53 each, exact above 1e-24."""
    parts = []
    for _ in range(PARTS):
        parts.append(float(np.float32(value)))
        value -= parts[-1]
    return tuple(parts)


def join_double(row: np.ndarray, index: int) -> float:
    """The double that `split_double` put into columns ``PARTS * index`` and following."""
    low_first = row[PARTS * index : PARTS * (index + 1)][::-1]
    return float(np.cumsum(low_first, dtype=np.float64)[-1])


def fused_adamw(
    row: np.ndarray,
    masters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
) -> None:
    """One step of torch's fused kernel by a row of `TorchAdamWRule`; gradients, float32, are scaled in place."""
    for gradient in gradients:
        gradient.mul_(float(row[COEF]))
    step = torch.tensor(join_double(row, STEP), dtype=torch.float32, device=masters[0].device)
    torch._fused_adamw_(
        masters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(masters),
        lr=join_double(row, LR),
        beta1=join_double(row, BETA1),
        beta2=join_double(row, BETA2),
        weight_decay=join_double(row, WEIGHT_DECAY),
        eps=join_double(row, EPS),
        amsgrad=False,
        maximize=False,
    )


@dataclass(frozen=True)
class _Span:
    """The consecutive blocks of one parameter within a tile, as torch views."""

    row: int
    gradient: torch.Tensor  #: float32, ours: summed over micro-batches, not yet scaled
    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]


class TorchBackend:
    """`offload.kernels.backend.Backend` on torch; ``rows`` must come from this object's ``rule``.

    ``num_threads`` holds for the worker thread alone; None leaves torch's choice.
    """

    name = "torch"

    def __init__(self, rule: Rule, *, num_threads: int | None = None, flush_denormals: bool = True) -> None:
        self.rule: Rule = TorchAdamWRule() if rule.name == AdamWRule.name else rule
        self._step = _step_adamw if rule.name == AdamWRule.name else _step_sign_sgd
        if rule.name not in (AdamWRule.name, SignSGDRule.name):
            raise KernelError(f"no torch kernel for rule {rule.name!r}: use backend='numba'")
        self.num_threads = num_threads
        self.flush_denormals = bool(flush_denormals)

    def start(self) -> None:
        """Set denormals and the number of threads for the calling thread, before its first parallel operation.

        Its OpenMP team inherits the mode when it starts.
        """
        torch.set_flush_denormal(self.flush_denormals)
        if self.num_threads is not None:
            _set_num_threads_here(self.num_threads)

    def prepare(self, variant: Variant) -> None:
        """Nothing to compile."""

    @torch.no_grad()
    def update(self, tile: TileArrays, rows: np.ndarray, select: np.ndarray) -> None:
        for start, stop, row in _merge(tile.blocks):
            if not select[row]:
                continue
            gradient = _whole_gradient(tile.grad, tile.acc, start, stop)
            if tile.sums is not None and tile.nonfinite is not None:
                _square_sums(gradient.numpy(), start, tile.sums, tile.nonfinite)
            master, *moments = _state(tile, start, stop)
            self._step(_Span(row, gradient, master, tuple(moments)), rows[row])
            if tile.weight is not None:
                _write_weight(master, tile.weight[start:stop])

    def accumulate(self, grad: np.ndarray, acc: np.ndarray, first: bool) -> None:
        target, source = torch.from_numpy(acc), _floats(grad)
        if first:
            target.copy_(source)
        else:
            target.add_(source.float())

    def square_sums(
        self,
        grad: np.ndarray,
        acc: np.ndarray | None,
        sums: np.ndarray,
        nonfinite: np.ndarray,
        blocks: np.ndarray,
        select: np.ndarray,
    ) -> None:
        for start, stop, row in _merge(blocks):
            if select[row]:
                _square_sums(_whole_gradient(grad, acc, start, stop).numpy(), start, sums, nonfinite)

    def expand(self, weight: np.ndarray, master: np.ndarray) -> None:
        torch.from_numpy(master).copy_(_floats(weight))

    def round_weights(self, master: np.ndarray, weight: np.ndarray) -> None:
        _write_weight(torch.from_numpy(master), weight)

    def unpack(self, name: str, stored: tuple[np.ndarray, ...], values: np.ndarray) -> None:
        self.expand(stored[0], values)

    def pack(self, name: str, values: np.ndarray, stored: tuple[np.ndarray, ...]) -> None:
        self.round_weights(values, stored[0])

    def fill_zero(self, array: np.ndarray) -> None:
        torch.from_numpy(array).zero_()

    def close(self) -> None:
        pass


def _set_num_threads_here(num_threads: int) -> None:
    """Set torch's thread count for the calling thread only.

    ``torch.set_num_threads`` writes this thread's OpenMP setting and a process-wide default, which threads read when they
    first use torch. The default is put back from a throw-away thread, whose own setting ends with it.
    """
    default = _in_new_thread(torch.get_num_threads)
    torch.get_num_threads()  # this thread's one-time initialisation, which would overwrite what follows
    torch.set_num_threads(num_threads)
    _in_new_thread(lambda: torch.set_num_threads(default))


def _in_new_thread(function: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def _merge(blocks: np.ndarray) -> list[tuple[int, int, int]]:
    """Join adjacent blocks of one parameter: one torch call instead of many."""
    merged: list[tuple[int, int, int]] = []
    for start, stop, row in blocks.tolist():
        if merged and merged[-1][1:] == (start, row):
            start = merged.pop()[0]
        merged.append((start, stop, row))
    return merged


def _floats(array: np.ndarray) -> torch.Tensor:
    """A view as the floating dtype it stands for: bfloat16 for uint16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def _whole_gradient(grad: np.ndarray, acc: np.ndarray | None, start: int, stop: int) -> torch.Tensor:
    """``round(acc + last)`` of elements ``[start, stop)`` in a float32 tensor of its own."""
    last = _floats(grad[start:stop]).to(torch.float32, copy=True)
    return last if acc is None else last.add_(torch.from_numpy(acc[start:stop]))


def _state(tile: TileArrays, start: int, stop: int) -> list[torch.Tensor]:
    """Elements ``[start, stop)`` of the state to step in place: the tile's, or a copy where the old one is to be kept."""
    old = [torch.from_numpy(array[start:stop]) for array in (tile.master, *tile.moments)]
    if tile.new_state is None:
        return old
    new = [torch.from_numpy(array[start:stop]) for array in tile.new_state]
    return [target.copy_(source) for target, source in zip(new, old, strict=True)]


def _write_weight(master: torch.Tensor, weight: np.ndarray) -> None:
    """Round to the weight's dtype; torch writes some NaNs as 0xffff, we write 0x7fc0."""
    target = _floats(weight)
    target.copy_(master)
    if weight.dtype == np.uint16:
        weight[torch.isnan(master).numpy()] = BF16_NAN_BITS


def _step_adamw(span: _Span, row: np.ndarray) -> None:
    tensors = (span.master, span.gradient, *span.moments)
    whole = span.master.numel() // PAD * PAD
    tails = [torch.nn.functional.pad(tensor[whole:], (0, -tensor.numel() % PAD)) for tensor in tensors]
    masters, gradients, exp_avgs, exp_avg_sqs = (
        [tensor[:whole], tail] for tensor, tail in zip(tensors, tails, strict=True)
    )
    fused_adamw(row, masters, gradients, exp_avgs, exp_avg_sqs)
    for tensor, tail in zip(tensors, tails, strict=True):
        tensor[whole:] = tail[: tensor.numel() - whole]


def _step_sign_sgd(span: _Span, row: np.ndarray) -> None:
    decay, step_size, coef = (float(value) for value in row)
    gradient = span.gradient.mul_(coef)
    # torch.sign(NaN) is 0; the product with the sign is exact.
    move = torch.where(torch.isnan(gradient), gradient, gradient.sign()).mul_(step_size)
    span.master.mul_(decay).add_(move)


def _square_sums(gradient: np.ndarray, start: int, sums: np.ndarray, nonfinite: np.ndarray) -> None:
    """Fill the entries for ``gradient`` (float32), which starts at element ``start`` of the tile."""
    num_blocks = -(-gradient.size // NORM_BLOCK)
    padded = np.zeros((num_blocks, NORM_BLOCK), np.float32)
    padded.reshape(-1)[: gradient.size] = gradient
    written = slice(start // NORM_BLOCK, start // NORM_BLOCK + num_blocks)
    with np.errstate(all="ignore"):
        sums[written] = square_sums_of_rows(padded)
    nonfinite[written] = ~np.isfinite(padded).all(axis=1)
