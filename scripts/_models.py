"""Decoder language models for the scripts: a byte-level GPT to train, Qwen3's shape to measure.

Parameters are stored in the dtype they are built or cast to (BF16 in all scripts). On a CPU the arithmetic
between them is FP32, because most CPUs have no BF16 matrix units and are twenty times slower without:
weights and gradients stay BF16 all the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from _loss import linear_cross_entropy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INIT_STD = 0.02


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder with grouped-query attention, gated MLPs and an output head tied to its embedding."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6

    def with_sizes(self, num_layers: int | None = None, hidden: int | None = None) -> DecoderShape:
        """The same architecture with other depth or width (MLP and head count scale with the width)."""
        shape = self if num_layers is None else replace(self, num_layers=num_layers)
        if hidden is None:
            return shape
        num_heads = max(1, hidden * shape.num_heads // shape.hidden)
        return replace(
            shape,
            hidden=hidden,
            intermediate=hidden * shape.intermediate // shape.hidden,
            num_heads=num_heads,
            num_kv_heads=max(1, num_heads * shape.num_kv_heads // shape.num_heads),
        )


SHAPES = {
    "qwen3-4b": DecoderShape(36, 2560, 9728, 32, 8, 128, 151_936),
    "qwen3-1.7b": DecoderShape(28, 2048, 6144, 16, 8, 128, 151_936),
    "qwen3-0.6b": DecoderShape(28, 1024, 3072, 16, 8, 128, 151_936),
    "tiny": DecoderShape(2, 64, 192, 4, 2, 16, 512),
    # byte-level GPTs for scripts/train.py
    "bytes-small": DecoderShape(4, 256, 768, 4, 4, 64, 256, rope_theta=1e4),
    "bytes-base": DecoderShape(24, 1024, 3072, 16, 16, 64, 256, rope_theta=1e4),
}


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
        self.mlp = MLP(shape)

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


class LanguageModel(nn.Module):
    """A backbone and its tied head; ``forward`` gives the mean next-token loss."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.backbone(ids)
        hidden = getattr(hidden, "last_hidden_state", hidden)
        head: Any = self.backbone.embed_tokens  # looked up here: fully_shard replaces its weight
        return linear_cross_entropy(hidden.flatten(0, 1), head.weight.to(hidden.dtype), targets.flatten())


def build_model(
    shape: DecoderShape,
    device: torch.device,
    *,
    dtype: torch.dtype,
    implementation: str = "auto",
    checkpointing: bool = True,
    seed: int = 0,
) -> LanguageModel:
    """A model with random weights, made on ``device`` in ``dtype``; the same seed gives the same weights.

    ``implementation`` is ``plain`` (the modules above), ``transformers`` (its Qwen3), or ``auto``: the
    latter where the package is installed.
    """
    if implementation == "auto":
        implementation = "transformers" if importlib.util.find_spec("transformers") else "plain"
    torch.manual_seed(seed)
    with device, _default_dtype(dtype):
        if implementation == "transformers":
            backbone: Any = _transformers_backbone(shape, checkpointing)
        else:
            backbone = Decoder(shape, checkpointing=checkpointing)
            _initialize(backbone)
    return LanguageModel(backbone).train()


def implementation_of(model: LanguageModel) -> str:
    """``plain`` or ``transformers``."""
    return "plain" if isinstance(model.backbone, Decoder) else "transformers"


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


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


def _initialize(backbone: nn.Module) -> None:
    for parameter in backbone.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=INIT_STD)


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
