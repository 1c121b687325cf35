"""A chunk that host and link divide, tile by tile: the bits of one that is whole, whatever each side is late by.

The embedding of these models is tied to the head: one parameter of sixteen tiles whose gradient is complete last.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import assembly
from offload.errors import MidStepError, NonFiniteGradientError, WorkerError
from offload.schedule import plan as planner
from offload.schedule.balancer import WORTH_S
from offload.schedule.conveyor import Conveyor
from offload.schedule.division import Divisions
from offload.schedule.flight import Flight
from offload.schedule.host_jobs import StepTile
from offload.schedule.hybrid_stepper import HybridStepper
from offload.schedule.mode_costs import Placement
from offload.transfer.host import LaneTransport
from offload.transfer.pinned import pinned_bytes
from tests import test_hybrid
from tests.training import (
    Recorder,
    Reference,
    adamw,
    assert_matches_reference,
    assert_same_snapshot,
    assert_weight_is_rounded_master,
    batches,
    loss_of,
    make_decoder,
    random_delays,
    snapshot,
    train,
    use_lanes,
)

TILE, TILES = 1024, 16
SIDES = ["host", "stream"]
Snapshot = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(autouse=True, scope="module")
def leave_nothing_to_the_garbage_collector() -> Iterator[None]:
    """Tracebacks of failures keep optimizers alive; other modules count mapped memory."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "HYBRID_CHUNK_NUMEL", 8192)
    monkeypatch.setattr(assembly, "DIVIDED_NUMEL", 8192)


def make_model() -> Any:
    return make_decoder(vocabulary=397, tied=True)


def divided(model: Any, /, *, share: float | None = 0.5, **options: Any) -> offload.AdamW:
    config = {
        "stream_share": share,
        "device_budget": 0,
        "tile_numel": TILE,
        **options.pop("config", {}),
    }
    return adamw(model, **{"mode": "hybrid", **options}, config=config)


def chunk_of(optimizer: offload.AdamW) -> int:
    [index] = optimizer.plan.divisions
    return index


def run(steps: int, *, mode: str = "hybrid", **options: Any) -> Snapshot:
    """Train beside the reference, compare every bit, and return the end."""
    model = make_model()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    recorder = Recorder(model)
    reference = Reference({name: masters.get(name, p.detach()) for name, p in model.named_parameters()})
    parts = options.get("accumulation_steps", 1)
    with divided(model, masters=masters, mode=mode, **options) as optimizer:
        train(model, optimizer, batches(steps), recorder=recorder, reference=reference, micro_batches=parts)
        assert_matches_reference(model, optimizer, reference)
        return snapshot(model, optimizer)


class Watched:
    """Tiles of the divided chunk (the first of the model's parameters) by who stepped them, in all steps so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host: list[int] = []
        self.stream: list[int] = []
        compute, work = StepTile.compute, Conveyor._work

        def on_host(job: StepTile) -> None:
            if job._plan.pieces[0].param == 0:
                self.host.append(job._plan.tile.index)
            compute(job)

        def on_device(conveyor: Conveyor, trip: Any, inside: Any) -> None:
            if trip.tile.tile.pieces[0].param == 0:
                self.stream.append(trip.tile.tile.index)
            work(conveyor, trip, inside)

        monkeypatch.setattr(StepTile, "compute", on_host)
        monkeypatch.setattr(Conveyor, "_work", on_device)

    def take(self) -> tuple[list[int], list[int]]:
        found = sorted(self.host), sorted(self.stream)
        self.host.clear()
        self.stream.clear()
        return found


WHOLE: tuple[list[int], list[int]] = (list(range(TILES)), [])
HALVES = (list(range(8)), list(range(8, TILES)))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans divide the chunk although all steps will treat it as whole."""
    original = planner.divide

    def divide(workload: Any, room: int, share: float) -> Any:
        return original(replace(workload, accumulates=False, holds_gradients=False), room, share)

    monkeypatch.setattr(planner, "divide", divide)


