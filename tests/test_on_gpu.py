"""The same bits on a GPU: every mode against fused torch on the CPU, streams, races and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offload
from offload.config import MODES
from offload.transfer.cuda import CudaTransport
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
    snapshot,
    train,
)

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000
"""Of `torch.cuda._sleep`: about 10 ms, far longer than anything here takes by itself."""


def run(steps: int, **options: Any) -> dict[str, dict[str, torch.Tensor]]:
    model = make_decoder(device="cuda")
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    recorder = Recorder(model)
    reference = Reference({name: masters.get(name, p.detach().cpu()) for name, p in model.named_parameters()})
    with adamw(model, masters=masters, **options) as optimizer:
        data = batches(steps, device="cuda")
        parts = options.get("accumulation_steps", 1)
        train(model, optimizer, data, recorder=recorder, reference=reference, micro_batches=parts)
        assert_matches_reference(model, optimizer, reference)
        return snapshot(model, optimizer)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("mode", ["resident", "wavefront"])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.5, 0.95), (0.3, 0.999)])
def test_bits_of_fused_torch(mode: str, betas: tuple[float, float], accumulation_steps: int) -> None:
    run(20, mode=mode, betas=betas, accumulation_steps=accumulation_steps)


@pytest.mark.parametrize("mode", ["resident", "wavefront"])
def test_clipping_and_skipping_measure_first(mode: str) -> None:
    model = make_decoder(device="cuda")
    offload.cast_compute_weights(model)
    with adamw(model, mode=mode, max_grad_norm=0.5, nonfinite="skip") as optimizer:
        data = batches(4, device="cuda")
        train(model, optimizer, data)
        assert optimizer.last_step.clipped
        before = snapshot(model, optimizer)
        loss_of(model, data[0]).backward()
        next(model.parameters()).grad = torch.full_like(next(model.parameters()), float("inf"))
        optimizer.step()
        assert optimizer.last_step.skipped
        assert_same_snapshot(snapshot(model, optimizer), before)


@pytest.mark.parametrize("pinned_budget", [None, 300_000])  # the second is enough for the rings alone
def test_speculation_gives_the_bits_of_deferral(pinned_budget: int | None) -> None:
    """Norms on both sides of the limit; gradients straight into a pinned slab, or through the ring."""

    def end(clip: str) -> tuple[Any, list[offload.StepReport]]:
        model = make_decoder(device="cuda")
        masters = offload.cast_compute_weights(model, keep_fp32="norm")
        config = {"pinned_budget": None if clip == "defer" else pinned_budget, "ring_slots": 8}
        reports = []
        with adamw(model, masters=masters, clip=clip, max_grad_norm=1.0, config=config) as optimizer:
            for index, ids in enumerate(batches(20, device="cuda")):
                (loss_of(model, ids) * (0.05, 8.0, 0.1)[index % 3]).backward()
                optimizer.step()
                reports.append(optimizer.last_step)
            return snapshot(model, optimizer), reports

    expected, deferred = end("defer")
    actual, speculated = end("speculate")
    assert_same_snapshot(actual, expected)
    assert [r.grad_norm for r in speculated] == [r.grad_norm for r in deferred]
    assert {r.rolled_back for r in speculated[1:]} == {True, False}
    assert all(r.early_tiles > 0 for r in speculated[1:] if not r.rolled_back)


@pytest.mark.parametrize("slow", ["to_host", "to_device"])
def test_f20_a_speculative_step_is_rolled_back(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """The last gradient is bad; copies in one direction are behind a GPU delay."""
    model = make_decoder(device="cuda")
    masters = offload.cast_compute_weights(model)
    with adamw(model, masters=masters, clip="speculate", nonfinite="skip") as optimizer:
        train(model, optimizer, batches(3, device="cuda"))
        before = snapshot(model, optimizer)
        issue = getattr(CudaTransport, f"issue_{slow}")

        def delayed(self: CudaTransport, *arguments: Any, **options: Any) -> Any:
            with torch.cuda.stream(getattr(self, f"_{slow}").stream):
                torch.cuda._sleep(CYCLES // 10)
            return issue(self, *arguments, **options)

        monkeypatch.setattr(CudaTransport, f"issue_{slow}", delayed)

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient[-1, -1] = float("nan")
            return gradient

        handle = model.embedding.weight.register_hook(spoil)
        loss_of(model, batches(1, device="cuda")[0]).backward()
        handle.remove()
        optimizer.step()
        assert optimizer.last_step.rolled_back
        assert_same_snapshot(snapshot(model, optimizer), before)


class Delayed(torch.autograd.Function):
    """Keeps the GPU busy in backward just before the gradients of what follows are computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        return grads[0]


