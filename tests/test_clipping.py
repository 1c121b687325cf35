"""Clipping and skipping while updates run inside backward: speculate, commit, roll back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.config import CLIP_POLICIES
from offload.schedule.policy import WINDOW, Policy
from tests.test_semantics import Experts, interrupted_backward, summed, with_reference
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
    use_lanes,
)

FACTORS = (0.05, 0.05, 8.0, 0.05, 1.0)
"""Of the loss, step by step: norms on both sides of the limit."""


def clipped_steps(
    model: nn.Module,
    optimizer: offload.AdamW,
    recorder: Recorder,
    reference: Reference,
    *,
    number: int,
    micro_batches: int = 1,
) -> list[offload.StepReport]:
    """Train, and the reference along with it by the naive formula; reports."""
    reports = []
    limit = optimizer._engine.policy.max_grad_norm
    for index, ids in enumerate(batches(number)):
        for part in range(micro_batches):
            (loss_of(model, ids.roll(part, 1)) * FACTORS[index % len(FACTORS)]).backward()
        gradients = recorder.take()
        norm = sum(summed(parts).double().square().sum() for parts in gradients.values()).sqrt().item()
        ratio = torch.tensor(min(1.0, limit / (norm + 1e-6)), dtype=torch.float32).item()
        optimizer.step()
        report = optimizer.last_step
        assert report.grad_norm == pytest.approx(norm, rel=1e-6)
        assert report.clip_coefficient == pytest.approx(ratio, rel=1e-6)
        reference.step(gradients, hyper_by_name(optimizer, model), report.clip_coefficient)
        optimizer.zero_grad()
        reports.append(report)
    return reports


@pytest.mark.parametrize("clip", CLIP_POLICIES)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_every_policy_gives_the_bits_of_the_naive_reference(
    monkeypatch: pytest.MonkeyPatch, clip: str, micro_batches: int
) -> None:
    """Under delays, with gradients kept in pinned memory (one micro-batch) and without (four)."""
    use_lanes(monkeypatch, delay=random_delays(3))
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    options: dict[str, Any] = {"max_grad_norm": 1.05 * micro_batches, "accumulation_steps": micro_batches}
    config = {} if micro_batches == 1 else {"pinned_budget": 0}
    with adamw(model, masters=masters, clip=clip, config=config, **options) as optimizer:
        reports = clipped_steps(model, optimizer, recorder, reference, number=30, micro_batches=micro_batches)
        assert_matches_reference(model, optimizer, reference)
    assert {report.clipped for report in reports} == {True, False}
    later = reports[1:]  # the first is observed
    assert any(report.speculated for report in later) == (clip != "defer")
    for report in later:
        assert report.rolled_back == (report.speculated and report.clipped)
        assert (report.early_tiles > 0) == (report.speculated and not report.clipped)


def test_a_commit_exchanges_the_tensors_that_state_names() -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, clip="speculate", max_grad_norm=1e9) as optimizer:
        addresses = []
        for ids in batches(4):
            train(model, optimizer, [ids], recorder=recorder, reference=reference)
            addresses.append(optimizer.state[model.head.weight]["exp_avg"].data_ptr())
            assert_matches_reference(model, optimizer, reference)  # reads optimizer.state
        assert len(set(addresses)) == 2
        saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        train(model, optimizer, batches(3))
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        assert_matches_reference(model, optimizer, reference)


@pytest.mark.parametrize("shadowed", [0.0, 0.5])
def test_chunks_without_memory_for_a_shadow_wait(shadowed: float) -> None:
    def end(**options: Any) -> tuple[Any, list[offload.StepReport], offload.Plan]:
        model = make_decoder(layers=4)
        masters, recorder, reference = with_reference(model)
        with adamw(model, masters=masters, clip="speculate", max_grad_norm=1.05, **options) as optimizer:
            reports = clipped_steps(model, optimizer, recorder, reference, number=10)
            assert_matches_reference(model, optimizer, reference)
            return snapshot(model, optimizer), reports, optimizer.plan

    expected, _, full = end()
    assert full.shadow_bytes > 0
    assert "second set of state" in str(full)
    budget = full.host_bytes - full.shadow_bytes + int(shadowed * full.shadow_bytes)
    actual, reports, plan = end(config={"host_budget": budget})
    assert plan.shadow_bytes == budget - (full.host_bytes - full.shadow_bytes)
    assert_same_snapshot(actual, expected)
    committed = [report for report in reports[1:] if not report.clipped]
    assert committed
    for report in committed:
        assert report.speculated == (shadowed > 0)
        assert (report.early_tiles > 0) == (shadowed > 0)
        assert report.late_tiles > 0


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_f20_a_speculative_step_is_rolled_back_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, value: float, delays: bool
) -> None:
    """The value arrives in the very last tile; all others were updated by then, and their weights sent."""
    if delays:
        use_lanes(monkeypatch, delay=random_delays(5))
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, clip="speculate", nonfinite="skip") as optimizer:
        train(model, optimizer, batches(3), recorder=recorder, reference=reference)
        before = snapshot(model, optimizer)
        handle = model.embedding.weight.register_hook(lambda gradient: spoiled(gradient, value))
        loss_of(model, batches(1)[0]).backward()
        handle.remove()
        optimizer.synchronize()
        assert not torch.equal(model.head.weight, before["head.weight"]["weight"])
        optimizer.step()
        recorder.take()
        report = optimizer.last_step
        assert (report.skipped, report.speculated, report.rolled_back) == (True, True, True)
        assert_same_snapshot(snapshot(model, optimizer), before)
        assert all(record.num_steps == 3 for record in optimizer._engine.records.values())
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)
        assert optimizer.last_step.early_tiles > 0


def spoiled(gradient: torch.Tensor, value: float) -> torch.Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[-1] = value
    return gradient


def test_raising_rolls_back_first() -> None:
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, clip="speculate", nonfinite="raise") as optimizer:
        train(model, optimizer, batches(3), recorder=recorder, reference=reference)
        before = snapshot(model, optimizer)
        handle = model.embedding.weight.register_hook(lambda gradient: spoiled(gradient, float("inf")))
        loss_of(model, batches(1)[0]).backward()
        handle.remove()
        with pytest.raises(offload.NonFiniteGradientError, match="embedding"):
            optimizer.step()
        recorder.take()
        assert_same_snapshot(snapshot(model, optimizer), before)
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


@pytest.mark.parametrize("how", ["dropped", "interrupted"])
def test_f46_a_speculative_backward_can_be_dropped(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Also right after it, while its updates are still under way."""
    use_lanes(monkeypatch, delay=random_delays(7))
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    with adamw(model, masters=masters, clip="speculate", max_grad_norm=1e9) as optimizer:
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        before = snapshot(model, optimizer)
        for ids in batches(3):
            if how == "dropped":
                loss_of(model, ids).backward()
            else:
                interrupted_backward(model, ids)
                with pytest.raises(offload.MidStepError, match=r"zero_grad\(\)"):
                    optimizer.step()
            with pytest.raises(offload.MidStepError):
                optimizer.state_dict()
            optimizer.zero_grad()
            assert_same_snapshot(snapshot(model, optimizer), before)
        recorder.take()
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


