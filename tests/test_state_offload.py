"""`CPUOffloadOptimizer` on the CPU: the base's bits in every mode, and everything else that the base does.

``chunked-stream`` runs on the asynchronous fake: a copy's destination holds NaN until the copy has run, on either side.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook

import offload
from offload.schedule.state_chunks import StateChunk, plan_chunks
from offload.schedule.state_export import expect_loaded
from offload.transfer.host import LaneTransport
from offload.transfer.pinned import mapped_bytes
from tests.test_scripts import run_script
from tests.training import batches, loss_of, make_decoder, random_delays, use_lanes

MODES = ("all-at-once", "chunked-sync", "chunked-stream")
SMALL = offload.OffloadConfig(tile_numel=1024, device_budget=4 * 30_000, timeout_s=60.0)
"""Copies of 4 KiB, and several chunks in every layer."""

NUM_TINY_PARAMETERS = 2 * 9 + 3
"""Of the benchmark's smallest model; each has a step count of 4 bytes."""


def matrices(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.dim() == 2]


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Interleaved, so that most chunks have parameters of both."""
    named = list(model.named_parameters())
    return [
        {"params": named[::2], "weight_decay": 0.1, "lr": 3e-3},
        {"params": named[1::2], "weight_decay": 0.0},
    ]


class Counting(torch.optim.Optimizer):
    """As third parties do it: counts in the group, on itself and in a tensor, buffers made from the first gradient, in a
    list, and a new tensor at each step; writes through ``.data``."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0})
        for group in self.param_groups:
            group.update(total=torch.zeros(()), seen=[])
        self.calls = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            group["total"].add_(1)
            group["seen"].append(group["step"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["buffers"] = [p.grad.detach().clone(), {"age": torch.zeros(3, dtype=torch.int64)}]
                    state["fast"] = torch.zeros_like(p)
                state["buffers"][0].mul_(0.9).add_(p.grad)
                state["buffers"][1]["age"] += self.calls
                state["fast"] = state["fast"] * 0.5 + p.grad
                p.data.add_(state["buffers"][0] + state["fast"], alpha=-group["lr"] / group["step"])
        return loss


BASES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw-fused": lambda m: torch.optim.AdamW(decay_groups(m), fused=True),
    "adamw-foreach": lambda m: torch.optim.AdamW(decay_groups(m), foreach=True, amsgrad=True),
    "adamw-single": lambda m: torch.optim.AdamW(m.named_parameters(), foreach=False),
    "adam": lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1),
    "sgd": lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1, momentum=0.9, dampening=0.3),
    "sgd-stateless": lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1),
    "muon": lambda m: torch.optim.Muon(matrices(m), lr=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.named_parameters()),
    "counting": lambda m: Counting(decay_groups(m)),
}


def wrapped(
    base: torch.optim.Optimizer, mode: str = "chunked-stream", **config: Any
) -> offload.CPUOffloadOptimizer:
    settings = {"tile_numel": 1024, "device_budget": 4 * 30_000, "timeout_s": 60.0, **config}
    return offload.CPUOffloadOptimizer(base, mode=mode, config=offload.OffloadConfig(**settings))


def train(model: nn.Module, optimizer: Any, data: list[Tensor], *, skip: str = "nothing") -> None:
    """Step by step; parameters with `skip` in their name get no gradient in every other step, beginning with the first."""
    for number, ids in enumerate(data):
        loss_of(model, ids).backward()
        for name, parameter in model.named_parameters():
            if skip in name and number % 2 == 0:
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            yield from flattened(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flattened(item, f"{path}.{index}")
    else:
        yield path, value


def assert_same(actual: Any, expected: Any) -> None:
    pairs = itertools.zip_longest(flattened(actual), flattened(expected))
    for (path, one), (other_path, other) in pairs:
        assert path == other_path
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype, path
            assert torch.equal(one.cpu(), other.cpu()), path
        else:
            assert one == other, path


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"weights": dict(model.state_dict()), **optimizer.state_dict()}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Teams that spin take the cores from the lanes' threads."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[LaneTransport]:
    return use_lanes(monkeypatch, poison=("to_host", "to_device"), delay=random_delays(3))


