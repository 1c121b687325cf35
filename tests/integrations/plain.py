"""The loop that the frameworks are compared with: plain torch on FP32 masters, over the same micro-batches.

All sizes are multiples of 64, so that no element falls into the scalar tail of torch's fused AdamW, and the norm is a
float64 sum as ours is: torch's own ``clip_grad_norm_`` takes it in FP32, which moves the coefficient by an ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offload
from tests.training import KERNEL_CACHE

SMALL = offload.OffloadConfig(tile_numel=4096, kernel_cache_dir=KERNEL_CACHE)
"""So small that even these models have several tiles. With a folder for compiled kernels repeated runs are faster."""

WIDTH = 64
VOCABULARY = 128


class Net(nn.Module):
    """Embedding, two layers, head; norms without decay."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def make_ids(number: int, *, rows: int = 1, length: int = 12, vocabulary: int = VOCABULARY) -> list[Tensor]:
    generator = torch.Generator().manual_seed(17)
    return [torch.randint(vocabulary, (rows, length), generator=generator) for _ in range(number)]


def in_steps(items: Sequence[Any], accumulation: int) -> list[list[Any]]:
    """Micro-batches by step; the last step may have fewer."""
    return [list(items[start : start + accumulation]) for start in range(0, len(items), accumulation)]


def plain_loop(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    loss: Callable[[nn.Module, Any, Sequence[Any]], Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    decay: Callable[[str], float] = lambda name: 0.01,
    max_norm: float | None = None,
    schedule: Callable[[int], float] = lambda step: 1.0,
) -> dict[str, Tensor]:
    """Train `model`; masters by name.

    Args:
        loss: of the model, a micro-batch, and all micro-batches of its step.
    """
    weights = dict(model.named_parameters())
    masters = {name: nn.Parameter(weight.detach().float().clone()) for name, weight in weights.items()}
    groups = [{"params": [master], "weight_decay": decay(name), "lr": lr} for name, master in masters.items()]
    optimizer = torch.optim.AdamW(groups, betas=betas, fused=True)
    for number, micro_batches in enumerate(steps):
        for micro_batch in micro_batches:
            loss(model, micro_batch, micro_batches).backward()
            for name, weight in weights.items():
                gradient, weight.grad = weight.grad.float(), None
                earlier = masters[name].grad
                masters[name].grad = gradient if earlier is None else earlier + gradient
        if max_norm is not None:
            _clip(masters.values(), max_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr * schedule(number)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


def _clip(parameters: Any, max_norm: float) -> None:
    gradients = [parameter.grad for parameter in parameters]
    norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
    coefficient = torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32)
    for gradient in gradients:
        gradient.mul_(coefficient)


def assert_same_weights(model: nn.Module, expected: dict[str, Tensor], *, prefix: str = "") -> None:
    """Bit for bit, after rounding masters to the weights' dtype."""
    weights = dict(model.named_parameters())
    assert {name.removeprefix(prefix) for name in weights} == set(expected)
    for name, weight in weights.items():
        master = expected[name.removeprefix(prefix)]
        assert torch.equal(weight.detach(), master.to(weight.dtype)), f"{name} differs"


def assert_trained(model: nn.Module, initial: nn.Module) -> None:
    """So that a comparison says something."""
    for (name, weight), before in zip(model.named_parameters(), initial.parameters(), strict=True):
        assert not torch.equal(weight, before), f"{name} was never changed"
