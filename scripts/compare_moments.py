"""Train the byte-level GPT of scripts/train.py with moments in FP32, BF16 and 8 bits, and compare.

    python scripts/compare_moments.py --steps 250 --json docs/results/moments-cpu.json

Each run starts from the same weights and sees the same text. `fp32, perturbed` is the yardstick: training amplifies any
difference, so FP32 is also compared with itself from weights that differ by a relative 2^-9, half of BF16's spacing at most.
Distances are of all masters from those of `fp32`, relative to how far training has moved these. The final loss is the mean
of the last 20 steps; that of text held out is of 32 batches.
"""

from __future__ import annotations

import _environment  # isort: skip  (sets variables that torch reads when it is loaded)

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import train
from _measure import format_table, write_json
from _models import build_model, num_parameters
from _progress import progress
from _shapes import SHAPES
from _text import load_text, sample_batch
from torch import Tensor

import offload

RUNS = {"fp32": "fp32", "fp32, perturbed": "fp32", "bf16": "bf16", "int8": "int8"}
PERTURBATION = 2.0**-9
FINAL_STEPS = 20
HELD_OUT_SHARE, HELD_OUT_BATCHES = 0.05, 32


def main() -> None:
    args = parse_arguments()
    text = load_text(args.data)
    split = int(text.numel() * (1 - HELD_OUT_SHARE))
    rows: list[dict[str, Any]] = []
    for beta2 in args.beta2:
        start = masters_of(build(args, perturbed=False))
        reference: Tensor | None = None
        for name, moments in RUNS.items():
            row, masters = run(args, name, moments, beta2, text[:split], text[split:])
            reference = masters if reference is None else reference
            row["distance"] = float((masters - reference).norm() / (reference - start).norm())
            rows.append(row)
    print_table(rows)
    write_json(
        args.json,
        {
            "script": "compare_moments",
            "shape": args.shape,
            "parameters": num_parameters(build(args, perturbed=False)),
            "steps": args.steps,
            "batch": args.batch,
            "length": args.length,
            "seed": args.seed,
            "runs": rows,
            "environment": _environment.describe(torch.device("cpu")),
        },
    )


def build(args: argparse.Namespace, *, perturbed: bool) -> Any:
    """The FP32 model; `perturbed`: each weight by a relative amount up to `PERTURBATION`."""
    model = build_model(
        SHAPES[args.shape],
        torch.device("cpu"),
        dtype=torch.float32,
        implementation="plain",
        checkpointing=False,
        seed=args.seed,
    )
    if perturbed:
        generator = torch.Generator().manual_seed(args.seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = 2 * torch.rand(parameter.shape, generator=generator) - 1
                parameter.mul_(1 + PERTURBATION * noise)
    return model


def run(
    args: argparse.Namespace, name: str, moments: str, beta2: float, text: Tensor, held_out: Tensor
) -> tuple[dict[str, Any], Tensor]:
    """Train once; what is reported of it, and its masters."""
    model = build(args, perturbed=name.endswith("perturbed"))
    masters = offload.cast_compute_weights(model, torch.bfloat16, keep_fp32=train.KEEP_FP32)
    config = offload.OffloadConfig(moments=moments, tile_numel=2**20)
    losses, seconds, kernel_seconds = [], [], []
    with offload.AdamW(
        model.named_parameters(),
        lr=args.lr,
        betas=(0.9, beta2),
        weight_decay=0.1,
        masters=masters,
        mode="wavefront",
        config=config,
    ) as optimizer:
        generator = torch.Generator().manual_seed(args.seed)
        with progress(args.steps, f"{name}, beta2 {beta2}") as advance:
            for step in range(args.steps):
                begin = time.perf_counter()
                train.set_learning_rate(optimizer, args.lr * train.schedule(step, args.steps))
                loss = model(*sample_batch(text, args.batch, args.length, generator))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seconds.append(time.perf_counter() - begin)
                report = optimizer.last_step
                kernel_seconds.append(report.timings.get("kernel", 0.0) if report else 0.0)
                losses.append(loss.item())
                advance(f"loss {losses[-1]:.3f}")
        final = torch.cat(
            [
                optimizer.state[p].get("master", p.detach()).flatten().float().clone()
                for p in model.parameters()
            ]
        )
        row = {
            "run": name,
            "moments": moments,
            "beta2": beta2,
            "final_loss": statistics.fmean(losses[-FINAL_STEPS:]),
            "held_out_loss": evaluate(args, model, held_out),
            "step_s": statistics.median(seconds[3:]),
            "kernel_s": statistics.median(kernel_seconds[3:]),
            "planned_host_bytes": optimizer.plan.host_bytes,
            "host_bytes": optimizer.host_bytes,
            "losses": losses,
        }
    return row, final


@torch.no_grad()
def evaluate(args: argparse.Namespace, model: Any, text: Tensor) -> float:
    """Mean loss of text that was not trained on."""
    generator = torch.Generator().manual_seed(args.seed)
    batches = (sample_batch(text, args.batch, args.length, generator) for _ in range(HELD_OUT_BATCHES))
    return statistics.fmean(model(*batch).item() for batch in batches)


def masters_of(model: Any) -> Tensor:
    """All weights of an FP32 model, flat."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def print_table(rows: list[dict[str, Any]]) -> None:
    header = ("beta2", "run", "loss", "held out", "distance", "ms/step", "kernel ms", "host MiB")
    body = [
        (
            f"{row['beta2']}",
            row["run"],
            f"{row['final_loss']:.4f}",
            f"{row['held_out_loss']:.4f}",
            f"{row['distance']:.4f}",
            f"{1e3 * row['step_s']:.1f}",
            f"{1e3 * row['kernel_s']:.2f}",
            f"{row['host_bytes'] / 2**20:.1f}",
        )
        for row in rows
    ]
    print(format_table(header, body))


def parse_arguments() -> argparse.Namespace:
    preset = train.PRESETS["cpu"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="training steps of each run")
    parser.add_argument("--data", type=Path, help="a text file or a folder of them")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--shape", choices=sorted(SHAPES), default=preset.shape)
    parser.add_argument("--batch", type=int, default=preset.batch, help="windows of text per step")
    parser.add_argument("--length", type=int, default=preset.length, help="bytes per window")
    parser.add_argument("--lr", type=float, default=preset.lr)
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.95, 0.999])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < FINAL_STEPS:
        parser.error(f"--steps must be at least {FINAL_STEPS}")
    return args


if __name__ == "__main__":
    main()
