"""What the wavefront's pipeline does by itself: gradients in, update, weights out, without a model around it.

    python scripts/bench_pipeline.py --numel 1000000000 --tiles 4,8,16 --slots 4,8 --threads 11,13,15

Backward is a stream of ready-made gradients, one per parameter, optionally with GPU work before each
(``--compute-ms`` per layer). Prints the update rate over all of backward and ``step()`` for each setting, and where
the worker's time went; the ceiling is what ``bench_kernel.py`` measures. Needs a GPU to say anything about copies.
"""

from __future__ import annotations

import _environment  # isort: skip  (sets variables that torch reads when it is loaded)

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _measure import format_table, synchronize, write_json

import offload

MI = 1 << 20
LAYER_NUMEL = 100 * MI
STAGES = ("kernel", "issue", "wait_gradient", "wait_slot", "hook", "exposed")


class GradientSource(torch.autograd.Function):
    """Forward: nothing. Backward: a made-up BF16 gradient of the weight, after some GPU work."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.weight, ctx.cycles = weight, cycles
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        if ctx.cycles and grads[0].is_cuda:
            torch.cuda._sleep(ctx.cycles)
        return grads[0], torch.full_like(ctx.weight, 1e-3), None


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.device)
    weights = make_weights(args.numel, device)
    settings = itertools.product(args.tiles, args.slots, args.threads)
    rows = [measure(args, weights, device, *setting) for setting in settings]
    headers = ("tile Mi", "slots", "threads", "Gparam/s", "step ms", *(f"{stage} ms" for stage in STAGES))
    print(
        format_table(
            headers,
            [[f"{value:g}" if isinstance(value, int) else f"{value:.4g}" for value in row] for row in rows],
        )
    )
    write_json(
        args.json,
        {
            "rows": [dict(zip(headers, row, strict=True)) for row in rows],
            "environment": _environment.describe(device),
        },
    )


def make_weights(numel: int, device: torch.device) -> dict[str, torch.nn.Parameter]:
    """Layers of four equal matrices."""
    part = min(LAYER_NUMEL, numel) // 4
    names = [
        f"layers.{layer}.{name}.weight" for layer in range(max(numel // (4 * part), 1)) for name in "abcd"
    ]
    return {
        name: torch.nn.Parameter(torch.full((part,), 0.5, dtype=torch.bfloat16, device=device))
        for name in names
    }


def measure(
    args: argparse.Namespace,
    weights: dict[str, torch.nn.Parameter],
    device: torch.device,
    tile: int,
    slots: int,
    threads: int,
) -> list[Any]:
    """Median rate and stages of one setting."""
    config = offload.OffloadConfig(
        tile_numel=tile * MI, ring_slots=slots, threads=threads, backlog_tiles=args.backlog
    )
    cycles = int(args.compute_ms / 4 * 1.9e6)
    seconds, stages = [], []
    with offload.AdamW(weights.items(), mode="wavefront", config=config) as optimizer:
        for _ in range(args.steps + 2):
            x = torch.zeros(1, device=device, requires_grad=True)
            for weight in weights.values():
                x = GradientSource.apply(x, weight, cycles)
            synchronize(device)
            start = time.perf_counter()
            x.sum().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            stages.append(optimizer.last_step.timings if optimizer.last_step else {})
    step = statistics.median(seconds[2:])
    numel = sum(weight.numel() for weight in weights.values())
    medians = [1e3 * statistics.median(timing.get(stage, 0.0) for timing in stages[2:]) for stage in STAGES]
    return [tile, slots, threads, numel / step / 1e9, 1e3 * step, *medians]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--numel", type=int, default=1_000_000_000, help="parameters")
    parser.add_argument(
        "--tiles", type=_integers, default=[4, 8, 16], metavar="N,N", help="tile sizes, in Mi elements"
    )
    parser.add_argument("--slots", type=_integers, default=[8], metavar="N,N", help="slots per ring")
    parser.add_argument(
        "--threads", type=_integers, default=[None], metavar="N,N", help="threads of the update"
    )
    parser.add_argument("--backlog", type=int, default=32, help="tiles that may wait on the device")
    parser.add_argument(
        "--compute-ms", type=float, default=0.0, help="GPU work per layer of 100 Mi parameters"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default=str(_environment.default_device()))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
