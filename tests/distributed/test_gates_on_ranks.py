"""Which weights a forward among ranks waits for: those that FSDP gathers, wherever it was told to gather them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.distributed.ranks import Ranks
from tests.distributed.training import assert_equal, mesh_of, optimizer_over, sharded_decoder, state_bits
from tests.training import batches, loss_of, make_decoder


def root_alone(model: nn.Module) -> None:
    fully_shard(model)


def no_root(model: nn.Module) -> None:
    for module in (model.embedding, *model.layers, model.norm):
        fully_shard(module)


def layers_in_pairs(model: nn.Module) -> None:
    fully_shard([model.layers[0], model.layers[1]])
    fully_shard([model.norm, model.embedding])
    fully_shard(model)


def one_replica(model: nn.Module) -> None:
    replicate(model)


def parts_of_layers(model: nn.Module) -> None:
    for layer in model.layers:
        for child in layer.children():
            fully_shard(child)
        fully_shard(layer)
    fully_shard(model)


WRAPPINGS = {
    each.__name__: each for each in (root_alone, no_root, one_replica, layers_in_pairs, parts_of_layers)
}


def gathered_early(wrapping: str) -> tuple[int, list[str]]:
    """How often FSDP gathered a group of weights in forwards with a step under way, and what nobody had waited for then."""
    model = make_decoder(layers=2)
    for layer in model.layers:
        layer.scale = nn.Parameter(torch.ones(1))
    WRAPPINGS[wrapping](model)
    optimizer = optimizer_over(model, "wavefront", overlap_forward=True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    chunk_of = {
        names[optimizer._engine.records[span.param].param]: chunk.index
        for chunk in optimizer._engine.chunks
        for span in chunk.spans
    }
    gathers, early, original = 0, [], FSDPParamGroup.unshard

    def unshard(self: FSDPParamGroup, *arguments: Any, **options: Any) -> None:
        nonlocal gathers
        flight = optimizer._engine.flight
        if flight is not None:
            gathers += 1
            gathered = [names[each.sharded_param] for each in self.fsdp_params]
            early.extend(name for name in gathered if chunk_of[name] in flight.missed)
        original(self, *arguments, **options)

    with optimizer, patch.object(FSDPParamGroup, "unshard", unshard):
        for ids in batches(4):
            loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    return gathers, early


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_no_weight_is_gathered_before_a_gate_has_waited_for_it(
    ranks: Ranks, wrapping: str, size: int
) -> None:
    for gathers, early in ranks.run(gathered_early, size, wrapping):
        assert gathers
        assert early == []


def ends_with_and_without_overlap(shape: tuple[int, ...], sizes: dict[str, Any], **options: Any) -> None:
    """Losses of evaluation and training, and the end: a step of two micro-batches of which the first reduces nothing."""
    mesh = mesh_of(shape, *("replicas", "shards")[-len(shape) :])
    found = []
    for overlap in (False, True):
        model, losses = sharded_decoder(mesh, sizes=sizes, **options), []
        config = {"ring_slots": 2}
        with optimizer_over(model, "wavefront", overlap_forward=overlap, config=config) as optimizer:
            for ids in batches(5):
                with torch.no_grad():
                    losses.append(loss_of(model, ids).item())
                for part in range(2):
                    model.set_requires_gradient_sync(part == 1)
                    loss = loss_of(model, ids.roll(part + dist.get_rank(), 1))
                    loss.backward()
                    losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            found.append((losses, state_bits(model, optimizer)))
    assert found[0][0] == found[1][0]
    assert_equal(found[1][1], found[0][1])


@pytest.mark.parametrize(
    ("shape", "sizes", "options"),
    [
        ((2,), {"tied": True}, {"reshard_after_forward": False}),
        ((2,), {"checkpointing": True}, {}),
        ((2,), {"checkpointing": False}, {}),
        ((2, 2), {}, {}),
    ],
)
def test_no_bit_changes(
    ranks: Ranks, shape: tuple[int, ...], sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    ranks.run(ends_with_and_without_overlap, 2 * len(shape), shape, sizes, **options)
