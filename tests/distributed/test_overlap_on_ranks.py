"""``overlap_forward`` among ranks: one exchange per step, norms one step later, and failures that reach all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import offload
from offload import assembly
from offload.schedule.flight import Mark
from offload.schedule.hybrid_stepper import HybridStepper
from offload.transfer.host import LaneTransport
from tests.distributed.ranks import Ranks
from tests.distributed.test_verdicts import assert_told, backward, counted_collectives, raised_by_step
from tests.distributed.training import assert_equal, local_bits, optimizer_over, sharded_decoder, state_bits
from tests.training import batches, loss_of

CLIPPED = {"max_grad_norm": 0.5}


def overlapped(model: nn.Module, **options: Any) -> offload.AdamW:
    return optimizer_over(model, "wavefront", **{"overlap_forward": True, **options})


def is_under_way(optimizer: offload.AdamW) -> bool:
    return optimizer._engine.flight is not None


def steps_and_norms(*, switch_off: bool = False, **options: Any) -> tuple[dict[int, float], dict[str, Any]]:
    """Norms by step, and the end; `switch_off`: rank 1 alone waits for its updates from the third step on."""
    model, norms = sharded_decoder(), {}
    with overlapped(model, **options) as optimizer:
        for step in range(5):
            if step == 2 and switch_off and dist.get_rank() == 1:
                optimizer._engine.stop_departing()
            backward(model, step)
            with counted_collectives() as collectives:
                optimizer.step()
                report = optimizer.last_step
            assert len(collectives) == 1
            norms[report.step] = report.grad_norm
            optimizer.zero_grad()
        return norms, state_bits(model, optimizer)


def norms_come_a_step_later() -> None:
    expected, end = steps_and_norms(overlap_forward=False)
    assert list(expected) == [1, 2, 3, 4, 5]
    for switch_off in (False, True):
        norms, state = steps_and_norms(switch_off=switch_off)
        assert list(norms) == [1, 2, 3, 4]
        assert norms.items() <= expected.items()
        assert_equal(state, end)


def test_f19_norms_come_a_step_later_and_one_exchange_is_enough(ranks: Ranks) -> None:
    ranks.run(norms_come_a_step_later, 2)


def steps_return_early(options: dict[str, Any]) -> list[bool]:
    """Whether each of some steps, whose reports nobody asks for, was under way when it had returned."""
    model, found = sharded_decoder(), []
    with overlapped(model, **options) as optimizer:
        for step in range(4):
            backward(model, step)
            optimizer.step()
            found.append(is_under_way(optimizer))
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("options", [{}, CLIPPED])
def test_steps_return_while_they_are_under_way(ranks: Ranks, options: dict[str, Any]) -> None:
    first = bool(options)  # else its norm is agreed in it
    assert ranks.run(steps_return_early, 2, options) == [[first, True, True, True]] * 2


def gradients_here_and_there() -> list[tuple[int, float]]:
    """Steps in which nobody, rank 0 alone, nobody, and rank 1 alone has a gradient; then what was reported."""
    model = fully_shard(nn.Linear(8, 8))
    seen = []
    with overlapped(model) as optimizer:
        for owner, value in ((None, 0.0), (0, 3.0), (None, 0.0), (1, 2.0), (0, 1.0)):
            if owner == dist.get_rank():
                gradient = torch.full_like(model.weight.to_local(), value)
                model.weight.grad = DTensor(gradient, model.weight._spec, requires_grad=False)
            if owner is None:
                with pytest.raises(offload.NoGradientError):
                    optimizer.step()
            else:
                optimizer.step()
                report = optimizer.last_step
                seen.append((report.step, report.grad_norm))
            optimizer.zero_grad()
    return seen


def test_f21_a_rank_without_a_gradient_hangs_nobody(ranks: Ranks) -> None:
    norms = [(4 * 8 * value * value) ** 0.5 for value in (3.0, 2.0)]
    assert ranks.run(gradients_here_and_there, 2) == [[(1, norms[0]), (1, norms[0]), (2, norms[1])]] * 2


def unreduced_gradients() -> None:
    """Nobody reduces the gradients of a plain parameter, from the second step on."""
    model = nn.ModuleDict({"sharded": fully_shard(nn.Linear(8, 8)), "plain": nn.Linear(8, 8, bias=False)})
    for parameter in model["plain"].parameters():
        dist.broadcast(parameter.data, 0)
    with overlapped(model) as optimizer:
        saved = optimizer.state_dict()
        for step in range(5):
            torch.manual_seed(dist.get_rank() if step in (1, 2) else 0)
            model["plain"](model["sharded"](torch.randn(2, 8))).square().mean().backward()
            if step != 2:
                optimizer.step()
                optimizer.zero_grad()
                continue
            with pytest.raises(offload.GradientError, match=r"differ between ranks.*rank_local"):
                optimizer.step()
            for parameter in model["plain"].parameters():
                dist.broadcast(parameter.data, 0)
            optimizer.load_state_dict(saved)  # and on with gradients that agree


def test_unreduced_gradients_are_noticed_a_step_later(ranks: Ranks) -> None:
    ranks.run(unreduced_gradients, 2)


# Failures


def worker_fails_under_way(
    options: dict[str, Any], *, checkpointing: bool | None = None
) -> tuple[str, str, float]:
    """A kernel of rank 1 fails when ``step()`` has returned: the next forward and backward go on, on all ranks."""
    logging.getLogger("offload").setLevel(logging.CRITICAL)
    made: list[LaneTransport] = []

    def make_lanes(device: torch.device, config: offload.OffloadConfig) -> LaneTransport:
        made.append(LaneTransport(device))
        return made[-1]

    def fail(*arguments: Any) -> None:
        raise ValueError("a reason of its own")

    model = sharded_decoder(sizes={"checkpointing": checkpointing})
    config = {"timeout_s": 60.0, "ring_slots": 2, "backlog_tiles": 512}
    with patch.object(assembly, "make_transport", make_lanes):
        optimizer = overlapped(model, config=config, **options)
    for step in range(3):
        loss = loss_of(model, batches(step + 1)[step].roll(dist.get_rank(), 1))
        optimizer.synchronize()
        if step == 2:
            made[0].hold("to_device")  # from the third tile on all wait for a slot
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert is_under_way(optimizer)
    worker = optimizer._engine._worker
    if dist.get_rank() == 1:
        optimizer._engine._stepper._host.backend.update = fail
    made[0].release("to_device")
    if dist.get_rank() == 1:
        worker._outcome.wait_failed(30.0)
        with torch.no_grad(), pytest.raises(offload.WorkerError, match="of its own"):
            model(batches(1)[0])  # nobody is told of this one
    backward(model, 3)
    return raised_by_step(optimizer)


FAILING = [({}, None), ({**CLIPPED, "clip": "defer"}, None), ({}, True)]


@pytest.mark.parametrize(("options", "checkpointing"), FAILING)
def test_a_worker_that_fails_under_way_is_told_to_the_others(
    ranks: Ranks, options: dict[str, Any], checkpointing: bool | None
) -> None:
    results = ranks.run(worker_fails_under_way, 3, options, checkpointing=checkpointing)
    assert_told(results, "WorkerError", "a reason of its own")


def weights_come_too_late(where: str) -> tuple[str, str, float]:
    """On rank 1 a wait for new weights ends at its deadline, and the update ends after that."""
    logging.getLogger("offload").setLevel(logging.CRITICAL)

    def late(*arguments: Any, **options: Any) -> None:
        raise offload.DeadlineError("too late")

    model = sharded_decoder()
    optimizer = overlapped(model, config={"timeout_s": 60.0})
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    patched = (
        patch.object(Mark, "wait", late)
        if where == "forward"
        else patch.object(HybridStepper, "settle", late)
    )
    failing = patched if dist.get_rank() == 1 else nullcontext()
    if where == "forward":
        with failing:
            loss = loss_of(model, batches(4)[3])
        loss.backward()
    else:
        loss = loss_of(model, batches(4)[3])
        with failing:
            loss.backward()
    return raised_by_step(optimizer)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_weights_that_come_too_late_are_in_no_step(ranks: Ranks, where: str) -> None:
    """The forward that went on without them had old ones, and gradients that were not taken are lost."""
    assert_told(ranks.run(weights_come_too_late, 2, where), "DeadlineError", "too late")


class Skipping(nn.Module):
    """Two sharded layers around a plain one, which a rank may leave out: no other has a part of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for index in (0, 2):
            fully_shard(self.layers[index])

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if not (skips and index == 1):
                x = layer(x)
        return x


