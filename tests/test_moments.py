"""Reduced moments through the optimizer: the same bits whatever the timing, the layout, clipping or a restart."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import ConfigError, OffloadConfig
from offload.errors import StateError
from offload.schedule.plan import Machine, Workload, needs_rates, plan
from tests.training import (
    adamw,
    assert_same_snapshot,
    batches,
    loss_of,
    make_decoder,
    random_delays,
    snapshot,
    train,
    two_groups,
    use_lanes,
)

KINDS = ["bf16", "int8"]
STATE_BYTES = {"bf16": 4 + 2 * 2, "int8": 4 + 2 * (1 + 4 / 1024)}
STEPS = 6
GIB = 2**30

Snapshot = dict[str, dict[str, Tensor]]


def build(moments: str, **options: Any) -> tuple[Any, offload.AdamW]:
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    config = {"moments": moments, **options.pop("config", {})}
    return model, adamw(model, masters=masters, config=config, **options)


def run(moments: str, *, steps: int = STEPS, micro_batches: int = 1, **options: Any) -> Snapshot:
    model, optimizer = build(moments, **options)
    with optimizer:
        train(model, optimizer, batches(steps), micro_batches=micro_batches)
        return snapshot(model, optimizer)


@pytest.fixture(scope="module")
def plain_run() -> Callable[[str], Snapshot]:
    """What six steps give; each kind is trained once."""
    done: dict[str, Snapshot] = {}

    def result(moments: str) -> Snapshot:
        if moments not in done:
            done[moments] = run(moments)
        return done[moments]

    return result


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize(
    ("tile_numel", "ring_slots", "threads"), [(1024, 2, 1), (1024, 8, 2), (4 << 20, 2, 2), (4096, 2, 1)]
)
def test_tiles_rings_threads_and_delays_change_no_bit(
    monkeypatch: pytest.MonkeyPatch,
    plain_run: Callable[[str], Snapshot],
    moments: str,
    tile_numel: int,
    ring_slots: int,
    threads: int,
) -> None:
    expected = plain_run(moments)
    use_lanes(monkeypatch, delay=random_delays(threads + ring_slots, most_s=1e-3))
    config = {"tile_numel": tile_numel, "ring_slots": ring_slots, "threads": threads}
    assert_same_snapshot(run(moments, config=config), expected)


@pytest.mark.parametrize("moments", KINDS)
def test_chunks_change_no_bit(plain_run: Callable[[str], Snapshot], moments: str) -> None:
    assert_same_snapshot(run(moments, config={"chunk_by": lambda name: None}), plain_run(moments))


@pytest.mark.parametrize("moments", KINDS)
def test_overlapping_the_forward_changes_no_bit(plain_run: Callable[[str], Snapshot], moments: str) -> None:
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    with adamw(
        two_groups(model),
        model=model,
        masters=masters,
        overlap_forward=True,
        config={"moments": moments},
    ) as optimizer:
        train(model, optimizer, batches(STEPS))
        optimizer.synchronize()
        assert_same_snapshot(snapshot(model, optimizer), plain_run(moments))


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize("clip", ["speculate", "defer"])
def test_waiting_for_a_verdict_changes_no_bit(
    plain_run: Callable[[str], Snapshot], moments: str, clip: str
) -> None:
    """Committed steps, whose state is written to a second set, and those that wait."""
    assert_same_snapshot(run(moments, clip=clip, max_grad_norm=1e9), plain_run(moments))


@pytest.mark.parametrize("moments", KINDS)
def test_rolled_back_steps_have_the_bits_of_deferred_ones(moments: str) -> None:
    speculated, deferred = (run(moments, clip=clip, max_grad_norm=0.1) for clip in ("speculate", "defer"))
    assert_same_snapshot(speculated, deferred)


@pytest.mark.parametrize("moments", KINDS)
def test_accumulation_changes_no_bit_by_layout(moments: str) -> None:
    one, other = (
        run(moments, micro_batches=2, accumulation_steps=2, config={"tile_numel": tile})
        for tile in (1024, 1 << 20)
    )
    assert_same_snapshot(one, other)


@pytest.mark.parametrize("moments", KINDS)
def test_reduced_moments_are_not_fp32s_and_close(plain_run: Callable[[str], Snapshot], moments: str) -> None:
    reduced, exact = plain_run(moments), run("fp32")
    for name, tensors in exact.items():
        for kind, bound in (("exp_avg", 0.2), ("exp_avg_sq", 0.3)):
            ours, theirs = reduced[name][kind], tensors[kind]
            assert ours.dtype == torch.float32
            if theirs.norm() > 0 and theirs.numel() > 1000:
                assert not torch.equal(ours, theirs)
                assert (ours - theirs).norm() < bound * theirs.norm(), (name, kind)


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize("clip", ["speculate", "defer"])
def test_a_skipped_step_leaves_every_bit(moments: str, clip: str) -> None:
    model, optimizer = build(moments, nonfinite="skip", clip=clip)
    with optimizer:
        train(model, optimizer, batches(2))
        before = snapshot(model, optimizer)
        loss_of(model, batches(1)[0]).mul(float("inf")).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_step is not None
        assert optimizer.last_step.skipped
        assert_same_snapshot(snapshot(model, optimizer), before)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("moments", KINDS)
def test_resumed_training_has_the_bits_of_an_uninterrupted_one(
    plain_run: Callable[[str], Snapshot], moments: str
) -> None:
    model, optimizer = build(moments)
    with optimizer:
        train(model, optimizer, batches(STEPS)[:3])
        saved = through_a_file(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
    resumed, optimizer = build(moments, lr=0.5, config={"tile_numel": 1024})
    with optimizer:
        train(resumed, optimizer, batches(1))  # of another run, to be forgotten
        resumed.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        for index, entry in optimizer.state_dict()["state"].items():
            for name, tensor in saved["state"][index].items():
                assert torch.equal(entry[name], tensor), name
        train(resumed, optimizer, batches(STEPS)[3:])
        assert_same_snapshot(snapshot(resumed, optimizer), plain_run(moments))


@pytest.mark.parametrize("moments", KINDS)
def test_state_dicts_are_torchs(moments: str) -> None:
    model = make_decoder()
    with adamw(model, config={"moments": moments}) as optimizer:
        train(model, optimizer, batches(2))
        saved = optimizer.state_dict()
        plain = torch.optim.AdamW(two_groups(model))
        plain.load_state_dict(saved)
        for parameter, state in plain.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert state[name].dtype == torch.float32
                assert torch.equal(state[name], optimizer.state[parameter][name])
        theirs = plain.state_dict()
        for entry in theirs["state"].values():
            entry["exp_avg"] = torch.full_like(entry["exp_avg"], 1.00390625)  # a tie: to even is 1.0
        optimizer.load_state_dict(theirs)
        for parameter in model.parameters():
            expected = 1.0 if moments == "bf16" else 1.00390625  # the largest of its block is exact
            assert bool((optimizer.state[parameter]["exp_avg"] == expected).all())


@pytest.mark.parametrize("moments", KINDS)
def test_state_of_frozen_parameters_waits_and_keeps_its_random_bits(moments: str) -> None:
    """A parameter that was frozen when the optimizer was built comes last among its records; its name is what counts."""
    model = make_decoder()
    with adamw(model, config={"moments": moments}) as optimizer:
        train(model, optimizer, batches(2))
        saved = optimizer.state_dict()
    ends = []
    for frozen in (False, True):
        other = make_decoder()
        other.load_state_dict(model.state_dict())
        first = other.embedding.weight
        first.requires_grad_(not frozen)
        with adamw(other, config={"moments": moments}) as optimizer:
            optimizer.load_state_dict(saved)
            first.requires_grad_(True)
            train(other, optimizer, batches(1))
            assert optimizer.state[first]["step"] == 3
            ends.append(snapshot(other, optimizer))
    assert_same_snapshot(*ends)


# What is seen ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", KINDS)
def test_moments_in_state_are_copies(moments: str) -> None:
    model, optimizer = build(moments)
    with optimizer:
        train(model, optimizer, batches(2))
        entry = optimizer.state[model.head.weight]
        seen = entry["exp_avg"]
        assert seen.shape == model.head.weight.shape
        assert seen.abs().sum() > 0
        kept = seen.clone()
        seen.zero_()
        assert torch.equal(entry["exp_avg"], kept)
        assert list(entry) == ["step", "master", "exp_avg", "exp_avg_sq"]
        for whole in (dict(entry), {**entry}, dict(entry.items()), copy.deepcopy(entry), copy.copy(entry)):
            assert type(whole) is dict
            assert torch.equal(whole["exp_avg"], kept)
            assert whole["exp_avg_sq"].shape == kept.shape
        assert torch.equal(entry.get("exp_avg"), kept)
        assert entry.get("nothing") is None
        assert any(torch.equal(value, kept) for value in entry.values() if value.shape == kept.shape)
        with pytest.raises(StateError, match=r"copies; use load_state_dict"):
            entry["exp_avg"] = kept


@pytest.mark.parametrize("moments", KINDS)
def test_the_plan_counts_what_is_mapped(moments: str) -> None:
    model = torch.nn.Linear(1024, 512, bias=False).bfloat16()
    numel = 1024 * 512
    with adamw(model.named_parameters(), config={"moments": moments, "ring_slots": 2}) as optimizer:
        gradients = 2 * numel  # of the observed step, not there yet
        state = optimizer.host_bytes - 2 * 2 * 2 * 4096
        assert state == pytest.approx(STATE_BYTES[moments] * numel, rel=0.01)
        assert optimizer.plan.host_bytes == pytest.approx(optimizer.host_bytes + gradients, rel=0.01)
        text = str(optimizer.plan)
        assert f"moments in {moments}" in text
        assert f"{STATE_BYTES[moments]:.2f} bytes per parameter instead of 12" in text


@pytest.mark.parametrize("moments", KINDS)
def test_auto_chooses_the_wavefront_even_where_state_would_fit_on_the_device(moments: str) -> None:
    workload = Workload(
        numel=GIB, state_arrays=3, ring_bytes=0, holds_gradients=False, gradient_bytes=2 * GIB, accumulates=False,
        moments=moments,
    )  # fmt: skip
    machine = Machine(device="cuda", free_device_bytes=100 * GIB, available_host_bytes=100 * GIB)
    made = plan("auto", workload, machine)
    assert made.mode == "wavefront"
    assert moments in made.reasons[0]
    assert made.host_bytes == pytest.approx((STATE_BYTES[moments] + 2) * GIB)
    assert not needs_rates("auto", workload, machine)


def test_auto_with_reduced_moments_runs() -> None:
    model = make_decoder(layers=1)
    with adamw(model, mode="auto", config={"moments": "bf16"}) as optimizer:
        assert optimizer.plan.mode == "wavefront"


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", KINDS)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"backend": "torch"}, r"backend='torch'"),
        *(
            ({"mode": mode}, f"mode='{mode}'")
            for mode in ("resident", "all-at-once", "chunked-sync", "chunked-stream", "hybrid")
        ),
    ],
)
def test_what_has_no_reduced_moments_is_refused(moments: str, options: dict[str, Any], named: str) -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=rf"moments='{moments}' with {named}: .*mode='auto'"):
        offload.AdamW(model.parameters(), config=OffloadConfig(moments=moments), **options)


@pytest.mark.parametrize("moments", KINDS)
def test_other_optimizers_are_refused(moments: str) -> None:
    model, config = torch.nn.Linear(4, 4), OffloadConfig(moments=moments)
    with pytest.raises(ConfigError, match=rf"moments='{moments}' with SignSGD"):
        offload.SignSGD(model.parameters(), config=config)
    with pytest.raises(ConfigError, match=rf"moments='{moments}' with CPUOffloadOptimizer"):
        offload.CPUOffloadOptimizer(torch.optim.AdamW(model.parameters()), config=config)


def test_unknown_moments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"moments='fp8'.*'fp32', 'bf16', 'int8'"):
        OffloadConfig(moments="fp8")
