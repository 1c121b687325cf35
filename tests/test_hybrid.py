"""Host, streamed and device state in one wavefront: the bits of every other mode, whatever the shares and the timing.

Without a GPU streamed and device chunks are plain memory and the host kernels compute; routes, orders, waits and
failures are the same.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import offload
from offload import assembly
from offload.errors import (
    ConfigError,
    DeadlineError,
    MidStepError,
    NonFiniteGradientError,
    OffloadError,
    WorkerError,
)
from offload.kernels.numba_backend import NumbaBackend
from offload.kernels.rule import AdamWRule
from offload.schedule.balancer import WORTH_S, Balancer
from offload.schedule.conveyor import Conveyor
from offload.schedule.hybrid_stepper import HybridStepper
from offload.schedule.mode_costs import Placement
from offload.schedule.stream_stepper import StreamStepper
from offload.schedule.updater import HostUpdater
from offload.schedule.worker import Worker
from offload.transfer.host import LaneTransport
from offload.transfer.pinned import pinned_bytes
from tests.training import (
    Recorder,
    Reference,
    adamw,
    assert_matches_reference,
    assert_same_snapshot,
    batches,
    loss_of,
    make_decoder,
    random_delays,
    snapshot,
    train,
    use_lanes,
)

SHARES = [0.0, 0.5, 1.0]
Snapshot = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(autouse=True, scope="module")
def leave_nothing_to_the_garbage_collector() -> Iterator[None]:
    """Tracebacks of failures keep optimizers alive; other modules count mapped memory."""
    yield
    gc.collect()


def hybrid(model: Any, /, *, share: float | None = 0.5, **options: Any) -> offload.AdamW:
    config = {"stream_share": share, **options.pop("config", {})}
    return adamw(model, **{"mode": "hybrid", **options}, config=config)


def run(
    steps: int, *, keep_fp32: str | None = "norm", with_reference: bool = True, **options: Any
) -> Snapshot:
    """Train beside the reference, compare every bit, and return the end."""
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32=keep_fp32)
    recorder = Recorder(model)
    reference = Reference({name: masters.get(name, p.detach()) for name, p in model.named_parameters()})
    with hybrid(model, masters=masters, **options) as optimizer:
        parts = options.get("accumulation_steps", 1)
        kept = (recorder, reference) if with_reference else (None, None)
        train(model, optimizer, batches(steps), recorder=kept[0], reference=kept[1], micro_batches=parts)
        if with_reference:
            assert_matches_reference(model, optimizer, reference)
        return snapshot(model, optimizer)


# Bits


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("share", SHARES)
def test_the_bits_of_fused_torch(share: float, accumulation_steps: int) -> None:
    run(8, share=share, accumulation_steps=accumulation_steps)


@pytest.mark.parametrize("device_budget", [0, 2**40])
def test_no_chunk_and_every_chunk_on_the_device(device_budget: int) -> None:
    run(5, config={"device_budget": device_budget})


@pytest.mark.parametrize("keep_fp32", [None, ""])
def test_all_weights_bf16_and_all_fp32(keep_fp32: str | None) -> None:
    run(5, keep_fp32=keep_fp32)


@pytest.mark.parametrize("tile_numel", [1024, 4096])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_tiles_and_delays_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, tile_numel: int, accumulation_steps: int
) -> None:
    use_lanes(monkeypatch, delay=random_delays(tile_numel))
    config = {"tile_numel": tile_numel, "ring_slots": 2, "backlog_tiles": 1}
    run(6, accumulation_steps=accumulation_steps, config=config)


@pytest.mark.parametrize("share", SHARES)
def test_layers_cut_into_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(assembly, "HYBRID_CHUNK_NUMEL", 2048)
    use_lanes(monkeypatch, delay=random_delays(5), poison={"to_host"})
    run(4, share=share, config={"tile_numel": 1024, "ring_slots": 2})


def test_every_placement_steps_inside_backward() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model, keep_fp32="norm")
    with hybrid(model) as optimizer:
        assert set(optimizer.plan.placements) == set(Placement)
        train(model, optimizer, batches(3))
        assert optimizer.last_step.early_tiles > 0
        assert optimizer.last_step.late_tiles == 0


# Prefetch


class Watched:
    """What the conveyor was told to expect, what came in ahead of its trip, and what was given up again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.expected: list[int] = []
        self.early: list[Any] = []
        self.evicted = 0
        original = Conveyor.expect, Conveyor._bring, Conveyor._evict

        def expect(conveyor: Conveyor, tiles: Any) -> None:
            self.expected.append(len(tiles))
            original[0](conveyor, tiles)

        def bring(conveyor: Conveyor, trip: Any) -> Any:
            if trip.tile.key in conveyor._early:
                self.early.append(trip.tile.key)
            return original[1](conveyor, trip)

        def evict(conveyor: Conveyor) -> None:
            self.evicted += 1
            original[2](conveyor)

        monkeypatch.setattr(Conveyor, "expect", expect)
        monkeypatch.setattr(Conveyor, "_bring", bring)
        monkeypatch.setattr(Conveyor, "_evict", evict)


