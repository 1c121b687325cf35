"""The contract of torch optimizers, bad input, failures and lifetimes. Rows of the fault list are named F<n>."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload import restored_state
from offload.schedule.backlog import Backlog
from offload.schedule.engine import Engine
from offload.schedule.host_stepper import HostStepper
from offload.transfer.pinned import mapped_bytes
from tests.training import (
    Recorder,
    Reference,
    adamw,
    assert_matches_reference,
    assert_same_snapshot,
    assert_weight_is_rounded_master,
    batches,
    hyper_by_name,
    loss_of,
    make_decoder,
    random_delays,
    snapshot,
    train,
    two_groups,
    use_lanes,
)

MODES = ["wavefront", "resident"]


def parameter(dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(8, 8, dtype=dtype, **options))


# Bad input --------------------------------------------------------------------------------------------------

BAD_PARAMETERS = {
    "fp16": (lambda: parameter(torch.float16), r"layer\.weight.*float16.*cast_compute_weights"),
    "fp64": (lambda: parameter(torch.float64), r"layer\.weight.*float64"),
    "complex": (lambda: parameter(torch.complex64), r"layer\.weight.*complex64"),
    "meta": (lambda: parameter(device="meta"), r"layer\.weight.*meta.*materialize"),
    "sparse": (lambda: nn.Parameter(torch.eye(8).to_sparse()), r"layer\.weight.*dense"),
}


@pytest.mark.parametrize("kind", BAD_PARAMETERS)
def test_f35_unsupported_parameters_are_named_and_leave_nothing_behind(kind: str) -> None:
    make, message = BAD_PARAMETERS[kind]
    before = mapped_bytes(), threading.active_count()
    with pytest.raises(offload.UnsupportedDtypeError, match=message) as caught:
        offload.AdamW([("fine", parameter()), ("layer.weight", make())], mode="wavefront")
    assert isinstance(caught.value, TypeError)
    assert (mapped_bytes(), threading.active_count()) == before


BAD_OPTIONS = {
    "mode": ({"mode": "wave"}, r"mode='wave'.*'wavefront'"),
    "backend": ({"backend": "cuda"}, r"backend='cuda'.*'numba'"),
    "lr": ({"lr": -1.0}, r"lr=-1\.0"),
    "lr nan": ({"lr": float("nan")}, "lr=nan"),
    "lr tensor": ({"lr": torch.ones(2)}, "lr is a tensor of 2 elements"),
    "betas": ({"betas": (0.9, 1.0)}, r"betas=\(0\.9, 1\.0\)"),
    "eps": ({"eps": -1e-8}, "eps=-1e-08"),
    "weight_decay": ({"weight_decay": -0.1}, r"weight_decay=-0\.1"),
    "max_grad_norm": ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0"),
    "clip": ({"clip": "sometimes"}, "clip='sometimes'"),
    "nonfinite": ({"nonfinite": "ignore"}, "nonfinite='ignore'"),
    "accumulation_steps": ({"accumulation_steps": 0}, "accumulation_steps=0"),
    "host_budget": ({"config": {"host_budget": 100}}, "host_budget is 100 bytes.*missing"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_named_and_leave_nothing_behind(case: str) -> None:
    options, message = BAD_OPTIONS[case]
    before = mapped_bytes(), threading.active_count()
    with pytest.raises((offload.ConfigError, offload.MemoryBudgetError), match=message):
        adamw([("a", parameter())], **options)
    assert (mapped_bytes(), threading.active_count()) == before


NO_NUMBERS = [
    ("lr", "1e-3", r"lr='1e-3' is a str: expected a number or a tensor of one element; .*float\('1e-3'\)"),
    ("lr", None, "lr=None is a NoneType: expected a number"),
    ("lr", True, "lr=True is a bool"),
    ("lr", [1e-3], r"lr=\[0\.001\] is a list"),
    ("lr", torch.tensor(True), r"lr=tensor\(True\) is a Tensor"),
    ("lr", torch.tensor(1e-3, device="meta"), "lr=tensor.*meta.* is a Tensor"),
    ("weight_decay", "0.1", r"weight_decay='0\.1' is a str: expected a number; .*float\('0\.1'\)"),
    ("weight_decay", None, "weight_decay=None is a NoneType"),
    ("eps", "1e-8", r"eps='1e-8' is a str: .*float\('1e-8'\)"),
    ("eps", torch.tensor(1e-8), "eps=tensor.* is a Tensor: expected a number"),
    ("eps", float("inf"), "eps=inf: expected a finite number"),
    ("betas", 0.9, r"betas=0\.9: expected two numbers"),
    ("betas", "09", "betas='09': expected two numbers"),
    ("betas", (0.9,), r"betas=\(0\.9,\): expected two numbers"),
    ("betas", (0.9, "0.95"), r"betas=\(0\.9, '0\.95'\): '0\.95' is a str: expected a number; .*float"),
    ("betas", None, "betas=None: expected two numbers"),
]


@pytest.mark.parametrize(("name", "value", "message"), NO_NUMBERS)
def test_hyperparameters_that_are_no_numbers_are_refused(name: str, value: Any, message: str) -> None:
    before = mapped_bytes(), threading.active_count()
    with pytest.raises(offload.ConfigError, match=message):
        adamw([("a", parameter())], **{name: value})
    with pytest.raises(offload.ConfigError, match=message):
        adamw([{"params": [parameter()], name: value}])
    assert (mapped_bytes(), threading.active_count()) == before
    with adamw([("a", parameter())]) as optimizer:
        with pytest.raises(offload.ConfigError, match=message):
            optimizer.add_param_group({"params": [parameter()], "param_names": ["b"], name: value})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1},
        {"lr": np.float32(1e-3), "weight_decay": np.float64(0.1), "eps": 0},
        {"lr": torch.tensor(1e-3), "betas": [0.9, 0.95]},
        {"lr": torch.tensor([1e-3]), "betas": (torch.tensor(0.9), np.float64(0.95))},
    ],
)
def test_numbers_of_other_kinds_are_taken(options: dict[str, Any]) -> None:
    weight = parameter()
    with adamw([("a", weight)], **options) as optimizer:
        before = weight.detach().clone()
        weight.sum().backward()
        optimizer.step()
        assert not torch.equal(weight, before)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_betas_in_an_array_are_compared_by_value(is_replaced: bool) -> None:
    """Replaced by others of the same value they have not changed; changed in place they have."""
    weight = parameter()
    with adamw([("a", weight)], betas=np.array([0.9, 0.95])) as optimizer:
        weight.sum().backward()
        optimizer.step()  # the first one, which applies nothing early
        weight.sum().backward()
        if is_replaced:
            optimizer.param_groups[0]["betas"] = np.array([0.9, 0.95])
            optimizer.step()
            return
        optimizer.param_groups[0]["betas"][0] = 0.8
        with pytest.raises(offload.HyperparameterChangedError, match="betas changed from"):
            optimizer.step()


@pytest.mark.parametrize(("owner", "name"), [(Engine, "close"), (Engine, "_abandon"), (Backlog, "end")])
def test_f44_close_that_was_interrupted_is_done_when_called_again(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mapped_bytes(), threading.active_count()
    weight = parameter()
    optimizer = adamw([("a", weight)])
    real, calls = getattr(owner, name), []

    def interrupted(*arguments: Any, **more: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    monkeypatch.setattr(owner, name, interrupted)
    if owner is Engine and name == "close":
        optimizer._finalizer.detach()  # which holds the real one
        optimizer._finalizer = weakref.finalize(optimizer, optimizer._engine.close)
    with pytest.raises(KeyboardInterrupt):
        optimizer.close()
    with pytest.raises(offload.ClosedError):
        optimizer.step()
    optimizer.close()
    assert optimizer.closed
    assert (mapped_bytes(), threading.active_count()) == before
    weight.sum().backward()
    assert weight.grad is not None  # no hook takes it


def test_f43_two_threads_close_once(monkeypatch: pytest.MonkeyPatch) -> None:
    close, calls = HostStepper.close, []
    reached, go_on = threading.Event(), threading.Event()

    def slow(stepper: HostStepper) -> None:
        calls.append(stepper)
        reached.set()
        assert go_on.wait(60.0)
        close(stepper)

    monkeypatch.setattr(HostStepper, "close", slow)
    optimizer = adamw([("a", parameter())])
    with ThreadPoolExecutor() as pool:
        first = pool.submit(optimizer.close)
        assert reached.wait(60.0)
        second = pool.submit(optimizer.close)
        with pytest.raises(FutureTimeout):  # it returns when all is closed
            second.result(0.2)
        go_on.set()
        first.result(60.0)
        second.result(60.0)
    assert len(calls) == 1


@pytest.mark.parametrize("params", [[], [nn.Parameter(torch.zeros(3), requires_grad=False)]])
def test_nothing_to_optimize(params: list[nn.Parameter]) -> None:
    with pytest.raises(offload.ConfigError, match="params"):
        offload.AdamW(params)


@pytest.mark.parametrize("params", [nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), parameter()])
def test_a_model_or_a_tensor_is_not_what_holds_parameters(params: Any) -> None:
    with pytest.raises(
        offload.ConfigError, match=rf"{type(params).__name__}: pass model.named_parameters\(\)"
    ):
        offload.AdamW(params)


@pytest.mark.parametrize("flag", ["amsgrad", "capturable", "differentiable"])
def test_unsupported_flags_of_groups_are_refused(flag: str) -> None:
    with pytest.raises(offload.ConfigError, match=flag):
        offload.AdamW([{"params": [parameter()], flag: True}])


@pytest.mark.parametrize("flag", ["amsgrad", "capturable", "differentiable"])
def test_unsupported_flags_of_torchs_constructor_are_refused_where_they_are_true(flag: str) -> None:
    with pytest.raises(offload.ConfigError, match=rf"{flag}=True is not supported"):
        offload.AdamW([parameter()], **{flag: True})
    with offload.AdamW([parameter()], **{flag: False}, fused=True, foreach=None):
        pass


def test_a_misspelled_argument_is_one() -> None:
    with pytest.raises(TypeError, match="max_gradnorm"):
        offload.AdamW([parameter()], max_gradnorm=1.0)


@pytest.mark.parametrize(
    "options", [{"config": {"tile_numel": 1024}}, {"overlap_forward": "yes"}, {"max_grad_norm": "4"}]
)
def test_arguments_of_another_type_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(offload.ConfigError, match=next(iter(options))):
        offload.AdamW([parameter()], **options)


def test_sparse_gradients_are_refused_by_name() -> None:
    embedding = nn.Embedding(10, 4, sparse=True, dtype=torch.bfloat16)
    with (
        adamw([("embedding.weight", embedding.weight)]),
        pytest.raises(offload.GradientError, match=r"embedding\.weight.*sparse"),
    ):
        embedding(torch.tensor([1])).sum().backward()


def test_masters_that_are_no_masters_are_refused_with_what_is_expected() -> None:
    model = make_decoder()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with pytest.raises(offload.ConfigError, match=r"masters is a dict: .* offload\.cast_compute_weights"):
        adamw(model, masters=values)


def test_masters_that_do_not_fit_the_weights_are_refused() -> None:
    model = make_decoder()
    masters = offload.cast_compute_weights(model)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    with pytest.raises(offload.ParameterError, match=r"head\.weight"):
        adamw(model, masters=masters)


def test_masters_of_other_parameters_are_refused() -> None:
    """They were left out, and the lower bits of the weights were gone without a word."""
    masters = offload.cast_compute_weights(make_decoder())
    model = make_decoder()
    offload.cast_compute_weights(model)
    with pytest.raises(
        offload.ConfigError,
        match=r"values of none of .* it has embedding\.weight, .*Pass model\.named_parameters",
    ):
        adamw(model.parameters(), masters=masters)


@pytest.mark.parametrize(("named", "keep_fp32"), [(True, "norm"), (False, "norm"), (True, None)])
def test_masters_of_what_comes_later_are_kept_for_it(named: bool, keep_fp32: str | None) -> None:
    """Also where the first parameters are BF16, and have names that say that the masters are not theirs."""
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32=keep_fp32)
    first = [(name, p) for name, p in model.named_parameters() if "norm" in name]
    rest = [(name, p) for name, p in model.named_parameters() if "norm" not in name]
    masters = masters.without([p for _, p in first])
    with adamw(first if named else [p for _, p in first], masters=masters) as optimizer:
        optimizer.add_param_group({"params": rest if named else [p for _, p in rest]})
        for name, p in rest:
            assert torch.equal(optimizer.state[p]["master"], masters[name])


def test_a_chunk_by_that_matches_no_name_is_refused() -> None:
    """All parameters were taken to be outside of layers."""
    config = offload.OffloadConfig(chunk_by=r"transformer\.h\.\d+")
    with pytest.raises(
        offload.ConfigError,
        match=r"config\.chunk_by=.* matches none of the \d+ names \(embedding\.weight, layers\.",
    ) as raised:
        offload.AdamW(make_decoder().named_parameters(), config=config)
    assert repr(config.chunk_by) in str(raised.value)


def test_a_chunk_by_of_layers_that_are_frozen_for_now_is_taken() -> None:
    model = make_decoder()
    model.layers.requires_grad_(False)
    config = offload.OffloadConfig(chunk_by=r"layers\.\d+")
    with offload.AdamW(
        model.named_parameters(), mode="resident", backend="torch", config=config
    ) as optimizer:
        train(model, optimizer, batches(1))
        model.layers.requires_grad_()
        train(model, optimizer, batches(1))
        assert "layers.1 (fp32)" in {chunk.name for chunk in optimizer._engine.chunks}


@pytest.mark.parametrize("chunk_by", [r"layers\.\d+", lambda name: "layer"])
def test_a_chunk_by_without_names_is_refused(chunk_by: object) -> None:
    config = offload.OffloadConfig(chunk_by=chunk_by)  # type: ignore[arg-type]
    with pytest.raises(offload.ConfigError, match=r"chunk_by=.* have no names .*named_parameters\(\)"):
        offload.AdamW(make_decoder().parameters(), config=config)
    offload.AdamW(make_decoder().named_parameters(), config=config).close()


def test_grad_scaler_is_refused() -> None:
    model = make_decoder()
    with adamw(model) as optimizer:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, batches(1)[0])).backward()
        with pytest.raises((offload.ConfigError, AssertionError), match=r"GradScaler|inf checks"):
            scaler.step(optimizer)


# The contract -----------------------------------------------------------------------------------------------


def test_it_is_a_torch_optimizer_with_its_keys() -> None:
    with adamw([parameter()]) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert set(optimizer.param_groups[0]) == {"params", *torch.optim.AdamW([parameter()]).defaults}
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", "master"}


def test_f2_fp32_parameters_stay_fp32_and_have_no_master() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model, keep_fp32="norm")
    with adamw(model) as optimizer:
        train(model, optimizer, batches(2))
        for name, p in model.named_parameters():
            assert p.dtype is (torch.float32 if "norm" in name else torch.bfloat16)
            assert ("master" in optimizer.state[p]) is (p.dtype is torch.bfloat16)


def test_f3_small_updates_add_up() -> None:
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    with adamw([("w", weight)], lr=6e-4, weight_decay=0.0) as optimizer:
        for _ in range(100):
            weight.sum().backward()
            optimizer.step()
    assert torch.allclose(weight.float(), torch.full((64,), 1 - 0.06), atol=4e-3)


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (step + 1)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, max_lr=0.01, total_steps=20, cycle_momentum=True
    ),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
}


@pytest.mark.parametrize("after_first_step", [False, True])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_f23_schedulers(kind: str, after_first_step: bool) -> None:
    model = make_decoder()
    masters = offload.cast_compute_weights(model)
    reference, recorder = Reference(dict(masters)), Recorder(model)
    with adamw(model, masters=masters) as optimizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        if after_first_step:
            train(model, optimizer, batches(1), recorder=recorder, reference=reference)
        scheduler = SCHEDULERS[kind](optimizer)
        train(model, optimizer, batches(8), recorder=recorder, reference=reference, scheduler=scheduler)
        assert_matches_reference(model, optimizer, reference)


def test_f23_lr_zero_stops_the_weights() -> None:
    model = make_decoder()
    with adamw(model) as optimizer:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, batches(2))
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_f24_decay_order_and_eps() -> None:
    model = make_decoder()
    masters = offload.cast_compute_weights(model)
    reference, recorder = Reference(dict(masters)), Recorder(model)
    options = {"lr": torch.tensor(0.1), "weight_decay": 0.5, "eps": 1e-3}
    with adamw(model.named_parameters(), masters=masters, **options) as optimizer:
        train(model, optimizer, batches(50), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


def test_maximize() -> None:
    model = make_decoder()
    masters = offload.cast_compute_weights(model)
    reference, recorder = Reference(dict(masters)), Recorder(model)
    with adamw(model, masters=masters, maximize=True) as optimizer:
        train(model, optimizer, batches(3), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


def test_closures_and_step_hooks() -> None:
    model = make_decoder()
    with adamw(model) as optimizer:
        calls = []
        optimizer.register_step_pre_hook(lambda *args: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *args: calls.append("post"))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batches(1)[0])
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(4)]
        assert losses[-1] < losses[0]
        assert calls == ["pre", "post"] * 4


def test_a_group_added_in_mid_training() -> None:
    model = make_decoder()
    masters = offload.cast_compute_weights(model)
    reference, recorder = Reference(dict(masters)), Recorder(model)
    first = [(n, p) for n, p in model.named_parameters() if not n.startswith("head")]
    with adamw(first, masters=masters) as optimizer:
        data = batches(6)
        for ids in data[:3]:
            loss_of(model, ids).backward()
            gradients = {n: g for n, g in recorder.take().items() if n != "head.weight"}
            model.head.weight.grad = None
            reference.step(gradients, {**hyper_by_name(optimizer, model)})
            optimizer.step()
        optimizer.add_param_group({"params": [("head.weight", model.head.weight)], "lr": 1e-2})
        train(model, optimizer, data[3:], recorder=recorder, reference=reference)
        assert optimizer.state[model.head.weight]["step"] == 3
        head = optimizer.state.pop(model.head.weight)
        optimizer.state[model.head.weight] = head
        assert torch.equal(model.head.weight, head["master"].bfloat16())
        with pytest.raises(offload.UnsupportedDtypeError):
            optimizer.add_param_group({"params": [("half", parameter(torch.float16))]})
        assert len(optimizer.param_groups) == 2


def test_a_group_that_failed_half_way_is_not_trained_and_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine had its parameters by then: they went on being stepped, and twice when the group came again."""
    first, second = parameter(), parameter()
    with adamw([("first", first)]) as optimizer:
        monkeypatch.setattr(restored_state, "_take_waiting", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.add_param_group({"params": [("second", second)], "param_names": ["second"]})
        monkeypatch.undo()
        before = second.detach().clone()
        for _ in range(2):
            second.grad, first.grad = torch.ones_like(second), torch.ones_like(first)
            optimizer.step()
            second.grad = None
        assert torch.equal(second, before)
        assert second not in optimizer.state
        optimizer.add_param_group({"params": [("second", second)]})
        second.grad, first.grad = torch.ones_like(second), torch.ones_like(first)
        optimizer.step()
        assert [int(optimizer.state[each]["step"]) for each in (first, second)] == [3, 1]
        assert len(optimizer._engine.records) == 2
        assert not torch.equal(second, before)


def _interrupted(*arguments: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("copier", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copier: Any) -> None:
    with adamw([parameter()]) as optimizer, pytest.raises(offload.StateError, match="state_dict"):
        copier(optimizer)


def test_sign_sgd_follows_its_formula() -> None:
    weight = nn.Parameter(torch.randn(3000, dtype=torch.bfloat16))
    master = weight.detach().float()
    config = offload.OffloadConfig(tile_numel=1024)
    with offload.SignSGD(
        [("w", weight)], lr=0.01, weight_decay=0.1, mode="wavefront", config=config
    ) as optimizer:
        for _ in range(4):
            gradient = torch.randn(3000, dtype=torch.bfloat16)
            (weight * gradient).sum().backward()
            master = master * torch.tensor(1 - 0.01 * 0.1) + torch.tensor(-0.01) * gradient.float().sign()
            optimizer.step()
        assert torch.equal(optimizer.state[weight]["master"], master)
        assert torch.equal(weight, master.bfloat16())
        assert set(optimizer.state[weight]) == {"step", "master"}


# Weights behind the optimizer's back ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_f1_weights_loaded_into_the_model_are_taken_up(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    model, other = make_decoder(0), make_decoder(1)
    for each in (model, other):
        offload.cast_compute_weights(each)
    with adamw(model, mode=mode) as optimizer:
        for group in optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        train(model, optimizer, batches(2))
        model.load_state_dict(other.state_dict())
        train(model, optimizer, batches(1))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(optimizer.state[p]["master"], q.float())
        assert "changed outside the optimizer" in caplog.text


def test_f1_resync_after_a_write_that_torch_hides() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        train(model, optimizer, batches(2))
        model.head.weight.data.copy_(torch.randn_like(model.head.weight))
        assert optimizer.resync() == ["head.weight"]
        assert torch.equal(optimizer.state[model.head.weight]["master"], model.head.weight.float())
        assert optimizer.resync() == []


def test_f1_a_write_between_backward_and_step_is_told_from_ours(caplog: pytest.LogCaptureFixture) -> None:
    """The weight has had its early update by then."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        train(model, optimizer, batches(3))
        loss_of(model, batches(1)[0]).backward()
        optimizer._engine._stepper.finish()
        with torch.no_grad():
            model.head.weight.fill_(0.5)
        optimizer.step()
        assert (model.head.weight == 0.5).all()
        for name, parameter in model.named_parameters():
            assert_weight_is_rounded_master(optimizer, parameter, name)
        assert "head.weight" in caplog.text
        optimizer.zero_grad()
        caplog.clear()
        train(model, optimizer, batches(2))
        assert "changed outside" not in caplog.text


@pytest.mark.parametrize("mode", ["wavefront", "hybrid", "resident", "chunked-stream"])
def test_a_graph_that_needs_the_old_weights_fails_by_rule_not_by_timing(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """New weights have not arrived, and autograd knows all the same."""
    made = use_lanes(monkeypatch)
    model = make_decoder()
    offload.cast_compute_weights(model)
    options = {"overlap_forward": True, "model": model} if mode in ("wavefront", "hybrid") else {}
    with adamw(model, mode=mode, **options) as optimizer:
        train(model, optimizer, batches(3))
        optimizer.synchronize()
        older, loss = loss_of(model, batches(2)[1]), loss_of(model, batches(1)[0])
        held = made if options else []
        for lanes in held:
            lanes.hold("to_device")
        loss.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            older.backward()
        for lanes in held:
            lanes.release("to_device")
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["wavefront", "hybrid"])
def test_f1_an_early_update_starts_from_what_a_hook_wrote_in_the_same_backward(mode: str) -> None:
    """As an update at ``step()`` would; the embedding's weight is one that backward itself does not need."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, mode=mode) as optimizer:
        for group in optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        train(model, optimizer, batches(3))

        def write(gradient: torch.Tensor) -> None:
            with torch.no_grad():
                model.embedding.weight.fill_(0.5)

        handle = model.layers[1].up.weight.register_hook(write)  # not the first one
        loss_of(model, batches(1)[0]).backward()
        handle.remove()
        optimizer.step()
        assert optimizer.last_step.early_tiles > 0
        assert (model.embedding.weight == 0.5).all()
        assert_weight_is_rounded_master(optimizer, model.embedding.weight, "embedding.weight")


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_that_is_freed_between_backward_and_step_can_come_back(mode: str) -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, mode=mode) as optimizer:
        train(model, optimizer, batches(3))
        loss_of(model, batches(1)[0]).backward()
        optimizer._engine._stepper.finish()
        weight, data = model.head.weight, model.head.weight.data
        weight.data = torch.empty(0, dtype=torch.bfloat16)
        with pytest.raises(offload.ParameterError, match=r"head.weight was .* and is .* now"):
            optimizer.step()
        weight.data = data
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, batches(1))
        for name, parameter in model.named_parameters():
            assert_weight_is_rounded_master(optimizer, parameter, name)


