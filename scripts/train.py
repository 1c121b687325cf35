"""Train a byte-level GPT on real text with offloaded AdamW, and report what it cost.

    python scripts/train.py                      # wavefront: FP32 state on the host, stepped inside backward
    python scripts/train.py --mode resident      # torch's own fused AdamW on the device, to compare

    torchrun --nproc-per-node 2 scripts/train.py # under FSDP2, each rank with text of its own; losses are means

The default text is the source of Python's standard library on this machine. Weights are BF16; masters and
moments are FP32. CUDA is used where there is one.
"""

from __future__ import annotations

import _environment  # isort: skip  (sets variables that torch reads when it is loaded)

import argparse
import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _measure import (
    device_bytes,
    format_table,
    host_bytes,
    in_gib,
    peak_host_bytes,
    stage_medians,
    stage_rows,
    synchronize,
    write_json,
)
from _models import LanguageModel, build_model, num_parameters
from _optimizers import make_optimizer, parse_assignments
from _progress import progress
from _ranks import World, join_world
from _shapes import SHAPES
from _text import load_text, sample_batch
from torch import Tensor

import offload

KEEP_FP32 = r"norm"  # the few parameters whose weights stay FP32
FINAL_STEPS = 10  # the final loss is their mean


@dataclass(frozen=True)
class Preset:
    """Defaults that make a run of a minute or two on the device at hand."""

    shape: str
    batch: int
    length: int
    steps: int
    lr: float


PRESETS = {
    "cpu": Preset("bytes-small", batch=8, length=128, steps=150, lr=2e-3),
    "cuda": Preset("bytes-base", batch=16, length=1024, steps=300, lr=3e-4),
}


def main() -> None:
    args = parse_arguments()
    with join_world(torch.device(args.device)) as world:
        run_training(args, world)


def run_training(args: argparse.Namespace, world: World) -> None:
    device = torch.device(args.device)
    text = load_text(args.data)
    shape = SHAPES[args.shape].with_sizes(args.layers, args.hidden)
    model = build_model(
        shape,
        device,
        dtype=torch.float32,
        implementation="plain",
        checkpointing=device.type == "cuda",
        seed=args.seed,
    )
    say = print if world.is_first else _say_nothing
    say(
        f"{num_parameters(model) / 1e6:.1f} M parameters on {device}, {text.numel() / 1e6:.1f} MB of text, "
        f"{args.steps} steps of {args.batch} x {args.length} bytes{f' on each of {world.size} ranks' * world.launched}, "
        f"mode {args.mode}",
        flush=True,
    )
    started = time.perf_counter()
    optimizer = prepare_optimizer(args, model, world)
    setup_s = time.perf_counter() - started
    say(f"optimizer ready after {setup_s:.1f} s (state built, kernels compiled)", flush=True)
    try:
        with nullcontext() if args.trace is None else optimizer.profile(args.trace):
            run = train(args, model, optimizer, text, device, world)
    finally:
        optimizer.close()
    result = {"setup_s": setup_s, **summarize(args, run, num_parameters(model), device, world)}
    if world.is_first:
        print_summary(result)
        write_json(args.json, result)


def _say_nothing(*words: str, flush: bool = False) -> None:
    """Of all ranks, one speaks."""


def prepare_optimizer(args: argparse.Namespace, model: LanguageModel, world: World) -> Any:
    """Cast the FP32 model to BF16 and keep its FP32 values as masters; then shard it."""
    masters = offload.cast_compute_weights(model, torch.bfloat16, keep_fp32=KEEP_FP32)
    world.shard(model)
    return make_optimizer(
        args.mode,
        model,
        masters=masters,
        config=parse_assignments(args.config),
        lr=args.lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        **parse_assignments(args.optimizer),
    )


@dataclass
class Run:
    """What was seen while training."""

    losses: list[float]
    step_seconds: list[float]
    reports: list[Any]
    wall_seconds: float


