"""Many small steps with everything that may befall an optimizer, compared with fused torch bit by bit.

    python scripts/soak.py                       # 2,000 steps, a few minutes
    python scripts/soak.py --seed 7 --minutes 60 --steps 1000000

Random modes, clip policies, limits, accumulation, tiles and rings; late copies and failing ones; backward passes that
raise or are dropped; gradients with an inf; layers frozen and unfrozen, groups added; checkpoints loaded into an optimizer
of another mode. At the end of each optimizer's life all bits must be the reference's. Memory and threads are looked at
when no optimizer is alive: over the second half they may not grow.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import random
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from _measure import write_json
from _soak import World

from offload.transfer.pinned import mapped_bytes

MOST_GROWTH_BYTES = 2**20
STEPS_PER_OPTIMIZER = (5, 25)
OPTIMIZERS_PER_WORLD = 6
NUM_COMPARED = 5
"""Samples whose median stands for the middle of a run, and for its end."""


@dataclass(frozen=True)
class Sample:
    """What the process held when no optimizer was alive."""

    step: int
    rss: int
    slabs: int
    threads: int
    python_threads: int


def main() -> None:
    args = parse_arguments()
    logging.getLogger("offload").setLevel(
        logging.CRITICAL
    )  # failures are made on purpose here, by the hundred
    result = soak(args.steps, args.seed, args.minutes, args.kernel_cache)
    for key, value in result.items():
        print(f"{key:>16}: {value}")
    write_json(args.json, result)
    if result["grown"]:
        sys.exit(f"soak: grown over the second half: {', '.join(result['grown'])}")
    print(f"soak: passed, {result['steps']} steps with the bits of the reference")


def soak(
    steps: int, seed: int, minutes: float | None = None, kernel_cache: str | None = None
) -> dict[str, Any]:
    """Run, and say what happened.

    Returns:
        ``grown`` lists what grew over the second half; memory only counts from 1,000 steps on, since before that kernels
        are still being compiled.

    Raises:
        AssertionError: a bit differs from the reference; the message has the options.
    """
    draw, tally = random.Random(seed), Counter[str]()
    samples: list[Sample] = []
    start, done = time.monotonic(), 0
    while done < steps and (minutes is None or time.monotonic() - start < 60 * minutes):
        done += _live(World(draw, tally, kernel_cache), draw, steps - done)
        samples.append(_sample(done))
        print(f"step {done}: {tally['recoveries']} recoveries", file=sys.stderr, flush=True)
    middle = [sample for sample in samples if sample.step >= done / 2]
    growth = _growth(middle)
    allowed = {"rss": MOST_GROWTH_BYTES, "slabs": MOST_GROWTH_BYTES, "threads": 0, "python_threads": 0}
    counted = allowed if done >= 1000 else {key: allowed[key] for key in ("slabs", "python_threads")}
    return {
        "seed": seed,
        "steps": done,
        "seconds": round(time.monotonic() - start, 1),
        "events": dict(sorted(tally.items())),
        "growth": growth,
        "grown": [key for key in counted if growth[key] > allowed[key]],
        "samples": [vars(sample) for sample in samples],
    }


def _live(world: World, draw: random.Random, most: int) -> int:
    """One world: a few optimizers, one after the other; the steps that they took."""
    done = 0
    try:
        for _ in range(OPTIMIZERS_PER_WORLD):
            world.renew()
            world.save()
            for _ in range(min(draw.randint(*STEPS_PER_OPTIMIZER), most - done)):
                world.step()
                done += 1
                if draw.random() < 0.05:
                    world.save()
            world.check()
            world.save()
            world.optimizer.close()
            if done >= most:
                break
    finally:
        world.close()
    return done


def _sample(step: int) -> Sample:
    gc.collect()
    _give_back_free_memory()
    process = psutil.Process()
    return Sample(
        step, process.memory_info().rss, mapped_bytes(), process.num_threads(), threading.active_count()
    )


def _give_back_free_memory() -> None:
    """What the C library keeps for later would be taken for growth."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        return


def _growth(samples: list[Sample]) -> dict[str, float]:
    """From the first to the last few samples."""
    number = max(1, min(NUM_COMPARED, len(samples) // 2))
    fields = ("rss", "slabs", "threads", "python_threads")

    def typical(part: list[Sample], field: str) -> float:
        return float(statistics.median(getattr(sample, field) for sample in part))

    return {field: typical(samples[-number:], field) - typical(samples[:number], field) for field in fields}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="stop after these, if steps are not done by then")
    parser.add_argument("--kernel-cache", help="folder of compiled kernels, so that the next run finds them")
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    main()