def test_our_own_writes_are_never_taken_for_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lanes(monkeypatch, delay=random_delays(3))
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        train(model, optimizer, batches(2))
        followed: list[int] = []
        load = type(optimizer._engine._stepper).load_weights
        monkeypatch.setattr(
            type(optimizer._engine._stepper),
            "load_weights",
            lambda self, records, **force: followed.append(len(records)) or load(self, records, **force),
        )
        train(model, optimizer, batches(4))
        assert followed == []


def test_weights_loaded_after_the_optimizers_state_keep_their_masters() -> None:
    """Restoring optimizer first, model second is fine: the weights agree with the masters that were loaded."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        train(model, optimizer, batches(3))
        saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        expected = snapshot(model, optimizer)
    fresh = make_decoder(7)
    offload.cast_compute_weights(fresh)
    with adamw(fresh) as optimizer:
        optimizer.load_state_dict(saved)
        fresh.load_state_dict(weights)
        optimizer.resync()
        assert_same_snapshot(snapshot(fresh, optimizer), expected)


# Checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_f26_f29_resumed_training_has_the_bits_of_the_uninterrupted_run(mode: str) -> None:
    def build(seed: int, **options: Any) -> tuple[nn.Module, offload.AdamW]:
        model = make_decoder(seed)
        masters = offload.cast_compute_weights(model, keep_fp32="norm")
        return model, adamw(model, masters=masters, mode=mode, **options)

    data = batches(12)
    model, optimizer = build(0)
    train(model, optimizer, data[:8])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, data[8:])
    expected = snapshot(model, optimizer)
    optimizer.close()

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, optimizer = build(1, lr=0.7, betas=(0.1, 0.2))
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(resumed, optimizer, data[8:])
    assert_same_snapshot(snapshot(resumed, optimizer), expected)
    optimizer.close()


def test_state_goes_both_ways_between_us_and_torch_for_fp32() -> None:
    ours, theirs = make_decoder(), make_decoder()
    with adamw(two_groups(ours)) as optimizer:
        train(ours, optimizer, batches(3))
        other = torch.optim.AdamW(two_groups(theirs), fused=True)
        theirs.load_state_dict(ours.state_dict())
        other.load_state_dict(optimizer.state_dict())
        train(theirs, other, batches(2))
        ours.load_state_dict(theirs.state_dict())
        optimizer.load_state_dict(other.state_dict())
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(optimizer.state[p]["exp_avg_sq"], other.state[q]["exp_avg_sq"])
            assert optimizer.state[p]["step"] == 5
        train(ours, optimizer, batches(1))


def test_f4_moments_without_masters(caplog: pytest.LogCaptureFixture) -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    plain = torch.optim.AdamW(two_groups(model))
    train(model, plain, batches(2))
    with adamw(model) as optimizer:
        train(model, optimizer, batches(1))
        optimizer.load_state_dict(plain.state_dict())
        assert "no FP32 masters" in caplog.text
        assert torch.equal(optimizer.state[model.head.weight]["master"], model.head.weight.float())


def test_f27_reading_state_in_mid_accumulation_leaves_no_trace() -> None:
    model = make_decoder()
    masters = offload.cast_compute_weights(model)
    reference, recorder = Reference(dict(masters)), Recorder(model)
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with adamw(model, masters=masters, accumulation_steps=2) as optimizer:
        get_optimizer_state_dict(model, optimizer)
        assert all(state["step"] == 0 for state in optimizer.state.values())
        for ids in batches(3):
            loss_of(model, ids).backward()
            get_optimizer_state_dict(model, optimizer)
            loss_of(model, ids.roll(1, 1)).backward()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
        assert_matches_reference(model, optimizer, reference)


def test_f28_a_state_dict_stays_what_it_was() -> None:
    model = make_decoder()
    with adamw(model) as optimizer:
        train(model, optimizer, batches(2))
        saved = optimizer.state_dict()
        frozen = copy.deepcopy(saved)
        train(model, optimizer, batches(2))
        for index, state in saved["state"].items():
            for name, tensor in state.items():
                assert torch.equal(tensor, frozen["state"][index][name])
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


# Timing, failures, lifetimes --------------------------------------------------------------------------------


def test_f11_a_slow_host_holds_backward_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lane held, backward stops after as many tiles as ring and backlog hold, and goes on when it is released."""
    (lanes,) = [use_lanes(monkeypatch)]
    model = make_decoder(width=64)
    offload.cast_compute_weights(model)
    with adamw(model, config={"ring_slots": 2, "backlog_tiles": 2, "tile_numel": 1024}) as optimizer:
        train(model, optimizer, batches(2))
        taken: list[str] = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: taken.append(name))
        lanes[0].hold("to_host")
        backward = threading.Thread(target=loss_of(model, batches(1)[0]).backward)
        backward.start()
        backward.join(1.0)
        assert backward.is_alive()
        assert len(taken) < 5
        lanes[0].release("to_host")
        backward.join(30.0)
        assert not backward.is_alive()
        optimizer.step()