def train_with_a_plain_layer(
    model: nn.Module, step: int, *, skips: bool, between: Callable[[], None] = lambda: None
) -> None:
    """`between`: called after forward."""
    torch.manual_seed(step)
    loss = model(torch.randn(2, 8), skips).square().mean()
    between()
    loss.backward()


LOCAL = {"config": {"timeout_s": 60.0, "rank_local": "layers.1"}}


def trained_with_a_plain_layer(parts: int = 1, **options: Any) -> tuple[nn.Module, offload.AdamW]:
    """Three steps of it; the last is under way with ``overlap_forward``."""
    logging.getLogger("offload").setLevel(logging.CRITICAL)
    model = Skipping()
    optimizer = overlapped(model, accumulation_steps=parts, **LOCAL, **options)
    for step in range(3):
        for _ in range(parts):
            train_with_a_plain_layer(model, step, skips=False)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def layer_left_out_on_one_rank(options: dict[str, Any], parts: int, between: str) -> tuple[str, str, float]:
    model, optimizer = trained_with_a_plain_layer(parts, **options)
    assert is_under_way(optimizer)
    is_mine = dist.get_rank() == 1
    for part in range(parts):
        rest = getattr(optimizer, between) if part == 0 else lambda: None
        train_with_a_plain_layer(model, 3, skips=is_mine and part == 0, between=rest)
    assert not (is_mine and optimizer._engine._ledger.touched)
    return raised_by_step(optimizer)


