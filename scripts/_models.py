"""Decoder language models for the scripts: a byte-level GPT to train, the shapes of Qwen3 and its experts to measure.

Parameters are stored in the dtype they are built or cast to (BF16 in all scripts). On a CPU the arithmetic
between them is FP32, because most CPUs have no BF16 matrix units and are twenty times slower without:
weights and gradients stay BF16 all the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from _experts import SparseMLP
from _loss import linear_cross_entropy
from _shapes import DecoderShape
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.distributed import local_shard, shard_of

INIT_STD = 0.02


class Linear(nn.Linear):
    """A linear layer without bias that computes in its input's dtype, whatever its weight is stored in."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with normalized queries and keys, as Qwen3 has it."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.grouped = shape.num_heads != shape.num_kv_heads
        self.q_proj = Linear(shape.hidden, width)
        self.k_proj = Linear(shape.hidden, kv_width)
        self.v_proj = Linear(shape.hidden, kv_width)
        self.o_proj = Linear(width, shape.hidden)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = _rotate(self.q_norm(q).transpose(1, 2), rotation)
        k = _rotate(self.k_norm(k).transpose(1, 2), rotation)
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate)
        self.up_proj = Linear(shape.hidden, shape.intermediate)
        self.down_proj = Linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = _mlp_of(shape)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Token ids [batch, length] to final hidden states [batch, length, hidden]."""

    def __init__(self, shape: DecoderShape, *, checkpointing: bool) -> None:
        super().__init__()
        self.shape = shape
        self.checkpointing = checkpointing
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        if x.device.type == "cpu":
            x = x.float()
        rotation = _rotation(ids.shape[1], self.shape, x)
        for layer in self.layers:
            if self.checkpointing and self.training:
                x = checkpoint(layer, x, rotation, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, rotation)
        return self.norm(x)


class Head(nn.Module):
    """An output head of its own, with the loss in its forward: FSDP gathers its weight for that alone."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocabulary, shape.hidden))

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.weight.to(hidden.dtype), targets)


class LanguageModel(nn.Module):
    """A backbone and its head, None where that is tied to the embedding; ``forward`` gives the mean next-token loss."""

    def __init__(self, backbone: nn.Module, head: Head | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.backbone(ids)
        hidden = getattr(hidden, "last_hidden_state", hidden).flatten(0, 1)
        if self.head is not None:
            loss: Tensor = self.head(hidden, targets.flatten())
            return loss
        embedding: Any = self.backbone.embed_tokens  # looked up here: fully_shard replaces its weight
        return linear_cross_entropy(hidden, embedding.weight.to(hidden.dtype), targets.flatten())


def build_model(
    shape: DecoderShape,
    device: torch.device,
    *,
    dtype: torch.dtype,
    implementation: str = "auto",
    checkpointing: bool = True,
    seed: int = 0,
    shard: Callable[[nn.Module], None] = lambda model: None,
) -> LanguageModel:
    """A model with random weights on ``device``, in ``dtype``; the same seed gives the same weights.

    Args:
        implementation: ``plain`` (the modules above), ``transformers`` (its Qwen3, dense shapes only), or ``auto``: the
            latter where the package is installed and has the shape.
        shard: divides the model among ranks, before the plain one takes any memory: so it may be larger than a device. The
            weights are the same on any number of ranks.
    """
    if implementation == "auto":
        found = not shape.num_experts and importlib.util.find_spec("transformers")
        implementation = "transformers" if found else "plain"
    if implementation == "transformers":
        return _build_transformers(shape, device, dtype, checkpointing, seed, shard)
    with torch.device("meta"), _default_dtype(dtype):
        model = LanguageModel(
            Decoder(shape, checkpointing=checkpointing), None if shape.tied else Head(shape)
        )
    shard(model)
    model.to_empty(device=device)
    _initialize(model, device, seed)
    return model.train()


def implementation_of(model: LanguageModel) -> str:
    """``plain`` or ``transformers``."""
    return "plain" if isinstance(model.backbone, Decoder) else "transformers"


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _mlp_of(shape: DecoderShape) -> nn.Module:
    if not shape.num_experts:
        return MLP(shape)
    return SparseMLP(shape.hidden, shape.num_experts, shape.experts_per_token, shape.expert_intermediate)


def _build_transformers(
    shape: DecoderShape,
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: bool,
    seed: int,
    shard: Callable[[nn.Module], None],
) -> LanguageModel:
    if shape.num_experts:
        raise SystemExit(
            "--implementation transformers: only of dense shapes; this one has experts, take plain"
        )
    torch.manual_seed(seed)
    with device, _default_dtype(dtype):
        model = LanguageModel(_transformers_backbone(shape, checkpointing))
    shard(model)
    return model.train()


def _transformers_backbone(shape: DecoderShape, checkpointing: bool) -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        initializer_range=INIT_STD,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    backbone = Qwen3Model(config)
    if checkpointing:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return backbone


@torch.no_grad()
def _initialize(model: nn.Module, device: torch.device, seed: int) -> None:
    """Norms are one. A sharded weight is drawn whole, one at a time, and cut: every rank draws the same."""
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        full.normal_(std=INIT_STD, generator=generator)
        local_shard(parameter).copy_(shard_of(full, parameter))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _rotation(length: int, shape: DecoderShape, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, each [length, head_dim]."""
    exponent = torch.arange(0, shape.head_dim, 2, device=like.device, dtype=torch.float32) / shape.head_dim
    position = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(position, shape.rope_theta**-exponent).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