# Bits


@pytest.mark.parametrize(("share", "on_host"), [(0.25, 12), (0.5, 8), (0.75, 4)])
def test_both_sides_step_their_tiles_and_no_bit_changes(
    monkeypatch: pytest.MonkeyPatch, share: float, on_host: int
) -> None:
    """The first step is observed, and the host's alone."""
    seen = Watched(monkeypatch)
    use_lanes(monkeypatch, delay=random_delays(1))
    run(1, share=share)
    assert seen.take() == WHOLE
    run(7, share=share)
    host, stream = seen.take()
    assert host == sorted([*range(TILES), *(tile for tile in range(on_host) for _ in range(6))])
    assert stream == sorted(tile for tile in range(on_host, TILES) for _ in range(6))


def test_the_plan_says_that_it_is_divided_and_how() -> None:
    model = make_model()
    offload.cast_compute_weights(model)
    with divided(model) as optimizer:
        for _ in range(2):
            chunk = optimizer.plan.chunks[chunk_of(optimizer)]
            assert (chunk.name, chunk.placement, chunk.host_numel) == ("misc.0", Placement.STREAM, 8 * TILE)
            words = str(optimizer.plan)
            assert "misc.0 comes last and is divided: the host steps 8 of its 16 tiles" in words
            assert "1 chunk: state on the host, stepped there and in buffers, each its own tiles" in words
            train(model, optimizer, batches(2))
        assert optimizer.last_step.early_tiles > 0
        assert optimizer.last_step.late_tiles == 0
        movable = optimizer.plan.placements.count(Placement.STREAM) - 1
        assert optimizer.plan.num_streamed == movable


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_what_one_side_does_alone_is_not_divided(share: float) -> None:
    model = make_model()
    offload.cast_compute_weights(model)
    with divided(model, share=share) as optimizer:
        assert optimizer.plan.divisions == {}
    run(4, share=share)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("lane", ["to_host", "to_device"])
def test_a_side_that_is_late_changes_no_bit(monkeypatch: pytest.MonkeyPatch, side: str, lane: str) -> None:
    made = lanes_of_sides(monkeypatch, side, delay=lambda name, index: 2e-3 * (name == lane))
    run(4, config={"ring_slots": 2, "backlog_tiles": 1})
    assert len(made) == 2


def test_its_tiles_come_in_ahead_and_only_those_that_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[int] = []
    evicted: list[bool] = []
    bring, evict = Conveyor._bring, Conveyor._evict

    def noted(self: Conveyor, trip: Any) -> Any:
        if trip.tile.key in self._early and trip.tile.tile.pieces[0].param == 0:
            ahead.append(trip.tile.tile.index)
        return bring(self, trip)

    monkeypatch.setattr(Conveyor, "_bring", noted)
    monkeypatch.setattr(Conveyor, "_evict", lambda self: evicted.append(True) or evict(self))
    run(5)
    assert sorted(ahead) == sorted(4 * HALVES[1])
    assert not evicted


def test_norms_are_those_of_a_wavefront() -> None:
    """Each side takes the squared sums of its own tiles."""
    norms: dict[str, list[float]] = {}
    for mode in ("wavefront", "hybrid"):
        model = make_model()
        offload.cast_compute_weights(model, keep_fp32="norm")
        with divided(model, mode=mode) as optimizer:
            for ids in batches(5):
                train(model, optimizer, [ids])
                norms.setdefault(mode, []).append(optimizer.last_step.grad_norm)
    assert norms["hybrid"] == norms["wavefront"]


def lanes_of_sides(monkeypatch: pytest.MonkeyPatch, side: str, **arguments: Any) -> dict[str, LaneTransport]:
    """Lanes by side: that of the host is made first. `arguments` are those of one side."""
    made: dict[str, LaneTransport] = {}

    def make(device: torch.device, config: offload.OffloadConfig) -> LaneTransport:
        name = SIDES[len(made) % 2]
        made[name] = LaneTransport(device, **(arguments if name == side else {}))
        return made[name]

    monkeypatch.setattr(assembly, "make_transport", make)
    return made


