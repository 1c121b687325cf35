"""Verdicts agreed by all ranks in one collective per step, and what becomes of the others when a rank fails or dies."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import offload
from offload import agreement
from tests.distributed.ranks import Ranks
from tests.distributed.training import (
    MODES,
    assert_equal,
    local_bits,
    mesh_of,
    optimizer_over,
    poisoned,
    sharded_decoder,
    train_beside_reference,
)
from tests.training import Recorder, batches, loss_of

DEADLINE_S = 4.0
"""Of the optimizer's collectives, where ranks are lost."""


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """The devices of all collectives that the library issues meanwhile."""
    devices: list[str] = []
    original = agreement.all_gather

    def gather(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        devices.append(output.device.type)
        return original(output, *arguments, **options)

    agreement.all_gather = gather
    try:
        yield devices
    finally:
        agreement.all_gather = original


def backward(model: nn.Module, step: int = 0) -> None:
    loss_of(model, batches(step + 1)[step].roll(dist.get_rank(), 1)).backward()


# Clip and skip


def clip_and_skip(mesh: tuple[int, ...] | None) -> list[list[Any]]:
    """Norm, coefficient and verdict of each step in each mode; a NaN comes to rank 1 alone in the last step."""
    seen = []
    for mode in MODES if mesh is None else ("resident", "wavefront"):
        model = sharded_decoder(mesh and mesh_of(mesh, "replicate", "shard"))
        recorder = Recorder(model)
        with optimizer_over(model, mode, max_grad_norm=0.5, nonfinite="skip") as optimizer:
            reports = train_beside_reference(model, optimizer, recorder, steps=2)
            before = local_bits(model, optimizer)
            with poisoned(model, "layers.1.up.weight", rank=1):
                backward(model)
            optimizer.step()
            reports.append(optimizer.last_step)
            assert_equal(local_bits(model, optimizer), before)
            seen.append([(r.clip_coefficient, r.clipped, r.skipped) for r in reports])
            norms = [r.grad_norm for r in reports[:2]]
            seen[-1].append(norms)
    return seen


@pytest.mark.parametrize(("size", "mesh"), [(2, None), (4, (2, 2))])
def test_f21_all_ranks_and_modes_clip_and_skip_alike(
    ranks: Ranks, size: int, mesh: tuple[int, ...] | None
) -> None:
    results = ranks.run(clip_and_skip, size, mesh)
    first = results[0][0]
    assert [verdict[1:] for verdict in first[:3]] == [(True, False), (True, False), (False, True)]
    for seen in results:
        assert all(each == first for each in seen)


def raise_everywhere() -> str:
    model = sharded_decoder()
    with optimizer_over(model, "wavefront", nonfinite="raise") as optimizer:
        before = local_bits(model, optimizer)
        with poisoned(model, "layers.0.qkv.weight", rank=1):
            backward(model)
        with pytest.raises(offload.NonFiniteGradientError) as raised:
            optimizer.step()
        assert_equal(local_bits(model, optimizer), before)
        backward(model)
        optimizer.step()
        assert not optimizer.last_step.skipped
    return str(raised.value)


def test_f21_all_ranks_raise_alike(ranks: Ranks) -> None:
    here, there = ranks.run(raise_everywhere, 2)
    assert "rank(s) [1]" in here
    assert "layers.0.qkv.weight" in there


# One collective


def one_collective() -> None:
    """On the mesh's device, though a shard of FSDP's CPU offload lies elsewhere."""
    for mode, options in [
        ("wavefront", {}),
        ("wavefront", {"max_grad_norm": 0.1, "nonfinite": "skip"}),
        ("chunked-stream", {"max_grad_norm": 0.1}),
        ("resident", {"nonfinite": "raise"}),
    ]:
        model = sharded_decoder()
        with optimizer_over(model, mode, **options) as optimizer:
            for step in range(2):
                backward(model, step)
                with counted_collectives() as devices, warnings.catch_warnings():
                    warnings.simplefilter("error", FutureWarning)  # torch's, of names that it will drop
                    optimizer.step()
                assert devices == ["cpu"], mode
                optimizer.zero_grad()


def test_f19_one_collective_per_step(ranks: Ranks) -> None:
    ranks.run(one_collective, 2)


def without_a_gradient(mode: str, options: dict[str, Any]) -> tuple[float, float]:
    """Rank 1 gets no gradient at all, in the first step nobody does."""
    model = fully_shard(nn.Linear(8, 8))
    with optimizer_over(model, mode, **options) as optimizer:
        with pytest.raises(offload.NoGradientError):
            optimizer.step()
        weight = model.weight
        if dist.get_rank() == 0:
            gradient = torch.full_like(weight.to_local(), 3.0)
            weight.grad = DTensor(gradient, weight._spec, requires_grad=False)
        optimizer.step()
        return optimizer.last_step.grad_norm, float(optimizer.state[weight]["step"])


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0, "nonfinite": "skip"}])
@pytest.mark.parametrize("mode", ["wavefront", "chunked-sync"])
def test_f21_a_rank_without_a_gradient_hangs_nobody(ranks: Ranks, mode: str, options: dict[str, Any]) -> None:
    expected = (4 * 8 * 9.0) ** 0.5
    assert ranks.run(without_a_gradient, 2, mode, options) == [(expected, 1.0), (expected, 0.0)]


