"""A parameter's local shard, and state that is sharded as its parameter is.

FSDP2 parameters are `DTensor`s; everything in this library works on the local shard of the rank. These
functions are the only place that knows the difference.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["local_shard", "shard_like", "shard_of"]


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


def shard_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """The part of `value`, detached, that belongs to the local shard of `parameter`; None where that is not here.

    Args:
        value: of the parameter's (global) shape: a full tensor, of which the part is cut, or a DTensor.
    """
    if isinstance(value, DTensor):
        alike = _placed_alike(parameter, value) if isinstance(parameter, DTensor) else False
        local = local_shard(value)
        return local if alike or local.shape == value.shape == local_shard(parameter).shape else None
    if not isinstance(parameter, DTensor):
        return value.detach()
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    part = value.detach()
    for dim, (start, size) in enumerate(zip(offset, shape, strict=False)):
        part = part.narrow(dim, min(start, part.shape[dim]), size)
    return part if part.shape == local_shard(parameter).shape else None


def _placed_alike(one: DTensor, other: DTensor) -> bool:
    """Meshes that come out of a file are other objects than those of the parameters."""
    return one.placements == other.placements and torch.equal(one.device_mesh.mesh, other.device_mesh.mesh)
