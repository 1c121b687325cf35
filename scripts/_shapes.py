"""Sizes of the models that the scripts build."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.cli.model_shape import ModelShape


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder with grouped-query attention and gated MLPs.

    `tied`: whether the output head is the embedding. `num_experts`: 0 for a dense model; else every layer has so many MLPs
    of width `expert_intermediate`, of which a token visits `experts_per_token`, and `intermediate` means nothing.
    """

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tied: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0

    def with_sizes(self, num_layers: int | None = None, hidden: int | None = None) -> DecoderShape:
        """The same architecture with other depth or width (MLPs and head count scale with the width)."""
        shape = self if num_layers is None else replace(self, num_layers=num_layers)
        if hidden is None:
            return shape
        num_heads = max(1, hidden * shape.num_heads // shape.hidden)
        return replace(
            shape,
            hidden=hidden,
            intermediate=hidden * shape.intermediate // shape.hidden,
            expert_intermediate=hidden * shape.expert_intermediate // shape.hidden,
            num_heads=num_heads,
            num_kv_heads=max(1, num_heads * shape.num_kv_heads // shape.num_heads),
        )

    def counted(self) -> ModelShape:
        """The same for the library's estimates of memory and time."""
        return ModelShape(
            self.num_layers,
            self.hidden,
            self.intermediate,
            self.vocabulary,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            tied=self.tied,
            qk_norm=True,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_intermediate=self.expert_intermediate,
        )


SHAPES = {
    "qwen3-4b": DecoderShape(36, 2560, 9728, 32, 8, 128, 151_936),
    "qwen3-1.7b": DecoderShape(28, 2048, 6144, 16, 8, 128, 151_936),
    "qwen3-0.6b": DecoderShape(28, 1024, 3072, 16, 8, 128, 151_936),
    "qwen3-30b-a3b": DecoderShape(
        48, 2048, 6144, 32, 4, 128, 151_936,
        tied=False, num_experts=128, experts_per_token=8, expert_intermediate=768,
    ),
    "tiny": DecoderShape(2, 64, 192, 4, 2, 16, 512),
    "tiny-moe": DecoderShape(
        3, 64, 192, 4, 2, 16, 512, tied=False, num_experts=8, experts_per_token=2, expert_intermediate=32
    ),
    # byte-level GPTs for scripts/train.py
    "bytes-small": DecoderShape(4, 256, 768, 4, 4, 64, 256, rope_theta=1e4),
    "bytes-base": DecoderShape(24, 1024, 3072, 16, 16, 64, 256, rope_theta=1e4),
}  # fmt: skip
