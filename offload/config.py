"""Options as values: `OffloadConfig` and the words that the constructors accept."""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from offload.errors import ConfigError

__all__ = [
    "BACKENDS",
    "CLIP_POLICIES",
    "MODES",
    "MOMENTS",
    "NONFINITE_POLICIES",
    "OffloadConfig",
    "check_choice",
    "check_moments",
    "require_match",
    "sample",
]

T = TypeVar("T")

MODES = ("resident", "all-at-once", "chunked-sync", "chunked-stream", "wavefront", "hybrid", "auto")
"""Where state lives and when it is stepped; the table in docs/architecture.md says which is which."""

BACKENDS = ("numba", "torch")
"""Who computes on the host: our kernels, or fused ``torch.optim`` (for parity)."""

CLIP_POLICIES = ("speculate", "defer", "auto")
"""How a wavefront clips; ``auto`` chooses between the others, step by step."""

NONFINITE_POLICIES = ("propagate", "skip", "raise")
"""What happens to a step whose gradients hold an inf or a NaN."""

MOMENTS = ("fp32", "bf16", "int8")
"""How moments are kept in host memory; docs/numerics.md has what the reduced ones cost in accuracy."""

BACKLOG_TILES, OVERLAPPED_BACKLOG_TILES = 32, 48

