"""Rows of the fault list that had no test of their own elsewhere; the table of all rows is in README.md."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.config import MODES
from offload.transfer.pinned import mapped_bytes
from tests.training import (
    Reference,
    adamw,
    assert_matches_reference,
    assert_same_snapshot,
    batches,
    hyper_by_name,
    loss_of,
    make_decoder,
    random_delays,
    snapshot,
    train,
    use_lanes,
)

ROOT = Path(__file__).resolve().parents[1]


def trained(**options: Any) -> dict[str, dict[str, torch.Tensor]]:
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    with adamw(model, masters=masters, **options) as optimizer:
        train(model, optimizer, batches(5))
        return snapshot(model, optimizer)


def test_f8_saved_state_of_frozen_parameters_waits_in_the_state_dict() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        train(model, optimizer, batches(2))
        saved = optimizer.state_dict()
    model.layers[1].requires_grad_(False)
    with adamw(model) as optimizer:
        optimizer.load_state_dict(saved)
        again = optimizer.state_dict()
        assert saved["state"].keys() == again["state"].keys()
        for index, entry in saved["state"].items():
            assert all(torch.equal(again["state"][index][name], value) for name, value in entry.items())


@pytest.mark.parametrize("backwards", [2, 3])
def test_f5_backward_passes_that_nobody_declared(backwards: int) -> None:
    """Three passes and then `step()`: the second raises, whatever the mode; none is lost without a word."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    for mode in ("wavefront", "resident", "chunked-stream"):
        with adamw(model, mode=mode) as optimizer:
            loss_of(model, batches(1)[0]).backward()
            for _ in range(backwards - 1):
                with pytest.raises(offload.UndeclaredBackwardError, match="accumulation_steps=2"):
                    loss_of(model, batches(1)[0]).backward()
            optimizer.step()


def test_f17_two_slots_and_two_hundred_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a slow consumer: every slot is used again and again while its tile is still awaited elsewhere."""
    torch.manual_seed(0)
    layers = nn.ParameterList(nn.Parameter(torch.randn(300 + 7 * i)) for i in range(200))
    masters = offload.cast_compute_weights(layers)
    reference = Reference(dict(masters))
    use_lanes(monkeypatch, delay=random_delays(3, most_s=2e-3))
    config = {"ring_slots": 2, "backlog_tiles": 1, "tile_numel": 1024}
    with adamw(layers.named_parameters(), masters=masters, config=config) as optimizer:
        for step in range(3):
            gradients = {name: [torch.randn_like(p)] for name, p in layers.named_parameters()}
            sum((p * gradients[name][0]).sum() for name, p in layers.named_parameters()).backward()
            reference.step(gradients, hyper_by_name(optimizer, layers))
            optimizer.step()
            assert step == 0 or optimizer.last_step.early_tiles >= 200
        assert_matches_reference(layers, optimizer, reference)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "auto"])
def test_f18_identical_runs_have_identical_bits(mode: str) -> None:
    first = trained(mode=mode)
    assert_same_snapshot(trained(mode=mode), first)
    other = {"ring_slots": 3, "tile_numel": 1024, "threads": 1, "backlog_tiles": 2}
    assert_same_snapshot(trained(mode=mode, config=other), first)


@pytest.mark.parametrize("swapped", ["all", "one"])
def test_f25_parameters_swapped_after_construction(swapped: str) -> None:
    """As wrappers do. All of them: no gradient comes. One of them: only the model shows it."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    owner = model if swapped == "one" else None
    with adamw(model, model=owner) as optimizer:
        train(model, optimizer, batches(1))
        for module in model.modules() if swapped == "all" else [model.head]:
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
        loss_of(model, batches(1)[0]).backward()
        expected = (
            (offload.NoGradientError, "replaced")
            if swapped == "all"
            else (offload.ParameterError, r"head\.weight.*replaced.*build the optimizer")
        )
        with pytest.raises(expected[0], match=expected[1]):
            optimizer.step()


def test_f39_a_child_forked_after_a_parallel_kernel() -> None:
    """A DataLoader's workers: they may use torch, and end; the parent goes on."""
    program = """
import torch, offload
from tests.training import *
model = make_decoder()
optimizer = adamw(model, config={"threads": 2, "tile_numel": 1024})
train(model, optimizer, batches(2))
data = [torch.ones(8) for _ in range(6)]
for workers in (1, 2):
    loader = torch.utils.data.DataLoader(data, num_workers=workers, multiprocessing_context="fork", timeout=60)
    assert sum(float(batch.sum()) for batch in loader) == 48
train(model, optimizer, batches(2))
optimizer.close()
print("done", flush=True)
"""
    search = {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **search},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_f43_modes_give_everything_back() -> None:
    for mode in MODES:
        gc.collect()
        before = mapped_bytes(), threading.active_count()
        model = make_decoder()
        optimizer = adamw(model, mode=mode)
        train(model, optimizer, batches(2))
        optimizer.close()
        assert (mapped_bytes(), threading.active_count()) == before, mode


def test_f44_ctrl_c_in_backward() -> None:
    """Raised in a hook of the user's: nothing hangs, and what was only held can be dropped."""
    model = make_decoder()
    offload.cast_compute_weights(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with adamw(model, nonfinite="skip", clip="defer") as optimizer:
        train(model, optimizer, batches(2))
        handle = model.layers[0].register_full_backward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, batches(1)[0]).backward()
        handle.remove()
        with pytest.raises(offload.MidStepError, match="ended with an exception"):
            optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, batches(2))


def test_f44_a_copy_that_fails_before_the_verdict_leaves_the_step_to_be_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the error's text says, also where the norm is measured first."""
    broken: list[bool] = []

    def fail(lane: str, index: int) -> BaseException | None:
        return OSError("the link is down") if broken and lane == "to_host" else None

    use_lanes(monkeypatch, fail=fail)
    expected = trained(mode="chunked-stream", max_grad_norm=0.5)
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    with adamw(model, masters=masters, mode="chunked-stream", max_grad_norm=0.5) as optimizer:
        for ids in batches(5):
            loss_of(model, ids).backward()
            broken.append(True)
            with pytest.raises(offload.StateError, match=r"nothing was changed .* call step\(\) again"):
                optimizer.step()
            broken.clear()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_snapshot(snapshot(model, optimizer), expected)


def test_f45_eight_optimizers_of_one_process() -> None:
    """Interleaved, each in another mode than its neighbour: the bits of each alone."""
    modes = [mode for mode in MODES if mode != "auto"]
    expected = trained(mode="resident")
    models = [make_decoder() for _ in range(8)]
    optimizers = []
    for index, model in enumerate(models):
        masters = offload.cast_compute_weights(model, keep_fp32="norm")
        optimizers.append(adamw(model, masters=masters, mode=modes[index % len(modes)]))
    for ids in batches(5):
        for model in models:
            loss_of(model, ids).backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
    for model, optimizer in zip(models, optimizers, strict=True):
        assert_same_snapshot(snapshot(model, optimizer), expected)
        optimizer.close()