def test_f14_weights_are_there_when_step_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lanes(
        monkeypatch,
        delay=lambda lane, index: 0.01 if lane == "to_device" else 0.0,
        poison=("to_host", "to_device"),
    )
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, config={"tile_numel": 32768}) as optimizer:
        for ids in batches(2):
            loss_of(model, ids).backward()
            optimizer.step()
            for name, p in model.named_parameters():
                assert torch.equal(p, optimizer.state[p]["master"].bfloat16()), name


@pytest.mark.parametrize("lane", ["to_host", "to_device"])
@pytest.mark.parametrize("index", [0, 3])
def test_f44_a_failing_copy_is_raised_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch, lane: str, index: int
) -> None:
    broken: list[bool] = []

    def fail(which: str, number: int) -> BaseException | None:
        if broken and which == lane:
            broken.append(True)
            return OSError("bus gone") if len(broken) == index + 2 else None
        return None

    use_lanes(monkeypatch, fail=fail)
    model = make_decoder()
    optimizer = adamw(model)
    train(model, optimizer, batches(2))
    broken.append(True)
    loss_of(model, batches(1)[0]).backward()  # never raised inside a hook
    with pytest.raises(offload.WorkerError, match="bus gone") as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, OSError)
    for call in (optimizer.step, optimizer.state_dict, optimizer.synchronize):
        with pytest.raises(offload.WorkerError, match="bus gone"):
            call()
    optimizer.close()


