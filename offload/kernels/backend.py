"""What the scheduler asks of a host backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from offload.kernels.rule import Rule

__all__ = ["Backend", "TileArrays", "Variant"]


@dataclass(frozen=True)
class TileArrays:
    """The arrays of one tile, all 1-D, contiguous and of one length n (a multiple of 1024), but for the last three.

    No two of them may overlap: the compiled loop would fall back to one element at a time.
    """

    grad: np.ndarray  #: uint16[n] (BF16 bits) or float32[n]: the last micro-batch's gradient
    acc: np.ndarray | None  #: float32[n]: the sum of the micro-batches before it
    master: np.ndarray  #: float32[n], in place
    moments: tuple[
        np.ndarray, ...
    ]  #: float32[n] each, in place, in the order of ``Rule.state_names``; else `Rule.stored`
    weight: np.ndarray | None  #: uint16[n] (BF16 bits) or float32[n], out; best at a 64-byte aligned address
    sums: np.ndarray | None  #: float64[n // 1024], out: squared norm of each norm block, before clipping
    nonfinite: np.ndarray | None  #: uint8[n // 1024], out: 1 where a norm block holds an inf or a NaN
    blocks: np.ndarray  #: int64[k, 3], see `blocks.make_blocks`; [k, 5] where moments are reduced
    #: Where the new (master, \*moments), in the dtypes of the old, go; None: in place. With it the old state is left as it
    #: was, for an exact rollback; what is not selected is written to neither.
    new_state: tuple[np.ndarray, ...] | None = None


@dataclass(frozen=True)
class Variant:
    """Which arrays an update has, and their dtypes: one compiled kernel each."""

    grad: Literal["bf16", "fp32"] = "bf16"
    acc: bool = False
    weight: Literal["bf16", "fp32"] | None = "bf16"
    sums: bool = False
    new_state: bool = False


class Backend(Protocol):
    """Host kernels. After construction every method is called in one thread, the worker; ``start`` first.

    All methods return when their work is done, and give the same bits whatever the number of threads.
    """

    name: str

    @property
    def rule(self) -> Rule:
        """Fills ``rows``: its columns are this backend's own."""

    def start(self) -> None:
        """Take up threads, compile what will be used, and from then on refuse to compile."""

    def prepare(self, variant: Variant) -> None:
        """Compile one more variant, where that is needed: for calls that the layout did not foresee."""

    def update(self, tile: TileArrays, rows: np.ndarray, select: np.ndarray) -> None:
        """Step the parameters of ``tile`` whose ``select`` (uint8[r]) is not 0 by ``rows`` (float32[r, num_columns])."""

    def accumulate(self, grad: np.ndarray, acc: np.ndarray, first: bool) -> None:
        """``acc = f32(grad)`` for the first micro-batch, else ``acc = acc + f32(grad)``."""

    def square_sums(
        self,
        grad: np.ndarray,
        acc: np.ndarray | None,
        sums: np.ndarray,
        nonfinite: np.ndarray,
        blocks: np.ndarray,
        select: np.ndarray,
    ) -> None:
        """The same ``sums`` and ``nonfinite`` as `update` gives, without an update."""

    def expand(self, weight: np.ndarray, master: np.ndarray) -> None:
        """``master = f32(weight)``; weight: uint16 (BF16 bits) or float32."""

    def round_weights(self, master: np.ndarray, weight: np.ndarray) -> None:
        """``weight = bf16(master)``, to nearest even, or a copy where ``weight`` is float32."""

    def unpack(self, name: str, stored: tuple[np.ndarray, ...], values: np.ndarray) -> None:
        """One parameter's moment ``name`` as float32; stored: its array of ``Rule.stored``, and its scales if any."""

    def pack(self, name: str, values: np.ndarray, stored: tuple[np.ndarray, ...]) -> None:
        """The reverse, rounded to nearest: what `unpack` gave comes back with the same bits."""

    def fill_zero(self, array: np.ndarray) -> None:
        """Zero a 1-D array by the team (the first touch of its pages)."""

    def close(self) -> None:
        """Release threads; harmless when repeated."""
