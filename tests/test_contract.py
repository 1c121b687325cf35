"""What users do beside training: threads, changed groups, forwards in mid-step, copies, modes of torch."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import offload
from offload.kernels.rule import RULES
from offload.schedule.hyperparameters import HYPERPARAMETERS
from tests.training import (
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

MODES = ["wavefront", "resident", "chunked-stream"]
DEADLINE_S = 60.0


def with_reference(model: nn.Module) -> tuple[offload.Masters, Recorder, Reference]:
    masters = offload.cast_compute_weights(model, keep_fp32=lambda name: "norm" in name)
    reference = Reference({name: masters.get(name, p.detach()) for name, p in model.named_parameters()})
    return masters, Recorder(model), reference


# Threads ----------------------------------------------------------------------------------------------------


class Meeting(torch.autograd.Function):
    """Identity; its backward waits for the other thread's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, barrier: threading.Barrier) -> torch.Tensor:
        ctx.barrier = barrier
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.barrier.wait(DEADLINE_S)
        return gradient, None


def backward_in_threads(losses: list[torch.Tensor]) -> None:
    """Run them at a time; raise what any of them raised."""
    errors: list[BaseException] = []

    def run(loss: torch.Tensor) -> None:
        try:
            loss.backward()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)

    threads = [threading.Thread(target=run, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def loss(self, indices: tuple[int, ...], barrier: threading.Barrier) -> torch.Tensor:
        """Both towers are in backward when either has given its first gradient."""
        x = torch.randn(4, 32, dtype=torch.bfloat16)
        for index in indices:
            x = Meeting.apply(torch.tanh(self.layers[index](x)), barrier)
        return x.float().square().mean()


@pytest.mark.parametrize("mode", MODES)
def test_two_threads_run_backward_at_a_time(mode: str) -> None:
    model = TwoTowers()
    masters, recorder, reference = with_reference(model)
    with adamw(model.named_parameters(), masters=masters, mode=mode, accumulation_steps=2) as optimizer:
        for _ in range(4):
            barrier = threading.Barrier(2)
            backward_in_threads([model.loss((0, 1), barrier), model.loss((2, 3), barrier)])
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)


class Linear(nn.Module):
    """Many parameters whose gradients are given numbers, whatever the weights: nothing but the sum can go wrong."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ParameterList(torch.randn(1500) for _ in range(30))

    def loss(self, factor: float) -> torch.Tensor:
        return sum(((index + factor) * weight).sum() for index, weight in enumerate(self.layers))


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_of_one_step_in_two_threads(mode: str) -> None:
    """The same parameters in both: two sums of two are equal in any order."""
    model = Linear()
    masters = offload.cast_compute_weights(model)
    reference = Reference(dict(masters))
    with adamw(model.named_parameters(), masters=masters, mode=mode, accumulation_steps=2) as optimizer:
        for step in range(20):
            factors = (0.5 + step, 2.0 - step)
            backward_in_threads([model.loss(factor) for factor in factors])
            gradients = {
                f"layers.{index}": [torch.full((1500,), index + factor).bfloat16() for factor in factors]
                for index in range(len(model.layers))
            }
            reference.step(gradients, hyper_by_name(optimizer, model))
            optimizer.step()
            optimizer.zero_grad()
        assert_matches_reference(model, optimizer, reference)


def test_a_gradient_that_is_added_to_the_sentinel_is_kept() -> None:
    """Whatever keeps the hook before it from running: nothing is lost."""
    weight = nn.Parameter(torch.ones(3000, dtype=torch.bfloat16))
    with adamw([("w", weight)], accumulation_steps=2, weight_decay=0.0) as optimizer:
        weight.sum().backward()
        source = optimizer._engine.records[0].source
        source.before = lambda gradient, *, more: None  # hides the method
        (2 * weight).sum().backward()
        del source.before
        optimizer.step()
        assert torch.allclose(optimizer.state[weight]["exp_avg"], torch.full((3000,), 0.3))


def test_a_hook_that_adds_to_a_gradient_that_has_left_is_told() -> None:
    """Only autograd itself may add to the sentinel, and only in backward."""
    weight = nn.Parameter(torch.ones(3000, dtype=torch.bfloat16))
    with adamw([("w", weight)]) as optimizer:
        handle = weight.register_post_accumulate_grad_hook(lambda p: p.grad.add_(1.0))
        with pytest.raises(offload.GradientError, match="reads the gradient of w"):
            weight.sum().backward()
        handle.remove()
        optimizer.zero_grad()
        weight.sum().backward()
        with pytest.raises(offload.GradientError, match="reads the gradient of w"):
            weight.grad.add_(1.0)
        optimizer.step()


def test_step_while_another_thread_is_in_backward_is_refused() -> None:
    model = TwoTowers()
    offload.cast_compute_weights(model)
    with adamw(model.named_parameters()) as optimizer:
        barrier = threading.Barrier(2)
        thread = threading.Thread(target=model.loss((0, 1), barrier).backward)
        thread.start()
        barrier.wait(DEADLINE_S)  # layer 1 has yet to give its gradient
        barrier.wait(DEADLINE_S)
        thread.join(DEADLINE_S)
        optimizer.step()
        entered, leave = threading.Event(), threading.Event()
        handle = model.layers[0].weight.register_hook(
            lambda g: entered.set() or (leave.wait(DEADLINE_S) and None)
        )
        loss = torch.tanh(model.layers[1](model.layers[0](torch.ones(1, 32, dtype=torch.bfloat16)))).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        assert entered.wait(DEADLINE_S)
        with pytest.raises(offload.MidStepError, match="still running"):
            optimizer.step()
        leave.set()
        thread.join(DEADLINE_S)
        handle.remove()
        optimizer.step()


# Fires ------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """A shift that is used outside and, with `reentrant`, inside of a checkpoint: then it fires twice in a pass.

    A weight that is multiplied would be caught by autograd itself, which finds it changed.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shift = nn.Parameter(torch.randn(32))
        self.layers = nn.ModuleList([nn.Linear(32, 32)])

    def loss(self, reentrant: bool) -> torch.Tensor:
        x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
        x = torch.utils.checkpoint.checkpoint(
            lambda y: torch.tanh(y + self.shift), x, use_reentrant=reentrant
        )
        return (self.layers[0](x) + self.shift).float().square().mean()


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_f7_a_weight_that_begins_to_fire_twice_in_its_last_micro_batch(accumulation_steps: int) -> None:
    """It cannot be right any more, and declaring more micro-batches would not help: the message says what would."""
    model = Shared()
    offload.cast_compute_weights(model)
    with adamw(model.named_parameters(), accumulation_steps=accumulation_steps) as optimizer:
        for _ in range(3):
            for _ in range(accumulation_steps):
                model.loss(False).backward()
            optimizer.step()
        for _ in range(accumulation_steps - 1):
            model.loss(False).backward()
        with pytest.raises(
            offload.GradientError, match=r"shift.*two gradients.*use_reentrant=False"
        ) as caught:
            model.loss(True).backward()
        assert not isinstance(caught.value, offload.UndeclaredBackwardError)
        with pytest.raises(offload.MidStepError, match="load the last checkpoint"):
            optimizer.step()


# Param groups -----------------------------------------------------------------------------------------------


def test_keys_of_the_users_may_hold_anything_and_change() -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters) as optimizer:
        for group in optimizer.param_groups:
            group["mask"], group["notes"] = torch.ones(7), {"a": torch.ones(2)}
        for ids in batches(3):
            loss_of(model, ids).backward()
            optimizer.param_groups[0]["mask"] = torch.zeros(7)
            optimizer.param_groups[1]["notes"] = object()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)
        assert optimizer.last_step.early_tiles > 0


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "betas in place": (
        lambda group: group["betas"].__setitem__(0, 0.5),
        r"betas changed from \(0\.9, 0\.95\) to \(0\.5",
    ),
    "lr tensor in place": (lambda group: group["lr"].fill_(0.5), r"lr changed from 0\.25 to 0\.5"),
    "another dict": (lambda group: None, r"weight_decay changed from 0\.125 to 0\.5"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_hyperparameters_changed_in_place_are_noticed(change: str) -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model.named_parameters(), weight_decay=0.125) as optimizer:
        optimizer.param_groups[0].update(betas=[0.9, 0.95], lr=torch.tensor(0.25))
        train(model, optimizer, batches(2))
        loss_of(model, batches(1)[0]).backward()
        apply, message = CHANGES[change]
        apply(optimizer.param_groups[0])
        if change == "another dict":
            optimizer.param_groups[0] = {**optimizer.param_groups[0], "weight_decay": 0.5}
        with pytest.raises(offload.HyperparameterChangedError, match=message):
            optimizer.step()