def test_state_comes_in_before_its_gradient_in_the_order_of_the_last_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Watched(monkeypatch)
    use_lanes(monkeypatch, delay=random_delays(3), poison={"to_host"})
    run(5, share=1.0, config={"tile_numel": 1024})
    assert len(seen.expected) == 4  # each step but the observed one
    assert len(set(seen.expected)) == 1
    assert len(seen.early) == sum(seen.expected)
    assert seen.evicted == 0


def test_a_wrong_expectation_costs_copies_and_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watched(monkeypatch)
    use_lanes(monkeypatch, delay=random_delays(4))
    watched = Conveyor.expect
    monkeypatch.setattr(Conveyor, "expect", lambda self, tiles: watched(self, list(reversed(tiles))))
    run(5, share=1.0, config={"tile_numel": 1024})
    assert len(seen.early) < sum(seen.expected) / 2


def test_what_came_in_for_nothing_is_not_used_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that reaches the head alone, then other state is loaded: what had come in ahead is old, and not used."""
    seen = Watched(monkeypatch)
    model = make_decoder()
    offload.cast_compute_weights(model)
    other = make_decoder()
    offload.cast_compute_weights(other)
    with (
        hybrid(model, share=1.0, config={"tile_numel": 1024}) as optimizer,
        adamw(other, mode="chunked-sync") as plain,
    ):
        for each, steps in ((optimizer, model), (plain, other)):
            train(steps, each, batches(2))
            saved = each.state_dict()
            train(steps, each, batches(2))
            steps.head.weight.sum().backward()  # only the head's tiles are worked on, others came in for nothing
            each.step()
            each.load_state_dict(saved)  # and are old from here on
            train(steps, each, batches(2))
        assert seen.evicted > 0
        assert_same_snapshot(snapshot(model, optimizer), snapshot(other, plain))


# Balance


def placed(optimizer: offload.AdamW) -> dict[str, Placement]:
    return {chunk.name: chunk.placement for chunk in optimizer.plan.chunks}


@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_chunks_change_sides_between_steps_and_no_bit_with_them(
    monkeypatch: pytest.MonkeyPatch, accumulation_steps: int, overlap_forward: bool
) -> None:
    """All streamed chunks go to the host one by one, then one comes back."""
    use_lanes(monkeypatch, delay=random_delays(6))
    late: list[str] = ["stream"]
    seen: list[dict[int, Placement]] = []

    def ends(self: HybridStepper) -> None:
        seen.append(dict(self.placements))
        if self._is_underway:
            a_little = 1.5 * WORTH_S
            self._ends = (0.0, a_little) if late == ["stream"] else (a_little, 0.0)

    monkeypatch.setattr(HybridStepper, "_note_ends", ends)
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    recorder = Recorder(model)
    reference = Reference({name: masters.get(name, p.detach()) for name, p in model.named_parameters()})
    with hybrid(
        model,
        share=None,
        masters=masters,
        accumulation_steps=accumulation_steps,
        overlap_forward=overlap_forward,
        model=model if overlap_forward else None,
    ) as optimizer:
        movable = {c.name for c in optimizer.plan.chunks if c.placement is Placement.STREAM}
        movable -= {name for name in movable if name.endswith("(fp32)")}
        assert movable
        each = {"recorder": recorder, "reference": reference, "micro_batches": accumulation_steps}
        train(model, optimizer, batches(2 + 2 * len(movable)), **each)
        optimizer.synchronize()
        assert all(placed(optimizer)[name] is Placement.HOST for name in movable)
        assert f"{len(movable)} chunks that could be streamed are stepped on the host" in str(optimizer.plan)
        late[:] = ["host"]
        train(model, optimizer, batches(4), **each)
        optimizer.synchronize()
        assert sum(placed(optimizer)[name] is Placement.STREAM for name in movable) == 1
        assert_matches_reference(model, optimizer, reference)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        train(model, optimizer, batches(2), **each)
        assert_matches_reference(model, optimizer, reference)
    assert len({tuple(each.items()) for each in seen}) > len(movable)


@pytest.mark.parametrize("first", ["stream", "host"])
def test_weights_that_moved_while_the_other_side_stepped_them_are_found(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Their old memory is still there, and a side that comes back to them must not write to it."""
    number = {"stream": 1000, "host": 0}
    turn = [first]
    monkeypatch.setattr(Balancer, "note", lambda self, *ends: min(number[turn[-1]], self._movable))

    def end(mode: str) -> Snapshot:
        model = make_decoder()
        offload.cast_compute_weights(model)
        old = []
        with hybrid(model, mode=mode, share=None) as optimizer:
            for side in ("host", "stream", "host") if first == "stream" else ("stream", "host", "stream"):
                train(model, optimizer, batches(2))
                for parameter in model.parameters():
                    old.append(parameter.data)
                    parameter.data = parameter.data.clone()
                train(model, optimizer, batches(1))  # the side that steps them now finds them
                turn.append(side)
                train(model, optimizer, batches(1))  # after which they change sides
            train(model, optimizer, batches(2))
            return snapshot(model, optimizer)

    expected = end("chunked-sync")
    turn[:] = [first]
    assert_same_snapshot(end("hybrid"), expected)


