"""Gradients: accumulated, missing, doubled, assigned, non-finite, interrupted. Rows of the fault list are named F<n>."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.training import (
    Decoder,
    Recorder,
    Reference,
    adamw,
    assert_matches_reference,
    assert_same_snapshot,
    batches,
    hyper_by_name,
    loss_of,
    make_decoder,
    snapshot,
    train,
)

MODES = ["wavefront", "resident"]


def with_reference(model: nn.Module) -> tuple[offload.Masters, Recorder, Reference]:
    masters = offload.cast_compute_weights(model, keep_fp32=lambda name: "norm" in name)
    reference = Reference({name: masters.get(name, p.detach()) for name, p in model.named_parameters()})
    return masters, Recorder(model), reference


class Experts(nn.Module):
    """Three experts of which each batch uses the ones it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.used: tuple[int, ...] = (0, 1, 2)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.used:
            x = x + torch.tanh(self.layers[index](x))
        return x.float().square().mean()


# Accumulation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_f5_declared_by_context(mode: str) -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, mode=mode) as optimizer:
        for ids in batches(6):
            with optimizer.accumulate():
                for part in range(2):
                    loss_of(model, ids.roll(part, 1)).backward()
            loss_of(model, ids.roll(2, 1)).backward()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)
        assert mode == "resident" or optimizer.last_step.early_tiles > 0


def test_f5_the_context_wins_over_the_count() -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, accumulation_steps=4) as optimizer:
        for ids in batches(3):
            with optimizer.accumulate():
                loss_of(model, ids).backward()
            loss_of(model, ids.roll(1, 1)).backward()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)


@pytest.mark.parametrize("mode", MODES)
def test_fewer_micro_batches_than_declared_are_applied_and_logged(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, mode=mode, accumulation_steps=4) as optimizer:
        train(model, optimizer, batches(2), recorder=recorder, reference=reference, micro_batches=4)
        with caplog.at_level(logging.INFO, "offload"):
            train(model, optimizer, batches(2), recorder=recorder, reference=reference, micro_batches=3)
        assert "3 of 4 declared micro-batches" in caplog.text
        train(model, optimizer, batches(2), recorder=recorder, reference=reference, micro_batches=4)
        assert_matches_reference(model, optimizer, reference)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_f5_an_undeclared_backward_raises_at_its_first_hook(mode: str, steps_before: int) -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, mode=mode) as optimizer:
        data = batches(steps_before + 2)
        train(model, optimizer, data[:steps_before], recorder=recorder, reference=reference)
        loss_of(model, data[-2]).backward()
        first = recorder.take()
        with pytest.raises(offload.UndeclaredBackwardError, match=r"accumulation_steps=2.*accumulate\(\)"):
            loss_of(model, data[-1]).backward()
        recorder.take()
        reference.step(first, hyper_by_name(optimizer, model))
        optimizer.step()  # what came before the mistake is still applied
        assert_matches_reference(model, optimizer, reference)


def test_f5_two_losses_of_one_graph() -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters) as optimizer:
        for ids in batches(4):
            loss = loss_of(model, ids)
            with optimizer.accumulate():
                loss.backward(retain_graph=True)
            (2 * loss).backward()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)


# Parameters that fire too little or too much ----------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_f6_experts_without_gradients(mode: str) -> None:
    """Never used: nothing changes, no step count. Used in one micro-batch: applied. Used before: nothing left over."""
    model = Experts()
    masters, recorder, reference = with_reference(model)
    usage = [
        ((0, 1), (0, 1)),
        ((0, 1, 2), (0, 1)),
        ((0, 1), (0, 1, 2)),
        ((0, 2), (0, 2)),
        ((0, 1), (0,)),
        ((0, 1, 2),) * 2,
    ]
    with adamw(model.named_parameters(), masters=masters, mode=mode, accumulation_steps=2) as optimizer:
        for parts in usage * 2:
            for model.used in parts:
                model.loss(torch.randn(4, 24, dtype=torch.bfloat16)).backward()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
            optimizer.zero_grad()
        assert_matches_reference(model, optimizer, reference)
        assert optimizer.state[model.layers[2].weight]["step"] == 8
        assert optimizer.state[model.layers[0].weight]["step"] == 12


