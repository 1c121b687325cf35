"""Gradients that autograd hands over while their collective still runs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import offload
from offload.parameters import ParamRecord
from tests.distributed.ranks import Ranks


def asynchronous() -> None:
    """What is copied by address must have one: a shard that is still being reduced has 0."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    seen: list[torch.Tensor] = []
    original = ParamRecord.flat_gradient

    def flat_gradient(record: ParamRecord, gradient: torch.Tensor) -> torch.Tensor:
        seen.append(original(record, gradient))
        return seen[-1]

    ParamRecord.flat_gradient = flat_gradient  # type: ignore[method-assign]
    try:
        with offload.AdamW([("w", weight)], lr=1e-3, mode="wavefront", backend="torch") as optimizer:
            whole = weight.redistribute(placements=[Replicate()], async_op=True)
            whole.to_local(grad_placements=[Partial()]).pow(2).sum().backward()
            optimizer.step()
    finally:
        ParamRecord.flat_gradient = original  # type: ignore[method-assign]
    (flat,) = seen
    assert type(flat) is torch.Tensor
    assert flat.data_ptr()
    assert (flat == 2 * dist.get_world_size()).all()


def test_a_gradient_in_flight_is_awaited(ranks: Ranks) -> None:
    ranks.run(asynchronous, 2)
