"""``overlap_forward``: the step ends inside the next forward, each module waits for its own weights, and no bit changes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import offload
from offload import assembly, restored_state
from offload.errors import ConfigError, StateError, WorkerError
from offload.schedule.backward_room import BackwardRoom, Queue
from offload.schedule.flight import Flight, Mark
from offload.schedule.host_jobs import StepTile
from offload.schedule.hybrid_stepper import HybridStepper
from offload.schedule.mode_costs import Placement
from offload.schedule.plan import ChunkPlan
from offload.schedule.worker import Worker
from tests.training import (
    Decoder,
    adamw,
    assert_same_snapshot,
    assert_weight_is_rounded_master,
    batches,
    loss_of,
    make_decoder,
    random_delays,
    snapshot,
    train,
    two_groups,
    use_lanes,
)

MODES = ["wavefront", "hybrid"]
Snapshot = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(autouse=True, scope="module")
def leave_nothing_to_the_garbage_collector() -> Iterator[None]:
    """Tracebacks of failures keep optimizers alive; other modules count mapped memory."""
    yield
    gc.collect()


def overlapped(parameters: nn.Module, *, overlap: bool = True, **options: Any) -> offload.AdamW:
    fields = {"stream_share": 0.5, "ring_slots": 64, "tile_numel": 4096, **options.pop("config", {})}
    options = {"mode": "wavefront", "overlap_forward": overlap, "model": parameters, "lr": 1e-3, **options}
    return offload.AdamW(two_groups(parameters), config=offload.OffloadConfig(**fields), **options)


def flight_of(optimizer: offload.AdamW) -> Flight | None:
    return optimizer._engine.flight


def run(steps: int, **options: Any) -> tuple[list[float], list[float], Snapshot]:
    """Losses, norms and the end. Norms are asked for after the next forward, so that steps do overlap."""
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    parts = options.get("accumulation_steps", 1)
    losses, norms = [], []
    with overlapped(model, masters=masters, **options) as optimizer:
        for ids in batches(steps):
            for part in range(parts):
                loss = loss_of(model, ids.roll(part, 1))
                if part == 0 and optimizer.last_step is not None:
                    norms.append(optimizer.last_step.grad_norm)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        norms.append(optimizer.last_step.grad_norm)
        return losses, norms, snapshot(model, optimizer)


def slow_weights(lane: str, index: int) -> float:
    return 3e-3 if lane == "to_device" else 0.0


# Order


def test_the_chunk_that_came_last_is_stepped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one whose weights the next forward needs first."""
    made = use_lanes(monkeypatch)
    stepped: list[str] = []
    original = StepTile.compute

    def compute(job: StepTile) -> None:
        stepped.append(job._plan.chunk.chunk.name)
        original(job)

    model = make_decoder()
    offload.cast_compute_weights(model)
    with overlapped(model, config={"ring_slots": 2}) as optimizer:
        train(model, optimizer, batches(2))
        optimizer.synchronize()
        monkeypatch.setattr(StepTile, "compute", compute)
        loss = loss_of(model, batches(1)[0])
        made[0].hold("to_host")  # two tiles are on their way, all others wait
        loss.backward()
        made[0].release("to_host")
        optimizer.step()
        optimizer.synchronize()
    # Two tiles had slots and one waited for the next: which ones, the threads' pace says.
    layers = [name for name in stepped[3:] if name.startswith("layers")]
    assert layers == sorted(layers)
    assert {"layers.1", "layers.2"} <= set(layers)


# Bits


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"max_grad_norm": 1.6}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_losses_norms_and_state_are_those_of_the_plain_step(
    monkeypatch: pytest.MonkeyPatch, mode: str, options: dict[str, Any]
) -> None:
    expected = run(5, mode=mode, overlap=False, **options)
    use_lanes(monkeypatch, delay=slow_weights)
    actual = run(5, mode=mode, **options)
    assert actual[:2] == expected[:2]
    assert_same_snapshot(actual[2], expected[2])