# The same bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BASES)
def test_bits_of_the_base_alone_over_ten_steps(name: str, mode: str) -> None:
    model, other = make_decoder(), make_decoder()
    plain, optimizer = BASES[name](model), wrapped(BASES[name](other), mode)
    for ids in batches(10):
        train(model, plain, [ids])
        train(other, optimizer, [ids])
        assert_same(everything(other, optimizer), everything(model, plain))
    assert vars(optimizer.base_optimizer).get("calls") == vars(plain).get("calls")
    assert len(optimizer.chunks) == 1 if mode == "all-at-once" else len(optimizer.chunks) > 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["adamw-fused", "sgd", "counting"])
def test_parameters_without_gradients_are_left_alone(name: str, mode: str) -> None:
    """Layer 1 gets its first gradient, and its first state, in the second step."""
    model, other = make_decoder(), make_decoder()
    plain, optimizer = BASES[name](model), wrapped(BASES[name](other), mode)
    train(model, plain, batches(6), skip="layers.1")
    train(other, optimizer, batches(6), skip="layers.1")
    assert_same(everything(other, optimizer), everything(model, plain))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("late", ["to_host", "to_device"])
def test_delays_change_no_bit(monkeypatch: pytest.MonkeyPatch, late: str, seed: int) -> None:
    """One direction far behind the other: the next chunk must not overwrite one that is leaving."""
    use_lanes(
        monkeypatch,
        poison=("to_host", "to_device"),
        delay=lambda lane, index: 0.003 if lane == late and (index + seed) % 3 == 0 else 0.0,
    )
    model, other = make_decoder(), make_decoder()
    plain, optimizer = BASES["adamw-fused"](model), wrapped(BASES["adamw-fused"](other))
    train(model, plain, batches(4))
    train(other, optimizer, batches(4))
    assert_same(everything(other, optimizer), everything(model, plain))


def test_wraps_an_optimizer_that_has_taken_steps() -> None:
    model, other = make_decoder(), make_decoder()
    plain, base = BASES["adamw-foreach"](model), BASES["adamw-foreach"](other)
    train(model, plain, batches(6))
    train(other, base, batches(3))
    train(other, wrapped(base), batches(6)[3:])
    assert_same(everything(other, base), everything(model, plain))


def test_state_that_was_replaced_behind_its_back_is_used() -> None:
    model, other = make_decoder(), make_decoder()
    plain = BASES["adamw-fused"](model)
    optimizer = wrapped(BASES["adamw-fused"](other))
    train(model, plain, batches(2))
    train(other, optimizer, batches(2))
    for each in (plain, optimizer):
        first, second = each.param_groups[0]["params"][:2]
        each.state[first]["exp_avg"] = torch.full_like(each.state[first]["exp_avg"], 0.5)
        each.state.pop(second)
    train(model, plain, batches(2))
    train(other, optimizer, batches(2))
    assert_same(everything(other, optimizer), everything(model, plain))


def test_strided_weights_and_bf16() -> None:
    def make() -> list[nn.Parameter]:
        torch.manual_seed(1)
        shapes = [(8, 6, 3, 3), (7, 5), (4,), (0, 3), ()]
        tensors = [torch.randn(shape) for shape in shapes]
        tensors[0] = tensors[0].to(memory_format=torch.channels_last)
        tensors[1] = tensors[1].t()
        tensors[2] = tensors[2].bfloat16()
        return [nn.Parameter(tensor) for tensor in tensors]

    ours, theirs = make(), make()
    optimizer, plain = wrapped(torch.optim.AdamW(ours), device_budget=None), torch.optim.AdamW(theirs)
    for step in range(4):
        torch.manual_seed(step)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        optimizer.step()
        plain.step()
    assert_same(ours, theirs)
    assert_same(optimizer.state_dict(), plain.state_dict())
    assert optimizer.state[ours[0]]["exp_avg"].stride() == ours[0].stride()


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"capturable": True}])
def test_what_is_loaded_goes_where_torch_would_put_it(flags: dict[str, bool]) -> None:
    """On a GPU a step count stays on the host, unless the base wants it on the device. Nothing is moved here."""
    param = nn.Parameter(torch.ones(4))
    chunk = StateChunk("chunk", [param], torch.device("cuda", 0))
    saved = {"step": torch.tensor(1.0), "exp_avg": torch.ones(4)}
    state = {param: dict(saved)}
    assert chunk.places(state) == []
    expect_loaded(chunk, state, [{"params": [param], **flags}])
    assert [place.key for place in chunk.places(state)] == (["step", "exp_avg"] if flags else ["exp_avg"])
    assert (state[param]["step"] is saved["step"]) == bool(flags)
    state[param]["note"] = torch.ones(2)
    assert "note" not in [place.key for place in chunk.places(state)]