@pytest.mark.parametrize(
    ("options", "parts", "between"),
    [({}, 1, "zero_grad"), ({}, 2, "synchronize"), (CLIPPED, 1, "synchronize")],
)
def test_a_layer_that_one_rank_leaves_out_is_told_to_the_others(
    ranks: Ranks, options: dict[str, Any], parts: int, between: str
) -> None:
    """Also where gradients are cleared between forward and backward."""
    results = ranks.run(layer_left_out_on_one_rank, 2, options, parts, between)
    assert_told(results, "StateError", "did not call the modules of layers.1")


def layer_left_out_while_the_update_is_late() -> tuple[str, str, float]:
    """On rank 1 the forward that left it out waits for the update, in vain."""

    def late(*arguments: Any) -> None:
        raise offload.DeadlineError("too late")

    model, optimizer = trained_with_a_plain_layer()
    is_mine = dist.get_rank() == 1
    with patch.object(HybridStepper, "settle", late) if is_mine else nullcontext():
        loss = model(torch.ones(2, 8), is_mine).square().mean()
    loss.backward()
    return raised_by_step(optimizer)


def test_a_layer_that_is_left_out_while_the_update_is_late_is_told_to_the_others(ranks: Ranks) -> None:
    assert_told(ranks.run(layer_left_out_while_the_update_is_late, 2), "DeadlineError", "too late")


def layer_left_out_on_all_ranks() -> None:
    """All say so and nothing was changed: the same batch again, and on to the end of a run without overlap."""
    ends = []
    for overlap in (False, True):
        model, optimizer = trained_with_a_plain_layer(overlap_forward=overlap)
        if not overlap:
            before = local_bits(model, optimizer)
        else:
            train_with_a_plain_layer(model, 3, skips=True)
            with pytest.raises(offload.StateError, match="run forward and backward again"):
                optimizer.step()
            optimizer.zero_grad()
            assert_equal(local_bits(model, optimizer), before)
        for step in (3, 4):
            train_with_a_plain_layer(model, step, skips=step == 3)
            optimizer.step()
            optimizer.zero_grad()
            assert not is_under_way(optimizer)
        ends.append(local_bits(model, optimizer))
        optimizer.close()
    assert_equal(*ends)


