"""State on the host, stepped on the device: the bits of fused torch in all three modes, whatever the timing.

Without a GPU the device buffers are plain memory and the host kernels compute; orders, waits and failures are the same.
Each order that a stream's wait keeps has a control that shows wrong bits when the wait is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from offload import assembly
from offload.errors import (
    NonFiniteGradientError,
    OffloadError,
    ParameterError,
    StateError,
    WorkerError,
)
from offload.schedule.device_slots import BUFFER_BYTES, NUM_SLOTS, FixedSlots, stream_tile_numel
from offload.schedule.policy import Policy
from offload.transfer.host import LaneTransport
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

CHUNKED = ["all-at-once", "chunked-sync", "chunked-stream"]
MODES = ["resident", *CHUNKED, "wavefront"]
MIB = 2**20


def run(
    steps: int, *, keep_fp32: str | None = "norm", with_reference: bool = True, **options: Any
) -> dict[str, dict[str, torch.Tensor]]:
    """Train beside the reference, compare every bit, and return the end."""
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32=keep_fp32)
    recorder = Recorder(model)
    reference = Reference({name: masters.get(name, p.detach()) for name, p in model.named_parameters()})
    with adamw(model, masters=masters, **{"mode": "chunked-stream", **options}) as optimizer:
        parts = options.get("accumulation_steps", 1)
        kept = (recorder, reference) if with_reference else (None, None)
        train(model, optimizer, batches(steps), recorder=kept[0], reference=kept[1], micro_batches=parts)
        if with_reference:
            assert_matches_reference(model, optimizer, reference)
        return snapshot(model, optimizer)


# Bits


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("mode", CHUNKED)
def test_the_bits_of_fused_torch(mode: str, accumulation_steps: int) -> None:
    run(12, mode=mode, accumulation_steps=accumulation_steps)


@pytest.mark.parametrize("mode", CHUNKED)
def test_on_the_torch_backend(mode: str) -> None:
    run(4, mode=mode, backend="torch")


@pytest.mark.parametrize("keep_fp32", [None, ""])
def test_all_weights_bf16_and_all_fp32(keep_fp32: str | None) -> None:
    run(6, keep_fp32=keep_fp32)


@pytest.mark.parametrize("tile_numel", [1024, 4096, MIB])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_f15_tiles_and_delays_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, tile_numel: int, accumulation_steps: int
) -> None:
    use_lanes(monkeypatch, delay=random_delays(tile_numel), poison={"to_host", "to_device"})
    run(6, accumulation_steps=accumulation_steps, config={"tile_numel": tile_numel})


@pytest.mark.parametrize("betas", [(0.5, 0.95), (0.3, 0.999)])
def test_other_betas_and_denormals(betas: tuple[float, float]) -> None:
    run(6, betas=betas)


def test_denormals_are_kept_on_request() -> None:
    model = make_decoder()
    recorder = Recorder(model)
    reference = Reference({name: p.detach() for name, p in model.named_parameters()}, flush=False)
    with adamw(model, mode="chunked-stream", flush_denormals=False) as optimizer:
        train(model, optimizer, batches(4), recorder=recorder, reference=reference)
        assert_matches_reference(model, optimizer, reference)


def test_sign_sgd_gives_the_same_bits_in_every_mode() -> None:
    ends = []
    for mode in MODES:
        model = make_decoder()
        masters = offload.cast_compute_weights(model, keep_fp32="norm")
        config = offload.OffloadConfig(tile_numel=4096)
        with offload.SignSGD(
            model.named_parameters(), lr=1e-3, weight_decay=0.1, masters=masters, mode=mode, config=config
        ) as optimizer:
            train(model, optimizer, batches(4))
            ends.append(snapshot(model, optimizer))
    for end in ends[1:]:
        assert_same_snapshot(end, ends[0])


# Clipping, skipping, accumulation


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_clipping_gives_the_same_bits_in_every_mode(accumulation_steps: int) -> None:
    def end(mode: str) -> tuple[dict[str, dict[str, torch.Tensor]], list[float], list[bool]]:
        model = make_decoder()
        masters = offload.cast_compute_weights(model, keep_fp32="norm")
        norms, clipped = [], []
        with adamw(
            model,
            masters=masters,
            mode=mode,
            max_grad_norm=1.6 * accumulation_steps,
            accumulation_steps=accumulation_steps,
        ) as optimizer:
            for ids in batches(6):
                train(model, optimizer, [ids], micro_batches=accumulation_steps)
                norms.append(optimizer.last_step.grad_norm)
                clipped.append(optimizer.last_step.clipped)
            return snapshot(model, optimizer), norms, clipped

    expected, norms, clipped = end("wavefront")
    assert True in clipped
    for mode in CHUNKED:
        actual, *rest = end(mode)
        assert rest == [norms, clipped]
        assert_same_snapshot(actual, expected)


@pytest.mark.parametrize("mode", CHUNKED)
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_f20_an_inf_in_the_last_gradient_changes_nothing(mode: str, nonfinite: str) -> None:
    model = make_decoder()
    offload.cast_compute_weights(model, keep_fp32="norm")
    with adamw(model, mode=mode, nonfinite=nonfinite) as optimizer:
        train(model, optimizer, batches(3))
        before = snapshot(model, optimizer)
        loss_of(model, batches(1)[0]).backward()
        bad = torch.zeros_like(model.embedding.weight)
        bad[-1, -1] = float("inf")
        model.embedding.weight.grad = bad
        if nonfinite == "raise":
            with pytest.raises(NonFiniteGradientError, match=r"embedding\.weight"):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.last_step.skipped
        assert_same_snapshot(snapshot(model, optimizer), before)
        optimizer.zero_grad()
        train(model, optimizer, batches(1))
        assert optimizer.state[model.embedding.weight]["step"] == 4


@pytest.mark.parametrize("mode", CHUNKED)
def test_f6_a_parameter_without_gradient_stays_as_it_is(mode: str) -> None:
    used, unused = (torch.nn.Parameter(torch.ones(3000, dtype=torch.bfloat16)) for _ in range(2))
    with adamw([used, unused], mode=mode, lr=0.1, weight_decay=0.5) as optimizer:
        used.grad = torch.ones_like(used)
        optimizer.step()
        assert torch.equal(unused, torch.ones_like(unused))
        assert optimizer.state[unused]["step"] == 0
        assert optimizer.state[used]["step"] == 1
        assert not torch.equal(used, torch.ones_like(used))


def test_zero_grad_drops_what_is_held_and_accumulated() -> None:
    model = make_decoder()
    with adamw(model, mode="chunked-stream", accumulation_steps=2) as optimizer:
        train(model, optimizer, batches(2), micro_batches=2)
        before = snapshot(model, optimizer)
        loss_of(model, batches(1)[0]).backward()
        loss_of(model, batches(1)[0]).backward()
        optimizer.zero_grad()
        with pytest.raises(OffloadError):
            optimizer.step()
        assert_same_snapshot(snapshot(model, optimizer), before)


# State and weights


@pytest.mark.parametrize("keep_fp32", ["norm", ""])
def test_checkpoints_are_interchangeable_between_modes(keep_fp32: str) -> None:
    """Six steps in one go, and six steps each in another mode, resumed from its predecessor's state dict."""

    def start() -> tuple[torch.nn.Module, Any]:
        model = make_decoder()
        return model, offload.cast_compute_weights(model, keep_fp32=keep_fp32)

    data = batches(6)
    model, masters = start()
    with adamw(model, mode="wavefront", masters=masters) as optimizer:
        train(model, optimizer, data)
        expected = snapshot(model, optimizer)
    model, masters = start()
    saved: dict[str, Any] | None = None
    for ids, mode in zip(data, [*CHUNKED, "wavefront", *CHUNKED[:2]], strict=True):
        with adamw(model, mode=mode, masters=masters if saved is None else None) as optimizer:
            if saved is not None:
                optimizer.load_state_dict(saved)
            train(model, optimizer, [ids])
            saved = optimizer.state_dict()
            end = snapshot(model, optimizer)
    assert_same_snapshot(end, expected)


