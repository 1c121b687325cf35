"""Layout: every element lies in exactly one piece, and nothing straddles what it must not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.config import TILE_ALIGN
from offload.layout import ALIGN, UNNAMED_CHUNK_NUMEL, Chunk, Kind, ParamSpec, build_chunks, layer_namer

BF16, FP32 = Kind("bf16", "bf16"), Kind("fp32", "fp32")
KINDS = (BF16, FP32, Kind("fp32", "bf16"), Kind("bf16", "fp32"))
NAMES = (
    None,
    "embed.weight",
    "head.weight",
    "encoder.layers.0.w",
    "encoder.layers.1.w",
    "decoder.layers.0.w",
    "h.0.w",
)
CHUNK_BY = (None, r"^\w+\.layers", lambda name: name.split(".")[0], lambda name: None)

numels = st.sampled_from([0, 1, ALIGN - 1, ALIGN, ALIGN + 1, 5 * ALIGN]) | st.integers(0, 9 * ALIGN)
params = st.lists(st.tuples(st.sampled_from(NAMES), numels, st.sampled_from(KINDS)), max_size=12)


def specs(*items: tuple[str | None, int], kind: Kind = BF16) -> list[ParamSpec]:
    return [ParamSpec(index, name, numel, kind) for index, (name, numel) in enumerate(items)]


def chunk_members(chunks: list[Chunk]) -> dict[str, set[int]]:
    return {chunk.name: {span.param for span in chunk.spans} for chunk in chunks}


@given(params, st.integers(1, 5), st.integers(0, 3), st.sampled_from(CHUNK_BY))
def test_every_layout(
    items: list[tuple[str | None, int, Kind]],
    tile_blocks: int,
    first_index: int,
    chunk_by: str | Callable[[str], str | None] | None,
) -> None:
    given_params = {10 + i: ParamSpec(10 + i, *item) for i, item in enumerate(items)}
    tile_numel = tile_blocks * ALIGN
    chunks = build_chunks(
        list(given_params.values()), tile_numel=tile_numel, first_index=first_index, chunk_by=chunk_by
    )
    assert [chunk.index for chunk in chunks] == list(range(first_index, first_index + len(chunks)))
    assert sorted(span.param for chunk in chunks for span in chunk.spans) == sorted(given_params)
    covered = {index: np.zeros(param.numel, int) for index, param in given_params.items()}
    for chunk in chunks:
        check_spans(chunk, given_params)
        check_tiles(chunk, tile_numel)
        for tile in chunk.tiles:
            for piece in tile.pieces:
                covered[piece.param][piece.param_start : piece.param_start + piece.numel] += 1
    assert all((count == 1).all() for count in covered.values())


def check_spans(chunk: Chunk, given_params: dict[int, ParamSpec]) -> None:
    """Spans are aligned, of one kind, do not overlap, and stand in reverse order of registration."""
    assert {given_params[span.param].kind for span in chunk.spans} == {chunk.kind}
    assert [span.row for span in chunk.spans] == list(range(len(chunk.spans)))
    assert [span.param for span in chunk.spans] == sorted((s.param for s in chunk.spans), reverse=True)
    end = 0
    for span in chunk.spans:
        assert span.numel == given_params[span.param].numel
        assert span.start % ALIGN == 0
        assert 0 <= span.start - end < ALIGN
        end = span.start + span.numel
    assert chunk.numel % ALIGN == 0
    assert 0 <= chunk.numel - end < ALIGN


def check_tiles(chunk: Chunk, tile_numel: int) -> None:
    """Tiles follow each other without a gap; a piece lies in its tile where its parameter lies in the chunk."""
    spans = {span.param: span for span in chunk.spans}
    assert [tile.index for tile in chunk.tiles] == list(range(len(chunk.tiles)))
    assert {tile.chunk for tile in chunk.tiles} <= {chunk.index}
    assert [tile.start for tile in chunk.tiles] == list(range(0, chunk.numel, tile_numel))
    assert [tile.stop for tile in chunk.tiles[:-1]] == [tile.start for tile in chunk.tiles[1:]]
    assert not chunk.tiles or chunk.tiles[-1].stop == chunk.numel
    for tile in chunk.tiles:
        assert tile.start % ALIGN == tile.stop % ALIGN == 0
        assert 0 < tile.numel <= tile_numel
        assert tile.pieces
        end = 0
        for piece in tile.pieces:
            span = spans[piece.param]
            assert piece.numel > 0
            assert piece.row == span.row
            assert tile.start + piece.tile_start == span.start + piece.param_start
            assert end <= piece.tile_start
            end = piece.tile_start + piece.numel
        assert end <= tile.numel


def test_alignment_is_the_same_in_config() -> None:
    assert TILE_ALIGN == ALIGN


def test_no_parameters_make_no_chunks() -> None:
    assert build_chunks([], tile_numel=ALIGN) == []


def test_empty_and_scalar_parameters() -> None:
    """An empty shard has a span, so that it has a row, but no piece; a 0-dim parameter has one element."""
    (chunk,) = build_chunks(specs(("a", 0), ("b", 1), ("c", 0)), tile_numel=ALIGN)
    assert {span.param for span in chunk.spans} == {0, 1, 2}
    assert [(p.param, p.numel) for tile in chunk.tiles for p in tile.pieces] == [(1, 1)]


def test_only_empty_parameters_make_no_tile() -> None:
    (chunk,) = build_chunks(specs(("a", 0), ("b", 0)), tile_numel=ALIGN)
    assert (chunk.numel, chunk.tiles) == (0, ())


def test_equal_layer_indices_under_different_prefixes_are_different_layers() -> None:
    chunks = build_chunks(
        specs(("encoder.layers.0.w", 1), ("decoder.layers.0.w", 1), ("encoder.layers.0.b", 1)),
        tile_numel=ALIGN,
    )
    assert chunk_members(chunks) == {"encoder.layers.0": {0, 2}, "decoder.layers.0": {1}}


def test_layer_1_is_not_layer_10() -> None:
    chunks = build_chunks(specs(("layers.1.w", 1), ("layers.10.w", 1)), tile_numel=ALIGN)
    assert chunk_members(chunks) == {"layers.1": {0}, "layers.10": {1}}


def test_kinds_of_one_layer_are_chunks_of_their_own() -> None:
    router = ParamSpec(1, "layers.0.router", 8, FP32)
    chunks = build_chunks([*specs(("layers.0.w", 8)), router], tile_numel=ALIGN)
    assert chunk_members(chunks) == {"layers.0": {0}, "layers.0 (fp32)": {1}}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((40, 60, 100, 1), [{1, 2}, {3}, {4}]),
        ((500, 1), [{1}, {2}]),
        ((1, 500), [{1}, {2}]),
        ((0, 100, 0), [{1, 2, 3}]),
    ],
)
def test_misc_is_split_by_the_largest_layer(sizes: tuple[int, ...], expected: list[set[int]]) -> None:
    """Whole parameters, in order; one that is larger than the limit is alone."""
    rest = [(f"x{i}", size) for i, size in enumerate(sizes)]
    chunks = build_chunks(specs(("layers.0.w", 100), *rest), tile_numel=ALIGN)
    misc = {name: members for name, members in chunk_members(chunks).items() if name.startswith("misc")}
    assert list(misc.values()) == expected
    assert list(misc) == (["misc"] if len(expected) == 1 else [f"misc.{i}" for i in range(len(expected))])


def test_unnamed_parameters_are_put_together_by_size() -> None:
    half = UNNAMED_CHUNK_NUMEL // 2
    chunks = build_chunks(specs((None, half), (None, half), (None, 1)), tile_numel=ALIGN)
    assert chunk_members(chunks) == {"misc.0": {0, 1}, "misc.1": {2}}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.up.weight", "model.layers.12"),
        ("transformer.h.3.attn.bias", "transformer.h.3"),
        ("h.3.attn.bias", "h.3"),
        ("vit.blocks.0.norm.weight", "vit.blocks.0"),
        ("bert.encoder.layer.7.output.dense.weight", "bert.encoder.layer.7"),
        ("model.embed_tokens.weight", None),
        ("depth.3.w", None),
        ("path.h.w", None),
        ("layers.0", None),
    ],
)
def test_usual_names_of_layers(name: str, layer: str | None) -> None:
    assert layer_namer(None)(name) == layer


def test_a_regex_names_the_layer_by_its_whole_match() -> None:
    name_of = layer_namer(r"stage(\d)")
    assert (name_of("net.stage2.w"), name_of("net.w")) == ("stage2", None)


@pytest.mark.parametrize(
    ("grad", "weight", "sizes"),
    [("bf16", "bf16", (2, 2)), ("fp32", "bf16", (4, 2)), ("bf16", "fp32", (2, 4))],
)
def test_bytes_of_a_kind(grad: str, weight: str, sizes: tuple[int, int]) -> None:
    assert (Kind(grad, weight).grad_bytes, Kind(grad, weight).weight_bytes) == sizes
