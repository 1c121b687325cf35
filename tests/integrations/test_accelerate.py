"""Accelerate: the loop of its documentation, with an optimizer of ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from tests.integrations.plain import (
    SMALL,
    Net,
    assert_same_weights,
    assert_trained,
    in_steps,
    loss_of,
    make_ids,
    plain_loop,
)

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402

from offload.integrations.accelerate import PreparedOptimizer, take_over  # noqa: E402

BATCHES = 10


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps its state in class attributes."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def make_accelerator(*, taken_over: bool = True, **options: Any) -> Any:
    accelerator = accelerate.Accelerator(cpu=not torch.cuda.is_available(), **options)
    return take_over(accelerator) if taken_over else accelerator


def adamw(model: nn.Module, **options: Any) -> offload.AdamW:
    return offload.AdamW(
        model.named_parameters(),
        **{"mode": "wavefront", "flush_denormals": False, "config": SMALL, **options},
    )


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.cat(make_ids(BATCHES, rows=2)), batch_size=2)


def divided_loss(model: nn.Module, ids: Tensor, accumulation: int) -> Tensor:
    return loss_of(model, ids) / accumulation


def documented_loop(
    accelerator: Any, model: nn.Module, optimizer: Any, *, max_norm: float | None, scheduler: Any = None
) -> None:
    data = accelerator.prepare(loader())
    for ids in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, ids))
            if accelerator.sync_gradients and max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["wavefront", "chunked-sync"])
@pytest.mark.parametrize(("accumulation", "max_norm"), [(1, None), (4, None), (4, 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_a_plain_loop(
    mode: str, accumulation: int, max_norm: float | None, dtype: torch.dtype
) -> None:
    """Ten batches in steps of four: the last step has two. Nothing is declared: accelerate says which is the last."""
    model, reference = Net().to(dtype), Net().to(dtype)
    expected = plain_loop(
        reference,
        in_steps(make_ids(BATCHES, rows=2), accumulation),
        lambda model, ids, _: divided_loss(model, ids, accumulation),
        max_norm=max_norm,
    )
    accelerator = make_accelerator(gradient_accumulation_steps=accumulation)
    model, optimizer = accelerator.prepare(model, adamw(model, mode=mode, max_grad_norm=max_norm))
    documented_loop(accelerator, model, optimizer, max_norm=max_norm)
    assert_same_weights(model, expected)
    assert_trained(model, Net().to(dtype))
    assert optimizer.last_step.step == -(-BATCHES // accumulation)
    optimizer.close()


def test_a_wavefront_steps_inside_backward_also_with_accumulation() -> None:
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(Net(), None)[0], None
    optimizer = accelerator.prepare(adamw(model))
    documented_loop(accelerator, model, optimizer, max_norm=None)
    assert optimizer.last_step.early_tiles > 0
    optimizer.close()


def test_accelerate_clips_as_torch_does_but_for_the_last_bits() -> None:
    """Torch takes the norm in FP32, so coefficients differ by an ulp: 2**-24 of the update, some of it rounded up."""
    model, other = Net(), Net()
    accelerator = make_accelerator()
    model, optimizer = accelerator.prepare(model, adamw(model, max_grad_norm=0.5))
    other, theirs = accelerator.prepare(other, torch.optim.AdamW(other.parameters(), fused=True))
    documented_loop(accelerator, model, optimizer, max_norm=0.5)
    documented_loop(accelerator, other, theirs, max_norm=0.5)
    for (name, weight), reference in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight, reference, rtol=1e-5, atol=1e-6, msg=name)
    optimizer.close()


def test_preparing_keeps_the_state_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would load the optimizer with its own state, by way of the device."""
    loads: list[int] = []
    original = offload.AdamW.load_state_dict
    monkeypatch.setattr(
        offload.AdamW, "load_state_dict", lambda self, state: (loads.append(1), original(self, state))[1]
    )
    model = Net()
    optimizer = make_accelerator().prepare(adamw(model))
    assert isinstance(optimizer, PreparedOptimizer)
    assert not loads
    optimizer.close()


@pytest.mark.gpu
def test_preparing_takes_no_device_memory() -> None:
    accelerator = make_accelerator()
    model = accelerator.prepare(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16))
    optimizer = adamw(model)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    accelerator.prepare(optimizer)
    assert torch.cuda.max_memory_allocated() == before
    optimizer.close()