# Failures


def raised_by_step(
    optimizer: offload.AdamW, closure: Callable[[], Any] | None = None
) -> tuple[str, str, float]:
    start = time.monotonic()
    with pytest.raises((offload.OffloadError, ZeroDivisionError)) as raised:
        optimizer.step(closure)
    waited = time.monotonic() - start
    optimizer.close()
    return type(raised.value).__name__, str(raised.value), waited


def assert_told(results: list[tuple[str, str, float]], name: str, reason: str) -> None:
    """Rank 1 raised `name`, and all others named it, long before a deadline."""
    names = [name if rank == 1 else "PeerError" for rank in range(len(results))]
    assert [name for name, _, _ in results] == names
    assert all("rank(s) [1]" in message for name, message, _ in results if name == "PeerError")
    assert reason in results[1][1]
    assert max(waited for _, _, waited in results) < 25.0


def failing_worker(mode: str, options: dict[str, Any]) -> tuple[str, str, float]:
    model = sharded_decoder()
    logging.getLogger("offload").setLevel(logging.CRITICAL)
    optimizer = optimizer_over(model, mode, config={"timeout_s": 60.0}, **options)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        optimizer._engine._worker.fail(ValueError("a reason of its own"))
    backward(model)
    return raised_by_step(optimizer)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}])
def test_a_rank_whose_worker_fails_is_told_to_the_others(ranks: Ranks, options: dict[str, Any]) -> None:
    results = ranks.run(failing_worker, 4, "wavefront", options)
    assert_told(results, "WorkerError", "a reason of its own")


def sharded_beside_plain() -> nn.ModuleDict:
    model = nn.ModuleDict({"sharded": fully_shard(nn.Linear(8, 8)), "plain": nn.Linear(8, 8)})
    for parameter in model["plain"].parameters():
        dist.broadcast(parameter.data, 0)
    return model


def backward_of_both(model: nn.ModuleDict) -> torch.Tensor:
    """With the same gradients of the plain part on all ranks."""
    torch.manual_seed(0)
    loss: torch.Tensor = model["plain"](model["sharded"](torch.randn(2, 8))).square().mean()
    loss.backward()
    return loss


def closure_fails_after_backward(options: dict[str, Any]) -> tuple[str, str, float]:
    """In the second step, whose gradients have gone to the host then."""
    model = sharded_beside_plain()
    optimizer = optimizer_over(model, "wavefront", config={"timeout_s": 60.0}, **options)
    optimizer.step(lambda: backward_of_both(model))
    optimizer.zero_grad()

    def closure() -> torch.Tensor:
        loss = backward_of_both(model)
        return loss / 0 if dist.get_rank() != 1 else 1 / 0  # type: ignore[return-value]

    return raised_by_step(optimizer, closure)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}])
def test_a_closure_that_fails_after_backward_is_told_to_the_others(
    ranks: Ranks, options: dict[str, Any]
) -> None:
    results = ranks.run(closure_fails_after_backward, 2, options)
    assert_told(results, "ZeroDivisionError", "division by zero")


def closure_fails_before_backward(passes: int) -> None:
    """On rank 1, in the step's first forward or in its second; the other goes on without it, as far as it comes."""
    model = sharded_beside_plain()
    with optimizer_over(model, "wavefront", accumulation_steps=2) as optimizer:

        def closure() -> None:
            for _ in range(passes):
                backward_of_both(model)
            raise ZeroDivisionError

        if dist.get_rank() == 1:
            with patch.object(agreement.Ranks, "_gather") as gather, pytest.raises(ZeroDivisionError):
                optimizer.step(closure)
            gather.assert_not_called()
        elif passes:
            backward_of_both(model)


@pytest.mark.parametrize("passes", [0, 1])
def test_a_closure_that_fails_before_backward_keeps_out_of_fsdps_collectives(
    ranks: Ranks, passes: int
) -> None:
    """The others are in forward or backward, where an exchange of ours would be taken for one of FSDP's."""
    ranks.run(closure_fails_before_backward, 2, passes)


def parameters_fail(how: str) -> tuple[str, str, float]:
    """On rank 1 a plain parameter is replaced, or is unfrozen as what cannot be trained."""
    model = sharded_beside_plain()
    plain = model["plain"]
    plain.bias.requires_grad_(how != "unfrozen")
    optimizer = optimizer_over(model, "wavefront", model=model, config={"timeout_s": 60.0})
    backward_of_both(model)
    optimizer.step()
    optimizer.zero_grad()
    backward_of_both(model)
    if how == "replaced" and dist.get_rank() == 1:
        plain.bias = nn.Parameter(plain.bias.detach().clone())
    if how == "unfrozen":
        if dist.get_rank() == 1:
            plain.bias.data = plain.bias.data.half()
        plain.bias.requires_grad_()
        plain.bias.grad = torch.zeros_like(plain.bias)
    return raised_by_step(optimizer)


