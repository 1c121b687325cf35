"""The sizes of a decoder language model, from a Hugging Face ``config.json`` or from numbers: parameters and arithmetic.

Of decoders as Llama, Mistral, Mixtral, Qwen2, Qwen3 and their mixtures of experts have them: attention with grouped
queries, gated MLPs, RMS norms. Others are refused by name rather than counted wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

__all__ = ["ModelShape", "read_config", "shape_of_config"]

FAMILIES = {
    # name: (attention biases on q, k, v; norms of q and k)
    "llama": (False, False),
    "mistral": (False, False),
    "mixtral": (False, False),
    "qwen2": (True, False),
    "qwen2_moe": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}


@dataclass(frozen=True)
class ModelShape:
    """Sizes; elements and counts.

    `intermediate`: of a dense MLP. `num_experts`: 0 for a dense model; then `expert_intermediate` is one expert's width,
    `experts_per_token` how many a token visits, `shared_intermediate` the width of what all tokens visit besides, and
    `num_dense_layers` counts layers without experts.
    """

    num_layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    num_dense_layers: int = 0

    def __post_init__(self) -> None:
        sizes = (
            "num_layers",
            "hidden",
            "intermediate",
            "vocabulary",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )

    # Parameters

    @property
    def attention_width(self) -> int:
        """Elements of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all keys of a token, or of all values."""
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_numel(self) -> int:
        """Elements of the embedding, or of the head."""
        return self.vocabulary * self.hidden

    @property
    def num_sparse_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    def layer_numel(self, *, sparse: bool) -> int:
        """Elements of one layer's parameters."""
        return self._attention_numel() + (
            self._experts_numel() if sparse else 3 * self.hidden * self.intermediate
        )

    @property
    def numel(self) -> int:
        """Elements of all parameters; a tied head counts once."""
        sparse = self.num_sparse_layers
        layers = sparse * self.layer_numel(sparse=True) + (self.num_layers - sparse) * self.layer_numel(
            sparse=False
        )
        return layers + (1 if self.tied else 2) * self.embedding_numel + self.hidden

    def _attention_numel(self) -> int:
        projections = 2 * self.hidden * (self.attention_width + self.kv_width)
        biases = (self.attention_width + 2 * self.kv_width) * self.qkv_bias
        return projections + biases + 2 * self.head_dim * self.qk_norm + 2 * self.hidden

    def _experts_numel(self) -> int:
        experts = self.num_experts * (3 * self.expert_intermediate + 1)  # and a row of the router
        shared = 3 * self.shared_intermediate + (self.shared_intermediate > 0)  # and its gate
        return self.hidden * (experts + shared)

    # Arithmetic

    def layer_flops(self, tokens: int, sequence: int, *, sparse: bool) -> float:
        """Floating-point operations of one layer's forward: two for each weight that a token meets, and attention.

        A causal query meets half of its sequence on average, once for the scores and once for the values.
        """
        weights = 2 * self.hidden * (
            self.attention_width + self.kv_width
        ) + 3 * self.hidden * self.active_width(sparse)
        return 2.0 * tokens * weights + 2.0 * tokens * sequence * self.attention_width

    def head_flops(self, tokens: int) -> float:
        """The same of the output head."""
        return 2.0 * tokens * self.embedding_numel

    def active_width(self, sparse: bool) -> int:
        """Width of the MLPs that one token goes through in a layer."""
        return (
            self.experts_per_token * self.expert_intermediate + self.shared_intermediate
            if sparse
            else self.intermediate
        )


def read_config(path: Path) -> ModelShape:
    """The shape that a ``config.json``, or the folder that holds one, describes.

    Raises:
        ConfigError: no such file, no JSON, or a model that is not a decoder of the known kind.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error}); name a config.json or its folder") from None
    except ValueError as error:
        raise ConfigError(f"{file}: is no JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: holds a {type(config).__name__}, not the object of a config.json")
    return shape_of_config(config, str(file))


def shape_of_config(config: Mapping[str, Any], name: str = "config") -> ModelShape:
    """The same from the parsed file. `name` is for messages."""
    config = {**config, **(config.get("text_config") or {})}
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{name}: model_type={family!r} is not one of {', '.join(FAMILIES)}; give the numbers instead "
            "(--layers, --hidden, --intermediate, --vocab, --heads, --kv-heads)"
        )
    qkv_bias, qk_norm = FAMILIES[family]

    def number(*names: str, default: int | None = None) -> int:
        value = next((config[key] for key in names if config.get(key) is not None), default)
        if value is None:
            raise ConfigError(f"{name}: {' or '.join(names)} is missing")
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name}: {names[0]} is {value!r}, a whole number is needed")
        return value

    heads, hidden, layers = number("num_attention_heads"), number("hidden_size"), number("num_hidden_layers")
    if heads < 1:
        raise ConfigError(f"{name}: num_attention_heads={heads} must be at least 1")
    shape: dict[str, Any] = {
        "num_layers": layers,
        "hidden": hidden,
        "intermediate": number("intermediate_size"),
        "vocabulary": number("vocab_size"),
        "num_heads": heads,
        "num_kv_heads": number("num_key_value_heads", default=heads),
        "head_dim": number("head_dim", default=hidden // heads),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": bool(config.get("attention_bias", qkv_bias)),
        "qk_norm": qk_norm,
    }
    experts = number("num_experts", "num_local_experts", default=0)
    if experts:
        shape |= {
            "num_experts": experts,
            "experts_per_token": number("num_experts_per_tok"),
            # Mixtral has no dense MLP: its intermediate_size is an expert's.
            "expert_intermediate": number("moe_intermediate_size", "intermediate_size"),
            "shared_intermediate": number("shared_expert_intermediate_size", default=0),
            "num_dense_layers": _num_dense_layers(config, layers),
        }
    return ModelShape(**shape)


def _num_dense_layers(config: Mapping[str, Any], num_layers: int) -> int:
    """Layers without experts, as the Qwen configurations name them."""
    named, every = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step") or 1
    return sum(1 for layer in range(num_layers) if layer in named or (layer + 1) % every)