def test_a_norm_that_the_optimizer_does_not_clip_to_is_refused() -> None:
    accelerator = make_accelerator()
    model = Net()
    model, optimizer = accelerator.prepare(model, adamw(model, max_grad_norm=1.0))
    accelerator.backward(loss_of(model, make_ids(1)[0]))
    for max_norm, norm_type in ((0.5, 2), (1.0, 1)):
        with pytest.raises(offload.ConfigError, match="norm"):
            accelerator.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    with pytest.raises(offload.ConfigError, match="clip_grad_value_"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(offload.ConfigError, match="1 of the"):
        accelerator.clip_grad_norm_(model.head.parameters(), 1.0)
    assert accelerator.clip_grad_norm_(model.parameters(), float("inf")) is None
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) is None
    optimizer.step()
    assert optimizer.last_step.grad_norm > 0
    optimizer.close()


def test_parameters_of_another_optimizer_are_clipped_by_accelerate() -> None:
    accelerator = make_accelerator()
    model, other = Net(), Net(1)
    model, other, ours, _ = accelerator.prepare(
        model, other, adamw(model, max_grad_norm=1.0), torch.optim.SGD(other.parameters(), lr=0.1)
    )
    for each in (model, other):
        accelerator.backward(loss_of(each, make_ids(1)[0]))
    assert accelerator.clip_grad_norm_(other.parameters(), 0.01) > 0.01
    norm = torch.nn.utils.get_total_norm([p.grad for p in other.parameters()])
    assert norm.item() == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(offload.ConfigError, match="with gradients of others"):
        accelerator.clip_grad_norm_([*model.parameters(), *other.parameters()], 1.0)
    ours.close()


def test_without_taking_over_nothing_goes_wrong_in_silence() -> None:
    accelerator = make_accelerator(taken_over=False)
    model = Net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_of(model, make_ids(1)[0]))
    with pytest.raises(offload.GradientError, match="max_grad_norm="):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(offload.GradientError, match="max_grad_norm="):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(offload.UndeclaredBackwardError, match="accumulation_steps"):
        accelerator.backward(loss_of(model, make_ids(1)[0]))
    optimizer.optimizer.close()


def test_without_taking_over_declared_accumulation_is_right() -> None:
    model = Net()
    expected = plain_loop(
        Net(), in_steps(make_ids(BATCHES, rows=2), 4), lambda model, ids, _: divided_loss(model, ids, 4)
    )
    accelerator = make_accelerator(taken_over=False, gradient_accumulation_steps=4)
    model, optimizer = accelerator.prepare(model, adamw(model, accumulation_steps=4))
    documented_loop(accelerator, model, optimizer, max_norm=None)
    assert_same_weights(model, expected)
    optimizer.optimizer.close()


def test_a_skipped_step_holds_prepared_schedulers_back() -> None:
    accelerator = make_accelerator()
    model = Net()
    model, optimizer = accelerator.prepare(model, adamw(model, nonfinite="skip"))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    before = copy.deepcopy(model.state_dict())
    accelerator.backward(loss_of(model, make_ids(1)[0]) * float("inf"))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [1e-3]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    accelerator.backward(loss_of(model, make_ids(1)[0]))
    optimizer.step()
    scheduler.step()
    assert not accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [5e-4]
    optimizer.close()


def test_save_state_and_load_state_resume_bit_for_bit(tmp_path: Path) -> None:
    accelerator = make_accelerator()
    model = Net().bfloat16()
    model, optimizer = accelerator.prepare(model, adamw(model))
    documented_loop(accelerator, model, optimizer, max_norm=None)
    accelerator.save_state(str(tmp_path))
    documented_loop(accelerator, model, optimizer, max_norm=None)
    final = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.close()

    accelerator.free_memory()
    other = Net(1).bfloat16()
    other, resumed = accelerator.prepare(other, adamw(other))
    accelerator.load_state(str(tmp_path))
    documented_loop(accelerator, other, resumed, max_norm=None)
    for index, entry in resumed.state_dict()["state"].items():
        assert all(torch.equal(entry[name], value) for name, value in final[index].items())
    for weight, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, expected)
    resumed.close()


def test_loss_scaling_and_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = make_accelerator()
    monkeypatch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu"))
    model = Net()
    optimizer = adamw(model)
    with pytest.raises(offload.ConfigError, match="bf16"):
        accelerator.prepare(optimizer)
    monkeypatch.setattr(accelerator, "scaler", None)
    monkeypatch.setattr(
        type(accelerator), "distributed_type", accelerate.utils.DistributedType.MULTI_CPU, raising=False
    )
    with pytest.raises(offload.ConfigError, match="MULTI_CPU"):
        accelerator.prepare_optimizer(optimizer)
    optimizer.close()


def test_a_scaler_that_cannot_hand_itself_over_is_refused_too() -> None:
    """Accelerate hides the signature of ``step``; the scaler then leaves its scale on the optimizer."""
    accelerate.Accelerator(cpu=True)
    model = Net()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu")
    wrapped = accelerate.optimizer.AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)
    scaler.scale(loss_of(model, make_ids(1)[0]))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(offload.ConfigError, match="GradScaler"):
        wrapped.step()
    optimizer.close()