def test_the_rest_of_a_committed_chunk_is_carried_over() -> None:
    """All experts in one chunk of many tiles; one of them is left out now and then."""
    model = Experts()
    masters, recorder, reference = with_reference(model)
    options: dict[str, Any] = {"clip": "speculate", "max_grad_norm": 1e9, "lr": 1e-2}
    config = {"tile_numel": 1024, "chunk_by": lambda name: "experts"}
    partly = 0
    with adamw(model.named_parameters(), masters=masters, config=config, **options) as optimizer:
        generator = torch.Generator().manual_seed(1)
        for step in range(9):
            model.used = (0, 1) if step in (3, 7) else (0, 1, 2)
            model.loss(torch.randn(4, 24, generator=generator).bfloat16()).backward()
            reference.step(recorder.take(), hyper_by_name(optimizer, model))
            optimizer.step()
            partly += step in (3, 7) and optimizer.last_step.early_tiles > 0
            assert_matches_reference(model, optimizer, reference)
    assert partly


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_the_rest_of_a_committed_chunk_is_carried_over_with_reduced_moments(moments: str) -> None:
    """As above; a run that waits for each verdict, and so carries nothing, is the reference."""
    ends, partly = [], 0
    for clip in ("speculate", "defer"):
        model = Experts()
        masters = offload.cast_compute_weights(model)
        options: dict[str, Any] = {"clip": clip, "max_grad_norm": 1e9, "lr": 1e-2}
        config = {"tile_numel": 1024, "chunk_by": lambda name: "experts", "moments": moments}
        with adamw(model.named_parameters(), masters=masters, config=config, **options) as optimizer:
            generator = torch.Generator().manual_seed(1)
            for step in range(9):
                model.used = (0, 1) if step in (3, 7) else (0, 1, 2)
                model.loss(torch.randn(4, 24, generator=generator).bfloat16()).backward()
                optimizer.step()
                partly += step in (3, 7) and optimizer.last_step.early_tiles > 0
                optimizer.zero_grad()
            ends.append(snapshot(model, optimizer))
    assert partly
    assert_same_snapshot(*ends)


@pytest.mark.parametrize("pinned_budget", [None, 0])
@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_gradients_assigned_after_a_backward_are_added(clip: str, pinned_budget: int | None) -> None:
    """What has left is held, straight or through the ring, or was stepped speculatively; one more is added to it."""
    model = make_decoder()
    masters, recorder, reference = with_reference(model)
    config = {"pinned_budget": pinned_budget}
    with adamw(model, masters=masters, clip=clip, max_grad_norm=1e9, config=config) as optimizer:
        train(model, optimizer, batches(2), recorder=recorder, reference=reference)
        for ids in batches(2):
            loss_of(model, ids).backward()
            more = torch.ones_like(model.head.weight)
            model.head.weight.grad = more
            gradients = recorder.take()
            gradients["head.weight"].append(more.clone())
            optimizer.step()
            reference.step(gradients, hyper_by_name(optimizer, model))
        assert_matches_reference(model, optimizer, reference)


