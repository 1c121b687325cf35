"""Plain tensors on several ranks: DistributedDataParallel, FSDP2's `replicate`, gradients reduced by hand and in hooks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.nn.parallel import DistributedDataParallel

import offload
from tests.distributed.ranks import Ranks
from tests.distributed.training import (
    MODES,
    assert_equal,
    assert_whole_state,
    local_bits,
    optimizer_over,
    train_beside_reference,
    whole,
)
from tests.training import Recorder, Reference, batches, hyper_by_name, loss_of, make_decoder


def make_model(keep_fp32: str | None = "norm") -> nn.Module:
    model = make_decoder(layers=1, width=24)
    offload.cast_compute_weights(model, keep_fp32=keep_fp32)
    return model


def ddp(mode: str, micro_batches: int = 1, **options: Any) -> list[int]:
    """Beside a reference that gets what stands in ``.grad`` after backward; tiles that were stepped early."""
    model = make_model()
    wrapped = DistributedDataParallel(model, **options)
    reference = Reference({name: whole(p).float() for name, p in model.named_parameters()})
    early = []
    with optimizer_over(model, mode, accumulation_steps=micro_batches, max_grad_norm=None) as optimizer:
        for ids in batches(3):
            for part in range(micro_batches):
                last = part == micro_batches - 1
                with contextlib.nullcontext() if last else wrapped.no_sync():
                    loss_of(wrapped, ids.roll(part + dist.get_rank(), 1)).backward()
            gradients = {name: [p.grad.clone()] for name, p in model.named_parameters()}
            assert_same_on_all_ranks(gradients)
            optimizer.step()
            reference.step(gradients, hyper_by_name(optimizer, model))
            early.append(optimizer.last_step.early_tiles)
            optimizer.zero_grad()
        assert_whole_state(model, optimizer, reference)
    return early


def assert_same_on_all_ranks(gradients: dict[str, list[torch.Tensor]]) -> None:
    for name, (gradient,) in gradients.items():
        first = gradient.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, gradient), name


def ddp_in_all_modes() -> None:
    for mode in MODES:
        assert ddp(mode) == [0] * 3


def ddp_variants() -> None:
    ddp("wavefront", gradient_as_bucket_view=True)
    ddp("wavefront", static_graph=True)
    ddp("wavefront", micro_batches=3)
    ddp("chunked-stream", micro_batches=3, gradient_as_bucket_view=True)


def test_ddp_gradients_are_taken_when_they_are_reduced(ranks: Ranks) -> None:
    ranks.run(ddp_in_all_modes, 2)


def test_ddp_variants(ranks: Ranks) -> None:
    ranks.run(ddp_variants, 2)


def ddp_after_the_first_step(how: str) -> None:
    """Once gradients are known to be complete in their hooks, somebody who reduces them later must be refused."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    with optimizer_over(model, "wavefront") as optimizer:
        with wrapped.no_sync():
            loss_of(wrapped if how == "no_sync" else model, batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(
            offload.GradientError, match=r"(?s)DistributedDataParallel.*before the optimizer's first step"
        ):
            loss_of(wrapped, batches(1)[0]).backward()


@pytest.mark.parametrize("how", ["no_sync", "unwrapped"])
def test_ddp_that_comes_late_is_never_silent(ranks: Ranks, how: str) -> None:
    ranks.run(ddp_after_the_first_step, 2, how)


def replicated(mode: str, micro_batches: int) -> None:
    model = make_model(keep_fp32=None)
    for layer in model.layers:
        layer.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        replicate(layer)
    model = replicate(model)
    recorder = Recorder(model)
    with optimizer_over(model, mode, accumulation_steps=micro_batches) as optimizer:
        reports = train_beside_reference(model, optimizer, recorder, micro_batches=micro_batches)
        assert (reports[-1].early_tiles > 0) == (mode == "wavefront")


@pytest.mark.parametrize(("mode", "micro_batches"), [("wavefront", 1), ("wavefront", 2), ("resident", 2)])
def test_replicate_hands_gradients_over_early(ranks: Ranks, mode: str, micro_batches: int) -> None:
    ranks.run(replicated, 2, mode, micro_batches)


def reduced_in_hooks() -> tuple[int, dict[str, torch.Tensor]]:
    """A hook of the user's reduces each gradient as it comes: it is complete when the optimizer's hook is called."""

    def reduce(parameter: torch.Tensor) -> None:
        dist.all_reduce(parameter.grad)

    model = make_model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    recorder = Recorder(model)
    reference = Reference({name: whole(p).float() for name, p in model.named_parameters()})
    with optimizer_over(model, "wavefront") as optimizer:
        for ids in batches(3):
            loss_of(model, ids.roll(dist.get_rank(), 1)).backward()
            gradients = recorder.take()
            optimizer.step()
            reference.step(gradients, hyper_by_name(optimizer, model))
            optimizer.zero_grad()
        assert_whole_state(model, optimizer, reference)
        return optimizer.last_step.early_tiles, local_bits(model, optimizer)


def test_gradients_reduced_in_hooks_are_taken_early(ranks: Ranks) -> None:
    results = ranks.run(reduced_in_hooks, 2)
    for early, bits in results:
        assert early > 0
        assert_equal(bits, results[0][1])


def local_micro_batches(mode: str) -> None:
    """Nobody reduces: micro-batches are added in FP32, in the first step too."""
    model = make_model()
    reference = Reference({name: whole(p).float() for name, p in model.named_parameters()})
    parts: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            parts.setdefault(name, []).append(gradient.clone())

        return hook

    for name, parameter in model.named_parameters():
        parameter.register_hook(keep(name))
    with optimizer_over(model, mode, accumulation_steps=3) as optimizer:
        for ids in batches(3):
            for part in range(3):
                loss_of(model, ids.roll(part, 1)).backward()
            optimizer.step()
            reference.step(parts, hyper_by_name(optimizer, model))
            parts.clear()
            optimizer.zero_grad()
        assert_whole_state(model, optimizer, reference)


@pytest.mark.parametrize("mode", ["wavefront", "chunked-sync"])
def test_micro_batches_of_plain_tensors_are_added_exactly(ranks: Ranks, mode: str) -> None:
    ranks.run(local_micro_batches, 1, mode)


def drop_between() -> None:
    """What stays in ``.grad`` can be dropped, by this optimizer's ``zero_grad`` only."""
    model = make_model()
    DistributedDataParallel(model)
    with optimizer_over(model, "wavefront") as optimizer:
        before = local_bits(model, optimizer)
        loss_of(model, batches(1)[0]).backward()
        optimizer.zero_grad()
        with pytest.raises(offload.NoGradientError):
            optimizer.step()
        assert_equal(local_bits(model, optimizer), before)
        loss_of(model, batches(1)[0]).backward()
        model.zero_grad()
        with pytest.raises(offload.MidStepError, match=r"zero_grad\(\) of the optimizer"):
            optimizer.step()


def test_gradients_that_stay_can_be_dropped(ranks: Ranks) -> None:
    ranks.run(drop_between, 1)