# Chunks -----------------------------------------------------------------------------------------------------


def names_of(model: nn.Module, optimizer: offload.CPUOffloadOptimizer) -> dict[str, list[str]]:
    known = {parameter: name for name, parameter in model.named_parameters()}
    return {chunk: [known[p] for p in params] for chunk, params in optimizer.chunks.items()}


def test_chunks_are_layers_then_the_rest() -> None:
    model = make_decoder(vocabulary=600)
    chunks = names_of(model, wrapped(torch.optim.AdamW(model.named_parameters()), device_budget=None))
    assert [name for name in chunks if not name.startswith("misc")] == ["layers.0", "layers.1", "layers.2"]
    assert all(member.startswith("layers.1.") for member in chunks["layers.1"])
    rest = [members for name, members in chunks.items() if name.startswith("misc (")]
    assert rest == [["embedding.weight"], ["norm.weight"], ["head.weight"]]


def test_chunks_may_be_finer_than_layers() -> None:
    model = make_decoder()
    chunks = names_of(model, wrapped(torch.optim.AdamW(model.named_parameters())))
    parts = [members for name, members in chunks.items() if name.startswith("layers.0 (")]
    assert len(parts) > 2
    assert [member for part in parts for member in part] == [
        name for name, _ in model.named_parameters() if name.startswith("layers.0.")
    ]


def test_chunks_by_size_without_names_and_by_a_function() -> None:
    model = make_decoder()
    sizes = [sum(p.nbytes for p in params) for _, params in plan_chunks(
        [{"params": list(model.parameters())}], whole=False, max_bytes=40_000)]  # fmt: skip
    assert len(sizes) > 3
    assert max(sizes) <= 40_000
    halves = wrapped(
        torch.optim.SGD(model.named_parameters()), device_budget=None, chunk_by=lambda name: name[:1]
    )
    assert list(halves.chunks) == ["e", "l", "n", "h"]


@pytest.mark.parametrize(("named", "words"), [(True, "matches none of the"), (False, "have no names")])
def test_a_chunk_by_that_says_nothing_is_refused(named: bool, words: str) -> None:
    model = make_decoder()
    base = torch.optim.SGD(list(model.named_parameters()) if named else model.parameters(), lr=0.1)
    config = offload.OffloadConfig(chunk_by=r"decoder\.\d+")
    with pytest.raises(offload.ConfigError, match=rf"config\.chunk_by=.*{words}"):
        offload.CPUOffloadOptimizer(base, config=config)
    offload.CPUOffloadOptimizer(base, "all-at-once", config=config).close()  # which has one chunk


def test_state_is_on_the_host_and_the_buffer_holds_the_two_largest_chunks() -> None:
    model = make_decoder()
    sizes = {}
    for mode in MODES:
        optimizer = wrapped(torch.optim.AdamW(model.named_parameters(), fused=True), mode)
        train(model, optimizer, batches(2))
        sizes[mode] = optimizer.device_bytes
        assert optimizer.host_bytes >= sum(2 * p.nbytes for p in model.parameters())
        largest = sorted((sum(2 * p.nbytes for p in ps) for ps in optimizer.chunks.values()), reverse=True)
        if mode == "chunked-stream":
            assert sum(largest[:2]) <= optimizer.device_bytes < 1.2 * sum(largest[:2])
        before = optimizer.last_step
        train(model, optimizer, batches(2))
        assert optimizer.device_bytes == sizes[mode]
        assert (
            optimizer.last_step.bytes_to_device == optimizer.last_step.bytes_to_host == before.bytes_to_host
        )
    assert sizes["all-at-once"] == 0 < sizes["chunked-sync"] < sizes["chunked-stream"]