def test_small_rings_and_random_delays_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(8, overlap=False)
    use_lanes(monkeypatch, delay=random_delays(21))
    actual = run(8, config={"ring_slots": 2, "backlog_tiles": 1, "tile_numel": 1024})
    assert actual[:2] == expected[:2]
    assert_same_snapshot(actual[2], expected[2])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_without_the_gates_a_forward_sees_old_weights(
    monkeypatch: pytest.MonkeyPatch, mode: str, gated: bool
) -> None:
    """No new weight can arrive before the first gate is reached."""
    made = use_lanes(monkeypatch)
    model = make_decoder()
    offload.cast_compute_weights(model)
    ids = batches(1)[0]

    def release() -> None:
        for lanes in made:
            lanes.release("to_device")

    def wait(self: Mark, *, on_host: bool) -> None:
        if gated:
            release()
            original(self, on_host=on_host)

    original = Mark.wait
    with overlapped(model, mode=mode, config={"device_budget": 0}) as optimizer:
        train(model, optimizer, batches(2))
        loss = loss_of(model, ids)
        optimizer.synchronize()
        for lanes in made:
            lanes.hold("to_device")
        loss.backward()
        optimizer.step()
        monkeypatch.setattr(Mark, "wait", wait)
        first = loss_of(model, ids).item()
        release()
        optimizer.synchronize()
        complete = loss_of(model, ids).item()
    assert (first == complete) is gated


# What waits for what


def test_step_returns_while_weights_are_on_their_way_and_each_module_waits_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = use_lanes(monkeypatch)
    model = make_decoder()
    offload.cast_compute_weights(model)
    waited: list[tuple[str, ...]] = []
    with overlapped(model) as optimizer:
        train(model, optimizer, batches(2))
        [lanes] = made
        loss_of(model, batches(1)[0]).backward()
        optimizer.synchronize()  # backward's weights have arrived; those of the next one will not
        optimizer.step()
        loss = loss_of(model, batches(1)[0])
        lanes.hold("to_device")
        loss.backward()
        optimizer.step()
        assert flight_of(optimizer) is not None
        names = {chunk.index: chunk.name for chunk in optimizer._engine.chunks}
        original = Flight.wait

        def wait(self: Flight, chunks: Any, *, on_host: bool) -> None:
            waited.append(tuple(sorted(names[index] for index in chunks)))
            lanes.release("to_device")
            original(self, chunks, on_host=on_host)

        monkeypatch.setattr(Flight, "wait", wait)
        model(batches(1)[0])
        assert waited[0] == ("misc",)  # where the model is called
        layers = [each for each in waited if each != ("misc",)]
        assert layers == [("layers.0",), ("layers.1",), ("layers.2",)]


def test_parts_of_the_model_can_be_called_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lanes(monkeypatch, delay=slow_weights)
    model = make_decoder()
    offload.cast_compute_weights(model)
    with overlapped(model) as optimizer, torch.no_grad():
        with torch.enable_grad():
            train(model, optimizer, batches(3))
        for name in ("embedding", "layers.1", "head"):
            module = model.get_submodule(name)
            inputs = (
                torch.zeros(1, 3, dtype=torch.long)
                if name == "embedding"
                else torch.zeros(1, 3, 40).bfloat16()
            )
            module(inputs)
            for parameter_name, parameter in module.named_parameters():
                assert_weight_is_rounded_master(optimizer, parameter, f"{name}.{parameter_name}")
        assert flight_of(optimizer) is not None


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "model.state_dict": lambda model, optimizer: model.state_dict(),
    "layer.state_dict": lambda model, optimizer: model.layers[2].state_dict(),
    "layer.load_state_dict": lambda model, optimizer: model.layers[2].load_state_dict(
        model.layers[2].state_dict()
    ),
    "model.load_state_dict": lambda model, optimizer: model.load_state_dict(model.state_dict()),
    "synchronize": lambda model, optimizer: optimizer.synchronize(),
    "resync": lambda model, optimizer: optimizer.resync(),
    "last_step": lambda model, optimizer: optimizer.last_step,
    "add_param_group": lambda model, optimizer: _add_a_layer(model, optimizer),
    "backward": lambda model, optimizer: model.head.weight.sum().backward(),
}


def _add_a_layer(model: Any, optimizer: Any) -> None:
    model.more = nn.Linear(4, 4)
    optimizer.add_param_group({"params": [(f"more.{n}", p) for n, p in model.more.named_parameters()]})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_whatever_reads_or_writes_state_completes_the_step_first(
    monkeypatch: pytest.MonkeyPatch, call: str, mode: str
) -> None:
    use_lanes(monkeypatch, delay=slow_weights)
    model = make_decoder()
    offload.cast_compute_weights(model)
    with overlapped(model, mode=mode) as optimizer:
        train(model, optimizer, batches(3))
        assert flight_of(optimizer) is not None  # zero_grad() has nothing to drop, and lets it fly
        CALLS[call](model, optimizer)
        assert flight_of(optimizer) is None
        for name, parameter in model.named_parameters():
            if call != "backward":
                assert_weight_is_rounded_master(optimizer, parameter, name)