def test_f44_a_failing_kernel_is_raised_at_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_decoder()
    optimizer = adamw(model)
    train(model, optimizer, batches(2))
    from offload.kernels.numba_backend import NumbaBackend

    monkeypatch.setattr(NumbaBackend, "update", lambda *args: 1 / 0)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(offload.WorkerError, match="ZeroDivisionError"):
        optimizer.step()
    optimizer.close()


def test_a_hanging_copy_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = use_lanes(monkeypatch)
    model = make_decoder()
    optimizer = adamw(model, config={"timeout_s": 0.5})
    train(model, optimizer, batches(1))
    lanes[0].hold("to_host")
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(offload.DeadlineError, match=r"timeout_s"):
        optimizer.step()
    lanes[0].release("to_host")
    optimizer.close()


def test_f43_close_gives_everything_back_and_may_be_repeated() -> None:
    gc.collect()
    before = mapped_bytes(), threading.active_count()
    model = make_decoder()
    optimizer = adamw(model)
    train(model, optimizer, batches(2))
    loss_of(model, batches(1)[0]).backward()
    optimizer.close()
    optimizer.close()
    assert (mapped_bytes(), threading.active_count()) == before
    assert not optimizer.state
    for call in (optimizer.step, optimizer.state_dict, optimizer.synchronize, optimizer.resync):
        with pytest.raises(offload.ClosedError):
            call()
    loss_of(model, batches(1)[0]).backward()
    assert model.head.weight.grad is not None  # the hooks are gone