TILE_ALIGN = 1024
"""Tiles are multiples of this many elements (see layout.ALIGN)."""


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`, else raise `ConfigError` naming the argument."""
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}")
    return value


def check_moments(config: OffloadConfig, what: str, good: bool) -> None:
    """Raise where `config` asks for reduced moments and `what`, an option with its value, has none (not `good`).

    Raises:
        ConfigError: names both options.
    """
    if config.moments != "fp32" and not good:
        raise ConfigError(
            f"config.moments={config.moments!r} with {what}: reduced moments are for offload.AdamW with backend='numba' in "
            "mode='wavefront', which mode='auto' chooses with them; choose that, or leave moments='fp32'"
        )


SHOWN = 4


def sample(names: Sequence[str]) -> str:
    """A few of `names`, from all over, for a message."""
    number = min(len(names), SHOWN)
    some = [names[i * len(names) // number] for i in range(number)]
    return ", ".join(some) + (f" and {len(names) - len(some)} more" if len(names) > len(some) else "")


def require_match(option: str, pattern: object, names: Sequence[str], remedy: str) -> None:
    """Raise where the regular expression `pattern` is found in none of `names`: it would change nothing, in silence.

    A function in its place may choose none.

    Args:
        option: its name, for the message.
        remedy: what else the caller may have meant.

    Raises:
        ConfigError: names the pattern and shows names.
    """
    if isinstance(pattern, str) and not any(map(re.compile(pattern).search, names)):
        raise ConfigError(
            f"{option}={pattern!r} matches none of the {len(names)} names ({sample(names)}): correct it, or {remedy}"
        )


def _knowing_its_fields(cls: type[T]) -> type[T]:
    """Of a dataclass: a field that it does not have is refused with the nearest one that it has."""
    made_init = cls.__init__

    @functools.wraps(made_init)
    def init(self: T, *args: Any, **given: Any) -> None:
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in [name for name in given if name not in known]:
            nearest = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
            raise ConfigError(f"{cls.__name__} has no field {name!r} (given {given[name]!r}): {meant}")
        made_init(self, *args, **given)

    setattr(cls, "__init__", init)  # noqa: B010 - mypy refuses the plain assignment
    return cls


@_knowing_its_fields
@dataclass(frozen=True)
class OffloadConfig:
    """How the optimizer uses the machine. No field but `moments` changes a single bit of the result.

    Raises:
        ConfigError: a field is out of its range, or there is none of that name; the message names it.
    """

    tile_numel: int = 8 * 1024 * 1024
    """Elements in one tile, the unit of one transfer and one kernel call; a multiple of 1024."""

    ring_slots: int = 16
    """Pinned slots in each of the two rings (gradients in, weights out); at least 2."""

    backlog_tiles: int | None = None
    """Tiles whose gradients may wait on the device for the worker before backward is held up; at least 1. None: 32, or 48
    where the next forward overlaps the update; there, more of them may wait in the room that backward frees on its way
    (`offload.schedule.backward_room`)."""

    host_budget: int | None = None
    """Bytes of host memory that the optimizer may map; None: what the machine and its cgroup leave free."""

    device_budget: int | None = None
    """Bytes of device memory that optimizer state may take; None: ``mode="auto"`` asks the allocator."""

    pinned_budget: int | None = None
    """Bytes of host memory that may be pinned; None: no limit but the system's own."""

    stream_share: float | None = None
    """Of ``mode="hybrid"``: how much of the state that is in host memory is stepped on the device, 0 to 1; None: planned
    from measured rates."""

    timeout_s: float = 300.0
    """Seconds after which a wait for the worker raises `DeadlineError`."""

    threads: int | None = None
    """Threads of the host kernels; None: `configure_cpu_optimizer_threads` decides."""

    numa_bind: bool = True
    """Bind the worker (not the process) to the CPUs of the GPU's NUMA node, where that is known."""

    chunk_by: str | Callable[[str], str | None] | None = None
    """Names to layers: a regular expression whose whole match is the layer's name, or a callable that
    returns it (None: the parameter belongs to no layer); None: the usual names of transformer layers. It needs names
    (``named_parameters()``), and an expression has to match one of them."""

    rank_local: str | Callable[[str], bool] | None = None
    """Names of parameters that are plain tensors among sharded ones and differ between ranks (a regular expression that
    is searched for, or a predicate); None: plain tensors are replicas, the same on all ranks."""

    kernel_cache_dir: str | None = None
    """Folder for compiled kernels; None: compile once per process and write nothing."""

    moments: str = "fp32"
    """How AdamW's moments are kept in host memory: ``"fp32"``; ``"bf16"``, rounded stochastically, 8 bytes of state per
    parameter instead of 12; or ``"int8"``, quantized in blocks of 1024, 6 bytes. Reduced ones change results: by how much is
    in docs/numerics.md. They are for mode ``"wavefront"`` and backend ``"numba"``."""

    def __post_init__(self) -> None:
        self._check_types()
        self._check(
            "tile_numel",
            self.tile_numel >= TILE_ALIGN and self.tile_numel % TILE_ALIGN == 0,
            f"a positive multiple of {TILE_ALIGN}",
        )
        self._check("ring_slots", self.ring_slots >= 2, "at least 2")
        self._check("backlog_tiles", self.backlog_tiles is None or self.backlog_tiles >= 1, "at least 1")
        for budget in ("host_budget", "device_budget", "pinned_budget"):
            value = getattr(self, budget)
            self._check(budget, value is None or value >= 0, "bytes, zero or more, or None")
        share = self.stream_share
        self._check("stream_share", share is None or 0.0 <= share <= 1.0, "a number from 0 to 1, or None")
        self._check("timeout_s", self.timeout_s > 0, "more than 0 seconds")
        self._check("threads", self.threads is None or self.threads >= 1, "at least 1, or None")
        folder = self.kernel_cache_dir
        self._check(
            "kernel_cache_dir", folder is None or isinstance(folder, str | os.PathLike), "a folder, or None"
        )
        self._check("moments", self.moments in MOMENTS, f"one of {', '.join(map(repr, MOMENTS))}")
        self._check_pattern("chunk_by", self.chunk_by)
        self._check_pattern("rank_local", self.rank_local)

    def check_names(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise where `chunk_by` says nothing of any parameter.

        Args:
            groups: the param groups that the optimizer begins with; names of frozen parameters count, which may be trained
                later.

        Raises:
            ConfigError: there are no names, or the expression matches none.
        """
        names = [name for group in groups for name in group.get("param_names") or ()]
        if self.chunk_by is not None and not names:
            raise ConfigError(
                f"config.chunk_by={self.chunk_by!r}: the parameters have no names that it could be asked of; pass "
                "model.named_parameters() to the optimizer, or leave chunk_by out"
            )
        require_match(
            "config.chunk_by", self.chunk_by, names, "leave it out for the usual names of transformer layers"
        )

    def num_backlog_tiles(self, *, overlaps_forward: bool = False) -> int:
        """`backlog_tiles`, or its default."""
        if self.backlog_tiles is not None:
            return self.backlog_tiles
        return OVERLAPPED_BACKLOG_TILES if overlaps_forward else BACKLOG_TILES

    def is_rank_local(self, name: str) -> bool:
        """Whether the plain parameter called `name` differs between ranks; see `rank_local`."""
        if self.rank_local is None or callable(self.rank_local):
            return self.rank_local is not None and self.rank_local(name)
        return re.search(self.rank_local, name) is not None

    def _check_pattern(self, field: str, pattern: object) -> None:
        named = pattern is None or isinstance(pattern, str) or callable(pattern)
        self._check(field, named, "a regular expression, a callable or None")
        if isinstance(pattern, str):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"config.{field}={pattern!r} is no regular expression: {error}") from None

    def _check_types(self) -> None:
        whole = ("tile_numel", "ring_slots")
        optional = ("backlog_tiles", "host_budget", "device_budget", "pinned_budget", "threads")
        for field in (*whole, *optional):
            value = getattr(self, field)
            self._check(field, _is_int(value) or (value is None and field in optional), "an integer")
        self._check("timeout_s", isinstance(self.timeout_s, int | float), "a number of seconds")
        share = self.stream_share
        self._check(
            "stream_share", share is None or isinstance(share, int | float), "a number from 0 to 1, or None"
        )

    def _check(self, field: str, good: bool, expected: str) -> None:
        if not good:
            raise ConfigError(f"config.{field}={getattr(self, field)!r}: expected {expected}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