def test_the_check_knows_all_that_rules_read() -> None:
    class Reading(dict[str, Any]):
        read: ClassVar[set[str]] = set()

        def __getitem__(self, key: str) -> Any:
            self.read.add(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            self.read.add(key)
            return super().get(key, default)

    defaults = torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).defaults
    for rule in RULES.values():
        group = Reading(defaults)
        rule.row(group, 1)
        assert Reading.read <= set(HYPERPARAMETERS)
        assert "lr" in Reading.read


@pytest.mark.parametrize("mode", MODES)
def test_a_removed_group_is_not_trained_and_may_come_back(mode: str) -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, mode=mode) as optimizer:
        data = batches(9)
        train(model, optimizer, data[:3], recorder=recorder, reference=reference)
        group = optimizer.param_groups.pop()
        removed = {name for name, p in model.named_parameters() if any(p is q for q in group["params"])}
        before = {name: p.detach().clone() for name, p in model.named_parameters() if name in removed}
        for ids in data[3:6]:
            loss_of(model, ids).backward()
            kept = {name: g for name, g in recorder.take().items() if name not in removed}
            reference.step(kept, hyper_by_name(optimizer, model))
            optimizer.step()
            assert all(
                p.grad is not None for name, p in model.named_parameters() if name in removed
            )  # as torch
            model.zero_grad()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            if name in removed:
                assert torch.equal(parameter, before[name])
                assert parameter not in optimizer.state
        assert len(optimizer.state_dict()["param_groups"]) == 1
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({**group, "lr": 2e-3})
        train(model, optimizer, data[6:], recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)
        assert optimizer.state[model.norm.weight]["step"] == 6