class Watching(torch.optim.SGD):
    """Calls `watch` in every inner step with the parameters that it may touch."""

    watch: Callable[[list[Tensor]], None] = staticmethod(lambda params: None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.watch([p for group in self.param_groups for p in group["params"]])
        inner: Any = torch.optim.SGD.step
        inner.__wrapped__(self)


@pytest.mark.parametrize("mode", ["chunked-sync", "chunked-stream"])
def test_no_step_has_all_state_on_the_device_not_even_the_first(mode: str) -> None:
    model = make_decoder()
    base = Watching(model.named_parameters(), lr=0.1, momentum=0.9)
    optimizer = wrapped(base, mode)
    seen: list[int] = []

    def watch(params: list[Tensor]) -> None:
        chosen = set(params)
        hosts = {id(h) for chunk in optimizer._chunks if chunk.block for h in chunk.block.host}
        away = [
            p
            for p, entry in base.state.items()
            for t in entry.values()
            if t is not None and id(t) not in hosts
        ]
        assert set(away) <= chosen
        seen.append(len(params))

    base.watch = watch
    train(model, optimizer, batches(2))
    assert len(seen) == 2 * len(optimizer.chunks)
    assert sum(seen) == 2 * len(list(model.parameters()))


def test_next_chunk_comes_and_previous_one_leaves_while_one_is_stepped(lanes: list[LaneTransport]) -> None:
    model = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
    base = Watching(((f"layers.{n}", p) for n, p in model.named_parameters()), lr=0.1, momentum=0.9)
    optimizer = wrapped(base, device_budget=None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    (transport,) = lanes
    began = dict(transport._counts)
    issued = []

    def watch(params: list[Tensor]) -> None:
        issued.append({lane: number - began[lane] for lane, number in transport._counts.items()})
        if len(issued) == 2:  # chunk 1 is stepped, and chunk 0 has not left yet: chunk 2 needs its place
            transport.release("to_host")

    transport.hold("to_host")
    base.watch = watch
    optimizer.step()
    assert issued[:2] == [{"to_device": 2, "to_host": 0}, {"to_device": 2, "to_host": 1}]
    assert len(issued) == 4


def test_sync_modes_use_no_streams(lanes: list[LaneTransport]) -> None:
    model = make_decoder()
    for mode in ("all-at-once", "chunked-sync"):
        train(model, wrapped(torch.optim.AdamW(model.parameters()), mode), batches(2))
    assert not lanes


# What the base does -----------------------------------------------------------------------------------------


def test_is_an_optimizer_in_front_of_its_base() -> None:
    model = make_decoder()
    base = torch.optim.AdamW(decay_groups(model))
    optimizer = wrapped(base)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.base_optimizer is base
    assert optimizer.state is base.state
    assert optimizer.param_groups is base.param_groups
    assert optimizer.defaults is base.defaults
    assert "AdamW" in repr(optimizer)
    loss_of(model, batches(1)[0]).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(offload.StateError, match="state_dict"):
            refused(optimizer)


def test_group_counters_advance_once_and_groups_are_the_users_in_the_step() -> None:
    model = make_decoder()
    base = Counting(decay_groups(model))
    optimizer = wrapped(base)
    groups = base.param_groups
    members = [list(group["params"]) for group in groups]
    total = groups[0]["total"]

    def hook(*_: Any) -> None:
        assert optimizer.param_groups is groups
        assert base.param_groups is groups

    optimizer.register_step_pre_hook(hook)
    base.register_step_pre_hook(hook)
    base.register_step_post_hook(hook)
    train(model, optimizer, batches(3))
    assert base.param_groups is groups
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(p) for p in ps] for ps in members]
    assert [group["step"] for group in groups] == [3, 3]
    assert groups[0]["total"] is total
    assert total == 3
    assert groups[0]["seen"] == [1, 2, 3]
    assert base.calls == 3