def test_auto_speculates_while_clips_are_rare() -> None:
    policy = Policy(
        mode="wavefront",
        early=True,
        accumulation_steps=1,
        max_grad_norm=1.0,
        nonfinite="propagate",
        clip="auto",
    )

    def step(*, roll_back: bool) -> bool:
        policy.begin_step()
        assert policy.early == policy.speculative
        policy.note(roll_back=roll_back)
        return policy.speculative

    assert step(roll_back=False)
    assert [step(roll_back=True) for _ in range(WINDOW)] == [True] * 2 + [False] * (WINDOW - 2)
    assert not step(roll_back=False)
    assert [step(roll_back=False) for _ in range(WINDOW)][-1]


@pytest.mark.parametrize(("clip", "speculates"), [("speculate", True), ("defer", False)])
def test_named_policies_do_not_change(clip: str, speculates: bool) -> None:
    policy = Policy(
        mode="wavefront",
        early=True,
        accumulation_steps=1,
        max_grad_norm=1.0,
        nonfinite="propagate",
        clip=clip,
    )
    for roll_back in [True] * 20 + [False] * 20:
        policy.begin_step()
        assert policy.speculative == speculates
        policy.note(roll_back=roll_back)


class Pieces(nn.Module):
    """`second` lies in two tiles of 4096, of which the other one is never complete where `third` is left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, numel in (("first", 100), ("second", 5000), ("third", 2000)):
            setattr(self, name, nn.Parameter(torch.randn(numel).bfloat16()))

    def loss(self, factor: float, *, whole: bool = True) -> torch.Tensor:
        used = list(self.parameters())[: None if whole else 2]
        return sum((factor * weight.float().square().sum() for weight in used), torch.zeros(()))


def test_a_gradient_that_waits_for_its_tile_is_taken_once_when_a_step_is_rolled_back() -> None:
    """An assigned gradient rolls back before gradients of incomplete tiles are held."""

    def end(clip: str) -> tuple[Any, float, bool]:
        model = Pieces()
        with adamw(model.named_parameters(), clip=clip, max_grad_norm=1e9) as optimizer:
            for factor in (0.01, 0.02, 0.03):
                model.loss(factor).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.loss(0.07, whole=False).backward()
            model.first.grad = torch.ones_like(model.first)
            optimizer.step()
            report = optimizer.last_step
            return snapshot(model, optimizer), report.grad_norm, report.rolled_back

    expected, norm, _ = end("defer")
    actual, also, rolled_back = end("speculate")
    assert rolled_back
    assert also == norm
    assert_same_snapshot(actual, expected)


def test_gradients_are_clipped_where_no_tile_was_stepped_early() -> None:
    """Parameters that come later have no shadow: theirs wait, and nothing else is regular."""

    def end(clip: str) -> tuple[Any, offload.StepReport]:
        model = Pieces()
        with adamw(model.named_parameters(), clip=clip, max_grad_norm=0.5) as optimizer:
            model.loss(0.01).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.late = nn.Parameter(torch.ones(3000).bfloat16())
            optimizer.add_param_group({"params": [("late", model.late)]})
            for _ in range(2):  # the second time it is regular, and the others are not
                model.late.float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return snapshot(model, optimizer), optimizer.last_step

    expected, _ = end("defer")
    actual, report = end("speculate")
    assert report.speculated
    assert report.clipped
    assert report.early_tiles == 0
    assert_same_snapshot(actual, expected)


def test_a_commit_leaves_out_parameters_whose_group_was_removed() -> None:
    """They share a chunk with others, whose state is exchanged."""
    model = Pieces()
    groups = [{"params": [(name, parameter)]} for name, parameter in model.named_parameters()]
    with adamw(groups, clip="speculate", max_grad_norm=1e9, config={"tile_numel": 1024}) as optimizer:
        for whole in (True, True, False, False, True):
            group = optimizer.param_groups.pop() if not whole else None
            model.loss(0.01, whole=whole).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert (model.third in optimizer.state) == whole
            if group is not None:
                optimizer.param_groups.append(group)
        assert optimizer.state[model.third]["step"] == 3
        assert_weight_is_rounded_master(optimizer, model.third, "third")


def test_closing_drops_a_speculative_step() -> None:
    """Nothing of it was final."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, clip="speculate", max_grad_norm=1e9) as optimizer:
        train(model, optimizer, batches(2))
        before = copy.deepcopy(model.state_dict())
        loss_of(model, batches(1)[0]).backward()
        assert optimizer._engine._early.applied
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_state_entries_are_copied_and_pickled_as_plain_clones() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        train(model, optimizer, batches(2))
        entry = optimizer.state[model.head.weight]
        for made in (copy.deepcopy(entry), pickle.loads(pickle.dumps(entry))):
            assert type(made) is dict
            assert made.keys() == entry.keys()
            for name, tensor in made.items():
                assert torch.equal(tensor, entry[name])
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
                assert tensor.data_ptr() != entry[name].data_ptr()
        assert copy.copy(entry)["exp_avg"] is entry["exp_avg"]
