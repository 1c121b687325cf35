"""A parameter's local shard, and state that is sharded as its parameter is.

FSDP2 parameters are `DTensor`s; everything in this library works on the local shard of the rank. These two
functions are the only place that knows the difference.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["local_shard", "shard_like"]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of `tensor`, detached, sharing its memory; the tensor itself where it is not sharded."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def shard_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as a tensor that is sharded as `parameter` is; `local` itself where that is not sharded.

    Built directly rather than by ``DTensor.from_local``, which would move host state to the mesh's device.
    """
    if not isinstance(parameter, DTensor):
        return local
    return DTensor(local, parameter._spec, requires_grad=False)
