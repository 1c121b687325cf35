"""Through the optimizers: runs that are resumed, exchanged with torch, exported and imported by torch's checkpointing."""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Callable, Iterator
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
from torch.optim.lr_scheduler import LambdaLR

import offload

MODES = ["resident", "all-at-once", "chunked-sync", "chunked-stream", "wavefront"]
DEADLINE_S = 30.0
Snapshot = dict[str, Any]


class Net(nn.Module):
    """Sizes are multiples of 64: torch's fused kernel has other bits in the scalar tail of a tensor."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False).to(dtype) for _ in range(2))
        self.head = nn.Linear(16, 64, bias=False).to(dtype)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.head(x).float() * self.scale).square().mean()


def backward(model: Net, index: int) -> None:
    generator = torch.Generator().manual_seed(index)
    model(torch.randn(4, 16, generator=generator).to(model.head.weight.dtype)).backward()


def train(model: Net, optimizer: Any, steps: range, schedule: Any = None) -> None:
    for index in steps:
        backward(model, index)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def make(model: Net, mode: str = "wavefront", **options: Any) -> offload.AdamW:
    config = offload.OffloadConfig(tile_numel=options.pop("tile_numel", 1024), ring_slots=2, threads=1)
    options = {"lr": 0.02, "backend": "torch"} | options
    return offload.AdamW(model.named_parameters(), mode=mode, config=config, **options)


def make_torch(model: Net, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.named_parameters(), **({"lr": 0.02, "fused": True} | options))


def snapshot(model: Net, optimizer: Any) -> Snapshot:
    """All state and all weights by parameter name, and the hyperparameters. Copied: torch gives its own tensors."""
    state_dict = copy.deepcopy(optimizer.state_dict())
    names = [name for group in state_dict["param_groups"] for name in group["param_names"]]
    entries = {names[index]: entry for index, entry in state_dict["state"].items()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [
        {k: v for k, v in g.items() if k not in ("fused", "foreach")} for g in state_dict["param_groups"]
    ]
    return {"state": entries, "weights": weights, "groups": groups}


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """`make`, with everything closed at the end."""
    made: list[offload.AdamW] = []

    def open_one(*arguments: Any, **options: Any) -> offload.AdamW:
        made.append(make(*arguments, **options))
        return made[-1]

    yield open_one
    for optimizer in made:
        optimizer.close()


# Resume


def warm_up(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 60))


@pytest.mark.parametrize(("mode", "later"), list(zip(MODES, [*MODES[1:], MODES[0]], strict=True)))
def test_f26_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    opened: Any, tmp_path: Path, mode: str, later: str
) -> None:
    """In mid-schedule, with other constructor arguments, in the same mode and in another one."""
    model = Net()
    optimizer = opened(model, mode, weight_decay=0.1)
    schedule = warm_up(optimizer)
    train(model, optimizer, range(58), schedule)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": schedule.state_dict()}
    offload.save_checkpoint(saved, tmp_path / "file")
    train(model, optimizer, range(58, 61), schedule)
    expected = snapshot(model, optimizer)
    for resumed_mode in (mode, later):
        loaded = offload.load_checkpoint(tmp_path / "file")
        model = Net()
        optimizer = opened(
            model, resumed_mode, lr=0.5, betas=(0.5, 0.6), eps=0.1, weight_decay=0.0, tile_numel=2048
        )
        schedule = warm_up(optimizer)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        schedule.load_state_dict(loaded["lr"])
        train(model, optimizer, range(58, 61), schedule)
        assert same(snapshot(model, optimizer), expected), resumed_mode


def test_the_optimizer_may_be_loaded_before_the_model(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    optimizer = opened(model)
    train(model, optimizer, range(3))
    weights, state = model.state_dict(), optimizer.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    train(model, optimizer, range(3, 5))
    expected = snapshot(model, optimizer)
    model = Net()
    optimizer = opened(model)
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(state)
    assert "do not round to the weights, which are written anew" in caplog.text
    model.load_state_dict(weights)
    train(model, optimizer, range(3, 5))
    assert same(snapshot(model, optimizer), expected)


# Interchange with torch


def test_fp32_state_goes_to_torch_and_back_without_loss(opened: Any) -> None:
    """torch, then this library, then torch, against torch all the way."""
    expected_model = Net(torch.float32)
    expected = make_torch(expected_model)
    train(expected_model, expected, range(9))

    model = Net(torch.float32)
    first = make_torch(model)
    train(model, first, range(3))
    ours = opened(model, lr=0.5, betas=(0.1, 0.2))
    ours.load_state_dict(first.state_dict())
    train(model, ours, range(3, 6))
    exported = ours.state_dict()
    ours.close()
    last = make_torch(model, lr=0.7)
    last.load_state_dict(exported)
    for group in last.param_groups:
        group["fused"] = True  # loading took None, which is what this library saves
    train(model, last, range(6, 9))
    assert same(snapshot(model, last), snapshot(expected_model, expected))


def test_f4_what_plain_adamw_loses_of_bf16_parameters_is_told(
    opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    plain = make_torch(model)
    train(model, plain, range(3))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = opened(model)
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(plain.state_dict())
    assert "no FP32 masters for 3 BF16 parameter(s) (layers.0.weight, layers.1.weight" in caplog.text
    assert "16-bit moments for 3 parameter(s)" in caplog.text
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        if parameter.dtype is torch.bfloat16:
            assert torch.equal(optimizer.state[parameter]["master"], parameter.float())
        assert torch.equal(optimizer.state[parameter]["exp_avg"], plain.state[parameter]["exp_avg"].float())


def test_masters_that_plain_adamw_carried_along_do_not_come_back(opened: Any) -> None:
    """It keeps them, cast to BF16, and never updates them: they would undo its steps."""
    model = Net()
    optimizer = opened(model)
    train(model, optimizer, range(3))
    plain = make_torch(model)
    plain.load_state_dict(optimizer.state_dict())
    optimizer.close()
    train(model, plain, range(3, 6))
    state_dict = plain.state_dict()
    assert state_dict["state"][1]["master"].dtype is torch.bfloat16
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer = opened(model)
    optimizer.load_state_dict(state_dict)
    assert all(map(torch.equal, model.parameters(), weights))


def test_masters_beside_fp32_weights_are_taken_only_where_they_belong(
    opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """From a BF16 run to an FP32 model: the lower bits come back; but not over weights of another step."""
    model = Net()
    optimizer = opened(model)
    train(model, optimizer, range(3))
    state_dict, state = optimizer.state_dict(), model.state_dict()
    masters = [p.detach().clone() for p in (optimizer.state[model.head.weight]["master"],)]
    wide = Net(torch.float32)
    wide.load_state_dict(state)
    opened(wide).load_state_dict(state_dict)
    assert torch.equal(wide.head.weight, masters[0])
    assert not torch.equal(wide.head.weight, model.head.weight.float())
    other = Net(torch.float32)
    weights = other.head.weight.detach().clone()
    with caplog.at_level(logging.WARNING):
        opened(other).load_state_dict(state_dict)
    assert torch.equal(other.head.weight, weights)
    assert "masters for 3 FP32 parameter(s)" in caplog.text


# Hooks and groups


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_load_hooks_see_what_torchs_see(opened: Any, kind: str) -> None:
    model = Net(torch.float32)
    optimizer = opened(model) if kind == "ours" else make_torch(model)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = {index: entry["exp_avg"].clone() for index, entry in saved["state"].items()}
    train(model, optimizer, range(2, 4))
    seen: list[Any] = []

    def before(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append({index: entry["exp_avg"].clone() for index, entry in state_dict["state"].items()})
        seen.append(state_dict is not saved)
        groups = [{**group, "lr": 0.125} for group in state_dict["param_groups"]]
        return {"state": state_dict["state"], "param_groups": groups}

    def after(optimizer: torch.optim.Optimizer) -> None:
        seen.append([optimizer.state[p]["exp_avg"].clone() for p in model.parameters()])
        seen.append(optimizer.param_groups[0]["lr"])

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(saved)
    assert same(seen, [kept, True, list(kept.values()), 0.125])


def test_a_load_hook_may_make_a_foreign_dict_fit(opened: Any) -> None:
    model = Net()
    optimizer = opened(model)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict["wrapped"])
    train(model, optimizer, range(2, 3))
    optimizer.load_state_dict({"wrapped": saved})
    assert same(optimizer.state_dict()["state"], saved["state"])


def test_save_hooks_see_and_change_the_clones(opened: Any) -> None:
    model = Net()
    optimizer = opened(model)
    train(model, optimizer, range(2))
    order: list[str] = []

    def drop(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        order.append("post")
        state_dict["state"][0]["exp_avg"].fill_(7.0)
        return {"only": state_dict["state"][0]["exp_avg"]}

    optimizer.register_state_dict_pre_hook(lambda _: order.append("pre"))
    optimizer.register_state_dict_post_hook(drop)
    exported = optimizer.state_dict()
    assert list(exported) == ["only"]
    assert order == ["pre", "post"]
    assert not (optimizer.state[model.scale]["exp_avg"] == 7.0).any()


def test_group_keys_are_those_of_torch(opened: Any) -> None:
    model = Net()
    (ours,), (torchs,) = (
        opened(model).state_dict()["param_groups"],
        make_torch(model).state_dict()["param_groups"],
    )
    assert ours.keys() == torchs.keys()


def test_of_loaded_groups_only_known_keys_are_taken(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    optimizer = opened(model)
    optimizer.param_groups[0]["my_scale"] = 3.0
    keys = set(optimizer.param_groups[0])
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0] |= {
        "momentum": 0.9, "fused": True, "foreach": True, "initial_lr": 0.25, "my_scale": 4.0, "lr": 0.5
    }  # fmt: skip
    del state_dict["param_groups"][0]["eps"]
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(state_dict)
    (group,) = optimizer.param_groups
    assert set(group) == keys | {"initial_lr"}
    assert "mean nothing here and are left out: momentum" in caplog.text
    values = [group[key] for key in ("fused", "foreach", "initial_lr", "my_scale", "lr", "eps")]
    assert values == [None, None, 0.25, 4.0, 0.5, 1e-8]


# Frozen parameters


def test_state_of_frozen_parameters_is_kept_as_torch_keeps_it(opened: Any) -> None:
    """Saved while all were trained, loaded where a layer is frozen, saved again, and trained on after it is thawed."""
    results = []
    for build in (opened, make_torch):
        model = Net(torch.float32)
        optimizer = build(model)
        train(model, optimizer, range(3))
        saved, weights = optimizer.state_dict(), model.state_dict()
        model = Net(torch.float32)
        model.load_state_dict(weights)
        model.layers[1].requires_grad_(False)
        optimizer = build(model)
        optimizer.load_state_dict(saved)
        if build is make_torch:
            optimizer.param_groups[0]["fused"] = True
        train(model, optimizer, range(3, 5))
        frozen = snapshot(model, optimizer)
        model.layers[1].requires_grad_(True)
        train(model, optimizer, range(5, 7))
        results.append([frozen, snapshot(model, optimizer)])
    assert results[0][0]["state"]["layers.1.weight"]["step"] == 3
    assert results[0][1]["state"]["layers.1.weight"]["step"] == 5
    assert same(results[0], results[1])


def test_masters_wait_with_the_state_of_frozen_parameters(opened: Any) -> None:
    model = Net()
    optimizer = opened(model)
    train(model, optimizer, range(3))
    saved, weights = optimizer.state_dict(), model.state_dict()
    model = Net()
    model.load_state_dict(weights)
    model.head.requires_grad_(False)
    optimizer = opened(model)
    optimizer.load_state_dict(saved)
    entry = optimizer.state[model.head.weight]
    assert same(dict(entry), saved["state"][3])
    assert entry["master"].data_ptr() != saved["state"][3]["master"].data_ptr()
    model.head.requires_grad_(True)
    train(model, optimizer, range(3, 4))
    lower_bits = optimizer.state[model.head.weight]["master"] - model.head.weight.float()
    untouched = saved["state"][3]["master"] - weights["head.weight"].float()
    assert untouched.any()
    assert lower_bits.any()
    assert optimizer.state[model.head.weight]["step"] == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_group_with_bad_masters_leaves_nothing_behind(mode: str) -> None:
    model = Net(torch.float32)
    masters = offload.cast_compute_weights(model)
    params = dict(model.named_parameters())
    late = params.pop("head.weight")
    config = offload.OffloadConfig(tile_numel=1024, ring_slots=2, threads=1)
    with offload.AdamW(
        params.items(), mode=mode, backend="torch", masters=masters, config=config
    ) as optimizer:
        before = optimizer.host_bytes
        with torch.no_grad():
            late.add_(1.0)
        with pytest.raises(offload.ParameterError, match=r"masters= of head\.weight"):
            optimizer.add_param_group({"params": [("head.weight", late)]})
        assert optimizer.host_bytes == before
        assert len(optimizer.param_groups) == 1
        assert late not in optimizer.state
        with torch.no_grad():
            late.copy_(masters["head.weight"])
        optimizer.add_param_group({"params": [("head.weight", late)]})
        train(model, optimizer, range(2))
        assert optimizer.state[late]["step"] == 2


# torch.distributed.checkpoint.state_dict

OPTIONS = {
    "plain": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "on the CPU": StateDictOptions(cpu_offload=True),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_state_goes_through_torchs_functions(opened: Any, options: StateDictOptions) -> None:
    model = Net()
    optimizer = opened(model)
    train(model, optimizer, range(3))
    exported = get_optimizer_state_dict(model, optimizer, options=options)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(3, 5))
    expected = snapshot(model, optimizer)
    model = Net()
    model.load_state_dict(weights)
    optimizer = opened(model, lr=0.9, betas=(0.1, 0.2))
    set_optimizer_state_dict(model, optimizer, exported, options=options)
    train(model, optimizer, range(3, 5))
    assert same(snapshot(model, optimizer), expected)


def test_full_flat_state_is_taken_as_flat_state(opened: Any) -> None:
    """With both options torch 2.13 fails to load what it saved, for its own optimizers too."""
    model = Net()
    optimizer = opened(model)
    train(model, optimizer, range(3))
    both = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    exported = get_optimizer_state_dict(model, optimizer, options=both)
    expected = snapshot(model, optimizer)["state"]
    train(model, optimizer, range(3, 5))
    set_optimizer_state_dict(model, optimizer, exported, options=OPTIONS["flat"])
    assert same(snapshot(model, optimizer)["state"], expected)


def test_flat_state_of_plain_adamw_is_taken(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Unflattening asks for masters, which it does not have, and puts an empty dict in their place."""
    flat = OPTIONS["flat"]
    model = Net()
    plain = make_torch(model, fused=None)
    train(model, plain, range(3))
    exported = get_optimizer_state_dict(model, plain, options=flat)
    optimizer = opened(model)
    with caplog.at_level(logging.WARNING):
        set_optimizer_state_dict(model, optimizer, exported, options=flat)
    assert "no FP32 masters for 3 BF16" in caplog.text
    assert optimizer.state[model.scale]["step"] == 3
    assert torch.equal(optimizer.state[model.scale]["exp_avg"], plain.state[model.scale]["exp_avg"])