def test_f13_backward_in_a_side_stream_behind_gpu_delays() -> None:
    def train_in(stream: torch.cuda.Stream | None) -> dict[str, dict[str, torch.Tensor]]:
        model = make_decoder(device="cuda")
        offload.cast_compute_weights(model)
        if stream is not None:
            for layer in model.layers:
                layer.register_forward_hook(lambda module, inputs, output: Delayed.apply(output))
        with adamw(model, config={"ring_slots": 2}) as optimizer:
            with torch.cuda.stream(stream):
                for ids in batches(5, device="cuda"):
                    if stream is None:
                        torch.cuda.synchronize()
                    loss_of(model, ids).backward()
                    if stream is None:
                        torch.cuda.synchronize()
                    optimizer.step()
            torch.cuda.synchronize()
            return snapshot(model, optimizer)

    expected = train_in(None)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    assert_same_snapshot(train_in(side), expected)


def test_f14_everybody_sees_the_new_weights_after_step() -> None:
    model = make_decoder(device="cuda")
    offload.cast_compute_weights(model)
    with adamw(model) as optimizer:
        for ids in batches(3, device="cuda"):
            loss_of(model, ids).backward()
            torch.cuda._sleep(CYCLES)
            optimizer.step()
            with torch.cuda.stream(torch.cuda.Stream()):
                elsewhere = {name: p.detach().cpu() for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                master = optimizer.state[parameter]["master"]
                assert torch.equal(elsewhere[name], master.to(torch.bfloat16)), name


def test_f15_gradient_memory_is_not_reused_under_a_copy() -> None:
    """Poison every block that the allocator hands out again during backward."""
    expected = run(6)

    class Poisoning(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            for numel in (1600, 4800, 3880, 5000):
                torch.full((numel,), float("nan"), dtype=torch.bfloat16, device="cuda")
            return grads[0]

    model = make_decoder(device="cuda")
    masters = offload.cast_compute_weights(model, keep_fp32="norm")
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: Poisoning.apply(output))
    with adamw(model, masters=masters) as optimizer:
        train(model, optimizer, batches(6, device="cuda"))
        assert_same_snapshot(snapshot(model, optimizer), expected)


def test_pinned_memory_is_the_rings_alone_and_goes_with_close() -> None:
    before = pinned_bytes()
    model = make_decoder(device="cuda")
    optimizer = adamw(model, config={"ring_slots": 4})
    assert pinned_bytes() - before == 2 * 4 * 4096 * 4
    optimizer.close()
    assert pinned_bytes() == before


def test_gradients_leave_the_device_in_backward() -> None:
    """After backward the device holds weights, and no gradients: they are on the host or on their way."""
    model = make_decoder(device="cuda", width=512, layers=4)
    offload.cast_compute_weights(model)
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    with adamw(model, config={"tile_numel": 65536}) as optimizer:
        train(model, optimizer, batches(2, device="cuda"))  # libraries take their workspaces
        for ids in batches(3, device="cuda"):
            loss = loss_of(model, ids)
            del ids
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss.backward()
            optimizer.synchronize()
            assert torch.cuda.memory_allocated() - before < 0.1 * gradient_bytes
            optimizer.step()


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "auto"])
def test_f31_saving_and_loading_take_no_device_memory(mode: str) -> None:
    """Not even for a moment: more than a few tiles would be a copy of the state."""
    model = make_decoder(device="cuda", width=256)
    offload.cast_compute_weights(model)
    with adamw(model, mode=mode, config={"tile_numel": 1024}) as optimizer:
        train(model, optimizer, batches(2, device="cuda"))
        optimizer.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        saved = optimizer.state_dict()
        assert all(
            tensor.device.type == "cpu" for state in saved["state"].values() for tensor in state.values()
        )
        optimizer.load_state_dict(saved)
        optimizer.synchronize()
        state_bytes = sum(12 * p.numel() for p in model.parameters())
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() - before < 0.25 * state_bytes


@pytest.mark.parametrize("mode", ["resident", "all-at-once", "chunked-sync", "chunked-stream"])
def test_a_device_that_hangs_meets_the_deadline(mode: str) -> None:
    """A kernel that takes seconds, and a limit of a tenth of one."""
    model = make_decoder(device="cuda")
    optimizer = adamw(model, mode=mode)
    try:
        train(
            model, optimizer, batches(2, device="cuda")
        )  # what is compiled and started takes longer than that
        stepper: Any = optimizer._engine._stepper
        if mode == "resident":
            stepper._timeout_s = 0.1
        else:
            stepper._worker.timeout_s = 0.1
        loss_of(model, batches(1, device="cuda")[0]).backward()
        torch.cuda._sleep(200 * CYCLES)
        with pytest.raises(offload.DeadlineError, match=r"timeout_s=0\.1"):
            optimizer.step()
        with pytest.raises((offload.WorkerError, offload.MidStepError)):
            optimizer.step()
    finally:
        torch.cuda.synchronize()
        optimizer.close()