def test_a_share_that_the_user_gave_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HybridStepper, "_note_ends", lambda self: setattr(self, "_ends", (0.0, 1.0)))
    model = make_decoder()
    offload.cast_compute_weights(model)
    with hybrid(model, share=0.5) as optimizer:
        before = placed(optimizer)
        train(model, optimizer, batches(6))
        assert placed(optimizer) == before


@pytest.mark.parametrize("overlap_forward", [False, True])
def test_both_ends_are_timed(overlap_forward: bool) -> None:
    ends: list[tuple[float, float]] = []
    model = make_decoder()
    offload.cast_compute_weights(model)
    overlap = {"overlap_forward": True, "model": model} if overlap_forward else {}
    with hybrid(model, share=None, **overlap) as optimizer:
        stepper = optimizer._engine._stepper
        note = stepper._balancer.note
        stepper._balancer.note = lambda *end: ends.append(end) or note(*end)
        train(model, optimizer, batches(4))
        optimizer.synchronize()
    assert len(ends) == 3  # the observed step has nothing to tell
    assert all(0.0 <= host < 60.0 and 0.0 <= stream < 60.0 for host, stream in ends)


# Clipping, skipping, irregular steps


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_clipping_gives_the_bits_of_a_wavefront(
    monkeypatch: pytest.MonkeyPatch, accumulation_steps: int
) -> None:
    use_lanes(monkeypatch, delay=random_delays(8))

    def end(mode: str) -> tuple[Snapshot, list[float], list[bool]]:
        model = make_decoder()
        masters = offload.cast_compute_weights(model, keep_fp32="norm")
        norms, clipped = [], []
        limit = 1.6 * accumulation_steps
        with hybrid(
            model, mode=mode, masters=masters, max_grad_norm=limit, accumulation_steps=accumulation_steps
        ) as optimizer:
            for ids in batches(5):
                train(model, optimizer, [ids], micro_batches=accumulation_steps)
                norms.append(optimizer.last_step.grad_norm)
                clipped.append(optimizer.last_step.clipped)
            return snapshot(model, optimizer), norms, clipped

    expected, norms, clipped = end("wavefront")
    assert True in clipped
    actual, *rest = end("hybrid")
    assert rest == [norms, clipped]
    assert_same_snapshot(actual, expected)


def test_the_norm_of_unclipped_steps_is_that_of_a_wavefront() -> None:
    norms: dict[str, list[float]] = {}
    for mode in ("wavefront", "hybrid"):
        model = make_decoder()
        offload.cast_compute_weights(model, keep_fp32="norm")
        with hybrid(model, mode=mode) as optimizer:
            for ids in batches(4):
                train(model, optimizer, [ids])
                norms.setdefault(mode, []).append(optimizer.last_step.grad_norm)
    assert norms["hybrid"] == norms["wavefront"]


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("name", ["embedding.weight", "layers.0.up.weight", "head.weight"])
def test_f20_an_inf_anywhere_changes_nothing(name: str, nonfinite: str) -> None:
    model = make_decoder()
    offload.cast_compute_weights(model, keep_fp32="norm")
    with hybrid(model, nonfinite=nonfinite) as optimizer:
        train(model, optimizer, batches(2))
        before = snapshot(model, optimizer)
        loss_of(model, batches(1)[0]).backward()
        weight = model.get_parameter(name)
        bad = torch.zeros_like(weight)
        bad[-1, -1] = float("inf")
        weight.grad = bad
        if nonfinite == "raise":
            with pytest.raises(NonFiniteGradientError, match=name):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.last_step.skipped
        assert_same_snapshot(snapshot(model, optimizer), before)
        optimizer.zero_grad()
        train(model, optimizer, batches(1))
        assert optimizer.state[weight]["step"] == 3


