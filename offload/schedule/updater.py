"""Who computes where state is on the device: our kernel, torch's fused one where that cannot be had, or a host stand-in.

An `Updater` steps one parameter, or a part of one that starts on a boundary of `layout.ALIGN` elements. Which of them it
is makes no difference to the steppers; `make_device_updater` chooses on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from offload.errors import KernelError
from offload.kernels.backend import Backend, TileArrays, Variant
from offload.kernels.blocks import make_blocks
from offload.kernels.device import DeviceBackend, TileTensors, is_available
from offload.kernels.rule import AdamWRule, Rule
from offload.kernels.torch_backend import TorchAdamWRule, fused_adamw
from offload.layout import ALIGN

__all__ = ["DeviceUpdater", "FusedUpdater", "HostUpdater", "Updater", "make_device_updater"]

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

UPLOAD_ROWS = 1024
"""Rows of hyperparameters (32 bytes each at most) in one copy: 64 KiB are what CUDA copies without a wait."""


class Updater(Protocol):
    """Steps a part of one parameter; asynchronous where the device is. The caller keeps tensors and rows alive."""

    @property
    def rule(self) -> Rule:
        """Makes the rows that `upload` takes."""

    def start(self) -> None:
        """Once, on the thread that will call the rest: take up threads, compile what is foreseen."""

    def upload(self, rows: Array) -> Sequence[Any]:
        """Hyperparameters (float32 ``[r, columns of the rule]``), row by row, as `update` wants them."""

    def blocks(self, numel: int) -> torch.Tensor:
        """The table of blocks that `TileTensors` of `numel` elements have."""

    def update(self, tile: TileTensors, row: Any) -> None:
        """One step, with the squared sums where the tile has room for them."""

    def measure(self, tile: TileTensors) -> None:
        """The squared sums alone."""


class _Blocks:
    """Tables of blocks, one for each number of elements that occurs: layers are alike."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, torch.Tensor] = {}

    def __call__(self, numel: int) -> torch.Tensor:
        if numel not in self._tables:
            table = make_blocks([(0, numel, 0)] if numel else [])
            self._tables[numel] = torch.from_numpy(table).to(self._device)
        return self._tables[numel]


class DeviceUpdater:
    """Our kernel, on the current stream.

    Args:
        variants: compiled at `start`; others when first used, about a second each.

    Raises:
        KernelError: there is no way to compile it here.
    """

    def __init__(
        self, device: torch.device, rule: Rule, *, flush_denormals: bool, variants: Collection[Variant] = ()
    ) -> None:
        self.rule = rule
        self.blocks = _Blocks(device)
        self._device, self._variants = device, tuple(variants)
        self._backend = DeviceBackend(rule, flush_denormals=flush_denormals)
        self._select = torch.ones(1, dtype=torch.uint8, device=device)

    def start(self) -> None:
        """Compile the variants; see `Raises` of the class."""
        for variant in self._variants:
            self._backend.warm(variant, self._device)

    def upload(self, rows: Array) -> Sequence[torch.Tensor]:
        """Does not wait for the stream: CUDA takes so small pageable copies into its command queue."""
        source = torch.from_numpy(np.ascontiguousarray(rows))
        parts = [part.to(self._device, non_blocking=True) for part in source.split(UPLOAD_ROWS)]
        return [row for part in parts for row in part.split(1)]

    def update(self, tile: TileTensors, row: torch.Tensor) -> None:
        self._backend.update(tile, row, self._select)

    def measure(self, tile: TileTensors) -> None:
        self._backend.square_sums(tile, self._select)


class FusedUpdater:
    """Torch's own kernels on the device: right, but the last bits are not those of the host kernels."""

    def __init__(self, device: torch.device, rule: Rule) -> None:
        self._is_adamw = rule.name == AdamWRule.name
        self.rule: Rule = TorchAdamWRule() if self._is_adamw else rule
        self.blocks = _Blocks(device)

    def start(self) -> None:
        """Nothing to prepare."""

    def upload(self, rows: Array) -> Sequence[Array]:
        """They stay on the host: torch takes hyperparameters as Python floats."""
        return list(rows)

    @torch.no_grad()
    def update(self, tile: TileTensors, row: Array) -> None:
        """See `Updater.update`; on the current stream, with temporaries of the size of the tile."""
        gradient = _whole_gradient(tile)
        _write_sums(tile, gradient)
        if self._is_adamw:
            fused_adamw(row, [tile.master], [gradient], *([moment] for moment in tile.moments))
        else:
            decay, step_size, coefficient = (float(value) for value in row)
            sign = torch.where(gradient.isnan(), gradient, gradient.mul_(coefficient).sign())
            tile.master.mul_(decay).add_(sign.mul_(step_size))
        if tile.weight is not None:
            tile.weight.copy_(tile.master)

    @torch.no_grad()
    def measure(self, tile: TileTensors) -> None:
        _write_sums(tile, _whole_gradient(tile))


