"""`CPUOffloadOptimizer` on a GPU: bits, streams, races and memory."""

from __future__ import annotations

import copy
import gc
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import offload
from offload.transfer.pinned import pinned_bytes
from tests.test_state_offload import BASES, MODES, assert_same, everything, train, wrapped
from tests.training import batches, loss_of, make_decoder

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000
"""Of `torch.cuda._sleep`: about 10 ms, far longer than anything here takes by itself."""

MIB = 1 << 20


def on_gpu(model: nn.Module, name: str = "adamw-fused") -> torch.optim.Optimizer:
    return BASES[name](model)


def layers(count: int = 6, width: int = 1024) -> nn.ModuleDict:
    """Layers of 8 MiB and an embedding of 24 MiB, with gradients."""
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "embedding": nn.Embedding(6 * width, width, device="cuda"),
        "layers": nn.ModuleList(nn.Linear(width, 2 * width, device="cuda") for _ in range(count)),
    })  # fmt: skip
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def large(
    model: nn.Module, mode: str, base: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **flags: Any
) -> Any:
    config = offload.OffloadConfig(tile_numel=1 << 18)
    return offload.CPUOffloadOptimizer(base(model.named_parameters(), **flags), mode=mode, config=config)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BASES)
def test_bits_of_the_base_alone_over_ten_steps(name: str, mode: str) -> None:
    model = make_decoder(device="cuda")
    other = copy.deepcopy(model)
    plain, optimizer = on_gpu(model, name), wrapped(on_gpu(other, name), mode)
    for ids in batches(10, device="cuda"):
        loss_of(model, ids).backward()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            two.grad = one.grad.clone()  # kernels of backward may add in another order
        plain.step()
        optimizer.step()
        plain.zero_grad()
        optimizer.zero_grad()
        assert_same(everything(other, optimizer), everything(model, plain))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("delayed", ["before", "inside"])
def test_nothing_is_read_before_it_is_there(mode: str, delayed: str) -> None:
    """Gradients come late, or every chunk's update does: copies must wait for both."""

    class Late(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            inner: Any = torch.optim.AdamW.step
            torch.cuda._sleep(CYCLES // 10)
            inner.__wrapped__(self)

    model = layers()
    other = copy.deepcopy(model)
    plain = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = large(other, mode, Late if delayed == "inside" else torch.optim.AdamW, fused=True)
    for step in range(4):
        torch.manual_seed(step)
        noise = [torch.randn_like(p) for p in model.parameters()]
        torch.cuda.synchronize()
        for one, two, value in zip(model.parameters(), other.parameters(), noise, strict=True):
            one.grad = value
            two.grad = torch.empty_like(value).fill_(float("nan"))
        if delayed == "before":
            torch.cuda._sleep(CYCLES)
        for two, value in zip(other.parameters(), noise, strict=True):
            two.grad.copy_(value)
        optimizer.step()
        digest = hash_of(optimizer.state.values())
        torch.cuda.synchronize()
        assert hash_of(optimizer.state.values()) == digest
        plain.step()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def hash_of(entries: Any) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        for tensor in entry.values():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_steps_in_side_streams() -> None:
    model = layers()
    other = copy.deepcopy(model)
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        twin.grad = parameter.grad.clone()
    plain, optimizer = (
        torch.optim.AdamW(model.parameters(), fused=True),
        large(other, "chunked-stream", fused=True),
    )
    for _ in range(4):
        plain.step()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            for parameter in other.parameters():
                parameter.grad.mul_(1.0)
            optimizer.step()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("mode", MODES)
def test_state_is_pinned_on_the_host_and_step_counts_live_where_the_base_wants_them(mode: str) -> None:
    before = pinned_bytes()
    for fused in (True, False):
        model = layers()
        with large(model, mode, fused=fused, foreach=not fused) as optimizer:
            seen: list[str] = []

            def watch(self: Any, *args: Any, seen: list[str] = seen) -> Any:
                result = torch.optim.Adam._init_group(self, *args)
                seen += [
                    self.state[p]["step"].device.type for group in self.param_groups for p in group["params"]
                ]
                return result

            optimizer.base_optimizer._init_group = watch.__get__(optimizer.base_optimizer)
            for _ in range(2):
                optimizer.step()
            assert set(seen) == {"cuda" if fused else "cpu"}
            for entry in optimizer.state.values():
                assert {tensor.device.type for tensor in entry.values()} == {"cpu"}
            assert (
                pinned_bytes() - before
                == optimizer.host_bytes
                >= 2 * sum(p.nbytes for p in model.parameters())
            )
        assert pinned_bytes() == before


@pytest.mark.parametrize("mode", MODES)
def test_memory_of_a_step_first_and_later(mode: str) -> None:
    gc.collect()  # cycles that earlier tests left would be collected in the middle of this one
    model = layers()
    sizes = [2 * p.nbytes for p in model.parameters()]
    optimizer = large(model, mode, fused=True)
    limits = {
        "all-at-once": sum(sizes),
        "chunked-sync": max(sizes),
        "chunked-stream": max(sizes) + sorted(sizes)[-2],
    }
    held, reserved = torch.cuda.memory_allocated(), []
    for step in range(6):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - held <= limits[mode] + 2 * MIB, step
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved[1:])) == 1
    assert (
        0 <= torch.cuda.memory_allocated() - held - optimizer.device_bytes < 2 * MIB
    )  # the allocator rounds up
    optimizer.close()
    assert torch.cuda.memory_allocated() == held


