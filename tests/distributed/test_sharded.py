"""FSDP2: in every mode, on 1, 2 and 4 ranks, the bits of a reference that was fed the same reduced gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import offload
from tests.distributed.ranks import Ranks
from tests.distributed.training import (
    MODES,
    assert_equal,
    local_bits,
    mesh_of,
    optimizer_over,
    sharded_decoder,
    state_bits,
    train_beside_reference,
    whole,
    whole_gradients,
)
from tests.training import Recorder, batches, loss_of

# Bits


def all_modes(mesh: tuple[int, ...] | None, **options: Any) -> None:
    """Each mode beside the reference; all of them end with the same bits, and their reports with the same norms."""
    ends = []
    for mode in MODES:
        model = sharded_decoder(mesh and mesh_of(mesh, "replicate", "shard"))
        recorder = Recorder(model)
        with optimizer_over(model, mode, **options) as optimizer:
            parts = options.get("accumulation_steps", 1)
            steps = 2 if dist.get_world_size() > 2 else 3
            reports = train_beside_reference(model, optimizer, recorder, steps=steps, micro_batches=parts)
            ends.append((state_bits(model, optimizer), [report.grad_norm for report in reports]))
            if mode == "wavefront" and "max_grad_norm" not in options:
                assert reports[-1].early_tiles > 0
    for state, norms in ends[1:]:
        assert_equal(state, ends[0][0])
        assert norms == ends[0][1]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_mode_has_the_bits_of_the_reference(ranks: Ranks, size: int) -> None:
    ranks.run(all_modes, size, None)


def test_every_mode_on_a_mesh_of_replicas_and_shards(ranks: Ranks) -> None:
    ranks.run(all_modes, 4, (2, 2))


def test_every_mode_clips_alike(ranks: Ranks) -> None:
    ranks.run(all_modes, 2, None, max_grad_norm=0.5)


def test_micro_batches_are_added_exactly(ranks: Ranks) -> None:
    ranks.run(all_modes, 2, None, accumulation_steps=3)


# Ways to skip a sync, to keep and to fetch weights


def knobs(mode: str) -> None:
    """One model per knob of FSDP, beside the reference; each changes when gradients come or weights are gathered."""
    for prepare, parts, options in KNOBS:
        model = sharded_decoder()
        recorder = Recorder(model)
        with optimizer_over(model, mode, **options) as optimizer:
            reports = train_beside_reference(
                model, optimizer, recorder, micro_batches=2, prepare=prepare, parts_per_step=parts
            )
            declared = options.get("accumulation_steps", 1) == parts
            assert (reports[-1].early_tiles > 0) == (mode == "wavefront" and declared)


def sync_last(model: FSDPModule, part: int) -> None:
    model.set_requires_gradient_sync(part == 1)


def flag_last(model: FSDPModule, part: int) -> None:
    model.set_is_last_backward(part == 1)


def keep_unsharded(model: FSDPModule, part: int) -> None:
    model.set_reshard_after_forward(False)


def prefetch(model: FSDPModule, part: int) -> None:
    first, second = model.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


KNOBS: list[tuple[Any, int, dict[str, Any]]] = [
    (sync_last, 1, {}),
    (sync_last, 1, {"accumulation_steps": 2}),
    (flag_last, 2, {"accumulation_steps": 2}),
    (keep_unsharded, 2, {"accumulation_steps": 2}),
    (prefetch, 2, {"accumulation_steps": 2}),
]


@pytest.mark.parametrize("mode", ["wavefront", "chunked-stream"])
def test_ways_to_skip_a_sync_and_to_gather_weights(ranks: Ranks, mode: str) -> None:
    ranks.run(knobs, 2, mode)


# Several meshes, and tensors outside of them


class Experts(nn.Module):
    """A dense part on all ranks, and an expert that each pair of ranks shares and the other pair has not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.dense = nn.Linear(24, 24, dtype=torch.bfloat16)
        torch.manual_seed(dist.get_rank() // 2)
        self.expert = nn.Linear(24, 24, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.dense(x)).float().square().mean()


def experts(mode: str) -> tuple[list[float], list[float]]:
    """Norms that were reported, and those of all gradients as one sees them from outside."""
    mesh = mesh_of((2, 2), "expert", "data")
    model = Experts()
    fully_shard(model.expert, mesh=mesh["data"])
    fully_shard(model.dense)
    fully_shard(model)
    recorder = Recorder(model)
    reported, expected = [], []
    with optimizer_over(model, mode, max_grad_norm=1e-2, betas=(0.9, 0.9)) as optimizer:
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 24, dtype=torch.bfloat16)).backward()
            squares = torch.zeros(1, dtype=torch.float64)
            for parts in recorder.take().values():
                squares += parts[0].to_local().double().square().sum()
            dist.all_reduce(squares)
            optimizer.step()
            assert optimizer.last_step.clipped
            reported.append(optimizer.last_step.grad_norm)
            expected.append(squares.sqrt().item())
            optimizer.zero_grad()
    return reported, expected