@pytest.mark.parametrize("ours_is_last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_f1_a_write_while_the_update_is_under_way_is_told_from_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, ours_is_last: bool
) -> None:
    """Weight and master agree afterwards, whoever's write came last."""
    made = use_lanes(monkeypatch)
    model = make_decoder()
    offload.cast_compute_weights(model)
    with overlapped(model, mode=mode) as optimizer:
        train(model, optimizer, batches(3))
        optimizer.synchronize()
        loss = loss_of(model, batches(1)[0])
        for lanes in made:
            lanes.hold("to_device") if ours_is_last else None
        loss.backward()
        optimizer.step()
        assert flight_of(optimizer) is not None
        if not ours_is_last:
            optimizer._engine._stepper.settle()
        with torch.no_grad():
            model.layers[1].up.weight.fill_(0.5)
        for lanes in made:
            lanes.release("to_device") if ours_is_last else None
        optimizer.synchronize()
        for name, parameter in model.named_parameters():
            assert_weight_is_rounded_master(optimizer, parameter, name)
        assert (model.layers[1].up.weight == 0.5).all() is not ours_is_last
        assert ("changed outside the optimizer" in caplog.text) is not ours_is_last


def test_without_landing_a_reader_sees_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made = use_lanes(monkeypatch)
    model = make_decoder()
    offload.cast_compute_weights(model)
    with overlapped(model) as optimizer:
        train(model, optimizer, batches(2))
        loss = loss_of(model, batches(1)[0])
        made[0].hold("to_device")
        loss.backward()
        optimizer.step()
        monkeypatch.setattr(HybridStepper, "settle", lambda self: None)
        monkeypatch.setattr(HybridStepper, "finish", lambda self: None)
        monkeypatch.setattr(HybridStepper, "end_step", lambda self, keep: None)
        optimizer.synchronize()
        name, parameter = "head.weight", model.head.weight
        with pytest.raises(AssertionError, match="rounded master"):
            assert_weight_is_rounded_master(optimizer, parameter, name)
        made[0].release("to_device")
        monkeypatch.undo()


def test_gradients_that_came_after_a_step_can_be_dropped() -> None:
    model = make_decoder()
    with overlapped(model, max_grad_norm=1e9) as optimizer:
        train(model, optimizer, batches(2))
        optimizer.synchronize()
        before = snapshot(model, optimizer)
        loss_of(model, batches(1)[0]).backward()
        optimizer.zero_grad()
        assert_same_snapshot(snapshot(model, optimizer), before)
        model.head.weight.grad = torch.ones_like(model.head.weight)
        optimizer.step()
        model.head.weight.grad = torch.ones_like(model.head.weight)
        optimizer.step()  # no forward in between
        assert optimizer.state[model.head.weight]["step"] == 4


@pytest.mark.parametrize("mode", MODES)
def test_close_ends_the_step_first(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    ends = []
    for overlap in (False, True):
        if overlap:
            use_lanes(monkeypatch, delay=slow_weights)
        model = make_decoder()
        offload.cast_compute_weights(model)
        with overlapped(model, mode=mode, overlap=overlap) as optimizer:
            train(model, optimizer, batches(3))
            assert (flight_of(optimizer) is not None) is overlap
        ends.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    assert all(torch.equal(ends[1][name], weight) for name, weight in ends[0].items())


# Sharded


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", MODES)
def test_under_fsdp_the_host_waits_before_weights_are_gathered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, one_rank: DeviceMesh, mode: str
) -> None:
    waits: list[bool] = []

    def losses(*, overlap: bool, prefetch: bool = False) -> list[float]:
        model = make_decoder().bfloat16()
        for layer in model.layers:
            layer.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))  # FSDP takes no scalars
            fully_shard(layer, mesh=one_rank)
        fully_shard(model, mesh=one_rank)
        if prefetch:
            model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
        found = []
        with overlapped(model, mode=mode, overlap=overlap) as optimizer:
            for ids in batches(4):
                loss = loss_of(model, ids)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
                assert (flight_of(optimizer) is not None) is overlap
        return found

    expected = losses(overlap=False)
    use_lanes(monkeypatch, delay=slow_weights)
    original = Mark.wait
    monkeypatch.setattr(
        Mark, "wait", lambda self, *, on_host: waits.append(on_host) or original(self, on_host=on_host)
    )
    assert losses(overlap=True) == expected
    assert waits
    assert all(waits)
    waits.clear()
    assert losses(overlap=True, prefetch=True) == expected
    assert not waits
    assert caplog.text.count("prefetches weights in forward explicitly") == 1