def test_f6_a_parameter_that_is_never_used_stays_as_it_is() -> None:
    model = Experts()
    model.used = (0, 1)
    offload.cast_compute_weights(model)
    with adamw(model.named_parameters(), weight_decay=0.5) as optimizer:
        before = snapshot(model, optimizer)
        for _ in range(3):
            model.loss(torch.randn(4, 24, dtype=torch.bfloat16)).backward()
            optimizer.step()
        after = snapshot(model, optimizer)
        for name in ("layers.2.weight", "layers.2.bias"):
            assert_same_snapshot({name: after[name]}, {name: before[name]})


@pytest.mark.parametrize("checkpointing", [True, False, None])
@pytest.mark.parametrize("mode", MODES)
def test_f7_tied_weights_under_both_kinds_of_checkpointing(mode: str, checkpointing: bool | None) -> None:
    model = make_decoder(tied=True, checkpointing=checkpointing)
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, mode=mode) as optimizer:
        train(model, optimizer, batches(5), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


class TiedInside(nn.Module):
    """One weight, used inside a checkpoint and outside of it: with reentrant checkpointing it fires twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.inside_first = True

    def loss(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        shared = self.layers[0]
        x = torch.utils.checkpoint.checkpoint(lambda y: torch.tanh(shared(y)), x, use_reentrant=reentrant)
        return shared(torch.tanh(self.layers[1](x))).float().square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_f7_a_weight_that_fires_twice_is_updated_once(mode: str, reentrant: bool) -> None:
    model = TiedInside()
    masters, recorder, reference = with_reference(model)
    with adamw(model.named_parameters(), masters=masters, mode=mode) as optimizer:
        for _ in range(5):
            x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
            model.loss(x, reentrant).backward()
            gradients = recorder.take()
            assert len(gradients["layers.0.weight"]) == (2 if reentrant else 1)
            reference.step(gradients, hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)
        assert optimizer.state[model.layers[0].weight]["step"] == 5


def test_f8_frozen_parameters_cost_nothing() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    with adamw(model) as optimizer:
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert all(p not in optimizer.state for n, p in model.named_parameters() if n in frozen)
        before = {n: p.clone() for n, p in model.named_parameters() if n in frozen}
        train(model, optimizer, batches(3))
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in frozen)
        trainable = sum(-(-p.numel() // 1024) * 1024 for p in model.parameters() if p.requires_grad)
        assert optimizer.host_bytes < 12 * trainable + 2 * 2 * 8 * 4 * 4096 + 2 * trainable


def test_f9_a_layer_unfrozen_later_trains_from_its_own_first_step() -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    late = model.layers[1]
    late.requires_grad_(False)
    with adamw(model, masters=masters) as optimizer:
        data = batches(8)
        train(model, optimizer, data[:3], recorder=recorder, reference=reference)
        late.requires_grad_(True)
        train(model, optimizer, data[3:], recorder=recorder, reference=reference)
        assert optimizer.state[late.qkv.weight]["step"] == 5
        assert optimizer.state[model.head.weight]["step"] == 8
        assert_matches_reference(model, optimizer, reference)


def test_f12_step_without_any_gradient_raises() -> None:
    model = make_decoder()
    with adamw(model) as optimizer:
        with pytest.raises(offload.NoGradientError, match=r"loss\.backward"):
            optimizer.step()
        train(model, optimizer, batches(2))
        with pytest.raises(offload.NoGradientError):
            optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_gradients_assigned_by_hand_are_applied(mode: str) -> None:
    model = make_decoder()
    masters, _, reference = with_reference(model)
    with adamw(model, masters=masters, mode=mode) as optimizer:
        for _ in range(3):
            gradients = {name: [torch.randn_like(p)] for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name][0].clone()
            reference.step(gradients, hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)


def test_f33_any_dense_strides() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Linear(12, 12)])
    model.layers[0].to(memory_format=torch.channels_last)
    model.layers[1].weight = nn.Parameter(torch.randn(12, 12).t())
    model.scalar = nn.Parameter(torch.tensor(0.5))
    model.empty = nn.Parameter(torch.empty(0, 4))
    masters, recorder, reference = with_reference(model)
    strides = {name: p.stride() for name, p in model.named_parameters()}
    with adamw(model.named_parameters(), masters=masters) as optimizer:
        for _ in range(4):
            image = torch.randn(2, 3, 6, 6, dtype=torch.bfloat16)
            y = model.layers[0](image).flatten(1)[:, :12]
            (model.layers[1](y).float().square().mean() * model.scalar + model.empty.sum()).backward()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)
        for name, parameter in model.named_parameters():
            assert parameter.stride() == strides[name] == optimizer.state[parameter]["exp_avg"].stride()


# Steps that must not happen ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_f20_a_skipped_step_changes_no_bit(mode: str, value: float, caplog: pytest.LogCaptureFixture) -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, mode=mode, nonfinite="skip") as optimizer:
        train(model, optimizer, batches(3), recorder=recorder, reference=reference)
        before = snapshot(model, optimizer)
        loss_of(model, batches(1)[0]).backward()
        model.embedding.weight.grad = torch.zeros_like(model.embedding.weight)  # finishes last
        model.embedding.weight.grad[-1, -1] = value
        with caplog.at_level(logging.WARNING, "offload"):
            optimizer.step()
        recorder.take()
        assert optimizer.last_step.skipped
        assert "embedding.weight" in caplog.text
        assert_same_snapshot(snapshot(model, optimizer), before)
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


@pytest.mark.parametrize("mode", MODES)
def test_raising_on_nonfinite_gradients_changes_no_bit(mode: str) -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, mode=mode, nonfinite="raise") as optimizer:
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        before = snapshot(model, optimizer)
        (loss_of(model, batches(1)[0]) * float("nan")).backward()
        with pytest.raises(offload.NonFiniteGradientError, match=r"head\.weight|embedding\.weight"):
            optimizer.step()
        recorder.take()
        assert_same_snapshot(snapshot(model, optimizer), before)
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


def test_nonfinite_gradients_propagate_by_default() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        (loss_of(model, batches(1)[0]) * float("nan")).backward()
        optimizer.step()
        assert torch.isnan(optimizer.state[model.head.weight]["master"]).all()
        assert torch.isnan(model.head.weight).all()
        assert not optimizer.last_step.grad_norm < float("inf")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_clipping_is_exact_on_both_sides_of_the_limit(mode: str, micro_batches: int) -> None:
    """The naive clipped reference: FP64 norm of the FP32 sums, torch's coefficient, one product."""
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    limit, clipped = 1.05 * micro_batches, []
    options: dict[str, Any] = {"max_grad_norm": limit, "accumulation_steps": micro_batches, "mode": mode}
    with adamw(model, masters=masters, **options) as optimizer:
        for index, ids in enumerate(batches(30)):
            for part in range(micro_batches):
                (loss_of(model, ids.roll(part, 1)) * (0.05, 1.0, 8.0)[index % 3]).backward()
            gradients = recorder.take()
            norm = sum(summed(parts).double().square().sum() for parts in gradients.values()).sqrt().item()
            ratio = torch.tensor(min(1.0, limit / (norm + 1e-6)), dtype=torch.float32).item()
            optimizer.step()
            assert optimizer.last_step.grad_norm == pytest.approx(norm, rel=1e-6)
            clipped.append(optimizer.last_step.clipped)
            reference.step(gradients, hyper_by_name(optimizer, model), optimizer.last_step.clip_coefficient)
            assert optimizer.last_step.clip_coefficient == pytest.approx(ratio, rel=1e-6)
        assert_matches_reference(model, optimizer, reference)
    assert any(clipped)
    assert not all(clipped)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


# Interruptions (F46) ----------------------------------------------------------------------------------------


def interrupted_backward(model: Decoder, ids: torch.Tensor) -> None:
    """A backward that raises when half of the layers have their gradients."""
    handle = model.layers[1].register_full_backward_hook(_raise)
    try:
        with pytest.raises(RuntimeError, match="on purpose"):
            loss_of(model, ids).backward()
    finally:
        handle.remove()


def _raise(*arguments: Any) -> None:
    raise RuntimeError("on purpose")


def test_f46_dropping_a_backward_that_was_only_held() -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, nonfinite="skip") as optimizer:
        for ids in batches(4):
            loss_of(model, ids.flip(1)).backward()
            recorder.take()
            optimizer.zero_grad()  # `if not isfinite(loss): zero_grad(); continue`
            train(model, optimizer, [ids], recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


def test_f46_dropping_a_backward_that_was_applied_is_refused() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        train(model, optimizer, batches(2))
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(offload.MidStepError, match=r"layers\.\d.*nonfinite='skip'"):
            optimizer.zero_grad()
        with pytest.raises(offload.MidStepError, match="step"):
            optimizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()


def test_f46_an_exception_in_a_backward_that_was_only_held() -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, nonfinite="skip") as optimizer:
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        interrupted_backward(model, batches(1)[0])
        recorder.take()
        with pytest.raises(offload.MidStepError, match=r"zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


def test_f46_an_exception_in_a_backward_that_was_applied() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        train(model, optimizer, batches(2))
        saved = optimizer.state_dict()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        interrupted_backward(model, batches(1)[0])
        for call in (optimizer.step, optimizer.zero_grad, optimizer.state_dict):
            with pytest.raises(offload.MidStepError):
                call()
        with pytest.raises(offload.MidStepError):
            loss_of(model, batches(1)[0]).backward()
        optimizer.load_state_dict(saved)
        assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
        train(model, optimizer, batches(1))


def test_hyperparameters_changed_between_backward_and_step() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        train(model, optimizer, batches(2))
        loss_of(model, batches(1)[0]).backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(offload.HyperparameterChangedError, match=r"lr changed from 0\.003 to 0\.5"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()


# Gradients that have left -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_reading_a_gradient_that_has_left_raises(mode: str) -> None:
    """`clip_grad_norm_` on nothing would return 0 and clip nothing, silently."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, mode=mode) as optimizer:
        for ids in batches(2):
            loss_of(model, ids).backward()
            gradient = model.head.weight.grad
            assert gradient is not None
            assert gradient.shape == model.head.weight.shape
            assert "head.weight" in repr(gradient)
            for read in (
                torch.nn.utils.clip_grad_norm_,
                lambda parameters, norm: next(parameters).grad + norm,
            ):
                with pytest.raises(offload.GradientError, match=r"max_grad_norm"):
                    read(model.parameters(), 1.0)
            optimizer.step()
            assert model.head.weight.grad is None
            optimizer.zero_grad(set_to_none=False)


def test_sentinels_go_when_the_optimizer_is_closed() -> None:
    model = make_decoder()
    optimizer = adamw(model)
    loss_of(model, batches(1)[0]).backward()
    optimizer.close()
    loss_of(model, batches(1)[0]).backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


# Compiled models (F10) --------------------------------------------------------------------------------------


def compiled_blocks(model: Decoder) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def compiled_model(model: Decoder) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize("compiled_autograd", [False, True])
@pytest.mark.parametrize("make", [compiled_blocks, compiled_model])
def test_f10_compiled_models(make: Any, compiled_autograd: bool) -> None:
    plain = make_decoder()
    masters, recorder, reference = with_reference(plain)
    with adamw(plain, masters=masters) as optimizer:
        model = make(plain)
        torch._dynamo.config.compiled_autograd = compiled_autograd
        try:
            for ids in batches(4):
                loss_of(model, ids).backward()
                reference.step(recorder.take(), hyper_by_name(optimizer, plain))
                optimizer.step()
        finally:
            torch._dynamo.config.compiled_autograd = False
        assert_matches_reference(plain, optimizer, reference)


def test_a_weight_that_begins_to_fire_twice_is_never_stepped_too_early() -> None:
    model = TiedInside()
    masters, recorder, reference = with_reference(model)
    with adamw(model.named_parameters(), masters=masters, accumulation_steps=2) as optimizer:
        for step in range(6):
            for _ in range(2):
                x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
                model.loss(x, reentrant=step >= 3).backward()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)


# Behind the optimizer's back -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_gradients_dropped_by_other_means_are_missed(mode: str) -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, mode=mode, accumulation_steps=2) as optimizer:
        loss_of(model, batches(1)[0]).backward()
        model.zero_grad()
        with pytest.raises(offload.MidStepError, match=r"zero_grad\(\) of the optimizer"):
            loss_of(model, batches(1)[0]).backward()
        with pytest.raises(offload.MidStepError):
            optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, batches(2), micro_batches=2)


def test_asking_autograd_for_gradients_drops_none() -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, accumulation_steps=2) as optimizer:
        for ids in batches(3):
            loss_of(model, ids).backward()
            torch.autograd.grad(loss_of(model, ids), list(model.parameters()))
            loss_of(model, ids.roll(1, 1)).backward()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)


@pytest.mark.parametrize("mode", MODES)
def test_f1_weights_loaded_between_backward_and_step(mode: str) -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, mode=mode) as optimizer:
        for group in optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        loss_of(model, batches(1)[0]).backward()
        loaded = {name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()}
        model.load_state_dict(loaded)
        optimizer.step()
        assert all(torch.equal(p, loaded[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("change", ["resize", "dtype", "strides"])
def test_parameters_of_another_form_are_refused(change: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False)).to(torch.bfloat16)
    weight = model[0].weight
    with adamw([("conv.weight", weight)]):
        if change == "resize":
            weight.data = torch.zeros(9, 4, 3, 3, dtype=torch.bfloat16)
        elif change == "dtype":
            weight.data = weight.data.float()
        else:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        with pytest.raises(offload.ParameterError, match=r"conv\.weight was .* when the optimizer was built"):
            weight.float().sum().backward()


@pytest.mark.parametrize("call", ["step", "zero_grad"])
def test_f44_what_was_cut_short_is_remembered(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Ctrl-C inside `step()`: no second application, no checkpoint of a mixture. Inside `zero_grad()`: run it again."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, nonfinite="skip") as optimizer:
        train(model, optimizer, batches(2))
        saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        loss_of(model, batches(1)[0]).backward()
        stepper = type(optimizer._engine._stepper)
        with monkeypatch.context() as patch:
            patch.setattr(stepper, "end_step", lambda *args: _interrupt())
            with pytest.raises(KeyboardInterrupt):
                getattr(optimizer, call)()
        if call == "step":
            for again in (optimizer.step, optimizer.zero_grad, optimizer.state_dict, optimizer.resync):
                with pytest.raises(offload.MidStepError, match=r"step\(\) was cut short"):
                    again()
            model.load_state_dict(weights)
            optimizer.load_state_dict(saved)
        else:
            with pytest.raises(offload.MidStepError, match="cut short"):
                optimizer.state_dict()
            optimizer.zero_grad()
        train(model, optimizer, batches(2))
        assert optimizer.state[model.head.weight]["step"] == 4


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_fp32_parameters_may_come_to_a_bf16_optimizer() -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    named = dict(model.named_parameters())
    bf16 = [(name, p) for name, p in named.items() if p.dtype is torch.bfloat16]
    with adamw(bf16, masters=masters, config={"tile_numel": 1024}) as optimizer:
        optimizer.add_param_group({"params": [(n, p) for n, p in named.items() if p.dtype is torch.float32]})
        train(model, optimizer, batches(3), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


def test_parameters_given_twice_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(offload.ConfigError, match="twice"):
        offload.AdamW([weight, weight])


def test_a_sentinel_gives_its_memory_to_nobody() -> None:
    model = make_decoder()
    with adamw(model) as optimizer:
        loss_of(model, batches(1)[0]).backward()
        gone = model.head.weight.grad
        for read in (
            lambda: gone.data_ptr(),
            lambda: pickle.dumps(gone),
            gone.share_memory_,
            gone.untyped_storage,
            gone.numpy,
        ):
            with pytest.raises(offload.GradientError, match=r"head\.weight"):
                read()
        optimizer.step()
