"""The default host backend: Numba kernels on the best thread team there is."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offload.construction import COMPILE, Stage, no_stage
from offload.errors import ClosedError
from offload.kernels.accumulate import accumulate_next, expand, fill_zero, round_weights
from offload.kernels.backend import TileArrays, Variant
from offload.kernels.blocks import BLOCK, NORM_BLOCK
from offload.kernels.jit import Kernel, cache_folder
from offload.kernels.norm import square_sums_of_tile
from offload.kernels.quantized import pack_codes, unpack_codes
from offload.kernels.rule import KernelRule
from offload.kernels.team import Team, make_team

__all__ = ["NumbaBackend"]

logger = logging.getLogger(__name__)

DTYPES = {"bf16": np.uint16, "fp32": np.float32}


class NumbaBackend:
    """`Backend` on this package's kernels; see `offload.kernels.adamw` for the bits.

    ``variants`` are compiled by ``start`` (about a second each, less with a cache), and no others later. ``cache_dir``
    keeps compiled kernels between processes; a folder that cannot be written is logged and not used. ``measures``: whether
    `square_sums` will be called. ``loads``, ``checks``: dtypes of weights from which masters are taken, or with which they
    are compared, straight after ``start``. ``stage``: told when something is being compiled.
    """

    name = "numba"

    def __init__(
        self,
        rule: KernelRule,
        *,
        num_threads: int,
        flush_denormals: bool = True,
        variants: Collection[Variant] = (Variant(),),
        cache_dir: str | os.PathLike[str] | None = None,
        measures: bool = True,
        loads: Collection[str] = (),
        checks: Collection[str] = (),
        stage: Stage = no_stage,
    ) -> None:
        self.rule = rule
        self.flush_denormals = bool(flush_denormals)
        self.variants = tuple(dict.fromkeys(variants))
        self._num_threads = num_threads
        self._cache_dir = cache_dir
        self._cache: Path | None = None
        self._measures, self._loads, self._checks, self._stage = measures, loads, checks, stage
        self._team: Team | None = None

    @property
    def team(self) -> Team:
        """The thread team, from ``start`` to ``close``."""
        if self._team is None:
            raise ClosedError(
                "the numba backend is not running: call start() first, and nothing after close()"
            )
        return self._team

    def start(self) -> None:
        """See `Backend.start`: the team, then all variants and what construction itself will call, by way of the cache."""
        if self._cache_dir is not None:
            self._cache = cache_folder(self._cache_dir)
        self._team = team = make_team(self._num_threads)
        with self._stage(COMPILE):
            team.start(self._cache)
        for variant in self.variants:
            self.prepare(variant)
        for kernel, arrays in self._first_calls():
            self._ensure(kernel, arrays)
        logger.info("numba backend: %s team of %d threads, %s", team.name, team.num_threads, self.variants)

    def prepare(self, variant: Variant) -> None:
        """See `Backend.prepare`; what is compiled already costs a look into a dict."""
        for kernel, arguments in self._hot_calls(variant):
            self._ensure(kernel, arguments)

    def update(self, tile: TileArrays, rows: np.ndarray, select: np.ndarray) -> None:
        self.team.run(self.rule.kernel, len(tile.blocks), self._update_arguments(tile, rows, select))

    def accumulate(self, grad: np.ndarray, acc: np.ndarray, first: bool) -> None:
        if first:
            self._run_elementwise(expand, grad, acc)
        else:
            self.team.run(accumulate_next, _num_blocks(acc.size), (grad, acc, self.flush_denormals))

    def square_sums(
        self,
        grad: np.ndarray,
        acc: np.ndarray | None,
        sums: np.ndarray,
        nonfinite: np.ndarray,
        blocks: np.ndarray,
        select: np.ndarray,
    ) -> None:
        arguments = (grad, acc, sums, nonfinite, blocks, select, self.flush_denormals)
        self.team.run(square_sums_of_tile, len(blocks), arguments)

    def expand(self, weight: np.ndarray, master: np.ndarray) -> None:
        self._run_elementwise(expand, weight, master)

    def round_weights(self, master: np.ndarray, weight: np.ndarray) -> None:
        self._run_elementwise(round_weights, master, weight)

    def unpack(self, name: str, stored: tuple[np.ndarray, ...], values: np.ndarray) -> None:
        if len(stored) == 1:
            self._run_elementwise(expand, stored[0], values)
        else:
            self._run_elementwise(unpack_codes, *stored, _is_signed(name), values)

    def pack(self, name: str, values: np.ndarray, stored: tuple[np.ndarray, ...]) -> None:
        if len(stored) == 1:
            self._run_elementwise(round_weights, values, stored[0])
        else:
            self._run_elementwise(pack_codes, values, _is_signed(name), *stored, numel=values.size)

    def fill_zero(self, array: np.ndarray) -> None:
        self._run_elementwise(fill_zero, array)

    def close(self) -> None:
        if self._team is not None:
            self._team.close()
            self._team = None

    def _run_elementwise(self, kernel: Kernel, *arrays: Any, numel: int | None = None) -> None:
        """Run a kernel without hyperparameters over `numel` elements (None: those of the last array).

        Some are only needed at construction: compiled when first used.
        """
        self._ensure(kernel, arrays)
        self.team.run(kernel, _num_blocks(arrays[-1].size if numel is None else numel), arrays)

    def _ensure(self, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        if not kernel.is_compiled(arguments):
            with self._stage(COMPILE):
                kernel.compile(arguments, cache=self._cache)

    def _update_arguments(self, tile: TileArrays, rows: np.ndarray, select: np.ndarray) -> tuple[Any, ...]:
        state = (tile.master, *tile.moments)
        new_state = tile.new_state or (None,) * len(state)
        arrays = (tile.grad, tile.acc, *state, *new_state, tile.weight)
        return (*arrays, tile.sums, tile.nonfinite, tile.blocks, rows, select, self.flush_denormals)

    def _first_calls(self) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
        """Those that fill masters or look at them, at construction."""
        master = np.zeros(NORM_BLOCK, np.float32)
        for kernel, dtypes in ((expand, self._loads), (round_weights, self._checks)):
            for dtype in sorted(set(dtypes)):
                weight = np.zeros(NORM_BLOCK, DTYPES[dtype])
                yield kernel, (weight, master) if kernel is expand else (master, weight)

    def _hot_calls(self, variant: Variant) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
        """The calls that may happen inside backward, with arguments of the right types."""
        select = np.zeros(1, np.uint8)
        rows = np.zeros((1, self.rule.num_columns), np.float32)
        sums, nonfinite = np.zeros(1), np.zeros(1, np.uint8)
        tile = _example_tile(variant, self.rule)
        yield self.rule.kernel, self._update_arguments(tile, rows, select)
        if self._measures:
            arguments = (tile.grad, tile.acc, sums, nonfinite, tile.blocks, select, self.flush_denormals)
            yield square_sums_of_tile, arguments
        if tile.acc is not None:
            yield expand, (tile.grad, tile.acc)
            yield accumulate_next, (tile.grad, tile.acc, self.flush_denormals)


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _is_signed(name: str) -> bool:
    """Whether a moment has a sign; what a square root is taken of has none."""
    return not name.endswith("_sq")


def _example_tile(variant: Variant, rule: KernelRule) -> TileArrays:
    """Arrays with the types of a variant."""
    fp32 = np.zeros(NORM_BLOCK, np.float32)
    moments = tuple(np.zeros(NORM_BLOCK // array.per, array.dtype) for array in rule.stored)
    return TileArrays(
        grad=np.zeros(NORM_BLOCK, DTYPES[variant.grad]),
        acc=fp32 if variant.acc else None,
        master=fp32,
        moments=moments,
        weight=None if variant.weight is None else np.zeros(NORM_BLOCK, DTYPES[variant.weight]),
        sums=np.zeros(1) if variant.sums else None,
        nonfinite=np.zeros(1, np.uint8) if variant.sums else None,
        blocks=np.zeros((0, 3), np.int64),
        new_state=(fp32, *moments) if variant.new_state else None,
    )
