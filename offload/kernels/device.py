"""The update on a CUDA device, with the bits of the host kernels.

``device.cu`` is compiled by NVRTC, which comes with torch's CUDA wheels: no toolchain is needed. Torch's own fused CUDA
kernel differs from its CPU kernel in most last bits, so a chunk could not move between host and device with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from offload.errors import KernelError
from offload.kernels.backend import Variant
from offload.kernels.blocks import BLOCK, NORM_BLOCK
from offload.kernels.launch import Launcher
from offload.kernels.rule import AdamWRule, Rule

__all__ = ["DeviceBackend", "TileTensors", "is_available"]

SOURCE = Path(__file__).with_name("device.cu")
BLOCK_THREADS = 256
LANES = 32
#: Norm blocks that one thread block takes, a warp each.
NORM_BLOCKS_PER_THREAD_BLOCK = BLOCK_THREADS // LANES
WEIGHT_CODES = {None: 0, torch.bfloat16: 1, torch.float32: 2}
NUM_POINTERS = 11
#: Thread blocks that share one block of the table.
GRID_PARTS = BLOCK // NORM_BLOCK // NORM_BLOCKS_PER_THREAD_BLOCK


_Key = tuple[int, bool, bool, torch.dtype | None, bool, bool]
"""Of a compiled variant: device, BF16 gradient, accumulator, weight's dtype, squared sums, whether it updates."""


@dataclass(frozen=True)
class TileTensors:
    """`offload.kernels.backend.TileArrays` as tensors of one device, with BF16 as ``torch.bfloat16``."""

    grad: torch.Tensor  #: bfloat16[n] or float32[n]
    acc: torch.Tensor | None  #: float32[n]
    master: torch.Tensor  #: float32[n], in place
    moments: tuple[torch.Tensor, ...]  #: float32[n] each, in place
    weight: torch.Tensor | None  #: bfloat16[n] or float32[n], out
    sums: torch.Tensor | None  #: float64[n // 1024], out
    nonfinite: torch.Tensor | None  #: uint8[n // 1024], out
    blocks: torch.Tensor  #: int64[k, 3]


def is_available() -> bool:
    """Whether there is a CUDA device and a torch that can compile for it."""
    return torch.cuda.is_available() and torch.version.hip is None and hasattr(torch.cuda, "_compile_kernel")