def test_f43_a_forgotten_optimizer_is_collected() -> None:
    gc.collect()
    before = mapped_bytes(), threading.active_count()
    model = make_decoder()
    optimizer = adamw(model)
    train(model, optimizer, batches(1))
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    assert (mapped_bytes(), threading.active_count()) == before


def test_f45_two_optimizers_of_one_model_do_not_mix() -> None:
    model = make_decoder()
    masters = offload.cast_compute_weights(model)
    reference, recorder = Reference(dict(masters)), Recorder(model)
    named = list(model.named_parameters())
    with adamw(named[::2], masters=masters) as even, adamw(named[1::2], masters=masters, lr=1e-2) as odd:
        for index, ids in enumerate(batches(6)):
            loss_of(model, ids).backward()
            hyper = {**hyper_by_name(even, model), **hyper_by_name(odd, model)}
            reference.step(recorder.take(), hyper)
            for optimizer in (even, odd) if index % 2 else (odd, even):
                optimizer.step()
        for name, p in named:
            state = even.state[p] if p in even.state else odd.state[p]
            assert torch.equal(state["master"].flatten(), reference.state(name)["master"])


def test_f16_state_is_complete_when_step_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lanes(monkeypatch, delay=lambda lane, index: 0.001)
    model = make_decoder()
    with adamw(model) as optimizer:
        for ids in batches(2):
            loss_of(model, ids).backward()
            optimizer.step()
            now = snapshot(model, optimizer)
            optimizer.synchronize()
            assert_same_snapshot(snapshot(model, optimizer), now)


