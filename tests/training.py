"""A small decoder, its training loop, and the reference that a run is compared with, bit by bit.

The reference is ``torch.optim.AdamW(fused=True)`` on flat FP32 copies, padded so that no element falls into torch's
scalar tail, in a thread that flushes denormals as the optimizer's worker does. It is fed the FP32 sum of the very BF16
gradients that the run produced: gradients are taken by a `Recorder` whose hooks run before the optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload import assembly
from offload.transfer.host import LaneTransport
from tests import oracles

PAD = 64


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


class Recorder:
    """Copies every gradient as it arrives, before the optimizer takes it. Build it before the optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.gradients: dict[str, list[Tensor]] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._keep(name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        def keep(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.gradients.setdefault(name, []).append(parameter.grad.detach().clone())

        return keep

    def take(self) -> dict[str, list[Tensor]]:
        """By parameter, the gradients since the last call, in order."""
        taken, self.gradients = self.gradients, {}
        return taken


class Reference:
    """Fused AdamW on padded flat FP32 copies of ``masters``; steps what got gradients, as torch does."""

    def __init__(self, masters: dict[str, Tensor], *, flush: bool = True) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_flush_denormal, initargs=(flush,))
        self._numel = {name: master.numel() for name, master in masters.items()}
        self._masters = {name: nn.Parameter(padded(master)) for name, master in masters.items()}
        self._optimizers = {
            name: torch.optim.AdamW([master], fused=True) for name, master in self._masters.items()
        }

    def step(
        self, gradients: dict[str, list[Tensor]], hyper: dict[str, dict[str, Any]], coef: float = 1.0
    ) -> None:
        """Gradients by name, one per micro-batch; hyperparameters by name, as in a param group."""
        self._thread.submit(self._step, gradients, hyper, coef).result()

    def _step(
        self, gradients: dict[str, list[Tensor]], hyper: dict[str, dict[str, Any]], coef: float
    ) -> None:
        for name, parts in gradients.items():
            optimizer = self._optimizers[name]
            names = ("lr", "betas", "eps", "weight_decay", "maximize")
            optimizer.param_groups[0].update({key: hyper[name][key] for key in names})
            total = memory_order(parts[0]).float()
            for part in parts[1:]:
                total = total + memory_order(part).float()
            self._masters[name].grad = padded(total * torch.tensor(coef, dtype=torch.float32))
            optimizer.step()

    def state(self, name: str) -> dict[str, Tensor]:
        """Flat FP32 ``master``, ``exp_avg``, ``exp_avg_sq``."""
        numel, master = self._numel[name], self._masters[name]
        state = self._optimizers[name].state.get(master, {})
        zero = torch.zeros(numel)
        return {
            "master": master.detach()[:numel],
            "exp_avg": state.get("exp_avg", zero)[:numel],
            "exp_avg_sq": state.get("exp_avg_sq", zero)[:numel],
        }


def padded(tensor: Tensor) -> Tensor:
    flat = memory_order(tensor).float().cpu()
    return F.pad(flat, (0, -flat.numel() % PAD)).clone()


def memory_order(tensor: Tensor) -> Tensor:
    """The tensor's elements in the order of its storage."""
    tensor = tensor.detach()
    return (
        tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        if tensor.numel()
        else tensor.flatten()
    )


def hyper_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: group for group in optimizer.param_groups for p in group["params"]}


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


def random_delays(seed: int, most_s: float = 0.002) -> Callable[[str, int], float]:
    """Delays that depend on nothing but the seed, the lane and the transfer's index."""

    def delay(lane: str, index: int) -> float:
        return float(np.random.default_rng([seed, len(lane), index]).random() ** 4 * most_s)

    return delay


def use_lanes(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> list[LaneTransport]:
    """Let optimizers built from now on use the asynchronous fake; the list names those made."""
    made: list[LaneTransport] = []

    def make(device: torch.device, config: offload.OffloadConfig) -> LaneTransport:
        made.append(LaneTransport(device, **arguments))
        return made[-1]

    monkeypatch.setattr(assembly, "make_transport", make)
    return made


def adamw(model: nn.Module | Iterable[Any], /, **options: Any) -> offload.AdamW:
    """An optimizer with small tiles, so that even small models have many."""
    config = {"tile_numel": 4096, "timeout_s": 60.0, **options.pop("config", {})}
    params = two_groups(model) if isinstance(model, nn.Module) else model
    return offload.AdamW(
        params, **{"mode": "wavefront", "lr": 1e-3, **options}, config=offload.OffloadConfig(**config)
    )
