"""What a run is compared with, bit by bit: ``torch.optim.AdamW(fused=True)`` on flat FP32 copies.

They are padded so that no element falls into torch's scalar tail, and stepped in a thread that flushes denormals as the
optimizer's worker does. The reference is fed the FP32 sum of the very gradients that the run produced: a `Recorder`
takes them by hooks that run before the optimizer's. Tests and `soak.py` share this module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD = 64
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "maximize")


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
            optimizer.param_groups[0].update({key: hyper[name][key] for key in HYPERPARAMETERS})
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

    def num_steps(self, name: str) -> int:
        """Steps of one parameter."""
        return int(self._optimizers[name].state.get(self._masters[name], {}).get("step", 0))

    def save(self) -> dict[str, Any]:
        """Everything, for `restore`."""
        return {
            name: (master.detach().clone(), copy.deepcopy(self._optimizers[name].state_dict()))
            for name, master in self._masters.items()
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go back to what `save` returned."""
        with torch.no_grad():
            for name, (master, state) in saved.items():
                self._masters[name].copy_(master)
                self._optimizers[name].load_state_dict(copy.deepcopy(state))

    def close(self) -> None:
        """End its thread."""
        self._thread.shutdown()


def padded(tensor: Tensor) -> Tensor:
    """Flat FP32, zeros up to a multiple of `PAD`."""
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
    """The param group of each parameter."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: group for group in optimizer.param_groups for p in group["params"]}


def random_delays(seed: int, most_s: float = 0.002) -> Callable[[str, int], float]:
    """Delays that depend on nothing but the seed, the lane and the transfer's index."""

    def delay(lane: str, index: int) -> float:
        return float(np.random.default_rng([seed, len(lane), index]).random() ** 4 * most_s)

    return delay