@pytest.mark.parametrize("mode", MODES)
def test_a_group_that_was_replaced_is_followed(mode: str) -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, mode=mode) as optimizer:
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.02}
        optimizer.param_groups.reverse()
        train(model, optimizer, batches(3), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_removed_in_mid_step_is_refused(mode: str) -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, mode=mode) as optimizer:
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        loss_of(model, batches(1)[0]).backward()
        group = optimizer.param_groups.pop()
        with pytest.raises(offload.StateError, match=r"removed between backward and step.*put it back"):
            optimizer.step()
        optimizer.param_groups.append(group)
        reference.step(recorder.take(), hyper_by_name(optimizer, model))
        optimizer.step()
        assert_matches_reference(model, optimizer, reference)


# Modes of torch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_everything_but_backward_may_happen_in_inference_mode(mode: str) -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    named = list(model.named_parameters())
    with torch.inference_mode():
        optimizer = adamw(named[:-1], masters=masters, mode=mode)
        optimizer.add_param_group({"params": named[-1:]})
    with optimizer:
        for ids in batches(3):
            loss_of(model, ids).backward()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            with torch.inference_mode():
                optimizer.step()
                optimizer.zero_grad()
        with torch.inference_mode():
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.resync()
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)
        assert not any(t.is_inference() for state in optimizer.state.values() for t in state.values())


def test_parameters_made_in_inference_mode_are_refused_by_name() -> None:
    with torch.inference_mode():
        weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(offload.ParameterError, match=r"layer\.weight.*inference_mode"):
        offload.AdamW([("layer.weight", weight)])


# Forwards in mid-step ---------------------------------------------------------------------------------------


def test_f46_a_forward_between_backward_and_step_is_refused() -> None:
    model = make_decoder(checkpointing=True)
    masters, recorder, reference = with_reference(model)
    optimizer = adamw(model, masters=masters, model=model)
    data = batches(8)
    train(model, optimizer, data[:3], recorder=recorder, reference=reference)
    loss_of(model, data[3]).backward()
    with (
        torch.no_grad(),
        pytest.raises(offload.MidStepError, match="a forward of the model between backward and step"),
    ):
        model(data[0])
    reference.step(recorder.take(), hyper_by_name(optimizer, model))
    optimizer.step()
    train(model, optimizer, data[4:], recorder=recorder, reference=reference)
    assert_matches_reference(model, optimizer, reference)
    loss_of(model, data[3]).backward()
    optimizer.close()
    model(data[0])


def test_f46_a_forward_of_untouched_weights_is_fine() -> None:
    """Micro-batches, held steps, and recomputation inside backward."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    head = nn.Linear(97, 97, bias=False, dtype=torch.bfloat16)
    named = [*model.named_parameters(), ("layers.9.weight", head.weight)]

    def loss(ids: torch.Tensor) -> torch.Tensor:
        x = torch.utils.checkpoint.checkpoint(model, ids, use_reentrant=False)
        return head(x).float().square().mean()

    with adamw(named, model=model, accumulation_steps=2) as optimizer:
        for ids in batches(4):
            loss(ids).backward()
            model(ids)
            loss(ids).backward()
            optimizer.step()
        assert optimizer.last_step.early_tiles > 0
    with adamw(named, model=model, nonfinite="skip", clip="defer") as optimizer:
        for ids in batches(3):
            loss(ids).backward()
            model(ids)
            optimizer.step()


@pytest.mark.parametrize("whole", [False, True])
def test_f10_a_compiled_model_may_be_given(whole: bool) -> None:
    plain = make_decoder()
    offload.cast_compute_weights(plain)
    model = torch.compile(plain, backend="aot_eager") if whole else plain
    with adamw(plain, model=model) as optimizer:
        if not whole:
            plain.compile(backend="aot_eager")
        for ids in batches(3):
            loss_of(model, ids).backward()
            optimizer.step()
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(offload.MidStepError, match="a forward of the model"):
            model(batches(1)[0])
        optimizer.step()
        model(batches(1)[0])


# Copies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, pickle.dumps, lambda optimizer: torch.save(optimizer, io.BytesIO())]
)
def test_copies_of_an_optimizer_are_refused_and_it_goes_on(copier: Any) -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters) as optimizer:
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        with pytest.raises(offload.StateError, match="state_dict"):
            copier(optimizer)
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


def test_a_copied_model_has_no_hooks_of_ours() -> None:
    """An EMA or an evaluation copy, made while gradients are away."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, nonfinite="skip", clip="defer") as optimizer:
        train(model, optimizer, batches(2))
        loss_of(model, batches(1)[0]).backward()
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        before = snapshot(model, optimizer)
        loss_of(twin, batches(1)[0]).backward()
        assert torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0) > 0
        assert_same_snapshot(snapshot(model, optimizer), before)
        optimizer.step()
    file.seek(0)
    assert torch.load(file, weights_only=False).head.weight.grad is None