def test_a_step_that_began_inside_backward_cannot_be_dropped() -> None:
    model = make_decoder()
    with hybrid(model) as optimizer:
        train(model, optimizer, batches(2))
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(MidStepError, match="already hold the new step"):
            optimizer.zero_grad()
        with pytest.raises(MidStepError, match="state_dict"):
            optimizer.state_dict()
        optimizer.step()


# State and weights


def test_checkpoints_are_interchangeable_with_other_modes() -> None:
    data = batches(5)
    expected = run(5, with_reference=False)
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    saved: dict[str, Any] | None = None
    modes = [("hybrid", 0.3), ("wavefront", None), ("hybrid", 1.0), ("chunked-stream", None), ("hybrid", 0.0)]
    for ids, (mode, share) in zip(data, modes, strict=True):
        with hybrid(model, mode=mode, share=share, masters=masters if saved is None else None) as optimizer:
            if saved is not None:
                optimizer.load_state_dict(saved)
            train(model, optimizer, [ids])
            saved = optimizer.state_dict()
            end = snapshot(model, optimizer)
    assert_same_snapshot(end, expected)


def test_f1_weights_written_behind_the_back_are_taken_up() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model, keep_fp32="norm")
    with hybrid(model) as optimizer:
        train(model, optimizer, batches(2))
        other = make_decoder(seed=1)
        offload.cast_compute_weights(other, keep_fp32="norm")
        model.load_state_dict(other.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        train(model, optimizer, batches(1))
        for name, parameter in other.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name
        with torch.no_grad():
            model.head.weight.data.add_(1)
            model.embedding.weight.data.add_(1)
        assert sorted(optimizer.resync()) == ["embedding.weight", "head.weight"]


def test_parameters_that_come_later_are_stepped_on_the_host() -> None:
    model = make_decoder()
    late = torch.nn.Parameter(torch.ones(5000))
    with hybrid(model) as optimizer:
        train(model, optimizer, batches(2))
        optimizer.add_param_group({"params": [("late", late)]})
        late.grad = torch.ones_like(late)
        train(model, optimizer, batches(1))
        assert optimizer.state[late]["step"] == 1
        assert not torch.equal(late, torch.ones_like(late))


def test_close_gives_everything_back() -> None:
    before = pinned_bytes()
    model = make_decoder()
    optimizer = hybrid(model)
    train(model, optimizer, batches(2))
    assert optimizer.host_bytes > 12 * sum(p.numel() for p in model.layers.parameters())
    loss_of(model, batches(1)[0]).backward()  # closed in mid-step
    optimizer.close()
    optimizer.close()
    assert pinned_bytes() == before
    assert not any(p._backward_hooks for p in model.parameters())


def test_the_torch_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hybrid.*backend='torch'.*numba"):
        hybrid(make_decoder(), backend="torch")


# The thread that issues, as a GPU has it


class OnItsOwnThread(StreamStepper):
    """Enqueues and computes on a worker of its own, with a backlog of `depth` tiles."""

    depth = 2

    def __init__(self, *, worker: Worker, **options: Any) -> None:
        backend = NumbaBackend(AdamWRule, num_threads=1, flush_denormals=True, cache_dir=None)
        updater = HostUpdater(backend)
        self.issuer = Worker("offload-stream", depth=self.depth, timeout_s=60.0)
        options |= {"updater": updater, "trips_ahead": self.depth, "issuer": self.issuer}
        super().__init__(worker=worker, **options)
        self.issuer.call(updater.start)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_thread_of_its_own_changes_no_bit(monkeypatch: pytest.MonkeyPatch, accumulation_steps: int) -> None:
    monkeypatch.setattr(assembly, "StreamStepper", OnItsOwnThread)
    use_lanes(monkeypatch, delay=random_delays(13))
    run(6, share=0.6, accumulation_steps=accumulation_steps, config={"tile_numel": 1024})


def test_an_error_of_that_thread_ends_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "StreamStepper", OnItsOwnThread)
    model = make_decoder()
    offload.cast_compute_weights(model)
    with hybrid(model, share=1.0) as optimizer:
        train(model, optimizer, batches(2))

        def run_trips(self: Conveyor, trips: Any) -> None:
            raise OSError("the link is down")

        monkeypatch.setattr(Conveyor, "run", run_trips)
        loss_of(model, batches(1)[0]).backward()
        for call in (optimizer.step, optimizer.state_dict, optimizer.synchronize):
            with pytest.raises(WorkerError, match="the link is down"):
                call()


