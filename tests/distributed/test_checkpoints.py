"""Checkpoints of sharded parameters: other numbers of ranks, asynchronous saves, failing and dying ranks.

Where numbers of ranks are compared, gradients are assigned: every rank cuts its part from the same full ones, so that
the next step of 4, 3 and 1 ranks can have the same bits.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.optim.lr_scheduler import LambdaLR

import offload
from offload.distributed import shard_like, shard_of
from tests.distributed.ranks import Ranks
from tests.training import KERNEL_CACHE

DEADLINE_S = 30.0
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
State = dict[str, Any]


class Scale(nn.Module):
    """FP32 among BF16; one element, so that all ranks but the first have none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.weight


class Net(nn.Module):
    """First dimensions of 10 and 2: uneven on 4 and 3 ranks, and empty on some."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(12, 10).bfloat16()
        self.second = nn.Linear(10, 2).bfloat16()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.second(torch.tanh(self.first(x)))).square().mean()


def build(seed: int, layout: str = "fsdp") -> Net:
    model = Net(seed)
    if layout == "plain":
        return model
    options: dict[str, Any] = {}
    if layout == "hsdp":
        options["mesh"] = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard")
        )
    if layout == "second dimension":
        options["shard_placement_fn"] = lambda p: Shard(p.dim() - 1)
    for module in (model.first, model.scale, model):
        fully_shard(module, **options)
    return model


def make(model: Net, kind: str = "wavefront", **options: Any) -> Any:
    options = {"lr": 0.02, "weight_decay": 0.1} | options
    if kind == "wrapper":
        return offload.CPUOffloadOptimizer(torch.optim.AdamW(model.named_parameters(), **options))
    config = offload.OffloadConfig(tile_numel=1024, ring_slots=2, threads=1)
    if kind == "bf16 moments":
        config = dataclasses.replace(config, moments="bf16", kernel_cache_dir=KERNEL_CACHE)
        return offload.AdamW(model.named_parameters(), mode="wavefront", config=config, **options)
    return offload.AdamW(model.named_parameters(), mode=kind, backend="torch", config=config, **options)


def step_assigned(model: Net, optimizer: Any, *indices: int) -> None:
    for index in indices:
        generator = torch.Generator().manual_seed(index)
        for parameter in model.parameters():
            full = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = shard_like(parameter, shard_of(full, parameter).clone())
        optimizer.step()
        optimizer.zero_grad()


def backward(model: Net, index: int) -> None:
    generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
    model(torch.randn(4, 12, generator=generator).bfloat16()).backward()


def train(model: Net, optimizer: Any, indices: range, schedule: Any = None) -> None:
    for index in indices:
        backward(model, index)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def states(model: Net, optimizer: Any, flat: bool = False) -> State:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def restore(model: Net, optimizer: Any, folder: Path, flat: bool = False) -> None:
    state = states(model, optimizer, flat)
    offload.load_sharded(state, folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(
        model, optimizer, state["optimizer"], options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )


def full(model: Net, optimizer: Any) -> State:
    """Everything, gathered and copied; empty on other ranks than 0."""
    return copy.deepcopy(
        {
            "model": get_model_state_dict(model, options=FULL),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
        }
    )


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


# Other numbers of ranks


def save_resharded(
    kind: str, layout: str, flat: bool, source: Path | None, target: Path
) -> tuple[State, State]:
    """Train, or take what is in `source`; save; the state then, and after one more step."""
    model = build(0 if source is None else 1, layout)
    optimizer = make(model, kind, **({} if source is None else {"lr": 0.5, "betas": (0.1, 0.2)}))
    if source is None:
        step_assigned(model, optimizer, 0, 1, 2)
    else:
        restore(model, optimizer, source, flat)
    offload.save_sharded(states(model, optimizer, flat), target)
    now = full(model, optimizer)
    step_assigned(model, optimizer, 3)
    after = full(model, optimizer)
    optimizer.close()
    return now, after


@pytest.mark.parametrize(
    ("kind", "layout", "flat"),
    [
        ("wavefront", "fsdp", False),
        ("chunked-stream", "fsdp", True),
        ("resident", "hsdp", False),
        ("wrapper", "fsdp", True),
        ("bf16 moments", "fsdp", False),
    ],
)
def test_f30_saved_on_four_ranks_loaded_on_three_and_on_one(
    ranks: Ranks, tmp_path: Path, kind: str, layout: str, flat: bool
) -> None:
    """Full tensors and the next step are the same; on one rank, the model is not sharded at all."""
    runs = []
    source: Path | None = None
    for size, its_layout in ((4, layout), (3, "fsdp"), (1, "plain")):
        target = tmp_path / f"of-{size}"
        runs.append(
            ranks.run(save_resharded, size, kind, its_layout, flat, source, target, deadline_s=120.0)[0]
        )
        source = target
    state = runs[0][0]["optimizer"]["state"]
    assert state["first.weight"]["exp_avg"].shape == (10, 12)
    assert ("master" in state["first.weight"]) == (kind != "wrapper")
    assert "master" not in state["scale.weight"]
    assert state["scale.weight"]["step"] == 3
    assert not same(*runs[0])
    for run in runs[1:]:
        for ours, theirs in zip(run, runs[0], strict=True):
            assert same(ours["model"], theirs["model"])
            assert same(ours["optimizer"], theirs["optimizer"])


# Resume in new processes


def run_resumed(first: int, last: int, folder: Path, source: bool) -> State:
    model = build(int(source))
    options = {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.1} if source else {}
    optimizer = make(model, "wavefront", **options)
    schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    if source:
        restore(model, optimizer, folder)
        schedule.load_state_dict(torch.load(folder / "schedule.pt", weights_only=True))
    train(model, optimizer, range(first, last), schedule)
    if not source and last < 6:
        offload.save_sharded(states(model, optimizer), folder)
        if dist.get_rank() == 0:
            torch.save(schedule.state_dict(), folder / "schedule.pt")
    return full(model, optimizer)


def test_f26_resumed_in_new_processes_as_if_never_interrupted(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(run_resumed, 2, 0, 6, tmp_path / "none", False)[0]
    ranks.run(run_resumed, 2, 0, 3, tmp_path / "saved", False)
    ranks.close()
    assert same(ranks.run(run_resumed, 2, 3, 6, tmp_path / "saved", True)[0], expected)


# What saving must not do


def look_or_not(look: bool, kind: str) -> State:
    model = build(0)
    optimizer = make(model, kind, **({} if kind == "wrapper" else {"accumulation_steps": 2}))
    for index in range(3):
        if look and index == 0:
            states(model, optimizer)
        backward(model, 2 * index)
        if look:
            states(model, optimizer)
        backward(model, 2 * index + 1)
        optimizer.step()
        optimizer.zero_grad()
    return full(model, optimizer)


@pytest.mark.parametrize("kind", ["wavefront", "wrapper"])
def test_f27_looking_at_sharded_state_leaves_no_trace(ranks: Ranks, kind: str) -> None:
    assert same(ranks.run(look_or_not, 2, True, kind)[0], ranks.run(look_or_not, 2, False, kind)[0])


class SlowWriter(dcp.FileSystemWriter):
    """Writes no data until it is told to."""

    gate: threading.Event

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        assert self.gate.wait(DEADLINE_S)
        return super().write_data(*arguments, **options)


def save_slowly(folder: Path) -> State:
    """As docs/checkpoints.md has it: written aside in the background, named when it is whole."""
    model = build(0)
    optimizer = make(model)
    train(model, optimizer, range(3))
    expected = full(model, optimizer)["optimizer"]
    background = dist.new_group(backend="gloo")
    writer = SlowWriter(folder.with_suffix(".writing"))
    writer.gate = threading.Event()
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    future = dcp.async_save(state, storage_writer=writer, process_group=background)
    train(model, optimizer, range(3, 5))
    assert not future.done()
    assert not folder.exists()
    writer.gate.set()
    future.result(DEADLINE_S)
    if dist.get_rank() == 0:
        folder.with_suffix(".writing").rename(folder)
    dist.barrier()
    model = build(1)
    optimizer = make(model)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    offload.load_sharded(state, folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert same(full(model, optimizer)["optimizer"], expected)
    return expected


def test_f28_an_asynchronous_save_holds_the_state_of_the_call(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(save_slowly, 2, tmp_path / "saved")[0]
    assert expected["state"]["first.weight"]["step"] == 3


# Other ways than folders


def exchange(way: str, folder: Path) -> None:
    model = build(0)
    optimizer = make(model)
    step_assigned(model, optimizer, 0, 1, 2)
    expected = full(model, optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    taken = {
        "broadcast": lambda: get_optimizer_state_dict(model, optimizer, options=FULL),
        "full": lambda: get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        ),
        "on the CPU": lambda: get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(cpu_offload=True)
        ),
        "file of each rank": optimizer.state_dict,
        "full tensors": lambda: with_full_tensors(optimizer.state_dict()),
    }[way]()
    step_assigned(model, optimizer, 3)
    model = build(1)
    model.load_state_dict(weights)
    optimizer = make(model, "chunked-sync", lr=0.7)
    if way == "file of each rank":
        path = folder / f"rank-{dist.get_rank()}"
        offload.save_checkpoint(taken, path)
        optimizer.load_state_dict(offload.load_checkpoint(path))
    elif way == "full tensors":
        optimizer.load_state_dict(taken)
    else:
        assert way != "broadcast" or bool(taken) == (dist.get_rank() == 0)
        options = StateDictOptions(
            full_state_dict=way != "on the CPU", broadcast_from_rank0=way == "broadcast"
        )
        set_optimizer_state_dict(model, optimizer, taken, options=options)
    assert same(full(model, optimizer), expected)


def with_full_tensors(state_dict: State) -> State:
    for entry in state_dict["state"].values():
        for name, value in entry.items():
            entry[name] = value.full_tensor() if isinstance(value, dcp.state_dict.DTensor) else value
    return state_dict


@pytest.mark.parametrize("way", ["broadcast", "full", "on the CPU", "file of each rank", "full tensors"])
def test_sharded_state_is_exchanged(ranks: Ranks, tmp_path: Path, way: str) -> None:
    ranks.run(exchange, 3, way, tmp_path)


def load_other_layout() -> None:
    model = build(0)
    optimizer = make(model)
    step_assigned(model, optimizer, 0)
    other = build(0, "second dimension")
    refusing = make(other)
    before = full(other, refusing)
    with pytest.raises(offload.CheckpointError, match=r"first\.weight: master is sharded in another way"):
        refusing.load_state_dict(optimizer.state_dict())
    assert same(full(other, refusing), before)


def test_state_of_another_layout_is_refused_on_every_rank(ranks: Ranks) -> None:
    ranks.run(load_other_layout, 2)


# Failing and dying ranks


def save_and_fail(folder: Path, death: bool) -> str:
    model = build(0)
    optimizer = make(model)
    step_assigned(model, optimizer, 0)
    offload.save_sharded(states(model, optimizer), folder / "step-1")
    step_assigned(model, optimizer, 1)

    def fail(*_: Any, **__: Any) -> None:
        if death:
            os._exit(9)
        raise OSError("no space left on device")

    failing = mock.patch.object(dcp.FileSystemWriter, "write_data", fail)
    with (
        failing if dist.get_rank() == 1 else mock.MagicMock(),
        pytest.raises(offload.CheckpointError) as caught,
    ):
        offload.save_sharded(states(model, optimizer), folder / "step-2")
    if not death:
        assert not (folder / "step-2").exists()
        restore(model, optimizer, folder / "step-1")
        assert (
            full(model, optimizer)["optimizer"].get("state", {}).get("scale.weight", {}).get("step", 1) == 1
        )
    return str(caught.value)


def test_one_failing_rank_fails_the_save_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks.run(save_and_fail, 2, tmp_path, False):
        assert "step-2 was not saved: rank 1: OSError: no space left on device" in message


def test_a_rank_that_dies_in_mid_save_leaves_the_previous_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    message, nothing = ranks.run(save_and_fail, 2, tmp_path, True, may_die=(1,), deadline_s=45.0)
    assert "step-2 was not saved" in message
    assert nothing is None
    assert {path.name for path in tmp_path.iterdir()} - {"step-2.writing"} == {"step-1"}
    state, after = ranks.run(
        save_resharded, 1, "wavefront", "plain", False, tmp_path / "step-1", tmp_path / "new"
    )[0]
    assert state["optimizer"]["state"]["scale.weight"]["step"] == 1
    assert after["optimizer"]["state"]["scale.weight"]["step"] == 2


def load_damaged(folder: Path) -> None:
    model = build(0)
    optimizer = make(model)
    step_assigned(model, optimizer, 0)
    offload.save_sharded(states(model, optimizer), folder / "step-1")
    if dist.get_rank() == 0:
        path = next((folder / "step-1").glob("__1_*.distcp"))
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    before = full(model, optimizer)
    with pytest.raises(offload.CheckpointError, match=r"distcp was cut short"):
        restore(model, optimizer, folder / "step-1")
    with pytest.raises(offload.CheckpointError, match=r"step-1 exists"):
        offload.save_sharded(states(model, optimizer), folder / "step-1")
    assert same(full(model, optimizer), before)


def test_every_rank_refuses_a_damaged_or_existing_folder(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(load_damaged, 2, tmp_path)