@pytest.mark.parametrize("mode", ["wavefront", "resident"])
def test_experts_on_submeshes_count_once_each(ranks: Ranks, mode: str) -> None:
    results = ranks.run(experts, 4, mode)
    for reported, expected in results:
        assert reported == results[0][0]
        assert reported == pytest.approx(expected, rel=1e-12)


def outside_fsdp(mode: str, micro_batches: int) -> dict[str, torch.Tensor]:
    """The last layer's FP32 scale and the head are plain tensors, whose gradients this loop reduces by hand."""
    model = sharded_decoder(ignored_params=set())
    plain = nn.Linear(97, 97, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(torch.eye(97))
    both = nn.ModuleDict({"sharded": model, "plain": plain})
    recorder = Recorder(model)
    handed: list[torch.Tensor] = []
    start = plain.weight.detach().clone()
    with optimizer_over(both, mode, accumulation_steps=micro_batches, max_grad_norm=0.5) as optimizer:
        for ids in batches(3):
            for part in range(micro_batches):
                mine = ids.roll(part + dist.get_rank(), 1)
                loss_of(nn.Sequential(model, plain), mine).backward()
            dist.all_reduce(plain.weight.grad)
            plain.weight.grad /= dist.get_world_size()
            handed.append(plain.weight.grad.clone())
            sharded = recorder.take()
            squares = handed[-1].double().square().sum()
            for parts in sharded.values():
                total = sum(whole_part.full_tensor().float() for whole_part in parts)
                squares += total.double().square().sum()
            optimizer.step()
            assert optimizer.last_step.grad_norm == pytest.approx(squares.sqrt().item(), rel=1e-6)
            optimizer.zero_grad()
        assert not torch.equal(plain.weight, start)
        return state_bits(both, optimizer)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_modules_outside_of_fsdp_are_taken_at_the_step(ranks: Ranks, micro_batches: int) -> None:
    ends = [ranks.run(outside_fsdp, 2, mode, micro_batches) for mode in ("wavefront", "chunked-sync")]
    for end in (*ends[0], *ends[1]):
        assert_equal(end, ends[0][0])


def forgotten_outside_fsdp() -> None:
    model = nn.ModuleDict({"sharded": fully_shard(nn.Linear(8, 8)), "plain": nn.Linear(8, 8)})
    config = {"rank_local": "plian"}
    with optimizer_over(model, "wavefront", max_grad_norm=1.0, config=config) as optimizer:
        torch.manual_seed(dist.get_rank())
        model["plain"](model["sharded"](torch.randn(2, 8))).square().mean().backward()
        with pytest.raises(
            offload.GradientError,
            match=r"\(plain\.weight, plain\.bias\) differ between ranks.*rank_local=...\), which is 'plian'",
        ):
            optimizer.step()
    config = {"rank_local": "plain"}
    with optimizer_over(model, "wavefront", max_grad_norm=1.0, config=config) as optimizer:
        model["plain"](model["sharded"](torch.randn(2, 8))).square().mean().backward()
        optimizer.step()


def test_unreduced_gradients_outside_of_fsdp_are_noticed(ranks: Ranks) -> None:
    ranks.run(forgotten_outside_fsdp, 2)


# Shapes


def tiny_shards(mode: str) -> None:
    """On 4 ranks: two rows, so two ranks have none; one bias element; ten rows, so 3, 3, 3 and 1."""

    def make() -> nn.Sequential:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(24, 10), nn.Linear(10, 2), nn.Linear(2, 1))
        offload.cast_compute_weights(model)
        return model

    def train(model: nn.Module) -> dict[str, torch.Tensor]:
        with optimizer_over(model, mode, max_grad_norm=0.05) as optimizer:
            torch.manual_seed(4)  # the same data everywhere: their mean is exact
            for _ in range(3):
                model(torch.randn(2, 24, dtype=torch.bfloat16)).float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if isinstance(model, FSDPModule):
                local = local_bits(model, optimizer)
                assert len(local["0.weight: exp_avg"]) == [3, 3, 3, 1][dist.get_rank()]
                assert len(local["1.weight: master"]) == [1, 1, 0, 0][dist.get_rank()]
                assert len(local["2.bias: weight"]) == [1, 0, 0, 0][dist.get_rank()]
            return state_bits(model, optimizer)

    assert_equal(train(fully_shard(make())), train(make()))