class HostUpdater:
    """The host kernels on tensors in host memory: what runs where there is no device. On the worker's thread alone."""

    def __init__(self, backend: Backend) -> None:
        self.blocks = _Blocks(torch.device("cpu"))
        self._backend = backend
        self._prepared: set[Variant] = set()
        self._select = np.ones(1, np.uint8)

    @property
    def rule(self) -> Rule:
        """Of the backend."""
        return self._backend.rule

    def start(self) -> None:
        """Start the backend, where nobody else does."""
        self._backend.start()

    def upload(self, rows: Array) -> Sequence[Array]:
        """Views of `rows`, float32 ``[1, columns]`` each: nothing has to move."""
        return [rows[index : index + 1] for index in range(len(rows))]

    def update(self, tile: TileTensors, row: Array) -> None:
        """See `Updater.update`; done when it returns. A variant that is new is compiled here."""
        self._prepare(tile, _name(tile.weight) if tile.weight is not None else None)
        arrays = TileArrays(
            grad=_array(tile.grad),
            acc=None if tile.acc is None else tile.acc.numpy(),
            master=tile.master.numpy(),
            moments=tuple(moment.numpy() for moment in tile.moments),
            weight=None if tile.weight is None else _array(tile.weight),
            sums=None if tile.sums is None else tile.sums.numpy(),
            nonfinite=None if tile.nonfinite is None else tile.nonfinite.numpy(),
            blocks=tile.blocks.numpy(),
        )
        self._backend.update(arrays, row, self._select)

    def measure(self, tile: TileTensors) -> None:
        self._prepare(tile, None)
        accumulated = None if tile.acc is None else tile.acc.numpy()
        assert tile.sums is not None
        assert tile.nonfinite is not None
        self._backend.square_sums(
            _array(tile.grad),
            accumulated,
            tile.sums.numpy(),
            tile.nonfinite.numpy(),
            tile.blocks.numpy(),
            self._select,
        )

    def _prepare(self, tile: TileTensors, weight: str | None) -> None:
        grad, sums = _name(tile.grad), tile.sums is not None
        variant = Variant(grad=grad, acc=tile.acc is not None, weight=weight, sums=sums)  # type: ignore[arg-type]
        if variant not in self._prepared:
            self._prepared.add(variant)
            self._backend.prepare(variant)


def make_device_updater(
    device: torch.device, rule: Rule, *, flush_denormals: bool, variants: Collection[Variant] = ()
) -> Updater:
    """Our kernel for `device`, started; torch's own, with a warning, where ours cannot be compiled."""
    try:
        if not is_available():
            raise KernelError("this torch cannot compile CUDA kernels")
        updater = DeviceUpdater(device, rule, flush_denormals=flush_denormals, variants=variants)
        updater.start()
    except KernelError as error:
        logger.warning(
            "torch's fused kernel steps on the device instead of ours (%s): results are right, but their "
            "last bits differ from those of the host kernels",
            error,
        )
        return FusedUpdater(device, rule)
    return updater


def _name(tensor: torch.Tensor) -> str:
    return "bf16" if tensor.dtype == torch.bfloat16 else "fp32"


def _array(tensor: torch.Tensor) -> Array:
    """As kernels see it: BF16 as its bit pattern."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
    return bits


def _whole_gradient(tile: TileTensors) -> torch.Tensor:
    gradient = tile.grad.to(torch.float32, copy=True)
    return gradient if tile.acc is None else gradient.add_(tile.acc)


def _write_sums(tile: TileTensors, gradient: torch.Tensor) -> None:
    if tile.sums is None or tile.nonfinite is None:
        return
    padded = torch.nn.functional.pad(gradient, (0, -gradient.numel() % ALIGN)).view(-1, ALIGN)
    tile.sums.copy_(padded.double().square_().sum(dim=1))
    tile.nonfinite.copy_(padded.isfinite().all(dim=1).logical_not_())