def test_a_thread_that_hangs_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks wait for room in its queue no longer than that, and raise nothing."""
    monkeypatch.setattr(assembly, "StreamStepper", OnItsOwnThread)
    model = make_decoder()
    offload.cast_compute_weights(model)
    over = threading.Event()
    with hybrid(model, share=1.0, config={"tile_numel": 1024}) as optimizer:
        train(model, optimizer, batches(2))
        optimizer._engine._stepper._stream.issuer.timeout_s = 0.2
        monkeypatch.setattr(Conveyor, "run", lambda self, trips: over.wait(30))
        try:
            loss_of(model, batches(1)[0]).backward()
            with pytest.raises(DeadlineError, match=r"took no job within 0\.2 s"):
                optimizer.step()
        finally:
            over.set()


# Waits and failures


class WithoutWaitOnStream(LaneTransport):
    """Work does not wait for its tile."""

    def wait_on_stream(self, transfer: Any) -> None:
        return


class WithoutAfter(LaneTransport):
    """A tile comes in although the one before has not left its slot."""

    def issue_to_device(self, copies: Any, after: Any) -> Any:
        return super().issue_to_device(copies, ())


def transports(
    monkeypatch: pytest.MonkeyPatch, kind: type[LaneTransport], slow: str, **arguments: Any
) -> None:
    """The streamed chunks' transport is of this kind; that of host chunks, which is made first, is plain."""
    kinds: Iterator[type[LaneTransport]] = iter([LaneTransport, kind])

    def delay(lane: str, index: int) -> float:
        return 2e-3 if lane == slow else 0.0

    monkeypatch.setattr(
        assembly, "make_transport", lambda device, config: next(kinds)(device, delay=delay, **arguments)
    )


@pytest.mark.parametrize(("kind", "slow"), [(WithoutWaitOnStream, "to_device"), (WithoutAfter, "to_host")])
def test_without_a_wait_bits_are_wrong(
    monkeypatch: pytest.MonkeyPatch, kind: type[LaneTransport], slow: str
) -> None:
    options = {"share": 1.0, "config": {"tile_numel": 1024}}
    transports(monkeypatch, LaneTransport, slow)
    run(3, **options)
    transports(monkeypatch, kind, slow)
    with pytest.raises(AssertionError):
        run(3, **options)


@pytest.mark.parametrize("which", ["host", "stream"])
@pytest.mark.parametrize("lane", ["to_device", "to_host"])
def test_a_failure_of_one_placement_ends_all(monkeypatch: pytest.MonkeyPatch, which: str, lane: str) -> None:
    armed: list[bool] = []
    made: list[LaneTransport] = []

    def make(device: torch.device, config: offload.OffloadConfig) -> LaneTransport:
        mine = len(made) == ("host", "stream").index(which)

        def fail(name: str, index: int) -> BaseException | None:
            return OSError("the link is down") if armed and mine and name == lane else None

        made.append(LaneTransport(device, fail=fail))
        return made[-1]

    monkeypatch.setattr(assembly, "make_transport", make)
    model = make_decoder()
    with hybrid(model) as optimizer:
        train(model, optimizer, batches(2))
        armed.append(True)
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(WorkerError, match="part old, part new") as caught:
            optimizer.step()
        assert isinstance(caught.value.__cause__, OSError)
        for call in (optimizer.step, optimizer.state_dict, optimizer.synchronize):
            with pytest.raises(WorkerError, match="the link is down"):
                call()


def test_a_kernel_that_fails_on_the_device_is_reported_at_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_decoder()
    with hybrid(model, share=0.0) as optimizer:
        train(model, optimizer, batches(2))

        def update(self: Any, tile: Any, row: Any) -> None:
            raise RuntimeError("launch failed")

        monkeypatch.setattr("offload.schedule.updater.HostUpdater.update", update)
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(WorkerError, match="launch failed"):
            optimizer.step()
        with pytest.raises(OffloadError):
            optimizer.state_dict()