@pytest.mark.parametrize("mode", MODES)
def test_f32_f30_empty_and_uneven_shards_are_as_unsharded(ranks: Ranks, mode: str) -> None:
    ranks.run(tiny_shards, 4, mode)


# Sentinels, and the other front


def sentinels() -> None:
    """A gradient that has left a shard is not to be read, nor dropped by others; hooks before ours see each one."""
    model = sharded_decoder()
    seen: list[torch.Tensor] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    with optimizer_over(model, "wavefront", accumulation_steps=2) as optimizer:
        for _ in range(2):
            loss_of(model, batches(1)[0]).backward()
        assert torch.equal(*seen)
        with pytest.raises(offload.GradientError, match="max_grad_norm"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        with pytest.raises(offload.MidStepError, match=r"zero_grad\(\) of the optimizer"):
            optimizer.step()


def test_where_a_sharded_gradient_has_left_a_sentinel_stands(ranks: Ranks) -> None:
    ranks.run(sentinels, 2)


def dropped_between_micro_batches() -> None:
    model = sharded_decoder()
    with optimizer_over(model, "wavefront", accumulation_steps=2) as optimizer:
        loss_of(model, batches(1)[0]).backward()
        model.zero_grad()
        with pytest.raises(offload.MidStepError, match=r"zero_grad\(\) of the optimizer"):
            loss_of(model, batches(1)[0]).backward()
        assert optimizer.last_step is None


def test_sharded_gradients_dropped_between_micro_batches_are_noticed(ranks: Ranks) -> None:
    ranks.run(dropped_between_micro_batches, 2)


def sign_sgd() -> None:
    """``p (1 - lr wd) - lr sign(g)`` of the whole gradients, in every mode."""
    for mode in MODES:
        model = sharded_decoder(fp32=True)
        recorder = Recorder(model)
        expected = {name: whole(parameter) for name, parameter in model.named_parameters()}
        config = offload.OffloadConfig(tile_numel=1024, threads=1, timeout_s=30.0)
        options: dict[str, Any] = {"mode": mode, "backend": "torch", "config": config}
        with offload.SignSGD(model.named_parameters(), lr=0.25, weight_decay=0.5, **options) as optimizer:
            for ids in batches(2):
                loss_of(model, ids.roll(dist.get_rank(), 1)).backward()
                for name, (gradient,) in whole_gradients(recorder).items():
                    expected[name] = expected[name] * 0.875 - 0.25 * gradient.sign()
                optimizer.step()
                optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter), expected[name]), name


def test_sign_sgd_in_every_mode(ranks: Ranks) -> None:
    ranks.run(sign_sgd, 2)


def any_optimizer() -> None:
    """Torch's own optimizer, and the same with its state on the host."""
    ends = []
    for mode in (None, "all-at-once", "chunked-sync", "chunked-stream"):
        model = sharded_decoder(fp32=True)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if mode is not None:
            optimizer = offload.CPUOffloadOptimizer(optimizer, mode=mode)
        for ids in batches(2):
            loss_of(model, ids.roll(dist.get_rank(), 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: whole(parameter) for name, parameter in model.named_parameters()})
    for end in ends[1:]:
        assert_equal(end, ends[0])


def test_the_state_of_any_optimizer_over_shards(ranks: Ranks) -> None:
    ranks.run(any_optimizer, 2)


# Order of construction


def masters_of_a_model_that_is_sharded_later(mode: str) -> None:
    """FP32 values that BF16 cannot hold reach the shards of a model that is sharded after the cast."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 3))
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    masters = offload.cast_compute_weights(model)
    fully_shard(model)
    with optimizer_over(model, mode, masters=masters) as optimizer:
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(whole(optimizer.state[parameter]["master"]), values[name])
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    others = fully_shard(nn.Linear(4, 4, dtype=torch.bfloat16)).parameters()
    with pytest.raises(offload.ConfigError, match=r"masters.*named_parameters"):
        offload.AdamW(others, masters=masters, mode="wavefront")
    with pytest.raises(offload.ParameterError, match=r"weight is sharded already.*before fully_shard"):
        offload.cast_compute_weights(fully_shard(nn.Linear(4, 4)))


@pytest.mark.parametrize("mode", ["wavefront", "resident", "chunked-sync"])
def test_masters_of_a_sharded_model(ranks: Ranks, mode: str) -> None:
    ranks.run(masters_of_a_model_that_is_sharded_later, 2, mode)


def optimizer_before_shards(part: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = optimizer_over(model, "wavefront")
    fully_shard(model[0])
    if part == "all":
        fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(offload.OffloadError, match=r"0\.weight.*after fully_shard"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("part", ["all", "some"])
def test_f25_an_optimizer_built_before_fully_shard_says_so(ranks: Ranks, part: str) -> None:
    ranks.run(optimizer_before_shards, 2, part)