# What cannot be guarded


class Careless(Decoder):
    """Calls its layers' ``forward`` itself: hooks do not see that."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer.forward(x)
        return self.head(self.norm(x))


def test_a_forward_past_the_modules_raises_and_ends_the_overlap() -> None:
    model = Careless()
    offload.cast_compute_weights(model)
    with overlapped(model) as optimizer:
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        with pytest.raises(StateError, match=r"did not call the modules of layers\.0.*run it again"):
            model(batches(1)[0])
        for name, parameter in model.named_parameters():
            assert_weight_is_rounded_master(optimizer, parameter, name)
        train(model, optimizer, batches(3))
        assert flight_of(optimizer) is None
        assert optimizer.last_step.step == 4


def test_refusals() -> None:
    model, other = make_decoder(), make_decoder()
    with pytest.raises(ConfigError, match="needs model="):
        adamw(model, overlap_forward=True)
    with pytest.raises(ConfigError, match=r"mode='chunked-stream'.*nothing to overlap"):
        overlapped(model, mode="chunked-stream")
    with pytest.raises(ConfigError, match=r"is not a parameter of model="):
        overlapped(model, model=other)
    model.layers[1].compile()
    with pytest.raises(ConfigError, match=r"layers\.1 is compiled"):
        overlapped(model)


def test_hooks_go_with_the_optimizer() -> None:
    model = make_decoder()
    optimizer = overlapped(model)
    train(model, optimizer, batches(2))
    optimizer.close()
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._state_dict_pre_hooks
    loss_of(model, batches(1)[0]).backward()


@pytest.mark.parametrize("limit", [0.5, 1e9], ids=["clipped", "committed"])
@pytest.mark.parametrize("shadowed", [0.5, 1.0])
def test_a_speculative_step_overlaps_the_forward(
    monkeypatch: pytest.MonkeyPatch, limit: float, shadowed: float
) -> None:
    """What waits for the verdict, or is updated again after it, is awaited as it was written last."""
    model = make_decoder()
    offload.cast_compute_weights(model, keep_fp32="norm")
    options: dict[str, Any] = {"clip": "speculate", "max_grad_norm": limit}
    with overlapped(model, overlap=False, **options) as optimizer:
        made = optimizer.plan
    if shadowed < 1.0:
        options["config"] = {"host_budget": int(made.host_bytes - (1.0 - shadowed) * made.shadow_bytes)}
    expected = run(5, overlap=False, **options)
    use_lanes(monkeypatch, delay=slow_weights)
    actual = run(5, **options)
    assert actual[:2] == expected[:2]
    assert_same_snapshot(actual[2], expected[2])


def test_loading_behind_a_committed_step_does_not_roll_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lanes(monkeypatch, delay=slow_weights)
    model = make_decoder()
    offload.cast_compute_weights(model)
    with overlapped(model, clip="speculate", max_grad_norm=1e9) as optimizer:
        train(model, optimizer, batches(2))
        saved = optimizer.state_dict()
        train(model, optimizer, batches(1))
        assert flight_of(optimizer) is not None
        optimizer.load_state_dict(saved)
        assert optimizer.last_step.speculated
        assert not optimizer.last_step.rolled_back


def test_a_deep_copy_of_the_model_is_free_of_the_optimizer() -> None:
    """As an average of weights is made."""
    model = make_decoder()
    offload.cast_compute_weights(model)
    with overlapped(model) as optimizer:
        train(model, optimizer, batches(2))
        optimizer.synchronize()
        average = copy.deepcopy(model)
        loss_of(model, batches(1)[0]).backward()
        assert torch.isfinite(
            loss_of(average, batches(1)[0])
        )  # in mid-step, when the model itself would raise
        optimizer.step()
        flight = flight_of(optimizer)
        assert flight is not None
        loss_of(average, batches(1)[0])
        assert not flight.passed
        loss_of(model, batches(1)[0])
        assert not flight.missed


# Failures


def test_an_error_of_the_worker_comes_up_at_the_next_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    made = use_lanes(monkeypatch)
    model = make_decoder()
    offload.cast_compute_weights(model)
    with overlapped(model) as optimizer:
        train(model, optimizer, batches(2))
        loss = loss_of(model, batches(1)[0])
        made[0].hold("to_host")
        loss.backward()
        optimizer.step()  # no kernel has run
        backend = optimizer._engine._stepper._host.backend

        def update(*arguments: Any) -> None:
            raise RuntimeError("a kernel failed")

        monkeypatch.setattr(backend, "update", update)
        made[0].release("to_host")
        with pytest.raises(WorkerError, match="a kernel failed"):
            model(batches(1)[0])
        for call in (optimizer.step, optimizer.state_dict, optimizer.synchronize):
            with pytest.raises(WorkerError, match="a kernel failed"):
                call()


# Room for gradients that wait


def test_a_dropped_step_says_nothing_about_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward may have been cut short; the one after it is observed."""
    in_use = iter(range(10**6, 0, -1))
    monkeypatch.setattr(
        assembly,
        "_make_room",
        lambda parts, issuer=None: BackwardRoom(lambda: next(in_use), [Queue(parts.worker, 1, 1.0)]),
    )
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, mode="hybrid", overlap_forward=True, model=model) as optimizer:
        room = optimizer._engine._stepper._room
        loss_of(model, batches(1)[0]).backward()
        optimizer.zero_grad()
        assert room._room is None
        train(model, optimizer, batches(1))
        optimizer.synchronize()
        assert room._room