def test_flat_state_is_taken_by_plain_adamw(opened: Any) -> None:
    model = Net(torch.float32)
    optimizer = opened(model)
    train(model, optimizer, range(3))
    exported = get_optimizer_state_dict(model, optimizer, options=OPTIONS["flat"])
    plain = make_torch(model, fused=None)
    set_optimizer_state_dict(model, plain, exported, options=OPTIONS["flat"])
    for p in model.parameters():
        assert same(dict(plain.state[p]), dict(optimizer.state[p]))


@pytest.mark.parametrize("mode", MODES)
def test_f27_looking_at_state_leaves_no_trace(opened: Any, mode: str) -> None:
    """Before the first step, and between the micro-batches of each."""

    def run(look: bool) -> Snapshot:
        model = Net()
        optimizer = opened(model, mode, accumulation_steps=2)
        for index in range(4):
            if look:
                get_optimizer_state_dict(model, optimizer)
            backward(model, 2 * index)
            if look:
                between = get_optimizer_state_dict(model, optimizer)
                assert all(entry["step"] == index for entry in between["state"].values())
            backward(model, 2 * index + 1)
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    assert same(run(True), run(False))


class SlowFile(io.BytesIO):
    """Writes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.go_on = threading.Event(), threading.Event()

    def write(self, data: Any) -> int:
        self.started.set()
        assert self.go_on.wait(DEADLINE_S)
        return super().write(data)


@pytest.mark.parametrize("mode", MODES)
def test_f28_a_slow_writer_writes_the_state_of_the_call(opened: Any, mode: str) -> None:
    model = Net()
    optimizer = opened(model, mode)
    train(model, optimizer, range(3))
    expected = snapshot(model, optimizer)["state"]
    file = SlowFile()
    writer = threading.Thread(target=torch.save, args=(optimizer.state_dict(), file))
    writer.start()
    assert file.started.wait(DEADLINE_S)
    train(model, optimizer, range(3, 5))
    file.go_on.set()
    writer.join(DEADLINE_S)
    assert not writer.is_alive()
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    names = loaded["param_groups"][0]["param_names"]
    assert same({names[index]: entry for index, entry in loaded["state"].items()}, expected)


# The wrapper of other optimizers


@pytest.mark.parametrize("bad", [None, [], {}, {"state": {}}, {"state": 3, "param_groups": []}], ids=str)
def test_the_wrapper_refuses_what_is_no_state_dict_and_changes_nothing(bad: Any) -> None:
    model = Net()
    with offload.CPUOffloadOptimizer(make_torch(model)) as optimizer:
        train(model, optimizer, range(2))
        before = snapshot(model, optimizer)
        with pytest.raises(offload.CheckpointError, match="no optimizer state dict"):
            optimizer.load_state_dict(bad)
        assert same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_wrappers_state_goes_through_torchs_functions(options: StateDictOptions) -> None:
    """Also into an optimizer that has no state yet: torch steps it once to make some."""
    model = Net(torch.float32)
    optimizer = offload.CPUOffloadOptimizer(make_torch(model))
    train(model, optimizer, range(3))
    exported = get_optimizer_state_dict(model, optimizer, options=options)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(3, 5))
    expected = snapshot(model, optimizer)
    optimizer.close()
    model = Net(torch.float32)
    model.load_state_dict(weights)
    with offload.CPUOffloadOptimizer(make_torch(model, lr=0.9)) as optimizer:
        set_optimizer_state_dict(model, optimizer, exported, options=options)
        train(model, optimizer, range(3, 5))
        assert same(snapshot(model, optimizer), expected)
