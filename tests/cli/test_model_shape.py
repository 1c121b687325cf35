"""Counted parameters against models whose size is known, and against modules that hold them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from _models import Decoder, num_parameters
from _shapes import SHAPES

from offload.cli.model_shape import ModelShape, read_config, shape_of_config
from offload.cli.workload import (
    Run,
    activations_of,
    arrivals_of,
    flops_of,
    forward_share_of,
    last_forward_of,
    workload_of,
)
from offload.config import OffloadConfig
from offload.errors import ConfigError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2_MOE = {
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151_936, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "numel"),
    [
        (LLAMA, 8_030_261_248),  # Llama 3 8B
        ({**LLAMA, "model_type": "mistral", "vocab_size": 32_000}, 7_241_732_096),  # Mistral 7B
        (MIXTRAL, 46_702_792_704),  # Mixtral 8x7B
        (QWEN2, 1_543_714_304),  # Qwen2.5 1.5B
        (QWEN2_MOE, 14_315_784_192),  # Qwen1.5-MoE-A2.7B
        (QWEN3_MOE, 30_532_122_624),  # Qwen3-30B-A3B
    ],
)
def test_known_models(config: dict[str, Any], numel: int) -> None:
    assert shape_of_config(config).numel == numel


@pytest.mark.parametrize("name", ["tiny", "qwen3-0.6b"])
def test_parameters_are_those_of_the_modules(name: str) -> None:
    made = SHAPES[name]
    with torch.device("meta"):
        model = Decoder(made, checkpointing=False)
    shape = ModelShape(
        made.num_layers, made.hidden, made.intermediate, made.vocabulary, made.num_heads, made.num_kv_heads,
        made.head_dim, tied=True, qk_norm=True,
    )  # fmt: skip
    assert shape.numel == num_parameters(model)
    assert shape.layer_numel(sparse=False) == num_parameters(model.layers[0])


def test_layers_without_experts_are_counted() -> None:
    shape = shape_of_config({**QWEN3_MOE, "mlp_only_layers": [0, 3], "decoder_sparse_step": 2})
    assert shape.num_dense_layers == 24 + 1  # every other one, and layer 3, which would have had experts
    assert shape.num_sparse_layers == 23


def test_a_folder_or_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == shape_of_config(LLAMA)
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        read_config(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"list\.json: holds a list"):
        read_config(tmp_path / "list.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 5}, "num_kv_heads=5"),
        ({"num_hidden_layers": 0}, "num_layers=0"),
    ],
)
def test_what_cannot_be_counted_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape_of_config({**LLAMA, **change})


def test_arrivals_hold_every_parameter_once_in_the_order_of_backward() -> None:
    for config in (LLAMA, QWEN2, QWEN3_MOE):
        run = Run(shape_of_config(config), 1024, 1024)
        arrivals = arrivals_of(run)
        assert sum(arrival.numel for arrival in arrivals) == run.shape.numel
        assert [arrival.at for arrival in arrivals] == sorted(arrival.at for arrival in arrivals)
        assert arrivals[-1].at == pytest.approx(1.0)
        assert (arrivals[0].numel == 0) == run.shape.tied


def test_ranks_share_the_parameters_and_gather_layers() -> None:
    shape = shape_of_config(LLAMA)
    one, eight = (Run(shape, 1024, 1024, ranks=ranks) for ranks in (1, 8))
    whole, share = (workload_of(run, OffloadConfig()).numel for run in (one, eight))
    assert share == pytest.approx(whole / 8, rel=1e-6)
    assert activations_of(one).unsharded_bytes == 0
    layer, head = shape.layer_numel(sparse=False), 2 * shape.embedding_numel
    assert activations_of(eight).unsharded_bytes == 4 * 2 * layer + head
    in_fp32 = replace(eight, reduce_dtype="fp32")
    assert activations_of(in_fp32).unsharded_bytes == (3 * 2 + 4) * layer + head
    with pytest.raises(ConfigError, match="reduce_dtype='fp16'"):
        replace(eight, reduce_dtype="fp16")


def test_a_token_has_a_copy_for_each_of_its_experts() -> None:
    """What they get and what they give are kept for backward, which has two gradients of that size more."""
    sparse = shape_of_config(QWEN3_MOE)
    single = replace(sparse, experts_per_token=1, expert_intermediate=8 * sparse.expert_intermediate)
    many, one = (activations_of(Run(shape, 1024, 1024)).layer_bytes for shape in (sparse, single))
    copies = 7 * sparse.hidden  # of seven experts more, all together as wide as the single one
    mlp = 8 * sparse.expert_intermediate
    assert sparse.active_width(True) == single.active_width(True) == mlp
    assert many - one == 2 * 1024 * (2 * copies + 2 * (8 * sparse.hidden - mlp))


def test_arithmetic_is_two_operations_a_weight_and_pass() -> None:
    """Short sequences, so that attention itself is nothing: 6 per weight and token, 8 with checkpointing."""
    shape = shape_of_config({**LLAMA, "vocab_size": 1})
    weights = shape.numel - 2 * shape.hidden - (2 * shape.num_layers + 1) * shape.hidden
    plain, checkpointed = (sum(flops_of(Run(shape, 64, 1, checkpointing=on))) for on in (False, True))
    assert plain == pytest.approx(6 * 64 * weights, rel=1e-3)
    assert checkpointed == pytest.approx(8 * 64 * weights, rel=1e-3)
    assert forward_share_of(Run(shape, 64, 1)) == pytest.approx(0.25, rel=1e-3)


def test_from_the_last_layer_on_forward_has_that_layer_and_the_head() -> None:
    """A loss in chunks takes the head's gradients there as well, twice the head's own work."""
    shape = shape_of_config(LLAMA)
    layer, head = shape.layer_flops(64, 1, sparse=False), shape.head_flops(64)
    for chunked, heads in ((False, 1), (True, 3)):
        found = last_forward_of(Run(shape, 64, 1, chunked_loss=chunked))
        assert found == pytest.approx((layer + heads * head) / (shape.num_layers * layer + heads * head))


def test_checkpointing_and_a_loss_in_chunks_save_memory() -> None:
    shape = shape_of_config(LLAMA)
    base = activations_of(Run(shape, 8192, 8192))
    assert activations_of(Run(shape, 8192, 8192, checkpointing=False)).kept_bytes > 10 * base.kept_bytes
    assert activations_of(Run(shape, 8192, 8192, chunked_loss=True)).loss_bytes < base.loss_bytes / 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"sequence": 99}, "sequence=99"),
        ({"dtype": "fp8"}, "fp8"),
        ({"ranks": 0}, "ranks=0"),
    ],
)
def test_impossible_runs_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Run(**{"shape": shape_of_config(LLAMA), "tokens": 64, "sequence": 64, **change})
