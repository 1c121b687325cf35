"""The parameters of a model by name, and the chunks that the optimizer makes of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from offload.cli.model_shape import ModelShape
from offload.layout import Chunk, Kind, ParamSpec, build_chunks
from offload.schedule.mode_costs import ChunkSize

__all__ = ["chunk_sizes", "parameters", "stages"]


def parameters(shape: ModelShape) -> Iterator[tuple[str, int]]:
    """Name and elements of each, in the order in which transformers registers them; all experts of a layer are two."""
    hidden = shape.hidden
    yield "embed_tokens.weight", shape.embedding_numel
    for index in range(shape.num_layers):
        sparse = index >= shape.num_layers - shape.num_sparse_layers
        members = (*_attention(shape), *(_experts(shape) if sparse else _mlp(hidden, shape.intermediate)))
        for name, numel in (*members, ("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            yield f"layers.{index}.{name}", numel
    yield "norm.weight", hidden
    if not shape.tied:
        yield "lm_head.weight", shape.embedding_numel


@lru_cache
def chunk_sizes(
    shape: ModelShape, *, ranks: int, dtype: str, tile_numel: int, chunk_numel: int | None = None
) -> tuple[ChunkSize, ...]:
    """What `offload.layout` makes of one rank's shards: a chunk per layer, or several of about `chunk_numel` elements."""
    specs = [
        ParamSpec(index, name, -(-numel // ranks), Kind(dtype, dtype))
        for index, (name, numel) in enumerate(parameters(shape))
    ]
    chunks = build_chunks(specs, tile_numel=tile_numel, chunk_numel=chunk_numel)
    return tuple(_size(chunk) for chunk in chunks)


def stages(shape: ModelShape) -> list[str]:
    """Where in backward each parameter's gradient is complete: ``head``, a layer's name, or ``embedding``."""
    return [_stage(name) for name, _ in parameters(shape)]


def _stage(name: str) -> str:
    layer = re.match(r"layers\.\d+", name)
    if layer is not None:
        return layer.group()
    return "embedding" if name.startswith("embed_tokens") else "head"


def _size(chunk: Chunk) -> ChunkSize:
    first = min(span.param for span in chunk.spans)
    return ChunkSize(
        chunk.name, chunk.numel, first, chunk.kind.grad_bytes, chunk.kind.weight_bytes, len(chunk.spans)
    )


def _attention(shape: ModelShape) -> Iterator[tuple[str, int]]:
    widths = {"q_proj": shape.attention_width, "k_proj": shape.kv_width, "v_proj": shape.kv_width}
    for name, width in widths.items():
        yield f"self_attn.{name}.weight", shape.hidden * width
        if shape.qkv_bias:
            yield f"self_attn.{name}.bias", width
    yield "self_attn.o_proj.weight", shape.hidden * shape.attention_width
    if shape.qk_norm:
        yield "self_attn.q_norm.weight", shape.head_dim
        yield "self_attn.k_norm.weight", shape.head_dim


def _mlp(hidden: int, width: int, prefix: str = "mlp") -> Iterator[tuple[str, int]]:
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield f"{prefix}.{name}.weight", hidden * width


def _experts(shape: ModelShape) -> Iterator[tuple[str, int]]:
    one, number = shape.hidden * shape.expert_intermediate, shape.num_experts
    yield "mlp.gate.weight", number * shape.hidden
    yield "mlp.experts.gate_up_proj", number * 2 * one
    yield "mlp.experts.down_proj", number * one
    if shape.shared_intermediate:
        yield from _mlp(shape.hidden, shape.shared_intermediate, "mlp.shared_expert")
        yield "mlp.shared_expert_gate.weight", shape.hidden
