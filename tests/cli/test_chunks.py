"""The chunks that `offload plan` counts with against those that the optimizer makes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from _models import Decoder, LanguageModel
from _shapes import SHAPES

import offload
from offload.assembly import DIVIDED_NUMEL, HYBRID_CHUNK_NUMEL
from offload.cli.chunks import chunk_sizes, parameters, stages
from offload.cli.hybrid import first_placements, hybrid_estimate
from offload.cli.model_shape import ModelShape, shape_of_config
from offload.cli.workload import Run, arrivals_at, workload_of
from offload.config import OffloadConfig
from offload.layout import Chunk, Kind, ParamSpec, build_chunks
from offload.rates import Rates
from offload.schedule.mode_costs import Machine, Placement
from offload.schedule.step_estimate import Arrival, Passes, estimate_step
from tests.cli.test_model_shape import LLAMA, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3_MOE

BF16 = Kind("bf16", "bf16")
DENSE = ModelShape(2, 64, 192, 512, 4, 2, 16, tied=True, qk_norm=True)


@pytest.mark.parametrize("config", [LLAMA, MIXTRAL, QWEN2, QWEN2_MOE, QWEN3_MOE])
def test_parameters_add_up(config: dict[str, Any]) -> None:
    shape = shape_of_config(config)
    assert sum(numel for _, numel in parameters(shape)) == shape.numel
    assert len(stages(shape)) == len(list(parameters(shape)))
    assert set(stages(shape)) == {"embedding", "head", *(f"layers.{i}" for i in range(shape.num_layers))}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_parameters_are_those_of_transformers(family: str) -> None:
    """Order and sizes, for the release at hand: which parameters fall into one chunk depends on them."""
    transformers = pytest.importorskip("transformers")
    options: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    sparse = family.endswith("moe")
    if sparse:
        options |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    made = transformers.AutoConfig.for_model(family, **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    real = [(name, parameter.numel()) for name, parameter in model.named_parameters()]
    if any(".experts.0." in name for name, _ in real):
        pytest.skip("a release that keeps each expert's weights apart")
    counted = list(parameters(shape_of_config({**made.to_dict(), "model_type": family})))
    sizes, expected = ([numel for _, numel in found] for found in (counted, real))
    if sparse:  # whether the router comes before the experts differs between families
        sizes, expected = sorted(sizes), sorted(expected)
    assert sizes == expected
    if not sparse:
        assert [chunk.numel for chunk in cut(counted)] == [chunk.numel for chunk in cut(real)]


def cut(found: list[tuple[str, int]]) -> list[Chunk]:
    specs = [ParamSpec(index, name, numel, BF16) for index, (name, numel) in enumerate(found)]
    return build_chunks(specs, tile_numel=1024, chunk_numel=16384)


def test_a_hybrid_has_the_chunks_of_the_optimizer() -> None:
    """Elements of each, on the CPU, where sizes are too small to be cut."""
    model = LanguageModel(Decoder(SHAPES["tiny"], checkpointing=False)).to(torch.bfloat16)
    with offload.AdamW(
        model.named_parameters(), mode="hybrid", config=offload.OffloadConfig(stream_share=0.5)
    ) as opt:
        real = {chunk.numel for chunk in opt.plan.chunks if "layers" in chunk.name}
    sizes = chunk_sizes(DENSE, ranks=1, dtype="bf16", tile_numel=1024, chunk_numel=HYBRID_CHUNK_NUMEL)
    assert {size.numel for size in sizes if "layers" in size.name} == real


def test_chunks_of_a_large_layer_are_cut_and_come_in_the_order_of_backward() -> None:
    shape = shape_of_config(LLAMA)
    run = Run(shape, 4096, 4096)
    workload = workload_of(run, OffloadConfig())
    assert [chunk.name for chunk in workload.parts[:2]] == ["layers.0/0", "layers.0/1"]
    arrivals = arrivals_at(run, workload.parts, [Placement.HOST] * len(workload.parts))
    assert [arrival.at for arrival in arrivals] == sorted(arrival.at for arrival in arrivals)
    assert arrivals[-1].at == 1.0
    assert arrivals[-1].numel >= shape.embedding_numel  # the first registered, the last complete
    assert sum(arrival.numel for arrival in arrivals) == sum(chunk.numel for chunk in workload.parts)


def test_a_tied_embedding_off_the_device_is_divided_and_ends_sooner() -> None:
    """Both of its parts are complete when backward is; `exposed_s` is what they leave."""
    shape = replace(shape_of_config(LLAMA), tied=True)
    run = Run(shape, 16384, 16384)
    rates, passes = Rates(4e9, 112e9, 48e9, 48e9, 48e9, 3.3e12), Passes(3.0, 9.0)
    config = OffloadConfig(device_budget=1 << 30)
    machine = Machine("cuda", None, 1 << 62, device_budget=1 << 30)
    found = hybrid_estimate(run, config, machine, rates, passes)
    parts = workload_of(run, config).parts
    [(index, on_host)] = found.plan.divisions.items()
    assert parts[index].first_param == 0
    assert DIVIDED_NUMEL < shape.embedding_numel == parts[index].numel
    assert "comes last and is divided" in found.words[1]
    placements = first_placements(found.plan)
    assert placements.count(Placement.STREAM) - 1 == found.plan.num_streamed
    *_, host, streamed = arrivals_at(run, parts, placements, found.plan.divisions)
    assert host == Arrival(on_host, 1.0, Placement.HOST)
    assert streamed == Arrival(shape.embedding_numel - on_host, 1.0, Placement.STREAM)
    assert found.step is not None
    for side in (Placement.HOST, Placement.STREAM):
        whole = [*placements]
        whole[index] = side
        workload = workload_of(run, config)
        alone = estimate_step("hybrid", workload, rates, passes, arrivals_at(run, parts, whole))
        assert found.step.exposed_s < 0.75 * alone.exposed_s


def test_what_is_pinned_beyond_the_share_is_stepped_on_the_host_at_first() -> None:
    run = Run(shape_of_config(LLAMA), 4096, 4096)
    rates = Rates(4e9, 112e9, 48e9, 48e9, 48e9, 3.3e12)
    machine = Machine("cuda", None, 1 << 62)
    made = hybrid_estimate(run, OffloadConfig(), machine, rates).plan
    assert made.num_streamed is not None
    placements = first_placements(made)
    assert placements.count(Placement.STREAM) == made.num_streamed
    assert made.num_streamed < made.placements.count(Placement.STREAM)
    assert placements.count(Placement.DEVICE) == made.placements.count(Placement.DEVICE)
    gaps = [index for index, placement in enumerate(placements) if placement is Placement.STREAM]
    assert max(after - before for before, after in itertools.pairwise(gaps)) <= 6  # spread evenly