def test_room_is_given_by_the_largest_job_of_the_link() -> None:
    """A chunk is one parameter where that is larger than a chunk may be, and waits as one job."""

    def unit_of(numel: int, host_numel: int = 0) -> int:
        chunk = ChunkPlan("a", numel, Placement.STREAM, host_numel)
        return assembly._streamed_numel(SimpleNamespace(chunks=(chunk,)))  # type: ignore[arg-type]

    most = assembly.HYBRID_CHUNK_NUMEL
    assert [unit_of(1024), unit_of(7 * most), unit_of(7 * most, most)] == [most, 7 * most, most]


# Gates that must not be lost, and must be met


def test_a_group_whose_parameters_no_forward_waits_for_is_refused_and_the_gates_stay() -> None:
    """They were taken away first, and from then on forwards read weights that were still on their way."""
    model, other = make_decoder(), nn.Parameter(torch.ones(3))
    with overlapped(model) as optimizer:
        train(model, optimizer, batches(2))
        chunks = len(optimizer._engine.chunks)
        with pytest.raises(ConfigError, match="not a parameter of model="):
            optimizer.add_param_group({"params": [("other", other)]})
        assert len(optimizer._engine.chunks) == chunks
        train(model, optimizer, batches(1))
        flight = flight_of(optimizer)
        assert flight is not None
        assert flight.missed
        model(batches(1)[0])
        assert not flight.missed
        other.sum().backward()
        assert other.grad is not None  # nobody takes it


class _ByHand(nn.Module):
    """A layer that is no module with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return x


class _Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("make", [_ByHand, _Tied])
def test_weights_of_a_module_that_is_never_called_are_awaited_around_it(make: type[nn.Module]) -> None:
    ends = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model = make()
        with overlapped(model, overlap=overlap) as optimizer:
            for _ in range(4):
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            ends.append(snapshot(model, optimizer))
    assert_same_snapshot(*ends)


def test_chunks_of_a_group_that_failed_half_way_have_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has them: they are under way in each step, and a forward has to wait for them."""
    model = make_decoder()
    first = [(name, p) for name, p in model.named_parameters() if not name.startswith("layers.2")]
    late = [(name, p) for name, p in model.named_parameters() if name.startswith("layers.2")]
    with offload.AdamW(first, mode="wavefront", overlap_forward=True, model=model) as optimizer:
        monkeypatch.setattr(restored_state, "_take_waiting", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.add_param_group({"params": late})
        monkeypatch.undo()
        for added in (False, True):
            if added:
                optimizer.add_param_group({"params": late})
            train(model, optimizer, batches(2))
            model.zero_grad()
        assert [int(optimizer.state[p]["step"]) for _, p in (first[0], late[0])] == [4, 2]


def _interrupted(*arguments: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("reason", [offload.DeadlineError("took no job"), OSError("the link is down")])
def test_a_mark_says_why_its_weights_will_not_come(reason: Exception) -> None:
    """Also where the reason is a deadline, but not that of this wait."""
    worker = Worker("failed", depth=1, timeout_s=60.0)
    worker.fail(reason)
    signal: Future[Any] = Future()
    signal.set_exception(reason)
    with pytest.raises(WorkerError, match=str(reason)):
        Mark([signal], worker, 60.0).wait(on_host=True)
    with pytest.raises(offload.DeadlineError, match=r"not ready within 0\.01 s"):
        Mark([Future()], worker, 0.01).wait(on_host=True)
    worker.close()
