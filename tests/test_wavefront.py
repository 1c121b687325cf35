"""The wavefront's bits: those of fused torch, whatever the timing, tiles, rings, threads or backend."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import offload
from offload.transfer.transport import Transfer, TransferState
from tests.training import (
    Recorder,
    Reference,
    adamw,
    assert_matches_reference,
    batches,
    make_decoder,
    random_delays,
    train,
    use_lanes,
)

BETAS = [(0.9, 0.95), (0.5, 0.95), (0.3, 0.999)]
MI = 1024 * 1024


def run(steps: int, *, keep_fp32: str | None = "norm", **options: Any) -> None:
    """Train with a scheduler beside the reference and compare every bit."""
    model = make_decoder()
    masters = offload.cast_compute_weights(model, keep_fp32=keep_fp32)
    recorder = Recorder(model)
    start = {name: masters.get(name, p.detach()) for name, p in model.named_parameters()}
    reference = Reference(start)
    with adamw(model, masters=masters, **options) as optimizer:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        losses = train(
            model, optimizer, batches(steps), recorder=recorder, reference=reference, scheduler=scheduler,
            micro_batches=options.get("accumulation_steps", 1),
        )  # fmt: skip
        assert_matches_reference(model, optimizer, reference)
        if options.get("mode") != "resident":
            assert optimizer.last_step.early_tiles > 0
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("betas", BETAS)
def test_fifty_steps_give_the_bits_of_fused_torch(betas: tuple[float, float]) -> None:
    run(50, betas=betas)


@pytest.mark.parametrize("mode", ["wavefront", "resident"])
@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_backends_and_modes_agree(backend: str, mode: str) -> None:
    run(50, backend=backend, mode=mode)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ring_slots", [2, 8])
@pytest.mark.parametrize("tile_numel", [1024, 4 * MI])
def test_tiles_rings_threads_and_delays_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, tile_numel: int, ring_slots: int, threads: int
) -> None:
    use_lanes(monkeypatch, delay=random_delays(threads + ring_slots, most_s=1e-3))
    run(12, config={"tile_numel": tile_numel, "ring_slots": ring_slots, "threads": threads})


def test_fifty_steps_under_random_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lanes(monkeypatch, delay=random_delays(5))
    run(50, config={"ring_slots": 2, "backlog_tiles": 1})


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_the_thread_that_runs_kernels_destroys_no_gradient(
    monkeypatch: pytest.MonkeyPatch, accumulation_steps: int
) -> None:
    """Destroying a tensor gives the interpreter's lock away, and the next kernel waits until it comes back."""
    threads: list[str] = []
    finish = Transfer.finish

    def note(transfer: Transfer) -> None:
        if transfer.num_bytes and transfer.state is TransferState.ISSUED:
            threads.append(threading.current_thread().name)
        finish(transfer)

    use_lanes(monkeypatch)
    monkeypatch.setattr(Transfer, "finish", note)
    run(3, accumulation_steps=accumulation_steps)
    assert any(name.endswith("copier") for name in threads)
    assert not any(name.endswith("worker") for name in threads)


@pytest.mark.parametrize("mode", ["wavefront", "resident"])
def test_accumulation_is_exact(mode: str) -> None:
    run(10, accumulation_steps=4, mode=mode)


def test_denormals_are_kept_on_request() -> None:
    run(5, flush_denormals=False)


def test_all_weights_bf16() -> None:
    run(10, keep_fp32=None)
