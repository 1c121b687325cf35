"""Parameters → chunks → tiles: where each element of the state lives. Pure; knows no tensor.

A *chunk* is a flat range of elements. Each parameter of it starts on a boundary of `ALIGN` elements, so that
blocks of the norm never straddle parameters or tiles; what lies between a parameter's end and the next boundary
is padding that nobody reads. A *tile* is a fixed-size slice of that range; the part of one parameter inside one
tile is a *piece*.

All parameters of a chunk have the same `Kind` (dtype of gradient and weight), so a tile is one array of each:
a layer with FP32 routers among BF16 weights makes two chunks. Inside a chunk parameters stand in reverse order of
registration, which is about the order in which backward finishes them: tiles fill up from the front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["ALIGN", "Chunk", "Kind", "ParamSpec", "Piece", "Span", "Tile", "build_chunks", "layer_namer"]

ALIGN = 1024
"""Elements; the one alignment rule of this library."""

UNNAMED_CHUNK_NUMEL = 64 * 1024 * 1024
"""Where parameters have no names, consecutive ones are put together up to this many elements."""

LAYER_NAMES = r"^(?:.*\.)?(?:layers?|h|blocks?)\.\d+(?=\.)"


@dataclass(frozen=True, order=True)
class Kind:
    """Dtypes of a chunk: ``"bf16"`` or ``"fp32"`` each."""

    grad: str
    weight: str

    @property
    def grad_bytes(self) -> int:
        """Bytes of one gradient element."""
        return 2 if self.grad == "bf16" else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes of one compute-weight element."""
        return 2 if self.weight == "bf16" else 4


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of a parameter. `index` is its position among the optimizer's parameters."""

    index: int
    name: str | None
    numel: int
    kind: Kind


@dataclass(frozen=True)
class Span:
    """A parameter's place in its chunk: elements [start, start + numel) and its row of hyperparameters."""

    param: int
    row: int
    start: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one tile."""

    param: int
    row: int
    param_start: int
    tile_start: int
    numel: int


@dataclass(frozen=True)
class Tile:
    """Elements [start, stop) of a chunk, both multiples of `ALIGN`."""

    chunk: int
    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """The parameters of one layer (or a part of what is in no layer) and the tiles that cover them."""

    index: int
    name: str
    kind: Kind
    spans: tuple[Span, ...]
    tile_numel: int

    @cached_property
    def numel(self) -> int:
        """Elements of the flat range, padding included."""
        return sum(_aligned(span.numel) for span in self.spans)

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles, in order; every one but the last has `tile_numel` elements."""
        bounds = [
            (start, min(start + self.tile_numel, self.numel))
            for start in range(0, self.numel, self.tile_numel)
        ]
        pieces: list[list[Piece]] = [[] for _ in bounds]
        for span in self.spans:
            for tile in range(span.start // self.tile_numel, _last_tile(span, self.tile_numel) + 1):
                pieces[tile].append(_cut(span, *bounds[tile]))
        return tuple(
            Tile(self.index, i, start, stop, tuple(cut))
            for i, ((start, stop), cut) in enumerate(zip(bounds, pieces, strict=True))
        )


def build_chunks(
    params: Sequence[ParamSpec],
    *,
    tile_numel: int,
    first_index: int = 0,
    chunk_by: str | Callable[[str], str | None] | None = None,
    chunk_numel: int | None = None,
) -> list[Chunk]:
    """Group `params` into chunks: one per layer and `Kind`, then what belongs to no layer.

    What is in no layer is split into misc chunks no larger than the largest layer, as far as whole parameters
    allow. Without names, consecutive parameters are put together by size.

    Args:
        params: in the optimizer's order.
        tile_numel: elements of a tile, a multiple of `ALIGN`.
        first_index: index of the first chunk (chunks are numbered over the optimizer's life).
        chunk_by: as `OffloadConfig.chunk_by`.
        chunk_numel: elements of a chunk, beyond which layers are cut too; None: a layer is one chunk.
    """
    name_of = layer_namer(chunk_by)
    layers: dict[tuple[str, Kind], list[ParamSpec]] = {}
    rest: dict[Kind, list[ParamSpec]] = {}
    for param in params:
        layer = name_of(param.name) if param.name is not None else None
        if layer is None:
            rest.setdefault(param.kind, []).append(param)
        else:
            layers.setdefault((layer, param.kind), []).append(param)
    limit = max((sum(p.numel for p in members) for members in layers.values()), default=UNNAMED_CHUNK_NUMEL)
    most = limit if chunk_numel is None else min(limit, chunk_numel)
    named = [(layer, "/", kind, members) for (layer, kind), members in layers.items()]
    named += [("misc", ".", kind, members) for kind, members in rest.items()]
    groups = []
    for name, dot, kind, members in named:
        parts = _split(members, most)
        names = [name] if len(parts) == 1 else [f"{name}{dot}{i}" for i in range(len(parts))]
        groups += [(_chunk_name(part, kind), kind, each) for part, each in zip(names, parts, strict=True)]
    return [
        Chunk(first_index + i, name, kind, _place(members), tile_numel)
        for i, (name, kind, members) in enumerate(groups)
    ]


def layer_namer(chunk_by: str | Callable[[str], str | None] | None) -> Callable[[str], str | None]:
    """A function from a parameter's name to its layer's name, or None where it belongs to no layer."""
    if callable(chunk_by):
        return chunk_by
    pattern = re.compile(chunk_by or LAYER_NAMES)

    def name_of(parameter: str) -> str | None:
        match = pattern.search(parameter)
        return match.group(0) if match else None

    return name_of


def _chunk_name(layer: str, kind: Kind) -> str:
    return layer if kind == Kind("bf16", "bf16") else f"{layer} ({kind.weight})"


def _split(params: Iterable[ParamSpec], limit: int) -> list[list[ParamSpec]]:
    """Consecutive runs whose sizes stay within `limit` where they hold more than one parameter."""
    parts: list[list[ParamSpec]] = []
    size = 0
    for param in params:
        if not parts or size + param.numel > limit:
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += param.numel
    return parts


def _place(params: Sequence[ParamSpec]) -> tuple[Span, ...]:
    spans = []
    start = 0
    for row, param in enumerate(reversed(params)):
        spans.append(Span(param.index, row, start, param.numel))
        start += _aligned(param.numel)
    return tuple(spans)


def _cut(span: Span, start: int, stop: int) -> Piece:
    first, last = max(span.start, start), min(span.start + span.numel, stop)
    return Piece(span.param, span.row, first - span.start, first - start, last - first)


def _last_tile(span: Span, tile_numel: int) -> int:
    """Index of the last tile that the span reaches; before the first one where the span is empty."""
    return (span.start + span.numel - 1) // tile_numel if span.numel else span.start // tile_numel - 1


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN
