"""Checkpoints on a GPU: what saving and loading take of its memory, and that bits survive (F31)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import offload

pytestmark = pytest.mark.gpu

MODES = ["resident", "all-at-once", "chunked-sync", "chunked-stream", "wavefront"]
DEVICE = "cuda"
WIDTH = 1024
LARGEST_BYTES = 4 * 4 * WIDTH * WIDTH
"""Of one full FP32 tensor: that of `Net.head`."""


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.head = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.to(dtype)
        self.scale = nn.Parameter(torch.ones(4 * WIDTH))
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.head(x).float() * self.scale).square().mean()


def train(model: Net, optimizer: Any, steps: range) -> None:
    for index in steps:
        generator = torch.Generator(DEVICE).manual_seed(index)
        x = torch.randn(16, WIDTH, generator=generator, device=DEVICE)
        model(x.to(model.head.weight.dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def make(model: Net, kind: str, **options: Any) -> Any:
    if kind == "wrapper":
        return offload.CPUOffloadOptimizer(torch.optim.AdamW(model.named_parameters(), **options))
    config = offload.OffloadConfig(tile_numel=256 * 1024, ring_slots=2)
    return offload.AdamW(model.named_parameters(), mode=kind, config=config, **options)


def tensors(optimizer: Any) -> dict[tuple[int, str], Tensor]:
    state = optimizer.state_dict()["state"]
    return {(index, name): value for index, entry in state.items() for name, value in entry.items()}


def growth(action: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that `action` leaves allocated on the device, and the most above before that it had at a time."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = action()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    after = torch.cuda.memory_allocated() - before
    del result
    return after, peak


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", [*MODES, "wrapper"])
def test_f31_saving_and_loading_take_one_tensor_of_device_memory(
    kind: str, flat: bool, tmp_path: Path
) -> None:
    model = Net()
    optimizer = make(model, kind, lr=1e-3)
    train(model, optimizer, range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    kept: list[Any] = []

    def save() -> None:
        kept.append(get_optimizer_state_dict(model, optimizer, options=options))
        offload.save_checkpoint(optimizer.state_dict(), tmp_path / "file")

    def load() -> None:
        set_optimizer_state_dict(model, optimizer, kept[0], options=options)
        optimizer.load_state_dict(offload.load_checkpoint(tmp_path / "file"))

    for action in (save, load):
        after, peak = growth(action)
        assert after == 0, action.__name__
        assert peak <= LARGEST_BYTES, action.__name__
    optimizer.close()


@pytest.mark.parametrize("kind", [*MODES, "wrapper"])
def test_a_run_is_resumed_with_its_bits(kind: str, tmp_path: Path) -> None:
    """Also in another mode, but for the wrapper, whose state has no masters."""
    model = Net()
    optimizer = make(model, kind, lr=1e-3)
    train(model, optimizer, range(4))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    offload.save_checkpoint(saved, tmp_path / "file")
    train(model, optimizer, range(4, 6))
    expected, weights = tensors(optimizer), [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    others = [kind] if kind == "wrapper" else [kind, MODES[(MODES.index(kind) + 1) % len(MODES)]]
    for other in others:
        loaded = offload.load_checkpoint(tmp_path / "file")
        model = Net()
        model.load_state_dict(loaded["model"])
        optimizer = make(model, other, lr=0.5, betas=(0.1, 0.2))
        optimizer.load_state_dict(loaded["optimizer"])
        train(model, optimizer, range(4, 6))
        state = tensors(optimizer)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in expected), other
        assert all(map(torch.equal, model.parameters(), weights)), other
        optimizer.close()


@pytest.mark.parametrize("mode", MODES)
def test_state_dicts_are_on_the_host_and_stay_as_they_are(mode: str) -> None:
    model = Net()
    with make(model, mode, lr=1e-3) as optimizer:
        train(model, optimizer, range(2))
        exported = tensors(optimizer)
        copies = {key: value.clone() for key, value in exported.items()}
        train(model, optimizer, range(2, 4))
        torch.cuda.synchronize()
        assert all(value.device.type == "cpu" for value in exported.values())
        assert all(torch.equal(exported[key], copies[key]) for key in copies)
        later = tensors(optimizer)
        assert not any(torch.equal(later[key], copies[key]) for key in copies)


def test_fp32_state_comes_from_and_goes_to_fused_torch_on_the_device() -> None:
    """Step counts of fused torch lie on the device; state of this library comes to it from the host."""
    model = Net(torch.float32)
    plain = torch.optim.AdamW(model.named_parameters(), lr=1e-3, fused=True)
    train(model, plain, range(3))
    with make(model, "wavefront", lr=0.5) as optimizer:
        optimizer.load_state_dict(plain.state_dict())
        for parameter in model.parameters():
            ours, theirs = optimizer.state[parameter], plain.state[parameter]
            assert ours["step"] == 3
            assert torch.equal(ours["exp_avg"].cpu(), theirs["exp_avg"].cpu())
            assert torch.equal(ours["exp_avg_sq"].cpu(), theirs["exp_avg_sq"].cpu())
        train(model, optimizer, range(3, 5))
        exported = optimizer.state_dict()
    last = torch.optim.AdamW(model.named_parameters(), lr=0.7, fused=True)
    last.load_state_dict(exported)
    for index, parameter in enumerate(model.parameters()):
        names = exported["param_groups"][0]["param_names"]
        assert dict(model.named_parameters())[names[index]] is parameter
        assert torch.equal(last.state[parameter]["exp_avg"].cpu(), exported["state"][index]["exp_avg"])
    assert last.param_groups[0]["lr"] == 1e-3
    train(model, last, range(5, 6))