# Steps in which it is whole


def test_micro_batches_of_the_context_keep_it_whole_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watched(monkeypatch)
    use_lanes(monkeypatch, delay=random_delays(2))
    model = make_model()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    recorder = Recorder(model)
    reference = Reference({name: masters.get(name, p.detach()) for name, p in model.named_parameters()})
    with divided(model, masters=masters) as optimizer:
        both: dict[str, Any] = {"recorder": recorder, "reference": reference}
        train(model, optimizer, batches(3), **both)
        seen.take()
        for ids in batches(3):
            with optimizer.accumulate():
                loss_of(model, ids).backward()
            train(model, optimizer, [ids.roll(1, 1)], **both)
            assert seen.take() == WHOLE
            train(model, optimizer, [ids], **both)
            assert seen.take() == HALVES
        assert_matches_reference(model, optimizer, reference)


@pytest.mark.usefixtures("always")
def test_declared_micro_batches_keep_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watched(monkeypatch)
    run(5, accumulation_steps=2)
    assert seen.stream == []


def test_what_would_always_be_whole_is_not_planned_as_divided() -> None:
    for options in ({"accumulation_steps": 2}, {"max_grad_norm": 1.0}, {"nonfinite": "skip"}):
        model = make_model()
        offload.cast_compute_weights(model)
        with divided(model, **options) as optimizer:
            assert optimizer.plan.divisions == {}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("clip", ["defer", "speculate", "auto"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_clipping_gives_the_bits_of_a_wavefront(
    monkeypatch: pytest.MonkeyPatch, clip: str, accumulation_steps: int
) -> None:
    seen = Watched(monkeypatch)
    use_lanes(monkeypatch, delay=random_delays(3))

    def end(mode: str) -> tuple[Snapshot, list[float], list[bool]]:
        model = make_model()
        masters = offload.cast_compute_weights(model, keep_fp32="norm")
        norms, clipped = [], []
        options: dict[str, Any] = {
            "max_grad_norm": 1.6,
            "clip": clip,
            "accumulation_steps": accumulation_steps,
        }
        with divided(model, mode=mode, masters=masters, **options) as optimizer:
            assert bool(optimizer.plan.divisions) is (mode == "hybrid")
            optimizer._engine.policy._clip = (
                clip  # a hybrid has no second set of state, and would always defer
            )
            for ids in batches(5):
                train(model, optimizer, [ids], micro_batches=accumulation_steps)
                norms.append(optimizer.last_step.grad_norm)
                clipped.append(optimizer.last_step.clipped)
            return snapshot(model, optimizer), norms, clipped

    expected, *rest = end("wavefront")
    actual, *same = end("hybrid")
    assert same == rest
    assert_same_snapshot(actual, expected)
    assert seen.stream == []


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("row", [0, 396])
def test_an_inf_in_either_part_changes_nothing(nonfinite: str, row: int) -> None:
    model = make_model()
    offload.cast_compute_weights(model, keep_fp32="norm")
    with divided(model, nonfinite=nonfinite) as optimizer:
        train(model, optimizer, batches(3))
        before = snapshot(model, optimizer)
        loss = loss_of(model, batches(1)[0])
        model.embedding.weight.register_hook(lambda gradient: _with_inf(gradient, row))
        loss.backward()
        if nonfinite == "raise":
            with pytest.raises(NonFiniteGradientError, match=r"embedding\.weight"):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.last_step.skipped
        assert_same_snapshot(snapshot(model, optimizer), before)


def _with_inf(gradient: torch.Tensor, row: int) -> torch.Tensor:
    bad = gradient.clone()
    bad[row, 0] = float("inf")
    return bad


def test_a_gradient_assigned_by_hand_is_applied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it the chunk is divided again, and what had come in ahead for nothing is not used."""
    seen = Watched(monkeypatch)
    ends = []
    for mode in ("hybrid", "wavefront"):
        model = make_model()
        offload.cast_compute_weights(model)
        with divided(model, mode=mode) as optimizer:
            train(model, optimizer, batches(3))
            seen.take()
            model.layers[1].up.weight.sum().backward()  # sets streamed state in motion
            model.embedding.weight.grad = torch.full_like(model.embedding.weight, 0.25)
            optimizer.step()
            optimizer.zero_grad()
            if mode == "hybrid":
                assert seen.take() == WHOLE
            train(model, optimizer, batches(3))
            ends.append(snapshot(model, optimizer))
    assert_same_snapshot(*ends)


# State and weights


def test_checkpoints_are_interchangeable() -> None:
    data = batches(6)
    expected = run(6, mode="wavefront")
    model = make_model()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    saved: dict[str, Any] | None = None
    for start, (mode, share) in enumerate((("hybrid", 0.5), ("wavefront", None), ("hybrid", 0.3))):
        given = masters if saved is None else None
        with divided(model, mode=mode, share=share, masters=given) as optimizer:
            if saved is not None:
                optimizer.load_state_dict(saved)
            train(model, optimizer, data[2 * start : 2 * start + 2])
            saved = optimizer.state_dict()
            end = snapshot(model, optimizer)
    assert_same_snapshot(end, expected)


def test_loading_between_divided_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lanes(monkeypatch, delay=random_delays(4))
    ends = []
    for mode in ("hybrid", "wavefront"):
        model = make_model()
        offload.cast_compute_weights(model)
        with divided(model, mode=mode) as optimizer:
            train(model, optimizer, batches(3))
            saved = optimizer.state_dict()
            train(model, optimizer, batches(3))
            optimizer.load_state_dict(saved)
            train(model, optimizer, batches(3))
            ends.append(snapshot(model, optimizer))
    assert_same_snapshot(*ends)


def test_f1_a_write_of_a_hook_in_the_same_backward_is_followed_by_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streamed tiles have come in by then, with the masters from before the write."""
    ahead: list[bool] = []
    expect = Conveyor.expect

    def noted(self: Conveyor, tiles: Any) -> None:
        expect(self, [tile for tile in tiles if tile.tile.pieces[0].param == 0])  # slots are few
        ahead.append(bool(self._early))

    monkeypatch.setattr(Conveyor, "expect", noted)
    ends = []
    for mode in ("hybrid", "wavefront"):
        model = make_model()
        offload.cast_compute_weights(model)
        with divided(model, mode=mode) as optimizer:
            train(model, optimizer, batches(3))
            loss = loss_of(model, batches(1)[0])
            weight = model.embedding.weight
            handle = weight.register_hook(lambda gradient, weight=weight: _fill(weight, 0.5))
            loss.backward()
            handle.remove()
            optimizer.step()
            optimizer.zero_grad()
            assert_weight_is_rounded_master(optimizer, weight, "embedding.weight")
            train(model, optimizer, batches(2))
            ends.append(snapshot(model, optimizer))
    assert True in ahead
    assert_same_snapshot(*ends)


def _fill(weight: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        weight.fill_(value)


def test_a_weight_that_moves_is_found_by_both_sides() -> None:
    model = make_model()
    offload.cast_compute_weights(model)
    with divided(model) as optimizer:
        train(model, optimizer, batches(3))
        weight = model.embedding.weight
        weight.data = weight.data.clone()
        train(model, optimizer, batches(2))
        assert_weight_is_rounded_master(optimizer, weight, "embedding.weight")


def test_other_chunks_change_sides_and_this_one_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "offload.schedule")
    late: list[str] = ["stream"]
    seen = Watched(monkeypatch)
    use_lanes(monkeypatch, delay=random_delays(5))

    def ends(self: HybridStepper) -> None:
        if self._is_underway:
            a_lot = 20 * WORTH_S
            self._ends = (0.0, a_lot) if late == ["stream"] else (a_lot, 0.0)

    monkeypatch.setattr(HybridStepper, "_note_ends", ends)
    model = make_model()
    masters = offload.cast_compute_weights(model)
    recorder = Recorder(model)
    reference = Reference({name: masters.get(name, p.detach()) for name, p in model.named_parameters()})
    with divided(model, share=None, masters=masters) as optimizer:
        index = chunk_of(optimizer)
        both: dict[str, Any] = {"recorder": recorder, "reference": reference}
        counts = []
        for side in ("stream", "host"):
            late[:] = [side]
            train(model, optimizer, batches(5), **both)
            placements = optimizer.plan.placements
            counts.append(placements.count(Placement.STREAM))
            assert placements[index] is Placement.STREAM
            assert optimizer.plan.divisions[index] == 8 * TILE
        assert counts[0] == 1  # all others have gone
        assert counts[1] > 1
        assert_matches_reference(model, optimizer, reference)
    assert len(seen.stream) == 9 * 8
    assert "layers.0/1: from now on" in caplog.text
    assert "misc.0: from now on" not in caplog.text


def test_parameters_that_come_later() -> None:
    model = make_model()
    late = nn.Parameter(torch.ones(40 * TILE, dtype=torch.bfloat16))
    with divided(model) as optimizer:
        train(model, optimizer, batches(2))
        optimizer.add_param_group({"params": [("late", late)]})
        for _ in range(3):
            (late.sum() + loss_of(model, batches(1)[0])).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state[late]["step"] == 3
        assert_weight_is_rounded_master(optimizer, late, "late")
        assert_weight_is_rounded_master(optimizer, model.embedding.weight, "embedding.weight")


def test_a_divided_step_cannot_be_dropped() -> None:
    model = make_model()
    offload.cast_compute_weights(model)
    with divided(model) as optimizer:
        train(model, optimizer, batches(2))
        model.embedding.weight.sum().backward()  # nothing else is stepped
        assert optimizer._engine._stepper.stepped_early == ["misc.0"]
        with pytest.raises(MidStepError, match=r"misc\.0"):
            optimizer.zero_grad()
        with pytest.raises(MidStepError, match="state_dict"):
            optimizer.state_dict()
        optimizer.step()


def test_close_in_mid_step_gives_everything_back() -> None:
    before = pinned_bytes()
    model = make_model()
    offload.cast_compute_weights(model)
    optimizer = divided(model)
    train(model, optimizer, batches(2))
    loss_of(model, batches(1)[0]).backward()
    optimizer.close()
    optimizer.close()
    assert pinned_bytes() == before
    assert not any(p._backward_hooks for p in model.parameters())


# Failures


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("lane", ["to_host", "to_device"])
def test_a_failure_of_either_side_ends_the_optimizer(
    monkeypatch: pytest.MonkeyPatch, side: str, lane: str
) -> None:
    """Only the divided chunk has a gradient, so that it is one of its copies that fails."""
    armed: list[bool] = []
    lanes_of_sides(
        monkeypatch,
        side,
        fail=lambda name, index: OSError("the link is down") if armed and name == lane else None,
    )
    model = make_model()
    offload.cast_compute_weights(model)
    with divided(model) as optimizer:
        train(model, optimizer, batches(2))
        armed.append(True)
        model.embedding.weight.sum().backward()
        with pytest.raises(WorkerError, match="part old, part new") as caught:
            optimizer.step()
        assert isinstance(caught.value.__cause__, OSError)
        for call in (optimizer.step, optimizer.state_dict, optimizer.synchronize):
            with pytest.raises(WorkerError, match="the link is down"):
                call()


# Overlapped with the next forward


class OnItsOwnThread(test_hybrid.OnItsOwnThread):
    """As on a GPU; all jobs of a backward find room, so that a test may hold them up."""

    depth = 64


def test_a_thread_of_its_own_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are at work on the chunk at the same time."""
    monkeypatch.setattr(assembly, "StreamStepper", OnItsOwnThread)
    use_lanes(monkeypatch, delay=random_delays(6))
    run(7)


def test_both_sides_are_at_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side's first tile of the chunk waits until the other side has begun with one of its own."""
    monkeypatch.setattr(assembly, "StreamStepper", OnItsOwnThread)
    begun = {side: threading.Event() for side in SIDES}
    met: dict[str, bool] = {}
    compute, work = StepTile.compute, Conveyor._work

    def meet(side: str, other: str) -> None:
        begun[side].set()
        if side not in met:
            met[side] = begun[other].wait(20.0)

    def on_host(job: StepTile) -> None:
        if job._plan.pieces[0].param == 0:
            meet("host", "stream")
        compute(job)

    def on_device(conveyor: Conveyor, trip: Any, inside: Any) -> None:
        if trip.tile.tile.pieces[0].param == 0:
            meet("stream", "host")
        work(conveyor, trip, inside)

    model = make_model()
    offload.cast_compute_weights(model)
    with divided(model) as optimizer:
        train(model, optimizer, batches(2))
        monkeypatch.setattr(StepTile, "compute", on_host)
        monkeypatch.setattr(Conveyor, "_work", on_device)
        train(model, optimizer, batches(1))
    assert met == {"host": True, "stream": True}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("held", SIDES)
def test_its_mark_comes_when_both_sides_have_written(
    monkeypatch: pytest.MonkeyPatch, held: str, whole: bool
) -> None:
    """One side's weights cannot arrive. A mark of the other side alone comes all the same, and the forward sees old ones."""
    monkeypatch.setattr(assembly, "StreamStepper", OnItsOwnThread)

    def weight_after(*, overlap: bool) -> torch.Tensor:
        made = lanes_of_sides(monkeypatch, held, delay=lambda name, index: 3e-3 * (name == "to_device"))
        model = make_model()
        offload.cast_compute_weights(model)
        options: dict[str, Any] = {"overlap_forward": True, "model": model} if overlap else {}
        with divided(model, config={"ring_slots": 64}, **options) as optimizer:
            train(model, optimizer, batches(3))
            optimizer.synchronize()
            if overlap:
                made[held].hold("to_device")
            model.embedding.weight.sum().backward()
            optimizer.step()
            if overlap:
                flight: Flight = optimizer._engine.flight
                if whole:
                    made[held].release("to_device")
                flight.wait([chunk_of(optimizer)], on_host=True)
            weight = model.embedding.weight.detach().clone()
            made[held].release("to_device")
            return weight

    expected = weight_after(overlap=False)
    if not whole:
        left = Placement.STREAM if held == "host" else Placement.HOST
        monkeypatch.setattr(HybridStepper, "_sides", lambda self, chunk: (left,))
    assert torch.equal(weight_after(overlap=True), expected) is whole


def test_its_streamed_tiles_go_before_those_of_chunks_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward needs it first; on the link nothing else changes its place."""
    monkeypatch.setattr(assembly, "StreamStepper", OnItsOwnThread)
    made = lanes_of_sides(monkeypatch, "stream")
    order: list[int] = []
    work = Conveyor._work

    def noted(self: Conveyor, trip: Any, inside: Any) -> None:
        order.append(trip.tile.tile.pieces[0].param)
        work(self, trip, inside)

    def run(mode: str) -> tuple[Snapshot, list[int]]:
        model, fired = make_model(), []
        offload.cast_compute_weights(model)
        options: dict[str, Any] = {"overlap_forward": True, "model": model, "config": {"ring_slots": 64}}
        with divided(model, mode=mode, share=0.7, **options) as optimizer:
            train(model, optimizer, batches(3))
            optimizer.synchronize()
            loss = loss_of(model, batches(1)[0])
            if mode == "hybrid":
                fired = optimizer._engine._stepper._stream._forecast.order
                monkeypatch.setattr(Conveyor, "_work", noted)
                made["stream"].hold("to_device")  # the first jobs are at work, all others wait
            loss.backward()
            made["stream"].release("to_device")
            optimizer.step()
            optimizer.synchronize()
            return snapshot(model, optimizer), fired

    end, fired = run("hybrid")
    params = list(dict.fromkeys(order))
    assert fired[-1] == 0  # complete last
    assert params.index(0) <= 3
    assert len(params) > 6
    others = [param for param in params if param != 0]
    assert others == [param for param in fired if param in others]
    assert_same_snapshot(end, run("wavefront")[0])


@pytest.mark.parametrize("side", SIDES)
def test_an_overlapped_step_has_the_losses_of_a_plain_one(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    monkeypatch.setattr(assembly, "StreamStepper", OnItsOwnThread)

    def losses(*, overlap: bool) -> tuple[list[float], Snapshot]:
        model = make_model()
        offload.cast_compute_weights(model, keep_fp32="norm")
        options: dict[str, Any] = {"overlap_forward": True, "model": model} if overlap else {}
        with divided(model, **options) as optimizer:
            found = train(model, optimizer, batches(6))
            assert (optimizer._engine.flight is not None) is overlap
            optimizer.synchronize()
            return found, snapshot(model, optimizer)

    expected = losses(overlap=False)
    lanes_of_sides(monkeypatch, side, delay=lambda lane, index: 3e-3 * (lane == "to_device"))
    actual = losses(overlap=True)
    assert actual[0] == expected[0]
    assert_same_snapshot(actual[1], expected[1])


def test_gradients_do_not_outlive_their_updates_until_the_next_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would lie on the device beside all that the next forward saves, where memory is at its peak."""
    monkeypatch.setattr(assembly, "StreamStepper", OnItsOwnThread)
    lanes_of_sides(monkeypatch, "stream", delay=lambda lane, index: 0.03 * (lane == "to_host"))
    seen: list[weakref.ref[torch.Tensor]] = []
    work = Conveyor._work

    def noted(self: Conveyor, trip: Any, inside: Any) -> None:
        _, waiting, _ = trip.work.args
        seen.extend(weakref.ref(last) for _, (last, _) in waiting)
        work(self, trip, inside)

    model = make_model()
    offload.cast_compute_weights(model)
    with divided(model, overlap_forward=True, model=model) as optimizer:
        train(model, optimizer, batches(2))
        monkeypatch.setattr(Conveyor, "_work", noted)
        train(model, optimizer, batches(1))
        engine = optimizer._engine
        engine._stepper._stream.issuer.call(lambda: None)  # after all that was submitted
        engine._worker.call(lambda: None, on_copier=True)
        assert engine.flight is not None
        assert seen
        assert not [gradient for gradient in seen if gradient() is not None]


# Books


def test_the_parts_cover_the_chunk_and_do_not_overlap() -> None:
    model = make_model()
    offload.cast_compute_weights(model)
    with divided(model, share=0.3) as optimizer:
        index = chunk_of(optimizer)
        [chunk] = [chunk for chunk in optimizer._engine.chunks if chunk.index == index]
    divisions = Divisions({index: 3 * TILE})
    assert not divisions.step(index)  # not added
    assert divisions.add(chunk)
    parts = divisions.step(index)
    assert parts is not None
    starts = [tile.start for tile in chunk.tiles]
    assert [start for start in starts if start in parts.host] == starts[:3]
    assert [start for start in starts if start in parts.streamed] == starts[3:]
    assert divisions.is_stepped(index)
    divisions.end_step()
    assert not divisions.is_stepped(index)
    divisions.keep_whole(index)
    assert divisions.step(index) is None
    assert divisions.expected == {}
