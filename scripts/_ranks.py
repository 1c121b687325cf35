"""Under torchrun: the process group, the model under FSDP2, and what ranks say in common.

Without torchrun all of this is about one process, and nothing is sharded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started."""

    rank: int = 0
    size: int = 1
    launched: bool = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def shard(self, model: nn.Module) -> None:
        """``fully_shard`` for each layer and the root; for the few FP32 modules of a BF16 model too, as FSDP asks for."""
        if not self.launched:
            return
        mixed = len({parameter.dtype for parameter in model.parameters()}) > 1
        for module in model.modules():
            dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
            if mixed and dtypes == {torch.float32}:
                fully_shard(module)
        for layer in model.backbone.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        if getattr(model, "head", None) is not None:
            # Its gradient is then reduced as the first one; backward begins with it, so it is not gathered twice.
            fully_shard(model.head, reshard_after_forward=False)  # type: ignore[arg-type]
        fully_shard(model)

    def mean(self, value: Tensor) -> Tensor:
        """Mean over ranks."""
        value = value.detach().clone()
        if self.launched:
            dist.all_reduce(value)
        return value / self.size

    def gather(self, value: T) -> list[T]:
        """What each rank has, in their order; picklable."""
        values: list[T] = [value] * self.size
        if self.launched:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.launched:
            dist.barrier()


@contextmanager
def join_world(device: torch.device) -> Iterator[World]:
    """The world that torchrun made; NCCL between GPUs, gloo between CPUs."""
    if "WORLD_SIZE" not in os.environ:
        yield World()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), launched=True)
    finally:
        dist.destroy_process_group()
