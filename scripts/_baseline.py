"""What the library is compared with: torch's own fused AdamW on FP32 masters, everything on the device; or no optimizer.

This is as fast as torch alone gets with BF16 weights and FP32 state. Gradients are widened to FP32 for a
bucket of parameters at a time, in one multi-tensor call, into a scratch buffer that all buckets share: no
second, FP32 copy of all gradients ever exists, and each fused step still covers many tensors. Under FSDP2 all
of this is about the rank's shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from offload.distributed import local_shard, shard_of

BUCKET_NUMEL = 1 << 28  # 1 GiB of FP32 gradients; a larger parameter is a bucket of its own


class NoOptimizer:
    """The loop without an update: each gradient goes when it has been computed."""

    last_step = None

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._hooks = [
            p.register_post_accumulate_grad_hook(_drop_gradient) for p in parameters if p.requires_grad
        ]

    def step(self) -> None:
        """Nothing is updated."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There are no gradients."""

    def synchronize(self) -> None:
        """Nothing is in flight outside the device's own stream."""

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class ResidentAdamW:
    """``torch.optim.AdamW(fused=True)`` on FP32 masters, with the result copied to the compute weights.

    It has the few methods that the scripts' training loops use, and the names they have in the library.
    """

    last_step = None

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        masters: Mapping[str, Tensor] | None = None,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self._buckets = [
            _Bucket(bucket, masters or {}, options) for bucket in _split_into_buckets(named, BUCKET_NUMEL)
        ]
        self._weights = [weight for _, weight in named]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for bucket in self._buckets for group in bucket.optimizer.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        coefficient = self._clip_coefficient()
        for bucket in self._buckets:
            bucket.step(coefficient)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self._weights:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()

    def synchronize(self) -> None:
        """Nothing is in flight outside the device's own stream."""

    def close(self) -> None:
        self._buckets.clear()

    def _clip_coefficient(self) -> Tensor | None:
        if self.max_grad_norm is None:
            return None
        grads = [w.grad for w in self._weights if w.grad is not None]
        norms = torch._foreach_norm([local_shard(grad) for grad in grads], 2, dtype=torch.float32)
        square_sum = torch.stack(norms).square().sum()
        if isinstance(grads[0], DTensor):
            dist.all_reduce(square_sum)
        return (self.max_grad_norm / (square_sum.sqrt() + 1e-6)).clamp(max=1.0)


class _Bucket:
    """A few parameters, their masters, and the torch optimizer that steps them."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], masters: Mapping[str, Tensor], options: dict[str, Any]
    ) -> None:
        self.weights = [weight for _, weight in named]
        self.masters = [_master(weight, masters.get(name)) for name, weight in named]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **options)

    def step(self, coefficient: Tensor | None) -> None:
        pairs = [(m, w) for m, w in zip(self.masters, self.weights, strict=True) if w.grad is not None]
        if not pairs:
            return
        masters: list[Tensor] = [master for master, _ in pairs]
        weights = [local_shard(weight) for _, weight in pairs]
        grads = _widened([local_shard(w.grad) for _, w in pairs if w.grad is not None])
        if coefficient is not None:
            torch._foreach_mul_(grads, coefficient)
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_(weights, masters)


def _master(weight: nn.Parameter, value: Tensor | None) -> nn.Parameter:
    value = local_shard(weight) if value is None else shard_of(value, weight)
    return nn.Parameter(value.to(weight.device, torch.float32, copy=True))


def _widened(grads: list[Tensor]) -> list[Tensor]:
    """FP32 copies of ``grads``, as views of one buffer, written by one multi-tensor call."""
    sizes = [grad.numel() for grad in grads]
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=grads[0].device)
    wide = [part.view_as(grad) for part, grad in zip(flat.split(sizes), grads, strict=True)]
    torch._foreach_copy_(wide, grads)
    return wide


def _split_into_buckets(
    named: list[tuple[str, nn.Parameter]], max_numel: int
) -> list[list[tuple[str, nn.Parameter]]]:
    """Consecutive runs of at most ``max_numel`` elements; a larger parameter is alone in its run."""
    buckets: list[list[tuple[str, nn.Parameter]]] = []
    room = 0
    for name, parameter in named:
        if not buckets or parameter.numel() > room:
            buckets.append([])
            room = max_numel
        buckets[-1].append((name, parameter))
        room -= parameter.numel()
    return buckets
