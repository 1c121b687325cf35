"""One mode of bench_step.py: its model and optimizer, the timed steps at each length, and a checkpoint at the end."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import traceback
from typing import Any

import _environment
import _resume
import torch
from _growth import Memory, growth, is_sampled
from _measure import (
    PhaseClock,
    device_bytes,
    host_bytes,
    huge_page_bytes,
    peak_host_bytes,
    stage_medians,
    synchronize,
)
from _models import LanguageModel, build_model, implementation_of, num_parameters
from _optimizers import (
    NOT_OURS,
    OVERLAPPING,
    make_optimizer,
    measure_rates,
    measure_rates_anew,
    parse_assignments,
    pinned_bytes,
    thread_budget,
    update_seconds,
)
from _ranks import World
from _shapes import SHAPES, DecoderShape

TRACED_STEPS = 3


def measure_mode(args: argparse.Namespace, world: World) -> dict[str, Any]:
    device = torch.device(args.device)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_cudnn_sdp(
            False
        )  # its backward is not deterministic; flash attention's can be
    started = time.perf_counter()
    config = parse_assignments(args.config)
    threads = None if args.worker in NOT_OURS else world.gather(thread_budget(device, config))
    model, rates = build_model_and_measure(args, device, world, args.seed)
    constructing = time.perf_counter()
    optimizer = build_optimizer(args, model)
    synchronize(device)
    ended = time.perf_counter()
    result = {
        "mode": args.worker,
        "parameters": num_parameters(model),
        "implementation": implementation_of(model),
        "setup_s": ended - started,
        "construction_s": ended - constructing,
        "construction": getattr(optimizer, "construction", None),  # seconds by stage
        "host_bytes_built": host_bytes(),
        "huge_page_bytes": huge_page_bytes(),
        "environment": _environment.describe(device),
        "threads": threads,
        "update": update_seconds(args.worker, optimizer, rates, config, parse_assignments(args.optimizer)),
    }
    result["runs"] = measure_lengths(args, model, optimizer, device, world)
    has_failed = result["runs"][-1]["status"] != "ok"
    if args.trace and args.worker not in NOT_OURS and not has_failed:
        trace_lengths(args, model, optimizer, device, world)
    if args.worker not in NOT_OURS:
        result["plan"] = str(optimizer.plan)  # as it is after the steps: a hybrid moves its balance
    for run in result["runs"]:
        run["update"] = result["update"]
    if result["update"] is not None:
        result["rates_after"] = vars(measure_rates_anew(device, config.get("threads")))
    if args.checkpoint and args.worker not in NOT_OURS and not has_failed:
        batch = batch_of(args, args.seq[-1], device, world)
        saved = _resume.save_and_go_on(args.checkpoint / args.worker, model, optimizer, batch, world)
        optimizer.close()
        del model, optimizer
        free(device)
        model, _ = build_model_and_measure(
            args, device, world, args.seed + 1
        )  # nothing is equal before it is loaded
        optimizer = build_optimizer(args, model)
        exact = args.deterministic or device.type == "cpu"
        result["checkpoint"] = _resume.load_and_compare(saved, model, optimizer, batch, world, exact=exact)
    closing = time.perf_counter()
    optimizer.close()
    result["close_s"] = time.perf_counter() - closing
    return result


def build_model_and_measure(
    args: argparse.Namespace, device: torch.device, world: World, seed: int
) -> tuple[LanguageModel, Any]:
    """The model, and the machine's rates, which the optimizer's plan then knows."""
    model = build_model(
        shape_of(args),
        device,
        dtype=torch.bfloat16,
        implementation=args.implementation,
        seed=seed,
        shard=world.shard,
    )
    world.barrier()  # ranks share the host's memory: each must see what the others leave
    return model, measure_rates(device, parse_assignments(args.config).get("threads"))


def build_optimizer(args: argparse.Namespace, model: LanguageModel) -> Any:
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, **parse_assignments(args.optimizer)}
    return make_optimizer(args.worker, model, config=parse_assignments(args.config), **options)


def shape_of(args: argparse.Namespace) -> DecoderShape:
    return SHAPES[args.model].with_sizes(args.layers, args.hidden)


def free(device: torch.device) -> None:
    """What nobody holds any more."""
    gc.collect()  # FSDP's states and hooks refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_lengths(
    args: argparse.Namespace, model: LanguageModel, optimizer: Any, device: torch.device, world: World
) -> list[dict[str, Any]]:
    """One entry per sequence length; what fails is recorded and ends the mode, or the run where others wait for us."""
    runs: list[dict[str, Any]] = []
    for length in args.seq:
        run = {"mode": args.worker, "seq": length, "status": "ok"}
        runs.append(run)
        try:
            run.update(measure_length(args, model, optimizer, device, length, world))
        except torch.OutOfMemoryError as error:
            if world.size > 1:
                raise
            run.update(status="out of memory", error=str(error))
            break
        except Exception as error:  # the other modes' figures are still worth having
            if world.size > 1:
                raise
            traceback.print_exc()
            run.update(status="error", error=f"{type(error).__name__}: {error}")
            break
    return runs


def measure_length(
    args: argparse.Namespace,
    model: LanguageModel,
    optimizer: Any,
    device: torch.device,
    length: int,
    world: World,
) -> dict[str, Any]:
    ids, targets = batch_of(args, length, device, world)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    losses: list[torch.Tensor] = []
    reports: list[Any] = []
    clock = PhaseClock(device)
    overlaps = bool(parse_assignments(args.optimizer).get("overlap_forward")) and args.worker in OVERLAPPING

    def step() -> None:
        clock.mark("forward")
        loss = model(ids, targets)
        if overlaps and optimizer.last_step is not None:
            reports.append(optimizer.last_step)
        clock.mark("backward")
        loss.backward()
        clock.mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if not overlaps:  # else asking would wait for the update, which is to go on in the next forward
            reports.append(optimizer.last_step)

    for _ in range(args.warmup):
        step()
    gc.collect()
    gc.freeze()  # a collection of all that was imported takes 0.3 s: what is there by now is not looked at again

    def settle() -> None:
        optimizer.synchronize()
        synchronize(device)

    settle()
    clock = PhaseClock(device)
    started = time.perf_counter()
    memory = []
    for index in range(args.steps):
        step()
        if is_sampled(index, args.steps):
            settle()
            memory.append(_memory_now(args, device))
    clock.mark("end")
    settle()
    wall_s = time.perf_counter() - started
    gc.unfreeze()
    found = times(clock.durations(), wall_s / args.steps, args.batch * length * world.size)
    return {
        **found,
        "long_run": growth(memory, found["all_step_s"]),
        **device_bytes(device),
        "pinned_bytes": pinned_bytes(args.worker),
        "host_bytes": host_bytes(),
        "peak_host_bytes": peak_host_bytes(),
        "stages": stage_medians(reports[args.warmup :]),
        "losses": [loss.item() for loss in losses],
    }


def trace_lengths(
    args: argparse.Namespace, model: LanguageModel, optimizer: Any, device: torch.device, world: World
) -> None:
    """A few more steps of each length, under `profile`; after all that is timed, since they go on with training."""
    args.trace.mkdir(parents=True, exist_ok=True)
    for length in args.seq:
        ids, targets = batch_of(args, length, device, world)
        with optimizer.profile(args.trace / f"{args.worker}-{length}.json"):
            for _ in range(TRACED_STEPS):
                model(ids, targets).backward()
                optimizer.step()
                optimizer.zero_grad()


def _memory_now(args: argparse.Namespace, device: torch.device) -> Memory:
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return Memory(allocated, pinned_bytes(args.worker), host_bytes())


def times(phases: dict[str, list[float]], mean_step_s: float, tokens: int) -> dict[str, Any]:
    """Medians of the phases; a step is the sum of its three, the mean counts what is in flight at the end."""
    steps = [sum(parts) for parts in zip(*phases.values(), strict=True)]
    return {
        "step_s": statistics.median(steps),
        "mean_step_s": mean_step_s,
        "tokens_per_s": tokens / statistics.median(steps),
        **{f"{name}_s": statistics.median(values) for name, values in phases.items()},
        "all_step_s": steps,
    }


def batch_of(
    args: argparse.Namespace, length: int, device: torch.device, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's batch of one length."""
    vocabulary = SHAPES[args.model].vocabulary
    return make_batch(vocabulary, args.batch, length, args.seed + world.rank, device)


def make_batch(
    vocabulary: int, batch: int, length: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and targets. One batch is learned by heart, so a wrong update soon shows in the loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (batch, length + 1), generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