class DeviceBackend:
    """The device's half of a rule: `update` of a tile, on the current or a given stream.

    Variants are compiled when first used, about a second each; `warm` does it ahead.
    """

    name = "device"

    def __init__(self, rule: Rule, *, flush_denormals: bool = True) -> None:
        if not is_available():
            raise KernelError(
                "the device kernel needs a CUDA device and torch.cuda._compile_kernel; "
                "use torch's fused optimizer on the device instead, whose last bits differ"
            )
        self.rule = rule
        self.flush_denormals = bool(flush_denormals)
        self._kernels: dict[_Key, Launcher] = {}

    def warm(self, variant: Variant, device: torch.device | int | None = None) -> None:
        """Compile a variant for ``device`` (default: the current one)."""
        weight = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}[variant.weight]
        with torch.cuda.device(device):
            index = torch.cuda.current_device()
            self._kernel((index, variant.grad == "bf16", variant.acc, weight, variant.sums, True))

    def update(
        self,
        tile: TileTensors,
        rows: torch.Tensor,
        select: torch.Tensor,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Enqueue one step of the selected parameters; ``rows``: float32[r, num_columns], ``select``: uint8[r].

        The caller keeps all tensors alive until the stream has passed this point.
        """
        self._launch(tile, rows, select, None if tile.weight is None else tile.weight.dtype, True, stream)

    def square_sums(
        self, tile: TileTensors, select: torch.Tensor, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Enqueue ``sums`` and ``nonfinite`` of the selected parameters, with the bits that `update` gives; no update."""
        self._launch(tile, select, select, None, False, stream)

    def _launch(
        self,
        tile: TileTensors,
        rows: torch.Tensor,
        select: torch.Tensor,
        weight: torch.dtype | None,
        updates: bool,
        stream: torch.cuda.Stream | None,
    ) -> None:
        num_blocks = tile.blocks.shape[0]
        if num_blocks == 0:
            return
        device = tile.master.device
        index = torch.cuda.current_device() if device.index is None else device.index
        key = (
            index,
            tile.grad.dtype == torch.bfloat16,
            tile.acc is not None,
            weight,
            tile.sums is not None,
            updates,
        )
        # An absent argument is never read; any tensor serves as its pointer.
        moments = tile.moments or (None, None)
        tensors = (tile.grad, tile.acc, tile.master, *moments, tile.weight, tile.sums, tile.nonfinite)
        present = [rows if tensor is None else tensor for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in (*present, tile.blocks, rows, select)]
        with _on_device(index):
            stream = stream or torch.cuda.current_stream(index)
            # A query binds the device's context to a thread that has not used it yet.
            self._kernel(key)((num_blocks, GRID_PARTS), stream.cuda_stream, addresses, stream.query)

    def _defines(
        self, grad_bf16: bool, has_acc: bool, weight: torch.dtype | None, has_sums: bool
    ) -> tuple[str, ...]:
        """The macros that ``device.cu`` expects."""
        values = {
            "ADAMW": int(self.rule.name == AdamWRule.name),
            "GRAD_BF16": int(grad_bf16),
            "HAS_ACC": int(has_acc),
            "WEIGHT": WEIGHT_CODES[weight],
            "HAS_SUMS": int(has_sums),
            "NUM_COLUMNS": self.rule.num_columns,
            "BLOCK_THREADS": BLOCK_THREADS,
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())

    def _kernel(self, key: _Key) -> Launcher:
        """The kernel of the current device for this key, compiled when first asked for."""
        launcher = self._kernels.get(key)
        if launcher is None:
            _, grad_bf16, has_acc, weight, has_sums, updates = key
            defines = self._defines(grad_bf16, has_acc, weight, has_sums)
            if not updates:
                defines = (*defines, "-DUPDATE=0")
            launcher = self._kernels[key] = _launcher(_compile(defines, self.flush_denormals))
        return launcher


def _launcher(kernel: Any) -> Launcher:
    function = getattr(kernel, "func", None)
    if not isinstance(function, ctypes.c_void_p) or function.value is None:
        raise KernelError(f"torch {torch.__version__}: a compiled kernel has no handle that can be launched")
    return Launcher(function.value, NUM_POINTERS, BLOCK_THREADS, owner=kernel)


def _on_device(index: int) -> contextlib.AbstractContextManager[object]:
    """The guard costs a microsecond and is needed on other devices than the current one only."""
    return contextlib.nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)


def _compile(defines: tuple[str, ...], flush: bool) -> Any:
    """Compile ``device.cu`` for the current device.

    The name tells the denormal mode: compilers that cache what they have compiled were seen to give back the kernel of the
    other mode when nothing but ``--ftz`` differed.
    """
    name = "update_tile_flushing" if flush else "update_tile_keeping"
    options = [
        *defines,
        f"-DKERNEL={name}",
        f"--ftz={'true' if flush else 'false'}",
        "--fmad=false",
        "--prec-div=true",
        "--prec-sqrt=true",
    ]
    compile_kernel = torch.cuda._compile_kernel
    # torch 2.9 and later agree on these three names; what else they take has changed between releases.
    known = inspect.signature(compile_kernel).parameters
    if not {"kernel_source", "kernel_name", "nvcc_options"} <= set(known):
        raise KernelError(
            f"torch {torch.__version__}: _compile_kernel has an unknown signature, {list(known)}"
        )
    with _no_toolkit_needed():
        try:
            return compile_kernel(kernel_source=SOURCE.read_text(), kernel_name=name, nvcc_options=options)
        except (RuntimeError, OSError) as error:
            raise KernelError(f"NVRTC could not compile the device kernel: {error}") from error


@contextlib.contextmanager
def _no_toolkit_needed() -> Iterator[None]:
    """Keep torch from asking for a CUDA toolkit.

    ``_compile_kernel`` adds the toolkit's include folder and raises where ``CUDA_HOME`` is not set. The source includes
    nothing, so any folder will do.
    """
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is not None:
        yield
        return
    with mock.patch.object(cpp_extension, "CUDA_HOME", str(SOURCE.parent)):
        yield