def test_hooks_and_closures_run_once() -> None:
    model = make_decoder()
    base = torch.optim.AdamW(model.named_parameters())
    optimizer = wrapped(base)
    calls: list[str] = []
    base.register_step_pre_hook(lambda opt, args, kwargs: calls.append(f"base pre {opt is base} {len(args)}"))
    base.register_step_post_hook(lambda opt, args, kwargs: calls.append(f"base post {opt is base}"))
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(f"pre {opt is optimizer}"))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(f"post {opt is optimizer}"))
    everywhere = register_optimizer_step_post_hook(lambda opt, *_: calls.append("global"))

    def closure() -> Tensor:
        calls.append(f"closure {torch.is_grad_enabled()}")
        optimizer.zero_grad()
        loss = loss_of(model, batches(1)[0])
        loss.backward()
        return loss

    try:
        with torch.no_grad():
            loss = optimizer.step(closure)
    finally:
        everywhere.remove()
    assert loss.item() > 0
    assert calls == ["pre True", "base pre True 2", "closure True", "base post True", "post True", "global"]


@pytest.mark.parametrize("on_base", [False, True])
def test_schedulers(on_base: bool) -> None:
    model, other = make_decoder(), make_decoder()
    plain, base = BASES["adamw-fused"](model), BASES["adamw-fused"](other)
    optimizer = wrapped(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each, target, net in ((plain, plain, model), (base if on_base else optimizer, optimizer, other)):
            schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, 0.01, total_steps=20),
                          torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.5)]  # fmt: skip
            for ids in batches(4):
                train(net, target, [ids])
                for scheduler in schedulers:
                    scheduler.step()
    assert_same(everything(other, optimizer), everything(model, plain))


def test_groups_may_be_added() -> None:
    model, other = make_decoder(), make_decoder()

    def split(net: nn.Module, late: bool) -> list[tuple[str, Tensor]]:
        return [(n, p) for n, p in net.named_parameters() if ("layers.2" in n or "up" in n) == late]

    plain = torch.optim.AdamW(split(model, False), foreach=True)
    for mode in MODES:
        other = make_decoder()
        optimizer = wrapped(torch.optim.AdamW(split(other, False), foreach=True), mode)
        if mode == MODES[0]:
            train(model, plain, batches(2))
            plain.add_param_group({"params": split(model, True), "lr": 0.01})
            train(model, plain, batches(3))
        train(other, optimizer, batches(2))
        optimizer.add_param_group({"params": split(other, True), "lr": 0.01})
        train(other, optimizer, batches(3))
        assert_same(everything(other, optimizer), everything(model, plain))
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": split(other, True)})


@pytest.mark.parametrize("base", [
    lambda ps: torch.optim.LBFGS(ps),
    lambda ps: type("MyLBFGS", (torch.optim.LBFGS,), {})(ps),
    lambda ps: type("Prodigy", (torch.optim.SGD,), {})(ps),
    lambda ps: wrapped(torch.optim.SGD(ps)),
    lambda ps: offload.SignSGD(ps),
    lambda ps: torch.optim.SGD(ps, differentiable=True),
    lambda ps: ps,
])  # fmt: skip
def test_what_cannot_be_stepped_in_chunks_is_refused_by_name(base: Callable[[Any], Any]) -> None:
    with pytest.raises(
        offload.ConfigError, match=r"LBFGS|Prodigy|CPUOffloadOptimizer|OffloadOptimizer|differentiable|list"
    ):
        wrapped(base([nn.Parameter(torch.ones(3))]))


def test_across_parameters_is_stepped_whole() -> None:
    model = make_decoder()
    base = type("Prodigy", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    optimizer = wrapped(base, "all-at-once")
    train(model, optimizer, batches(1))
    assert list(optimizer.chunks) == ["all"]


def test_devices_and_modes_are_checked() -> None:
    ones = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))]
    with pytest.raises(offload.ParameterError, match="cpu, meta"):
        wrapped(torch.optim.SGD(ones))
    with pytest.raises(TypeError, match="meta"):
        wrapped(torch.optim.SGD(ones[1:]))
    with pytest.raises(offload.ConfigError, match="chunked-stream"):
        wrapped(torch.optim.SGD(ones[:1]), "wavefront")
    with pytest.raises(offload.MemoryBudgetError, match="host_budget"):
        wrapped(torch.optim.Adagrad(ones[:1]), host_budget=8)