def test_no_stream_is_made_in_a_step_and_none_at_all_in_sync_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = torch.cuda.Stream

    class Counted(original):  # type: ignore[valid-type, misc]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if "stream_id" not in kwargs:  # else it names one that exists, as current_stream() does
                made.append(1)
            return super().__new__(cls, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "Stream", Counted)
    for mode, expected in (("all-at-once", 0), ("chunked-sync", 0), ("chunked-stream", 2)):
        made.clear()
        optimizer = large(layers(), mode, fused=True)
        for _ in range(3):
            optimizer.step()
        assert len(made) == expected


def test_copies_overlap_each_other_and_the_step() -> None:
    """Streamed, a step takes clearly less time than one after the other."""
    times = {}
    for mode in ("chunked-sync", "chunked-stream"):
        model = layers(12, 4096)
        optimizer = offload.CPUOffloadOptimizer(
            torch.optim.AdamW(model.named_parameters(), fused=True), mode=mode
        )
        seconds = []
        for _ in range(8):
            optimizer.step()
            seconds.append(optimizer.last_step.seconds)
        times[mode] = sorted(seconds[2:])[2]
    assert times["chunked-stream"] < 0.75 * times["chunked-sync"], times


@pytest.mark.parametrize("mode", MODES)
def test_saving_and_loading_stay_off_the_device(mode: str) -> None:
    model = layers()
    optimizer = large(model, mode, fused=True)
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before
    assert all(t.device.type == "cpu" for entry in saved["state"].values() for t in entry.values())
    digest = hash_of(saved["state"].values())
    for _ in range(2):
        optimizer.step()
    assert hash_of(saved["state"].values()) == digest


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach", "sgd", "muon"])
def test_state_dicts_go_between_the_plain_base_and_the_host(name: str) -> None:
    def with_gradients(source: nn.Module) -> nn.Module:
        net = copy.deepcopy(source)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        return net

    def steps(optimizer: Any, number: int) -> None:
        for _ in range(number):
            optimizer.step()

    start = make_decoder(device="cuda")
    reference, model = with_gradients(start), with_gradients(start)
    plain, first = on_gpu(reference, name), on_gpu(model, name)
    steps(plain, 6)
    steps(first, 2)
    moved = wrapped(on_gpu(model, name))
    moved.load_state_dict(first.state_dict())  # from the device
    steps(moved, 2)
    last = on_gpu(model, name)
    last.load_state_dict(moved.state_dict())  # and back
    steps(last, 2)
    assert_same(everything(model, last), everything(reference, plain))
    home = wrapped(on_gpu(copy.deepcopy(model).cpu(), name), "chunked-sync")
    home.load_state_dict(moved.state_dict())
    assert_same(home.state_dict()["state"], moved.state_dict()["state"])


@pytest.mark.parametrize("mode", MODES)
def test_distributed_checkpoint_of_a_fresh_optimizer(mode: str) -> None:
    model = make_decoder(device="cuda")
    other = copy.deepcopy(model)
    plain, optimizer = on_gpu(model), wrapped(on_gpu(other), mode)
    saved = get_optimizer_state_dict(other, optimizer)
    train(model, plain, batches(2, device="cuda"))
    train(other, optimizer, batches(2, device="cuda"))
    state: dict[str, Tensor] = optimizer.state[other.embedding.weight]
    assert state["step"] == plain.state[model.embedding.weight]["step"].cpu() == 2
    set_optimizer_state_dict(other, optimizer, saved)
    assert state is not optimizer.state[other.embedding.weight]
    assert not optimizer.state[other.embedding.weight]["exp_avg"].any()


def test_running_out_of_device_memory_is_told() -> None:
    model = layers()
    optimizer = large(model, "chunked-stream", fused=True)
    optimizer.step()

    class Full(torch.optim.AdamW):
        calls = 0

        def step(self, closure: Any = None) -> None:
            Full.calls += 1
            if Full.calls == 4:
                raise torch.OutOfMemoryError("no more")
            inner: Any = torch.optim.AdamW.step
            inner.__wrapped__(self)

    other = layers()
    failing = large(other, "chunked-stream", Full, fused=True)
    with pytest.raises(offload.MidStepError, match="no more"):
        failing.step()
    with pytest.raises(offload.MidStepError):
        failing.state_dict()
    failing.load_state_dict(optimizer.state_dict())
    failing.step()
    assert all(t.device.type == "cpu" for entry in failing.state.values() for t in entry.values())