def train(
    args: argparse.Namespace,
    model: LanguageModel,
    optimizer: Any,
    text: Tensor,
    device: torch.device,
    world: World,
) -> Run:
    generator = torch.Generator().manual_seed(args.seed + world.rank)
    run = Run([], [], [], 0.0)
    start = time.perf_counter()
    with progress(args.steps, args.mode) if world.is_first else nullcontext(_say_nothing) as advance:
        for step in range(args.steps):
            begin = time.perf_counter()
            set_learning_rate(optimizer, args.lr * schedule(step, args.steps))
            ids, targets = (t.to(device) for t in sample_batch(text, args.batch, args.length, generator))
            loss = model(ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(world.mean(loss).item())
            run.step_seconds.append(time.perf_counter() - begin)
            run.reports.append(optimizer.last_step)
            advance(f"loss {run.losses[-1]:.3f}  {run.step_seconds[-1] * 1e3:.0f} ms/step")
    optimizer.synchronize()
    synchronize(device)
    run.wall_seconds = time.perf_counter() - start
    return run


def schedule(step: int, num_steps: int) -> float:
    """Linear warm-up over a tenth of the run, then half a cosine down to a tenth of the peak."""
    warmup = max(1, num_steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def summarize(
    args: argparse.Namespace, run: Run, numel: int, device: torch.device, world: World
) -> dict[str, Any]:
    final_loss = statistics.fmean(run.losses[-FINAL_STEPS:])
    step_s = statistics.median(run.step_seconds[min(3, args.steps - 1) :])
    return {
        "script": "train",
        "mode": args.mode,
        "ranks": world.size,
        "parameters": numel,
        "steps": args.steps,
        "first_loss": run.losses[0],
        "final_loss": final_loss,
        "loss_ratio": final_loss / run.losses[0],
        "step_s": step_s,
        "bytes_per_s": world.size * args.batch * args.length / step_s,
        "wall_s": run.wall_seconds,
        "host_bytes": host_bytes(),
        "peak_host_bytes": peak_host_bytes(),
        **device_bytes(device),
        "stages": stage_medians(run.reports),
        "losses": run.losses,
        "environment": _environment.describe(device),
    }


def print_summary(result: dict[str, Any]) -> None:
    rows = [
        ("loss, first step", f"{result['first_loss']:.3f}"),
        (f"loss, mean of the last {FINAL_STEPS}", f"{result['final_loss']:.3f}"),
        ("share of the first loss", f"{result['loss_ratio']:.0%}"),
        ("training", f"{result['wall_s']:.1f} s"),
        ("step, median", f"{result['step_s'] * 1e3:.1f} ms"),
        ("text per second", f"{result['bytes_per_s'] / 1e3:.1f} kB"),
        ("host memory, peak", f"{in_gib(result['peak_host_bytes'])} GiB"),
        ("device memory, peak", f"{in_gib(result['peak_device_bytes'])} GiB"),
        *stage_rows(result["stages"]),
    ]
    print(format_table(("", result["mode"]), rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mode", default="wavefront", help="resident (torch's own), wavefront, auto, ...")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--data", type=Path, help="a text file or a folder of them")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument(
        "--trace", type=Path, help="write a Chrome trace there (few steps: it shows each copy)"
    )
    parser.add_argument("--device", default=str(_environment.default_device()))
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--batch", type=int, help="windows of text per step")
    parser.add_argument("--length", type=int, help="bytes per window")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--config", action="append", default=[], metavar="FIELD=VALUE", help="of OffloadConfig"
    )
    parser.add_argument(
        "--optimizer", action="append", default=[], metavar="NAME=VALUE", help="of offload.AdamW"
    )
    args = parser.parse_args()
    preset = PRESETS[torch.device(args.device).type]
    for name, value in vars(preset).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.trace is not None and args.mode == "resident":
        parser.error("--trace: torch's own optimizer, which --mode resident trains with, takes none")
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


if __name__ == "__main__":
    main()