@pytest.mark.parametrize(
    ("how", "name", "reason"),
    [
        ("replaced", "ParameterError", r"plain.bias was replaced in the model"),
        ("unfrozen", "UnsupportedDtypeError", "plain.bias is torch.float16"),
    ],
)
def test_parameters_that_fail_at_the_step_are_told_to_the_others(
    ranks: Ranks, how: str, name: str, reason: str
) -> None:
    assert_told(ranks.run(parameters_fail, 2, how), name, reason)


def built_one_after_the_other() -> tuple[str, str, float] | None:
    """Ranks 0 and 1 of three share a mesh; rank 1 builds its optimizer when rank 0 has one, then fails in its first step."""
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 2:
        return None
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    group = mesh.get_group()
    if dist.get_rank() == 1:
        dist.barrier(group)
    optimizer = optimizer_over(model, "wavefront", config={"timeout_s": 60.0})
    if dist.get_rank() == 0:
        dist.barrier(group)
    model(torch.randn(2, 8)).square().mean().backward()
    if dist.get_rank() == 1:
        optimizer._engine._worker.fail(ValueError("a reason of its own"))
    return raised_by_step(optimizer)


def test_building_an_optimizer_waits_for_nobody(ranks: Ranks) -> None:
    results = ranks.run(built_one_after_the_other, 3)
    assert_told(results[:2], "WorkerError", "a reason of its own")


def groups_made_for(shape: tuple[int, ...]) -> tuple[int, float] | None:
    """Ranks 0 and 1 of three have a mesh of their own: groups made beyond the mesh's for two steps, and the last norm."""
    names = ("replicate", "shard")[-len(shape) :]
    mesh = DeviceMesh("cpu", torch.arange(2).reshape(shape), mesh_dim_names=names)
    if dist.get_rank() == 2:
        return None
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    with (
        optimizer_over(model, "wavefront", config={"timeout_s": 60.0}) as optimizer,
        patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
    ):
        for step in range(2):
            model(torch.full((2, 8), 1.0 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return new_group.call_count, optimizer.last_step.grad_norm


def test_a_mesh_s_own_group_serves_where_there_is_one(ranks: Ranks) -> None:
    """Making one more is a wait, and with NCCL may need ranks that do not come."""
    one_d = ranks.run(groups_made_for, 3, (2,))
    two_d = ranks.run(groups_made_for, 3, (2, 1))
    assert [made for made, _ in one_d[:2]] == [0, 0]
    assert [made for made, _ in two_d[:2]] == [1, 1]
    assert one_d[0][1] == one_d[1][1] == pytest.approx(two_d[0][1])


def die_before_the_step(mode: str, where: str) -> str:
    model = sharded_decoder()
    optimizer = optimizer_over(model, mode, max_grad_norm=1.0, config={"timeout_s": DEADLINE_S})
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    if where == "step":
        backward(model)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rest = optimizer.step if where == "step" else lambda: backward(model)
    with pytest.raises(RuntimeError) as raised:  # torch's own, where FSDP is the first to miss the rank
        rest()
    optimizer.close()
    return type(raised.value).__name__


def test_a_killed_rank_ends_the_others(ranks: Ranks) -> None:
    assert ranks.run(die_before_the_step, 4, "wavefront", "step", may_die=[1]) == [
        "PeerError", None, "PeerError", "PeerError"
    ]  # fmt: skip
    results = ranks.run(die_before_the_step, 2, "wavefront", "backward", may_die=[1], timeout_s=DEADLINE_S)
    assert results[0] is not None


def missing_rank() -> float:
    """Rank 1 lives and works on, but does not come to ``step()``."""
    model = sharded_decoder()
    optimizer = optimizer_over(model, "wavefront", config={"timeout_s": DEADLINE_S})
    backward(model)
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(offload.PeerError, match=rf"did not reach step\(\) within {DEADLINE_S} s"):
            optimizer.step()
        with pytest.raises(offload.MidStepError):
            optimizer.state_dict()
    waited = time.monotonic() - start
    optimizer.close()
    return waited


def test_a_rank_that_does_not_come_is_missed_by_the_deadline(ranks: Ranks) -> None:
    waited = ranks.run(missing_rank, 2, timeout_s=100.0, deadline_s=60.0, may_die=[1])[0]
    assert DEADLINE_S <= waited < 3 * DEADLINE_S


def test_sums_are_added_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = agreement.Ranks(1.0)
    parts = [1e16, 1.0, -1e16, 1.0, 0.1]
    monkeypatch.setattr(ours, "_gather", lambda share: [agreement.Share(part) for part in parts])
    assert ours.combine(agreement.Share()).square_sum == sum(parts)
    assert ours.combine(agreement.Share()).square_sum != sum(sorted(parts))
