"""Time whole training steps of one model under several optimizer modes.

    python scripts/bench_step.py --model qwen3-4b --seq 8192,16384 --modes resident,wavefront --json out.json

``resident`` is torch's own fused AdamW with FP32 masters on the device: what one would use if memory were no
matter. ``offload-resident`` is the library's mode of that name. All modes start from the same random weights
and see the same batch in every step, so their losses can be compared step by step. Each mode runs in a fresh
process, in which all sequence lengths follow each other.

    torchrun --nproc-per-node 2 scripts/bench_step.py --model qwen3-4b --seq 16384 --modes resident,wavefront

shards the model with FSDP2; each rank has a batch of its own, and the modes follow each other in the same processes.
Figures are those of rank 0, but for tokens per second, which are those of all ranks. An error ends the run.
"""

from __future__ import annotations

import _environment  # isort: skip  (sets variables that torch reads when it is loaded)

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from _measure import (
    PhaseClock,
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
from _models import SHAPES, LanguageModel, build_model, implementation_of, num_parameters
from _optimizers import (
    BASELINE,
    OVERLAPPING,
    make_optimizer,
    measure_rates,
    parse_assignments,
    pinned_bytes,
    update_seconds,
)
from _ranks import World, join_world
from _roofline import CAUSES, Compute, exposed, roofline

# One mode after another in its own process ------------------------------------------------------------------


def main() -> None:
    args = parse_arguments()
    if args.worker:
        write_json(args.json, measure_mode(args, World()))
        return
    started = time.perf_counter()
    with join_world(torch.device(args.device)) as world:
        modes = []
        for mode in args.modes:
            modes.append(run_here(mode, args, world) if world.launched else run_in_subprocess(mode))
            result = summarize(args, modes, world, time.perf_counter() - started)
            if world.is_first:  # what is measured stays measured, whatever becomes of the next mode
                write_json(args.json, result)
        if world.is_first:
            print_tables(result)
    if any(run["status"] == "error" for run in result["runs"]):
        raise SystemExit(1)


def summarize(
    args: argparse.Namespace, modes: list[dict[str, Any]], world: World, wall_s: float
) -> dict[str, Any]:
    runs = [run for mode in modes for run in mode["runs"]]
    compare_with_first(runs)
    return {
        "script": "bench_step",
        "model": args.model,
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
        "plans": {mode["mode"]: mode.get("plan") for mode in modes},
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
    gc.collect()  # FSDP's states and hooks refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    world.barrier()
    return result


def run_in_subprocess(mode: str) -> dict[str, Any]:
    """The same command line, for one mode; all its memory is gone when it returns."""
    print(f"{mode} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mode.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", mode, "--json", str(path)]
        code = subprocess.run(command, check=False).returncode
        if path.exists():
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return result
    return {"mode": mode, "runs": [{"mode": mode, "status": "error", "error": f"exit status {code}"}]}


# One mode, in the process made for it -----------------------------------------------------------------------


def measure_mode(args: argparse.Namespace, world: World) -> dict[str, Any]:
    device = torch.device(args.device)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_cudnn_sdp(
            False
        )  # its backward is not deterministic; flash attention's can be
    started = time.perf_counter()
    model = build_model(
        SHAPES[args.model].with_sizes(args.layers, args.hidden),
        device,
        dtype=torch.bfloat16,
        implementation=args.implementation,
        seed=args.seed,
    )
    world.shard(model)
    config = parse_assignments(args.config)
    rates = measure_rates(device, config.get("threads"))
    optimizer = make_optimizer(
        args.worker,
        model,
        config=config,
        **{"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, **parse_assignments(args.optimizer)},
    )
    synchronize(device)
    result = {
        "mode": args.worker,
        "parameters": num_parameters(model),
        "implementation": implementation_of(model),
        "setup_s": time.perf_counter() - started,
        "environment": _environment.describe(device),
        "update": update_seconds(args.worker, optimizer, rates, config, parse_assignments(args.optimizer)),
    }
    result["runs"] = measure_lengths(args, model, optimizer, device, world)
    if args.worker != BASELINE:
        result["plan"] = str(optimizer.plan)  # as it is after the steps: a hybrid moves its balance
    for run in result["runs"]:
        run["update"] = result["update"]
    optimizer.close()
    return result


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
    ids, targets = make_batch(
        SHAPES[args.model].vocabulary, args.batch, length, args.seed + world.rank, device
    )
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
    optimizer.synchronize()
    synchronize(device)
    clock = PhaseClock(device)
    started = time.perf_counter()
    for _ in range(args.steps):
        step()
    clock.mark("end")
    optimizer.synchronize()
    synchronize(device)
    wall_s = time.perf_counter() - started
    return {
        **times(clock.durations(), wall_s / args.steps, args.batch * length * world.size),
        **device_bytes(device),
        "pinned_bytes": pinned_bytes(args.worker),
        "host_bytes": host_bytes(),
        "peak_host_bytes": peak_host_bytes(),
        "stages": stage_medians(reports[args.warmup :]),
        "losses": [loss.item() for loss in losses],
    }


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


def make_batch(
    vocabulary: int, batch: int, length: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and targets. One batch is learned by heart, so a wrong update soon shows in the loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (batch, length + 1), generator=generator).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# Comparison and tables --------------------------------------------------------------------------------------


def compare_with_first(runs: list[dict[str, Any]]) -> None:
    """Adds to each run its share of the baseline's throughput and its losses' distance from the first mode's."""
    done = [run for run in runs if run["status"] == "ok"]
    for run in done:
        peers = [peer for peer in done if peer["seq"] == run["seq"]]
        reference = peers[0]["losses"]
        run["max_loss_difference"] = max(abs(a - b) for a, b in zip(run["losses"], reference, strict=True))
        run["bit_equal_losses"] = run["losses"] == reference
        baseline = next((peer for peer in peers if peer["mode"] == BASELINE), None)
        run["share_of_resident"] = baseline and baseline["step_s"] / run["step_s"]
        if baseline is not None:
            add_roofline(run, Compute(baseline["forward_s"], baseline["backward_s"]))


def add_roofline(run: dict[str, Any], compute: Compute) -> None:
    """The time that the rates allow, the share of it reached, and the exposed seconds by cause."""
    run["exposed_s"] = exposed(run, compute)
    update = run.get("update")
    if update is None:
        return
    run["roofline_s"] = roofline(
        run["mode"],
        compute,
        update["seconds"],
        num_chunks=update["chunks"],
        num_tiles=update["tiles"],
        overlaps_forward=update["overlaps_forward"],
    )
    run["share_of_roofline"] = run["roofline_s"] / run["step_s"]


def print_tables(result: dict[str, Any]) -> None:
    done = [run for run in result["runs"] if run["status"] == "ok"]
    for run in result["runs"]:
        if run["status"] != "ok":
            print(f"{run['mode']} at {run.get('seq', 'start')}: {run['status']}: {run['error']}")
    if not done:
        return
    sharded = f", FSDP2 on {result['ranks']} rank(s), figures of rank 0" if result["sharded"] else ""
    size = f"{result['parameters'] / 1e9:.3f} G parameters"
    print(f"\n{result['model']}, {size}, {result['implementation']}{sharded}\n")
    headers = (
        "mode", "seq", "step s", "mean s", "of resident", "tokens/s", "forward s", "backward s", "optimizer s",
        "device GiB", "reserved GiB", "pinned GiB", "host GiB",
    )  # fmt: skip
    print(format_table(headers, [table_row(run) for run in done]))
    print_rooflines([run for run in done if "exposed_s" in run])
    for length in dict.fromkeys(run["seq"] for run in done):
        print_losses(length, [run for run in done if run["seq"] == length])
    for run in done:
        if run["stages"]:
            title = f"{run['mode']}, {run['seq']} tokens"
            print("\n" + format_table((title, "median"), stage_rows(run["stages"])))


def table_row(run: dict[str, Any]) -> list[str]:
    share = run["share_of_resident"]
    return [
        run["mode"],
        str(run["seq"]),
        f"{run['step_s']:.3f}",
        f"{run['mean_step_s']:.3f}",
        "-" if share is None else f"{share:.1%}",
        f"{run['tokens_per_s']:.0f}",
        *(f"{run[name]:.3f}" for name in ("forward_s", "backward_s", "optimizer_s")),
        *(in_gib(run[f"{name}_bytes"]) for name in ("peak_device", "peak_reserved", "pinned", "host")),
    ]


def print_rooflines(runs: list[dict[str, Any]]) -> None:
    """See docs/roofline.md."""
    if not runs:
        return
    rows = [
        [
            run["mode"],
            str(run["seq"]),
            *(f"{run[name]:.3f}" if name in run else "-" for name in ("step_s", "roofline_s")),
            f"{run['share_of_roofline']:.1%}" if "share_of_roofline" in run else "-",
            *(f"{run['exposed_s'][cause]:.3f}" for cause in CAUSES),
        ]
        for run in runs
    ]
    headers = (
        "mode",
        "seq",
        "step s",
        "roofline s",
        "of roofline",
        *(f"exposed: {cause} s" for cause in CAUSES),
    )
    print("\nRoofline, and the time above forward and backward alone, by cause (docs/roofline.md):\n")
    print(format_table(headers, rows))


def print_losses(length: int, runs: list[dict[str, Any]]) -> None:
    print(f"\nLosses at {length} tokens, warm-up included:\n")
    steps = zip(*(run["losses"] for run in runs), strict=True)
    rows = [[str(step), *(f"{loss:.6f}" for loss in losses)] for step, losses in enumerate(steps)]
    rows.append(["max difference", *(f"{run['max_loss_difference']:.2g}" for run in runs)])
    rows.append(["bit-equal", *("yes" if run["bit_equal_losses"] else "no" for run in runs)])
    print(format_table(["step", *(run["mode"] for run in runs)], rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--layers", type=int, help="another depth")
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
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--worker", metavar="MODE", help=argparse.SUPPRESS)
    return parser.parse_args()


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _at_least(minimum: int) -> Any:
    def convert(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"at least {minimum}, not {text}")
        return int(text)

    return convert


if __name__ == "__main__":
    main()