def test_f16_state_read_straight_after_a_step_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lanes(monkeypatch, delay=random_delays(3, most_s=5e-3))
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, mode="chunked-stream") as optimizer:
        for ids in batches(4):
            loss_of(model, ids).backward()
            optimizer.step()
            first = optimizer.state_dict()["state"]
            optimizer.synchronize()
            second = optimizer.state_dict()["state"]
            for index, entry in first.items():
                assert all(torch.equal(tensor, second[index][name]) for name, tensor in entry.items())


def test_f1_weights_written_behind_the_back_are_taken_up() -> None:
    model = make_decoder()
    offload.cast_compute_weights(model, keep_fp32="norm")
    with adamw(model, mode="chunked-stream") as optimizer:
        train(model, optimizer, batches(2))
        other = make_decoder(seed=1)
        offload.cast_compute_weights(other, keep_fp32="norm")
        model.load_state_dict(other.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        for name, parameter in other.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name


def test_masters_of_other_weights_are_refused() -> None:
    for keep_fp32 in (None, ""):
        model = make_decoder()
        masters = offload.cast_compute_weights(model, keep_fp32=keep_fp32)
        if keep_fp32 is not None:
            masters.add("head.weight", model.head.weight, model.head.weight.detach() + 1)
        with torch.no_grad():
            model.head.weight += 1 if keep_fp32 is None else 0
        with pytest.raises(ParameterError, match=r"head\.weight"):
            adamw(model, mode="chunked-stream", masters=masters)


def test_an_fp32_weight_is_its_own_master() -> None:
    """No second copy of it anywhere: 8 bytes per element on the host, not 12, and 8 each way per step."""
    numel = 10 * 1024
    weight = torch.nn.Parameter(torch.ones(numel))
    with adamw([weight], mode="chunked-stream") as optimizer:
        assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.host_bytes == 8 * numel + 9 * numel // 1024
        weight.grad = torch.ones(numel)
        optimizer.step()
        assert optimizer.last_step.bytes_to_device == 8 * numel
        assert optimizer.last_step.bytes_to_host == 8 * numel + 9 * numel // 1024


def test_parameters_that_come_later_are_stepped_too() -> None:
    first, second = (
        torch.nn.Parameter(torch.ones(5000, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    with adamw([first], mode="chunked-stream") as optimizer:
        first.grad = torch.ones_like(first)
        optimizer.step()
        optimizer.add_param_group({"params": [second]})
        for parameter in (first, second):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer.state[first]["step"] == 2
        assert optimizer.state[second]["step"] == 1
        assert torch.equal(second, optimizer.state[second]["master"].bfloat16())


def test_f33_strides_are_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(48, 130, generator=generator)
    ends = []
    for mode in ("wavefront", "chunked-stream"):
        weight = torch.nn.Parameter(values.t().to(torch.bfloat16))
        with adamw([weight], mode=mode) as optimizer:
            for _ in range(3):
                weight.grad = torch.ones(130, 48, dtype=torch.bfloat16)
                optimizer.step()
            assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
            ends.append(weight.detach().clone())
    assert torch.equal(*ends)


# Device buffers


@pytest.mark.parametrize("num_arrays", range(5))
def test_device_buffers_stay_within_their_bound(num_arrays: int) -> None:
    numel = stream_tile_numel(2**40, num_arrays)
    assert NUM_SLOTS * 4 * num_arrays * numel <= BUFFER_BYTES
    assert stream_tile_numel(1024, num_arrays) == 1024
    assert numel % 1024 == 0


def test_buffers_do_not_depend_on_the_number_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FixedSlots] = []
    original = FixedSlots.__init__

    def note(self: FixedSlots, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)

    monkeypatch.setattr(FixedSlots, "__init__", note)
    weight = torch.nn.Parameter(torch.ones(40 * 4096 + 7, dtype=torch.bfloat16))
    with adamw([weight], mode="chunked-stream") as optimizer:
        [slots] = made
        before = [array.data_ptr() for slot in slots._slots for array in slot.state]
        assert len(before) == 3 * NUM_SLOTS
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            assert optimizer.last_step.late_tiles == 41
        assert [array.data_ptr() for slot in slots._slots for array in slot.state] == before


# Inside backward, as a mode that mixes placements will have it


@pytest.mark.parametrize("mode", ["chunked-sync", "chunked-stream"])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_tiles_can_be_stepped_inside_backward(
    monkeypatch: pytest.MonkeyPatch, mode: str, accumulation_steps: int
) -> None:
    use_lanes(monkeypatch, delay=random_delays(11), poison={"to_host", "to_device"})
    reports = []

    def early(**options: Any) -> Policy:
        reports.append(options)
        return Policy(**{**options, "early": True})

    monkeypatch.setattr(assembly, "Policy", early)
    run(8, mode=mode, accumulation_steps=accumulation_steps, config={"backlog_tiles": 2})
    assert reports


# Waits: each one is needed


class WithoutWaitOnStream(LaneTransport):
    """Work does not wait for its tile."""

    def wait_on_stream(self, transfer: Any) -> None:
        return


class WithoutAfter(LaneTransport):
    """A tile comes in although the one before has not left its slot."""

    def issue_to_device(self, copies: Any, after: Any) -> Any:
        return super().issue_to_device(copies, ())


class WithoutWait(LaneTransport):
    """``finish`` does not wait for the last tiles to leave."""

    def wait(self, transfer: Any) -> None:
        return


def slow(lane_name: str) -> Callable[[str, int], float]:
    return lambda lane, index: 2e-3 if lane == lane_name else 0.0


@pytest.mark.parametrize(
    ("transport", "lane"),
    [(WithoutWaitOnStream, "to_device"), (WithoutAfter, "to_host"), (WithoutWait, "to_host")],
)
def test_without_a_wait_bits_are_wrong(
    monkeypatch: pytest.MonkeyPatch, transport: type[LaneTransport], lane: str
) -> None:
    def make(kind: type[LaneTransport]) -> None:
        monkeypatch.setattr(assembly, "make_transport", lambda device, config: kind(device, delay=slow(lane)))

    make(LaneTransport)
    run(3)
    make(transport)
    with pytest.raises(AssertionError):
        run(3)


# Failures


def failing(lane: str, when: list[bool]) -> Callable[[str, int], BaseException | None]:
    def fail(name: str, index: int) -> BaseException | None:
        return OSError("the link is down") if name == lane and when else None

    return fail


@pytest.mark.parametrize("lane", ["to_device", "to_host"])
def test_a_failure_in_mid_step_is_final_and_says_so(monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    """The second tile of the third step fails: the first one has been stepped by then."""
    count = {"to_device": 0, "to_host": 0}
    armed: list[bool] = []

    def fail(name: str, index: int) -> BaseException | None:
        if armed and name == lane:
            count[name] += 1
            if count[name] == 2:
                return OSError("the link is down")
        return None

    use_lanes(monkeypatch, fail=fail)
    model = make_decoder()
    with adamw(model, mode="chunked-stream") as optimizer:
        train(model, optimizer, batches(2))
        loss_of(model, batches(1)[0]).backward()
        armed.append(True)
        with pytest.raises(WorkerError, match="part old, part new") as caught:
            optimizer.step()
        assert isinstance(caught.value.__cause__, OSError)
        for call in (optimizer.step, optimizer.state_dict, optimizer.synchronize):
            with pytest.raises(WorkerError, match="the link is down"):
                call()


def test_a_failure_before_the_first_tile_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(4, with_reference=False)
    broken: list[bool] = []
    use_lanes(monkeypatch, fail=failing("to_device", broken))
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    with adamw(model, mode="chunked-stream", masters=masters) as optimizer:
        train(model, optimizer, batches(3))
        before = snapshot(model, optimizer)
        loss_of(model, batches(4)[3]).backward()
        broken.append(True)
        with pytest.raises(StateError, match=r"nothing was changed .* call step\(\) again"):
            optimizer.step()
        assert_same_snapshot(snapshot(model, optimizer), before)
        broken.clear()
        optimizer.step()
        assert_same_snapshot(snapshot(model, optimizer), expected)


def test_a_failing_kernel_leaves_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_decoder()
    with adamw(model, mode="chunked-sync") as optimizer:
        train(model, optimizer, batches(1))
        updates = []

        def update(self: Any, tile: Any, row: Any) -> None:
            updates.append(tile)
            if len(updates) == 5:
                raise RuntimeError("launch failed")

        monkeypatch.setattr("offload.schedule.updater.HostUpdater.update", update)
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(WorkerError, match="launch failed"):
            optimizer.step()
        with pytest.raises(WorkerError):
            optimizer.state_dict()


def test_closing_twice_and_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[bool] = []
    use_lanes(monkeypatch, fail=failing("to_host", broken))
    model = make_decoder()
    optimizer = adamw(model, mode="chunked-stream")
    loss_of(model, batches(1)[0]).backward()
    broken.append(True)
    with pytest.raises(WorkerError):
        optimizer.step()
    optimizer.close()
    optimizer.close()