def test_a_layer_that_all_ranks_leave_out_changes_nothing(ranks: Ranks) -> None:
    ranks.run(layer_left_out_on_all_ranks, 2)


class ReadingPast(Skipping):
    """The plain layer is not left out: its weights are read past the module."""

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = nn.functional.linear(x, layer.weight, layer.bias) if skips and index == 1 else layer(x)
        return x


def train_reducing_by_hand(model: nn.Module, step: int, *, skips: bool = False) -> None:
    """So that gradients of the plain layer stay in ``param.grad`` until ``step()``."""
    train_with_a_plain_layer(model, step, skips=skips)
    for parameter in model.layers[1].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


def refused_gradients_that_stay(ends_with: str) -> None:
    """Nobody clears them between the refused step and the next one, or state is loaded in place of that step."""
    logging.getLogger("offload").setLevel(logging.CRITICAL)
    ends = []
    for is_refused in (False, True):
        model = ReadingPast()
        optimizer = overlapped(model, config={"timeout_s": 60.0})
        saved = optimizer.state_dict()
        for step in range(3):
            train_reducing_by_hand(model, step)
            optimizer.step()
            optimizer.zero_grad()
        assert is_under_way(optimizer)
        if is_refused:
            train_reducing_by_hand(model, 3, skips=True)
        if ends_with == "load_state_dict":
            optimizer.load_state_dict(saved)
        elif is_refused:
            with pytest.raises(offload.StateError, match="gradients are dropped"):
                optimizer.step()
        train_reducing_by_hand(model, 3)
        optimizer.step()
        optimizer.synchronize()
        ends.append(local_bits(model, optimizer))
        optimizer.close()
    assert_equal(*ends)


@pytest.mark.parametrize("ends_with", ["step", "load_state_dict"])
def test_refused_gradients_that_stay_in_grad_are_in_no_later_step(ranks: Ranks, ends_with: str) -> None:
    ranks.run(refused_gradients_that_stay, 2, ends_with)


def layer_left_out_in_evaluation() -> None:
    """On rank 1 alone, which raises at once and trains on without overlap."""
    ends = []
    for skips in (False, dist.get_rank() == 1):
        model, optimizer = trained_with_a_plain_layer()
        with (
            torch.no_grad(),
            pytest.raises(offload.StateError, match="drop its result") if skips else nullcontext(),
        ):
            model(torch.ones(2, 8), skips)
        for step in (3, 4):
            train_with_a_plain_layer(model, step, skips=False)
            optimizer.step()
            optimizer.zero_grad()
            assert is_under_way(optimizer) is not skips
        optimizer.synchronize()
        ends.append(local_bits(model, optimizer))
        optimizer.close()
    assert_equal(*ends)


def test_a_layer_that_is_left_out_in_evaluation_is_a_matter_of_that_rank(ranks: Ranks) -> None:
    ranks.run(layer_left_out_in_evaluation, 2)


def worker_fails_between_micro_batches(overlap: bool) -> tuple[str, str, float]:
    """On rank 1, in the first backward pass of a step: the next forward goes on."""
    logging.getLogger("offload").setLevel(logging.CRITICAL)
    model = sharded_decoder()
    optimizer = optimizer_over(
        model,
        "wavefront",
        model=model,
        overlap_forward=overlap,
        accumulation_steps=2,
        config={"timeout_s": 60.0},
    )
    for step in range(2):
        for part in range(2):
            if (step, part) == (1, 1) and dist.get_rank() == 1:
                optimizer._engine._worker.fail(ValueError("a reason of its own"))
            backward(model, step)
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    return raised_by_step(optimizer)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_that_fails_between_micro_batches_is_told_to_the_others(ranks: Ranks, overlap: bool) -> None:
    results = ranks.run(worker_fails_between_micro_batches, 2, overlap)
    assert_told(results, "WorkerError", "a reason of its own")
