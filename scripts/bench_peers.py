"""Time a training step with this library and with what one would use instead, in one run.

    python scripts/bench_peers.py --model qwen3-4b --seq 8192,16384 --json out.json

Model, batch and timing are those of bench_step.py, and all start from the same BF16 weights. Each peer runs in a fresh
process; one that is not installed, or that fails, has its reason in the table.

- ``resident``: torch's fused AdamW with FP32 masters, everything on the device.
- ``torchao``: ``torchao.optim.CPUOffloadOptimizer`` around fused AdamW. It keeps BF16 state for BF16 weights: no FP32
  masters, so small updates round away.
- ``fsdp-offload``: FSDP2 on one rank with ``CPUOffloadPolicy``: FP32 weights on the host, fused AdamW there, BF16 compute.
- any mode of ``offload.AdamW``, such as ``wavefront``; with ``+overlap`` the next forward overlaps the update.
"""

from __future__ import annotations

import _environment  # isort: skip  (sets variables that torch reads when it is loaded)

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
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
    synchronize,
    write_json,
)
from _models import LanguageModel, build_model, num_parameters
from _one_mode import make_batch, times
from _optimizers import make_optimizer, pinned_bytes
from _shapes import SHAPES

BASELINE = "resident"
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
OVERLAP = "overlap"
TIMEOUT_S = 1800.0


class Skipped(Exception):  # noqa: N818 - not an error: the reason stands in the table
    """A peer that cannot run here; the message says why."""


# One peer after another, each in its own process ------------------------------------------------------------


def main() -> None:
    args = parse_arguments()
    if args.worker:
        write_json(args.json, measure_peer(args))
        return
    peers = [run_in_subprocess(peer, args.timeout) for peer in args.peers]
    runs = [run for peer in peers for run in peer["runs"]]
    add_shares(runs)
    result = {
        "script": "bench_peers",
        "model": args.model,
        "parameters": next((peer["parameters"] for peer in peers if "parameters" in peer), None),
        "batch": args.batch,
        "warmup": args.warmup,
        "steps": args.steps,
        "runs": runs,
        "environment": next((peer["environment"] for peer in peers if "environment" in peer), None),
    }
    print_table(result)
    write_json(args.json, result)


def run_in_subprocess(peer: str, timeout_s: float) -> dict[str, Any]:
    """The same command line, for one peer."""
    print(f"{peer} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peer.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", peer, "--json", str(path)]
        try:
            code: int | str = subprocess.run(command, timeout=timeout_s).returncode
        except subprocess.TimeoutExpired:
            code = f"none after {timeout_s:.0f} s"
        if path.exists():
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return result
    return {"runs": [{"peer": peer, "status": "error", "reason": f"exit status {code}"}]}


# One peer, in the process made for it -----------------------------------------------------------------------