# Failures ---------------------------------------------------------------------------------------------------


class Failing(torch.optim.AdamW):
    """Raises in the inner step that touches `victim`, after it has changed it."""

    victim: Tensor | None = None
    error: BaseException = ValueError("out of luck")

    def step(self, closure: Any = None) -> None:
        inner: Any = torch.optim.AdamW.step
        inner.__wrapped__(self)
        if any(p is self.victim for group in self.param_groups for p in group["params"]):
            raise self.error


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [ValueError("out of luck"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [0, 2])
def test_a_base_that_raises_in_mid_step(error: BaseException, mode: str, after: int) -> None:
    model = make_decoder()
    base = Failing(decay_groups(model))
    optimizer = wrapped(base, mode)
    train(model, optimizer, batches(after))
    saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    groups, members = base.param_groups, [list(group["params"]) for group in base.param_groups]
    base.victim, base.error = model.layers[1].qkv.weight, error
    loss_of(model, batches(1)[0]).backward()
    expected = offload.MidStepError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        optimizer.step()
    if isinstance(error, Exception):
        assert caught.value.__cause__ is error
        assert "out of luck" in str(caught.value)
        assert ("layers.1" if mode != "all-at-once" else "all") in str(caught.value)
    assert base.param_groups is groups
    assert all(
        p is q for g, ps in zip(groups, members, strict=True) for p, q in zip(g["params"], ps, strict=True)
    )
    hosts = {id(h) for chunk in optimizer._chunks if chunk.block for h in chunk.block.host}
    assert all(id(t) in hosts for entry in base.state.values() for t in entry.values())
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(offload.MidStepError, match="load_state_dict"):
            refused()

    base.victim = None  # the checkpoint makes it good again
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    plain_model = make_decoder()
    plain = torch.optim.AdamW(decay_groups(plain_model))
    train(plain_model, plain, [*batches(after), *batches(3)])
    optimizer.zero_grad()
    train(model, optimizer, batches(3))
    assert_same(everything(model, optimizer), everything(plain_model, plain))


def failing_optimizer(
    monkeypatch: pytest.MonkeyPatch, lane: str, index: int
) -> tuple[nn.Module, offload.CPUOffloadOptimizer, list[LaneTransport]]:
    """After two good steps, the `index`-th copy of the next step fails."""
    limits: dict[str, int] = {}

    def fail(name: str, number: int) -> BaseException | None:
        return OSError("the link is down") if limits.get(name) == number else None

    lanes = use_lanes(monkeypatch, poison=("to_host", "to_device"), fail=fail, delay=random_delays(5))
    model = make_decoder()
    optimizer = wrapped(BASES["adamw-foreach"](model))
    train(model, optimizer, batches(2))
    limits[lane] = lanes[0]._counts[lane] + index
    return model, optimizer, lanes


def test_a_copy_that_fails_before_anything_was_stepped_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, _ = failing_optimizer(monkeypatch, "to_device", 0)
    before = everything(copy.deepcopy(model), optimizer)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(OSError, match="link is down"):
        optimizer.step()
    assert_same(everything(model, optimizer), before)
    optimizer.step()
    plain_model = make_decoder()
    plain = BASES["adamw-foreach"](plain_model)
    train(plain_model, plain, [*batches(2), *batches(1)])
    assert_same(everything(model, optimizer), everything(plain_model, plain))


@pytest.mark.parametrize(("lane", "index"), [("to_device", 40), ("to_host", 0), ("to_host", 40)])
def test_a_copy_that_fails_later_is_said_to_have_spoilt_the_state(
    monkeypatch: pytest.MonkeyPatch, lane: str, index: int
) -> None:
    model, optimizer, _ = failing_optimizer(monkeypatch, lane, index)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(offload.MidStepError, match="link is down"):
        optimizer.step()
    with pytest.raises(offload.MidStepError, match="Load a checkpoint"):
        optimizer.step()


def test_errors_of_closures_and_hooks_change_nothing() -> None:
    model = make_decoder()
    optimizer = wrapped(BASES["counting"](model))
    train(model, optimizer, batches(1))
    before = everything(copy.deepcopy(model), optimizer)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert_same(everything(model, optimizer), before)
    train(model, optimizer, batches(1))


def test_an_optimizer_that_changes_other_parameters_state_is_found_out() -> None:
    class Meddling(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            inner: Any = torch.optim.SGD.step
            inner.__wrapped__(self)
            for entry in self.state.values():
                entry["momentum_buffer"] = entry["momentum_buffer"] / 2

    model = make_decoder()
    with pytest.raises(offload.StateError, match="all-at-once"):
        train(
            model,
            wrapped(Meddling(model.named_parameters(), lr=0.1, momentum=0.9), "chunked-sync"),
            batches(2),
        )


# State dicts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach", "sgd", "muon", "adagrad", "counting"])
@pytest.mark.parametrize("direction", ["from plain", "to plain", "to another mode"])
def test_state_dicts_are_those_of_the_base(name: str, direction: str) -> None:
    if name == "counting" and direction == "to plain":
        pytest.skip("torch casts its int64 state to the weight's dtype")
    model = make_decoder()
    first = BASES[name](model)
    first = first if direction == "from plain" else wrapped(first)
    train(model, first, batches(3))
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    unsaved = copy.deepcopy(saved)
    other = copy.deepcopy(model)
    second = BASES[name](other)
    second = second if direction == "to plain" else wrapped(second, "chunked-sync")
    second.load_state_dict(saved)
    assert_same(second.state_dict(), first.state_dict())
    train(model, first, batches(3))
    train(other, second, batches(3))
    if name != "counting":  # what it counts on itself is in no state dict
        assert_same(everything(other, second), everything(model, first))
    if direction != "to plain":  # torch itself goes on with the tensors that it was given
        assert_same(saved, unsaved)


def test_a_state_dict_stays_what_it_was() -> None:
    model = make_decoder()
    optimizer = wrapped(BASES["adamw-foreach"](model))
    train(model, optimizer, batches(2))
    state_dict = optimizer.state_dict()
    then = copy.deepcopy(state_dict)
    storages = {
        t.untyped_storage().nbytes() for _, t in flattened(state_dict["state"]) if isinstance(t, Tensor)
    }
    assert max(storages) <= max(p.nbytes for p in model.parameters())
    train(model, optimizer, batches(2))
    optimizer.close()
    assert_same(state_dict, then)


def test_loading_keeps_dtypes_and_hooks_run() -> None:
    weight = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    base = torch.optim.AdamW([weight], foreach=False)
    optimizer = wrapped(base)
    calls: list[str] = []
    for each, name in ((base, "base"), (optimizer, "own")):
        each.register_load_state_dict_pre_hook(
            lambda opt, sd, name=name: calls.append(f"pre {name} {len(sd['state'])}")
        )
        each.register_load_state_dict_post_hook(
            lambda opt, name=name: calls.append(f"post {name} {len(opt.state)}")
        )
        each.register_state_dict_post_hook(lambda opt, sd, name=name: calls.append(f"save {name}"))
    moments = {"exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8, dtype=torch.float64)}
    optimizer.load_state_dict({**base.state_dict(), "state": {0: {"step": torch.tensor(3.0), **moments}}})
    assert calls == ["save base", "pre own 1", "pre base 1", "post base 1", "post own 1"]
    assert {t.dtype for t in optimizer.state[weight].values()} == {torch.float32, torch.float64}
    optimizer.state_dict()
    assert calls[-2:] == ["save base", "save own"]


def test_old_step_counts_are_brought_up_to_date() -> None:
    weight = nn.Parameter(torch.zeros(8))
    optimizer = wrapped(torch.optim.AdamW([weight]))
    entry = {"step": 7, "exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: entry}})
    weight.grad = torch.ones(8)
    optimizer.step()
    assert optimizer.state[weight]["step"] == 8
    assert entry["step"] == 7


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    model = make_decoder()
    optimizer = wrapped(BASES["adamw-foreach"](model))
    train(model, optimizer, batches(2))
    before = optimizer.state_dict()
    other = wrapped(torch.optim.AdamW([nn.Parameter(torch.ones(2))])).state_dict()
    for wrong in (other, {"state": {}}, {"param_groups": [{}, {}], "state": {}}):
        with pytest.raises(offload.CheckpointError, match=r"does not fit|no optimizer state dict"):
            optimizer.load_state_dict(wrong)
    assert_same(optimizer.state_dict(), before)
    train(model, optimizer, batches(1))


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach", "sgd", "muon", "counting"])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_a_fresh_optimizer_leaves_no_trace(name: str, mode: str) -> None:
    """DCP steps an optimizer that has no state, with zeros for gradients."""
    model, other = make_decoder(), make_decoder()
    optimizer = wrapped(BASES[name](other), mode)
    saved = get_optimizer_state_dict(other, optimizer)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert all(not t.any() for path, t in flattened(saved["state"]) if path.endswith("step"))
    assert getattr(optimizer.base_optimizer, "calls", 0) == 0
    get_optimizer_state_dict(other, optimizer)
    plain = BASES[name](model)
    train(model, plain, batches(3))
    train(other, optimizer, batches(3))
    assert_same(everything(other, optimizer), everything(model, plain))


def test_distributed_checkpoints_restore() -> None:
    for mode in MODES:
        model = make_decoder()
        optimizer = wrapped(BASES["adamw-fused"](model), mode)
        train(model, optimizer, batches(3))
        saved = get_optimizer_state_dict(model, optimizer)
        other = copy.deepcopy(model)
        for restored in (wrapped(BASES["adamw-fused"](other), mode), BASES["adamw-fused"](other)):
            set_optimizer_state_dict(other, restored, copy.deepcopy(saved))
            assert_same(restored.state_dict(), optimizer.state_dict())


# Life -------------------------------------------------------------------------------------------------------


def test_close_gives_memory_back_and_state_stays_readable() -> None:
    gc.collect()
    before = mapped_bytes()
    model = make_decoder()
    with wrapped(BASES["adamw-foreach"](model)) as optimizer:
        train(model, optimizer, batches(2))
        assert mapped_bytes() > before
        expected = optimizer.state_dict()
    optimizer.close()
    assert optimizer.host_bytes == optimizer.device_bytes == 0
    assert_same(optimizer.base_optimizer.state_dict(), expected)
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(offload.ClosedError):
            refused()
    optimizer.base_optimizer.state.clear()
    gc.collect()
    assert mapped_bytes() == before


def test_forgotten_optimizers_are_collected() -> None:
    gc.collect()
    before = mapped_bytes()
    model = make_decoder()
    optimizer = wrapped(BASES["adamw-foreach"](model))
    train(model, optimizer, batches(2))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert mapped_bytes() == before


def test_two_optimizers_over_one_model_do_not_meet() -> None:
    model, other = make_decoder(), make_decoder()
    names = [n for n, _ in model.named_parameters()]

    def pair(net: nn.Module) -> list[torch.optim.Optimizer]:
        named = dict(net.named_parameters())
        return [torch.optim.AdamW([(n, named[n]) for n in names[part::2]], fused=True) for part in (0, 1)]

    plain, ours = pair(model), [wrapped(base) for base in pair(other)]
    for number, ids in enumerate(batches(6)):
        train(model, plain[number % 2], [ids])
        train(other, ours[number % 2], [ids])
    for one, two in zip(ours, plain, strict=True):
        assert_same(everything(other, one), everything(model, two))


def test_the_memory_benchmark_runs(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--models", "tiny", "--steps", "2", "--modes", "chunked-stream"]
    names = ["cpu-offload-fused", "cpu-offload-foreach"]
    result = run_script("bench_memory.py", tmp_path / "out.json", *options, "--optimizers", ",".join(names))
    assert [row["optimizer"] for row in result["rows"]] == names
    for row in result["rows"]:
        assert row["status"] == "ok"
        assert row["state_bytes"] == 8 * row["parameters"] + 4 * NUM_TINY_PARAMETERS
        assert row["moved_bytes"] > 2 * row["state_bytes"]  # padding
        assert row["step_s"] > 0
        assert row["later_extra_bytes"] is row["first_extra_bytes"] is None
