"""A chunk that host and link divide, on a GPU: the wavefront's bits behind delays of either side; gradients freed early.

The embedding of this model is tied to the head: one parameter of 17 tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import offload
from offload import assembly
from offload.schedule.conveyor import Conveyor
from offload.schedule.hybrid_stepper import HybridStepper
from offload.schedule.mode_costs import Placement
from offload.transfer.cuda import CudaTransport
from tests.device_gate import DeviceGate
from tests.training import (
    Recorder,
    Reference,
    adamw,
    assert_matches_reference,
    assert_same_snapshot,
    batches,
    loss_of,
    make_decoder,
    snapshot,
    train,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

WIDTH, VOCABULARY, TILE = 256, 1031, 16384
TILES = -(-WIDTH * VOCABULARY // TILE)
BUFFERS = 8 * 3 * 4 * TILE
"""Bytes of the device buffers: with this budget nothing else is on the device."""

CYCLES = 20_000_000
Snapshot = dict[str, dict[str, torch.Tensor]]
Result = tuple[Snapshot, list[float], list[float]]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "HYBRID_CHUNK_NUMEL", 4 * TILE)
    monkeypatch.setattr(assembly, "DIVIDED_NUMEL", 8 * TILE)


def make_model() -> Any:
    return make_decoder(device="cuda", width=WIDTH, layers=3, vocabulary=VOCABULARY, tied=True)


def divided(model: Any, /, *, share: float = 0.5, **options: Any) -> offload.AdamW:
    config = {"stream_share": share, "device_budget": BUFFERS, "tile_numel": TILE, "backlog_tiles": 4}
    config |= options.pop("config", {})
    return adamw(model, **{"mode": "hybrid", **options}, config=config)


def end_of(mode: str, *, backward: Any = None, overlap: bool = False, **options: Any) -> Result:
    """State, norms and losses of six steps; `backward` runs the loss's backward."""
    model = make_model()
    offload.cast_compute_weights(model, keep_fp32="norm")
    if overlap:
        options |= {"overlap_forward": True, "model": model}
    norms, losses = [], []
    with divided(model, mode=mode, **options) as optimizer:
        assert bool(optimizer.plan.divisions) is (mode == "hybrid")
        for ids in batches(6, device="cuda"):
            loss = loss_of(model, ids)
            (backward or torch.Tensor.backward)(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if not overlap:
                norms.append(optimizer.last_step.grad_norm)
        optimizer.synchronize()
        torch.cuda.synchronize()
        end = snapshot(model, optimizer)
    on_cpu = {name: {kind: tensor.cpu() for kind, tensor in each.items()} for name, each in end.items()}
    return on_cpu, norms, [loss.item() for loss in losses]


@pytest.fixture(scope="module")
def expected() -> Result:
    """The wavefront's, every step of which is complete before the next thing happens."""

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        torch.cuda.synchronize()

    return end_of("wavefront", backward=backward)


def assert_same(actual: Result, expected: Result) -> None:
    assert_same_snapshot(actual[0], expected[0])
    assert actual[1] == expected[1]
    assert actual[2] == expected[2]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_the_bits_of_fused_torch(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    streamed: list[int] = []
    work = Conveyor._work

    def noted(self: Conveyor, trip: Any, inside: Any) -> None:
        if trip.tile.tile.pieces[0].param == 0:
            streamed.append(trip.tile.tile.index)
        work(self, trip, inside)

    monkeypatch.setattr(Conveyor, "_work", noted)
    model = make_model()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    recorder = Recorder(model)
    reference = Reference({name: masters.get(name, p.detach().cpu()) for name, p in model.named_parameters()})
    with divided(model, share=share, masters=masters) as optimizer:
        train(model, optimizer, batches(8, device="cuda"), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)
        assert optimizer.last_step.late_tiles == 0
        [on_host] = optimizer.plan.divisions.values()
    assert sorted(streamed) == sorted(7 * list(range(on_host // TILE, TILES)))


def test_gradients_that_come_late_change_no_bit(expected: Result) -> None:
    def backward(loss: torch.Tensor) -> None:
        torch.cuda._sleep(CYCLES)  # hooks fire long before their gradients are there
        loss.backward()

    assert_same(end_of("hybrid", backward=backward), expected)


@pytest.mark.parametrize("side", ["host", "stream"])
@pytest.mark.parametrize("lane", ["_to_host", "_to_device"])
def test_a_side_whose_copies_are_late_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, expected: Result, side: str, lane: str
) -> None:
    delay_copies(monkeypatch, side, lane)
    assert_same(end_of("hybrid"), expected)


def delay_copies(monkeypatch: pytest.MonkeyPatch, side: str, lane: str) -> None:
    """Each copy of one direction waits on the device."""
    on_copies(monkeypatch, side, lane, lambda stream: torch.cuda._sleep(CYCLES // 16))


def on_copies(
    monkeypatch: pytest.MonkeyPatch, side: str, lane: str, act: Callable[[torch.cuda.Stream], object]
) -> None:
    """Before each copy of one direction, of the transport of one side: that of the host is made first."""
    made: list[CudaTransport] = []
    make, enqueue = assembly.make_transport, CudaTransport._enqueue

    def noted(device: torch.device, config: offload.OffloadConfig) -> Any:
        transport = make(device, config)
        made.append(transport)
        return transport

    def late(self: CudaTransport, used: Any, copies: Any, after: Any) -> Any:
        mine = made[("host", "stream").index(side)] if len(made) == 2 else None
        if self is mine and used is getattr(self, lane) and copies:
            with torch.cuda.stream(used.stream):
                act(used.stream)
        return enqueue(self, used, copies, after)

    monkeypatch.setattr(assembly, "make_transport", noted)
    monkeypatch.setattr(CudaTransport, "_enqueue", late)


def test_gradients_that_are_freed_early_are_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, expected: Result
) -> None:
    """The host's tiles are long back when the device begins with its own, from a gradient that only trips still hold."""
    delay(monkeypatch, "stream")
    assert_same(end_of("hybrid", backward=_backward_and_poison), expected)


def _backward_and_poison(loss: torch.Tensor) -> None:
    """Whatever the allocator gets back in backward is filled with NaN at once."""
    loss.backward()
    for size in (WIDTH, WIDTH * VOCABULARY, 3 * WIDTH * WIDTH, WIDTH * (3 * WIDTH + 5)):
        for _ in range(8):
            torch.full((size,), float("nan"), dtype=torch.bfloat16, device="cuda")


def delay(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """Weights that one side writes come milliseconds late."""
    if side == "host":
        delay_copies(monkeypatch, "host", "_to_device")
        return
    work = Conveyor._work

    def slow(self: Conveyor, trip: Any, inside: Any) -> None:
        with self._on_stream():
            torch.cuda._sleep(CYCLES // 16)
        work(self, trip, inside)

    monkeypatch.setattr(Conveyor, "_work", slow)


@pytest.mark.parametrize("side", ["host", "stream"])
def test_an_overlapped_step_gives_the_losses_of_a_plain_one(
    monkeypatch: pytest.MonkeyPatch, expected: Result, side: str
) -> None:
    delay(monkeypatch, side)
    end, _, losses = end_of("hybrid", overlap=True)
    assert losses == expected[2]
    assert_same_snapshot(end, expected[0])


@pytest.mark.parametrize("side", ["host", "stream"])
@pytest.mark.parametrize("whole", [True, False])
def test_its_mark_is_one_of_both_sides(monkeypatch: pytest.MonkeyPatch, side: str, whole: bool) -> None:
    """One side is held at a gate. With a mark of the other side alone, whoever reads then sees old weights."""
    gate, held = DeviceGate(), {"now": False}

    def weight_after(*, overlap: bool) -> torch.Tensor:
        model = make_model()
        offload.cast_compute_weights(model)
        options: dict[str, Any] = {"overlap_forward": True, "model": model} if overlap else {}
        with divided(model, **options) as optimizer:
            train(model, optimizer, batches(3, device="cuda"))
            optimizer.synchronize()
            torch.cuda.synchronize()
            held["now"] = overlap
            [chunk] = optimizer.plan.divisions
            model.embedding.weight.sum().backward()  # nothing else is updated
            optimizer.step()
            if overlap:
                optimizer._engine.flight.wait([chunk], on_host=False)
            weight = model.embedding.weight.detach().clone()
            read = torch.cuda.current_stream().record_event()
            if overlap and not whole:
                read.synchronize()  # it waits for nothing that is held
            held["now"] = False
            gate.open()
            return weight.cpu()

    expected = weight_after(overlap=False)
    gate = DeviceGate()
    _hold(monkeypatch, side, gate, held)
    if not whole:
        left = Placement.STREAM if side == "host" else Placement.HOST
        monkeypatch.setattr(HybridStepper, "_sides", lambda self, chunk: (left,))
    assert torch.equal(weight_after(overlap=True), expected) is whole


def _hold(monkeypatch: pytest.MonkeyPatch, side: str, gate: DeviceGate, held: Mapping[str, bool]) -> None:
    """While `held` says so: weights that one side writes wait at the gate."""
    if side == "host":
        on_copies(monkeypatch, "host", "_to_device", lambda stream: held["now"] and gate.hold(stream))
        return
    work = Conveyor._work

    def behind(self: Conveyor, trip: Any, inside: Any) -> None:
        if held["now"]:
            with self._on_stream():
                gate.hold(torch.cuda.current_stream())
        work(self, trip, inside)

    monkeypatch.setattr(Conveyor, "_work", behind)
