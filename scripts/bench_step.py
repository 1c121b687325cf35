"""Time whole training steps of one model under several optimizer modes.

    python scripts/bench_step.py --model qwen3-4b --seq 8192,16384 --modes resident,wavefront --json out.json

``resident`` is torch's own fused AdamW with FP32 masters on the device: what one would use if memory were no
matter. ``offload-resident`` is the library's mode of that name, and ``model-alone`` no optimizer at all: gradients
are dropped as they come, which is the least memory and time that any of them can reach. All modes start from the same
random weights and see the same batch in every step, so their losses can be compared step by step. Each mode runs in
a fresh process, in which all sequence lengths follow each other.

    torchrun --nproc-per-node 2 scripts/bench_step.py --model qwen3-4b --seq 16384 --modes resident,wavefront

shards the model with FSDP2; each rank has a batch of its own, and the modes follow each other in the same processes.
Figures are those of rank 0, but for tokens per second, which are those of all ranks. An error ends the run.

    torchrun --nproc-per-node 8 scripts/bench_step.py --model qwen3-30b-a3b --layers auto --seq 8192,16384

cuts the layers to what the machine holds, by the library's own plan, which is printed before anything is allocated. With
--checkpoint FOLDER each mode is saved after its steps, built anew and loaded, and must go on with the same losses.
"""

from __future__ import annotations

import _environment  # isort: skip  (sets variables that torch reads when it is loaded)

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _layer_plan
import _published
import torch
from _measure import write_json
from _one_mode import free, measure_mode, shape_of
from _optimizers import BASELINE, LIBRARY_RESIDENT, NOT_OURS, parse_assignments
from _ranks import World, join_world
from _shapes import SHAPES
from _step_tables import compare_with_first, print_tables

from offload import ConfigError, MemoryBudgetError, OffloadConfig
from offload.config import MODES

# One mode after another in its own process ------------------------------------------------------------------


def main() -> None:
    args = parse_arguments()
    if args.worker:
        write_json(args.json, measure_mode(args, World()))
        return
    started = time.perf_counter()
    with join_world(torch.device(args.device)) as world:
        refuse_unknown_options(args)
        refuse_old_checkpoints(args)
        layer_plan = plan_layers(args, world)
        modes = []
        for mode in args.modes:
            modes.append(run_here(mode, args, world) if world.launched else run_in_subprocess(mode, args))
            result = {
                **summarize(args, modes, world, time.perf_counter() - started),
                "layer_plan": layer_plan,
            }
            if world.is_first:  # what is measured stays measured, whatever becomes of the next mode
                write_json(args.json, result)
        if world.is_first:
            print_tables(result)
    failed = any(run["status"] == "error" for run in result["runs"])
    if failed or not all(check["equal"] for check in result["checkpoints"].values()):
        raise SystemExit(1)


def refuse_unknown_options(args: argparse.Namespace) -> None:
    """Before the run rather than in each of its modes."""
    unknown = sorted(set(args.modes) - {*MODES, *NOT_OURS, LIBRARY_RESIDENT})
    if unknown:
        raise SystemExit(
            f"bench_step.py: --modes {','.join(unknown)}: choose among {', '.join([*NOT_OURS, *MODES])}"
        )
    try:
        OffloadConfig(**parse_assignments(args.config))
    except ConfigError as error:
        raise SystemExit(f"bench_step.py: --config: {error}") from None


def refuse_old_checkpoints(args: argparse.Namespace) -> None:
    """Before the run rather than at its end."""
    old = [
        str(args.checkpoint / mode)
        for mode in args.modes
        if args.checkpoint and (args.checkpoint / mode).exists()
    ]
    if old:
        raise SystemExit(f"bench_step.py: {', '.join(old)}: there already; give --checkpoint a new folder")


def plan_layers(args: argparse.Namespace, world: World) -> dict[str, Any] | None:
    """What the run takes and what there is, before it; sets the layers of ``--layers auto``. The same on all ranks.

    None for dense models of a given depth: some are run to see where memory ends.
    """
    is_auto = args.layers == "auto"
    whole = SHAPES[args.model].with_sizes(hidden=args.hidden)
    if not is_auto and not whole.num_experts:
        return None
    look = _layer_plan.memory_here if world.launched else _layer_plan.memory_of_children
    memory = _layer_plan.least(world.gather(look(torch.device(args.device), args.checkpoint)))
    options = parse_assignments(args.optimizer)
    job = _layer_plan.Job(
        whole if is_auto else whole.with_sizes(args.layers),
        args.batch * max(args.seq),
        max(args.seq),
        ranks=world.size,
        holds_gradients="max_grad_norm" in options or options.get("nonfinite", "propagate") != "propagate",
        num_saves=sum(mode not in NOT_OURS for mode in args.modes) if args.checkpoint else 0,
        overlaps_forward=bool(options.get("overlap_forward")),
        config=OffloadConfig(**parse_assignments(args.config)),
    )
    try:
        args.layers, planned = _layer_plan.decide(
            args.modes, job, memory, cuts=is_auto, of=whole.num_layers, says=world.is_first
        )
    except MemoryBudgetError as error:
        raise SystemExit(f"bench_step.py: {error}" if world.is_first else 1) from None
    return planned