@pytest.mark.slow
def test_f44_exit_in_mid_step_is_prompt() -> None:
    program = """
import torch, offload
weight = torch.nn.Parameter(torch.zeros(1 << 16, dtype=torch.bfloat16))
optimizer = offload.AdamW([("w", weight)], mode="wavefront", config=offload.OffloadConfig(tile_numel=1024))
weight.sum().backward()
print("leaving", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("leaving\n", 0), done.stderr


def test_thread_counts_of_torch_stay() -> None:
    before = torch.get_num_threads()
    with adamw([parameter()], config={"threads": 1}):
        assert torch.get_num_threads() == before


def test_modes_that_are_not_there_yet_are_refused_by_name() -> None:
    with pytest.raises(offload.ConfigError, match="overlap_forward"):
        adamw([parameter()], overlap_forward=True)


@pytest.mark.parametrize("mode", MODES)
def test_reports(mode: str) -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, mode=mode) as optimizer:
        assert optimizer.last_step is None
        train(model, optimizer, batches(3))
        report = optimizer.last_step
        assert report.step == 3
        assert report.mode == mode
        assert report.grad_norm > 0
        assert report.bytes_to_host == sum(p.nbytes for p in model.parameters())
        assert "kernel" in report.timings
        assert str(report).startswith("step 3")
        assert mode in str(optimizer.plan)


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(offload.UnsupportedDtypeError, match=r"weight.*no data"):
        offload.AdamW(nn.LazyLinear(4).named_parameters())


@pytest.mark.parametrize("change", [{"lr": -1.0}, {"betas": None}, {"amsgrad": True}])
def test_loaded_groups_are_checked_before_anything_changes(change: dict[str, Any]) -> None:
    model = make_decoder()
    with adamw(model) as optimizer:
        train(model, optimizer, batches(2))
        before, groups = snapshot(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
        saved = optimizer.state_dict()
        saved["param_groups"][0].update(change)
        with pytest.raises(offload.CheckpointError):
            optimizer.load_state_dict(saved)
        assert_same_snapshot(snapshot(model, optimizer), before)
        assert optimizer.state_dict()["param_groups"] == groups


def test_other_group_sizes_are_refused() -> None:
    four = [parameter() for _ in range(4)]
    with adamw([{"params": four[:2]}, {"params": four[2:]}]) as optimizer:
        other = torch.optim.AdamW([{"params": four[:1]}, {"params": four[1:]}])
        with pytest.raises(offload.CheckpointError, match=r"\[1, 3\].*\[2, 2\]"):
            optimizer.load_state_dict(other.state_dict())
