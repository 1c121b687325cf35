"""A parameter's local shard, and state that is sharded as its parameter is.

FSDP2 parameters are `DTensor`s; everything in this library works on the local shard of the rank. These functions are
the only place that knows the difference.
"""

from __future__ import annotations

import math

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from offload.errors import ParameterError

__all__ = [
    "awaited",
    "local_gradient",
    "local_shard",
    "matching_shard",
    "mesh_ranks",
    "peek_shard",
    "root_mesh",
    "shard_like",
    "shard_of",
    "shard_start",
]


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of `tensor`, detached, sharing its memory; the tensor itself where it is not sharded."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def peek_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The same for whoever only asks for shape, version or address: no new tensor is made, which hooks would feel."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as one with memory: what ``redistribute(async_op=True)`` gives has none (its address is 0).

    Whoever copies by address must wait for the collective itself, which torch's own operations do.
    """
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def shard_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as a tensor that is sharded as `parameter` is; `local` itself where that is not sharded.

    Built directly rather than by ``DTensor.from_local``, which would move host state to the mesh's device.
    """
    if not isinstance(parameter, DTensor):
        return local
    return DTensor(local, parameter._spec, requires_grad=False)


def shard_of(full: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of the whole tensor `full` that this rank holds of `parameter`; a view.

    Raises:
        ParameterError: the shapes do not fit, or the parameter's shards are no single range per dimension.
    """
    if not isinstance(parameter, DTensor):
        return full
    if full.shape != parameter.shape:
        raise ParameterError(
            f"a tensor of shape {tuple(full.shape)} for a parameter of {tuple(parameter.shape)}"
        )
    shape, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if tuple(shape) != tuple(local_shard(parameter).shape):
        raise ParameterError(f"placements {parameter.placements} cannot be cut out of a whole tensor")
    for dim, (size, offset) in enumerate(zip(shape, offsets, strict=True)):
        full = full.narrow(dim, min(offset, full.shape[dim] - size), size)
    return full


def shard_start(parameter: torch.Tensor) -> int:
    """The index in the whole parameter, row by row, of the first element of this rank's shard.

    0 where the shard is no consecutive range: unless it is of the first dimension, and dense in that order.
    """
    local = peek_shard(parameter)
    if not isinstance(parameter, DTensor) or not local.is_contiguous() or not local.dim():
        return 0
    shape, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if tuple(shape) != tuple(local.shape) or tuple(shape[1:]) != tuple(parameter.shape[1:]):
        return 0
    return int(offsets[0]) * math.prod(parameter.shape[1:])


def matching_shard(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor | None:
    """The part of `value`, detached, that this rank holds of `parameter`; None where it is not here.

    Args:
        value: of the parameter's (global) shape: a whole tensor, or a DTensor, which must be sharded as `parameter` is.
    """
    if not isinstance(value, DTensor):
        return shard_of(value.detach(), parameter)
    local = local_shard(value)
    if isinstance(parameter, DTensor):
        # Meshes that come out of a file are other objects than those of the parameters.
        same_ranks = torch.equal(value.device_mesh.mesh, parameter.device_mesh.mesh)
        alike = same_ranks and value.placements == parameter.placements
    else:
        alike = local.shape == value.shape == parameter.shape
    return local if alike else None


def local_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The rank's part of `gradient`, as `parameter` is sharded.

    A gradient that autograd made of DTensors may still be a partial sum, or sharded in another way: then this is a
    collective, as it is in torch's optimizers.
    """
    gradient = gradient.detach()
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return local_shard(gradient)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_shard(gradient)


def mesh_ranks(parameter: torch.Tensor) -> frozenset[int]:
    """The ranks of the whole mesh that `parameter`'s mesh was sliced from; none where it is not sharded."""
    if not isinstance(parameter, DTensor):
        return frozenset()
    return frozenset(root_mesh(parameter).mesh.flatten().tolist())


def root_mesh(parameter: DTensor) -> DeviceMesh:
    """The whole mesh that `parameter`'s mesh was sliced from, or that mesh."""
    mesh = parameter.device_mesh
    root: DeviceMesh = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    return root