def summarize(
    args: argparse.Namespace, modes: list[dict[str, Any]], world: World, wall_s: float
) -> dict[str, Any]:
    runs = [run for mode in modes for run in mode["runs"]]
    compare_with_first(runs, shape_of(args).counted(), args.batch)
    return {
        "script": "bench_step",
        "model": args.model,
        "layers": shape_of(args).num_layers,
        "ranks": world.size,
        "sharded": world.launched,
        "parameters": modes[0].get("parameters"),
        "implementation": modes[0].get("implementation"),
        "batch": args.batch,
        "warmup": args.warmup,
        "steps": args.steps,
        "optimizer": parse_assignments(args.optimizer),
        "config": parse_assignments(args.config),
        "setup_s": {mode["mode"]: mode.get("setup_s") for mode in modes},
        "construction_s": {mode["mode"]: mode.get("construction_s") for mode in modes},
        "construction": {
            mode["mode"]: {
                "stages": mode["construction"],
                **{name: mode.get(name) for name in ("host_bytes_built", "huge_page_bytes", "close_s")},
            }
            for mode in modes
            if mode.get("construction")
        },
        "rates": {
            mode["mode"]: {"before": mode["update"]["rates"], "after": mode["rates_after"]}
            for mode in modes
            if mode.get("rates_after")
        },
        "plans": {mode["mode"]: mode.get("plan") for mode in modes},
        "threads": next((mode["threads"] for mode in modes if mode.get("threads")), None),
        "checkpoints": {mode["mode"]: mode["checkpoint"] for mode in modes if mode.get("checkpoint")},
        "published": _published.beside(args.model, runs),
        "wall_s": wall_s,
        "runs": runs,
        "environment": modes[0].get("environment"),
    }


def run_here(mode: str, args: argparse.Namespace, world: World) -> dict[str, Any]:
    """One mode in this process, beside the other ranks; its memory is freed for the next one."""
    if world.is_first:
        print(f"{mode} on {world.size} rank(s) ...", flush=True)
    args.worker = mode
    result = measure_mode(args, world)
    free(torch.device(args.device))
    world.barrier()
    return result


def run_in_subprocess(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """The same command line, for one mode; all its memory is gone when it returns."""
    print(f"{mode} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mode.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", mode, "--json", str(path)]
        if args.layers is not None:
            command += ["--layers", str(args.layers)]  # as planned
        code = subprocess.run(command, check=False).returncode
        if path.exists():
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return result
    return {"mode": mode, "runs": [{"mode": mode, "status": "error", "error": f"exit status {code}"}]}


# Command line -----------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument(
        "--layers", type=_layers, metavar="N", help="another depth; auto: as many layers as memory holds"
    )
    parser.add_argument("--hidden", type=int, help="another width")
    parser.add_argument("--implementation", choices=("auto", "plain", "transformers"), default="auto")
    parser.add_argument(
        "--seq", type=_integers, default=[8192, 16384], metavar="N,N", help="tokens per sequence"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument("--modes", type=_names, default=[BASELINE, "wavefront"], metavar="M,M")
    parser.add_argument("--steps", type=_at_least(5), default=8, help="timed steps, at least 5")
    parser.add_argument("--warmup", type=_at_least(3), default=4, help="steps before them, at least 3")
    parser.add_argument(
        "--config", action="append", default=[], metavar="FIELD=VALUE", help="of OffloadConfig"
    )
    parser.add_argument(
        "--optimizer", action="append", default=[], metavar="NAME=VALUE", help="of offload.AdamW"
    )
    parser.add_argument("--deterministic", action="store_true", help="ask torch for deterministic kernels")
    parser.add_argument("--device", default=str(_environment.default_device()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="after the steps of each mode save it to a new folder there, resume from it, compare losses",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FOLDER",
        help="profile three more steps of each mode and length, to there",
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--worker", metavar="MODE", help=argparse.SUPPRESS)
    return parser.parse_args()


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _layers(text: str) -> int | str:
    return text if text == "auto" else _at_least(1)(text)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _at_least(minimum: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"at least {minimum}, not {text}")
        return int(text)

    return convert


if __name__ == "__main__":
    main()
