"""Hybrids under FSDP2: each rank places its own shards, and all end with the bits of a reference on whole tensors."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import offload
from offload import assembly
from offload.schedule.flight import Mark
from offload.schedule.hybrid_plan import MAX_SLOTS
from offload.schedule.mode_costs import Placement
from offload.transfer.host import LaneTransport
from tests.distributed.ranks import Ranks
from tests.distributed.training import (
    assert_equal,
    optimizer_over,
    poisoned,
    sharded_decoder,
    state_bits,
    train_beside_reference,
)
from tests.training import Recorder, batches, loss_of

CHUNK = 2048
"""Elements of a hybrid's chunks, and from which on a parameter is divided: shards of the embedding are above it."""

BUFFERS = MAX_SLOTS * 12 * 1024
"""Bytes of a hybrid's device buffers, of tiles as small as `optimizer_over` has them."""

TIED = {"vocabulary": 397, "tied": True}
"""The embedding is the head, too: the parameter whose gradient is complete last, on each rank some of the rows."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the first rank that compiles a kernel leaves it for the others."""
    return str(tmp_path_factory.mktemp("kernels"))


def hybrid(model: Any, cache: str, **options: Any) -> offload.AdamW:
    """Half of what can be is streamed, on rank 0, and less on others: rates differ between processes."""
    share = 0.5 if dist.get_rank() == 0 else 0.25
    on_gpu = next(model.parameters()).is_cuda
    config = {
        "stream_share": share,
        "device_budget": BUFFERS if on_gpu else 0,  # and no state
        "kernel_cache_dir": cache,
        "timeout_s": 120.0,  # the first ranks compile, all at the same time
        **options.pop("config", {}),
    }
    return optimizer_over(model, "hybrid", backend="numba", config=config, **options)


def ends_of_hybrids(cache: str, variants: list[dict[str, Any]], device: str = "cpu") -> None:
    assembly.HYBRID_CHUNK_NUMEL = assembly.DIVIDED_NUMEL = CHUNK
    ends = []
    for options in variants:
        model = sharded_decoder(device=device, sizes=TIED)
        recorder = Recorder(model)
        with hybrid(model, cache, **options) as optimizer:
            parts = options.get("accumulation_steps", 1)
            applies_at_once = parts == 1 and "max_grad_norm" not in options
            assert {Placement.HOST, Placement.STREAM} <= set(optimizer.plan.placements)
            assert len(optimizer.plan.divisions) == applies_at_once
            reports = train_beside_reference(model, optimizer, recorder, steps=4, micro_batches=parts)
            assert (reports[-1].early_tiles > 0) == ("max_grad_norm" not in options)
            is_open = "overlap_forward" in options and "max_grad_norm" not in options
            is_late = is_open and dist.get_world_size() > 1  # norms are agreed in the step after
            assert [report.step for report in reports] == ([1, 1, 2, 3] if is_late else [1, 2, 3, 4])
            ends.append((state_bits(model, optimizer), {report.step: report.grad_norm for report in reports}))
    for state, norms in ends[1:]:
        assert_equal(state, ends[0][0])
        assert norms.items() <= ends[0][1].items()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_with_and_without_overlap_the_bits_are_the_references(ranks: Ranks, cache: str, size: int) -> None:
    overlapped = {"overlap_forward": True}
    narrow = {"overlap_forward": True, "config": {"ring_slots": 2, "backlog_tiles": 1}}
    ranks.run(ends_of_hybrids, size, cache, [{}, overlapped, narrow])


def test_clipping_and_micro_batches(ranks: Ranks, cache: str) -> None:
    for options in ({"max_grad_norm": 0.5}, {"accumulation_steps": 2}):
        ranks.run(ends_of_hybrids, 2, cache, [options, {"overlap_forward": True, **options}])


def late_weights_change_no_loss(cache: str, options: dict[str, Any], *, gated: bool) -> bool:
    """No new weight arrives before a forward waits for it; whether losses are those of steps without overlap."""
    assembly.HYBRID_CHUNK_NUMEL = assembly.DIVIDED_NUMEL = CHUNK
    made: list[LaneTransport] = []
    waits: list[bool] = []

    def make_lanes(device: torch.device, config: offload.OffloadConfig) -> LaneTransport:
        made.append(LaneTransport(device))
        return made[-1]

    def release() -> None:
        for lanes in made:
            lanes.release("to_device")

    def wait(self: Mark, *, on_host: bool) -> None:
        waits.append(on_host)
        if gated:
            release()
            original(self, on_host=on_host)

    def losses(*, overlap: bool) -> list[float]:
        model, found = sharded_decoder(sizes=TIED), []
        options_here = {"overlap_forward": overlap, "config": {"ring_slots": 256}, **options}
        with hybrid(model, cache, **options_here) as optimizer:
            for step, ids in enumerate(batches(5)):
                loss = loss_of(model, ids)
                found.append(loss.item())
                release()
                optimizer.synchronize()
                if overlap and step:  # the first step waits for all, to agree on a norm
                    made[-2].hold("to_device")  # the host's; the other one brings state
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            release()
        return found

    expected, original = losses(overlap=False), Mark.wait
    with patch.object(assembly, "make_transport", make_lanes), patch.object(Mark, "wait", wait):
        found = losses(overlap=True)
    assert waits
    assert all(waits)  # FSDP gathers from the weights: the host waits
    return found == expected


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e9, "clip": "defer"}])
@pytest.mark.parametrize("gated", [True, False])
def test_each_rank_waits_for_the_weights_that_it_gathers(
    ranks: Ranks, cache: str, gated: bool, options: dict[str, Any]
) -> None:
    assert ranks.run(late_weights_change_no_loss, 2, cache, options, gated=gated) == [gated] * 2


def skip_of_one(cache: str, rank: int) -> list[bool]:
    """An inf on one rank, in the shard of a streamed chunk: whether each step was skipped."""
    assembly.HYBRID_CHUNK_NUMEL = assembly.DIVIDED_NUMEL = CHUNK
    model = sharded_decoder(sizes=TIED)
    skipped = []
    with hybrid(model, cache, nonfinite="skip", overlap_forward=True) as optimizer:
        for step in range(4):
            before = state_bits(model, optimizer)
            ids = batches(step + 1)[step]
            if step == 2:
                with poisoned(model, "layers.0.up.weight", rank):
                    loss_of(model, ids).backward()
            else:
                loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.last_step.skipped)
            if skipped[-1]:
                assert_equal(state_bits(model, optimizer), before)
    return skipped


@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_on_one_rank_is_skipped_by_all(ranks: Ranks, cache: str, rank: int) -> None:
    assert ranks.run(skip_of_one, 2, cache, rank) == [[False, False, True, False]] * 2