def measure_peer(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    result: dict[str, Any] = {"peer": args.worker, "environment": _environment.describe(device), "runs": []}
    try:
        model = build_model(
            SHAPES[args.model],
            device,
            dtype=torch.bfloat16,
            implementation=args.implementation,
            seed=args.seed,
        )
        result["parameters"] = num_parameters(model)
        optimizer, pinned = PEERS.get(args.worker, make_ours)(args.worker, model, device)
        for length in args.seq:
            run = {"peer": args.worker, "seq": length, "status": "ok"}
            run |= measure_length(args, model, optimizer, device, length)
            result["runs"].append({**run, "pinned_bytes": pinned()})
    except Skipped as reason:
        result["runs"].append({"peer": args.worker, "status": "skipped", "reason": str(reason)})
    except Exception as error:  # noqa: BLE001 - the other peers' figures are still worth having
        traceback.print_exc()
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        result["runs"].append({"peer": args.worker, "status": "error", "reason": words})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return result


def measure_length(
    args: argparse.Namespace, model: LanguageModel, optimizer: Any, device: torch.device, length: int
) -> dict[str, Any]:
    ids, targets = make_batch(SHAPES[args.model].vocabulary, args.batch, length, args.seed, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    losses: list[torch.Tensor] = []

    def step(clock: PhaseClock) -> None:
        clock.mark("forward")
        loss = model(ids, targets)
        clock.mark("backward")
        loss.backward()
        clock.mark("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    def settle() -> None:
        getattr(optimizer, "synchronize", lambda: None)()
        synchronize(device)

    for _ in range(args.warmup):
        step(PhaseClock(device))
    settle()
    clock, started = PhaseClock(device), time.perf_counter()
    for _ in range(args.steps):
        step(clock)
    clock.mark("end")
    settle()
    mean_s = (time.perf_counter() - started) / args.steps
    values = [float(loss) for loss in losses]
    return {
        **times(clock.durations(), mean_s, args.batch * length),
        **device_bytes(device),
        "host_bytes": host_bytes(),
        "peak_host_bytes": peak_host_bytes(),
        "losses": values,
        "final_loss": values[-1],
    }


# Peers ------------------------------------------------------------------------------------------------------

Made = tuple[Any, Callable[[], int | None]]  # an optimizer, and how much it has pinned


def make_ours(peer: str, model: LanguageModel, device: torch.device) -> Made:
    """The baseline, or a mode of this library."""
    mode, _, option = peer.partition("+")
    if option not in ("", OVERLAP):
        raise ValueError(f"{peer!r}: only +{OVERLAP} can follow a mode")
    options = {**HYPERPARAMETERS, "overlap_forward": option == OVERLAP}
    return make_optimizer(mode, model, **options), lambda: pinned_bytes(mode)


def make_torchao(_: str, model: LanguageModel, device: torch.device) -> Made:
    if importlib.util.find_spec("torchao") is None:
        raise Skipped("torchao is not installed")
    if device.type != "cuda":
        raise Skipped("torchao's CPUOffloadOptimizer needs a GPU")
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, fused=True, **HYPERPARAMETERS
    ), lambda: None


def make_fsdp(_: str, model: LanguageModel, device: torch.device) -> Made:
    """Shards `model` in place, over one rank."""
    if not torch.distributed.is_available():
        raise Skipped("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_gpu = device.type == "cuda"
    distributed: Any = torch.distributed
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
    }
    model.float()
    backbone: Any = model.backbone
    for layer in backbone.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model._embedding = LiveEmbedding(backbone)  # type: ignore[assignment]
    return torch.optim.AdamW(model.parameters(), fused=True, **HYPERPARAMETERS), lambda: None


class LiveEmbedding:
    """Stands in for the list that holds the tied weight: FSDP exchanges the parameter of the module in each forward."""

    def __init__(self, backbone: Any) -> None:
        self._backbone = backbone

    def __getitem__(self, _: int) -> torch.Tensor:
        weight: torch.Tensor = self._backbone.embed_tokens.weight
        return weight


PEERS: dict[str, Callable[[str, LanguageModel, torch.device], Made]] = {
    "torchao": make_torchao,
    "fsdp-offload": make_fsdp,
}


# Table ------------------------------------------------------------------------------------------------------


def add_shares(runs: list[dict[str, Any]]) -> None:
    """Each run's speed as a share of the baseline's at the same length."""
    resident = {
        run["seq"]: run["step_s"] for run in runs if run["peer"] == BASELINE and run["status"] == "ok"
    }
    for run in runs:
        if run["status"] == "ok":
            base = resident.get(run["seq"])
            run["share_of_resident"] = None if base is None else base / run["step_s"]


def print_table(result: dict[str, Any]) -> None:
    headers = ("peer", "tokens", "step s", "of resident", "device GiB", "host GiB", "final loss")
    rows = []
    for run in result["runs"]:
        if run["status"] != "ok":
            rows.append([run["peer"], "-", "-", "-", "-", "-", f"{run['status']}: {run['reason']}"])
            continue
        share = run["share_of_resident"]
        rows.append(
            [
                run["peer"],
                str(result["batch"] * run["seq"]),
                f"{run['step_s']:.3f}",
                "-" if share is None else f"{share:.1%}",
                in_gib(run["peak_device_bytes"]),
                in_gib(run["peak_host_bytes"]),
                f"{run['final_loss']:.4f}",
            ]
        )
    print(f"\n{result['model']}, {result['steps']} steps after {result['warmup']}\n")
    print(format_table(headers, rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--implementation", choices=("auto", "plain", "transformers"), default="auto")
    parser.add_argument("--seq", type=lambda text: [int(part) for part in text.split(",")], default=[8192])
    parser.add_argument("--batch", type=int, default=1, help="sequences per step")
    parser.add_argument(
        "--peers",
        type=lambda text: [part.strip() for part in text.split(",")],
        default=[BASELINE, *PEERS, "wavefront", f"hybrid+{OVERLAP}"],
        metavar="P,P",
        help=f"{BASELINE}, {', '.join(PEERS)}, or modes of offload.AdamW, also with +{OVERLAP}",
    )
    parser.add_argument("--steps", type=int, default=7, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds that one peer may take")
    parser.add_argument("--device", default=str(_environment.default_device()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--worker", metavar="PEER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 1 or args.warmup < 1:
        parser.error("--steps and --warmup must be at least 1")
    return args


if __name__ == "__main__":
    main()
