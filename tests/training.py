"""A small decoder, its training loop, and comparison with the reference, bit by bit.

The reference is that of ``scripts/_reference.py``, whose names are passed on here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _reference import PAD, Recorder, Reference, hyper_by_name, memory_order, padded, random_delays
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload import assembly
from offload.transfer.host import LaneTransport
from tests import oracles

__all__ = [
    "PAD",
    "Block",
    "Decoder",
    "Recorder",
    "Reference",
    "adamw",
    "assert_matches_reference",
    "assert_same_bits",
    "assert_same_snapshot",
    "assert_weight_is_rounded_master",
    "batches",
    "hyper_by_name",
    "loss_of",
    "make_decoder",
    "master_of",
    "memory_order",
    "padded",
    "random_delays",
    "snapshot",
    "train",
    "two_groups",
    "use_lanes",
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 3 * width + 5)
        self.down = nn.Linear(3 * width + 5, width)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.scale * self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """``checkpointing``: None, or use_reentrant."""

    def __init__(
        self,
        *,
        width: int = 40,
        layers: int = 3,
        vocabulary: int = 97,
        tied: bool = False,
        checkpointing: bool | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = (
                layer(x)
                if self.checkpointing is None
                else checkpoint(layer, x, use_reentrant=self.checkpointing)
            )
        return self.head(self.norm(x))


def make_decoder(seed: int = 0, *, device: str = "cpu", **sizes: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(**sizes).to(device)


def batches(number: int, *, vocabulary: int = 97, device: str = "cpu") -> list[Tensor]:
    """Random ids; four batches come again and again, so that there is something to learn."""
    generator = torch.Generator().manual_seed(17)
    few = [torch.randint(vocabulary, (2, 12), generator=generator).to(device) for _ in range(4)]
    return [few[index % len(few)] for index in range(number)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay and a higher rate, the rest without."""
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.dim() >= 2], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [(n, p) for n, p in named if p.dim() < 2], "weight_decay": 0.0, "lr": 1e-3},
    ]


def train(
    model: nn.Module,
    optimizer: Any,
    data: Sequence[Tensor],
    *,
    recorder: Recorder | None = None,
    reference: Reference | None = None,
    scheduler: Any = None,
    micro_batches: int = 1,
) -> list[float]:
    """Train step by step, and the reference along with it; losses."""
    losses = []
    for ids in data:
        for part in range(micro_batches):
            loss = loss_of(model, ids.roll(part, 1))
            loss.backward()
        if reference is not None and recorder is not None:
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def master_of(optimizer: Any, parameter: Tensor) -> Tensor:
    """A parameter's FP32 values: its master, or the weight itself where it is FP32."""
    return optimizer.state[parameter].get("master", parameter.detach())


def assert_matches_reference(model: nn.Module, optimizer: Any, reference: Reference) -> None:
    for name, parameter in model.named_parameters():
        expected = reference.state(name)
        state = {**optimizer.state[parameter], "master": master_of(optimizer, parameter)}
        for kind, tensor in expected.items():
            assert_same_bits(memory_order(state[kind]).cpu(), tensor, f"{name}: {kind}")
        assert_weight_is_rounded_master(optimizer, parameter, name)


def assert_weight_is_rounded_master(optimizer: Any, parameter: Tensor, name: str) -> None:
    master = memory_order(master_of(optimizer, parameter)).cpu()
    weight = memory_order(parameter).cpu()
    assert torch.equal(weight, master.to(weight.dtype)), f"{name}: weight is not its rounded master"


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    same = oracles.same_bits(np.ascontiguousarray(actual.numpy()), np.ascontiguousarray(expected.numpy()))
    assert same, f"{what}: {int((actual != expected).sum())} of {actual.numel()} elements differ"


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """Clones of everything that a step changes."""
    return {
        name: {
            "weight": parameter.detach().clone(),
            **{k: v.clone() for k, v in optimizer.state[parameter].items()},
        }
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def assert_same_snapshot(
    actual: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensors in expected.items():
        for kind, tensor in tensors.items():
            assert torch.equal(actual[name][kind], tensor), f"{name}: {kind} differs"


def use_lanes(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> list[LaneTransport]:
    """Let optimizers built from now on use the asynchronous fake; the list names those made."""
    made: list[LaneTransport] = []

    def make(device: torch.device, config: offload.OffloadConfig) -> LaneTransport:
        made.append(LaneTransport(device, **arguments))
        return made[-1]

    monkeypatch.setattr(assembly, "make_transport", make)
    return made


KERNEL_CACHE = os.environ.get(
    "OFFLOAD_TEST_KERNEL_CACHE", str(Path(tempfile.gettempdir()) / "offload-test-kernels")
)
"""Compiling takes most of a small test's time. A folder inside is named by the kernels' sources."""


def adamw(model: nn.Module | Iterable[Any], /, **options: Any) -> offload.AdamW:
    """An optimizer with small tiles, so that even small models have many."""
    config = {
        "tile_numel": 4096,
        "timeout_s": 240.0,
        "kernel_cache_dir": KERNEL_CACHE,
        **options.pop("config", {}),
    }
    params = two_groups(model) if isinstance(model, nn.Module) else model
    return offload.AdamW(
        params, **{"mode": "wavefront", "lr": 1e-3, **options}, config=offload.OffloadConfig(**config)
    )
