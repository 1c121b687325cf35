"""Device memory that an optimizer step takes beyond weights and gradients, and its time, for state kept on the host.

    python scripts/bench_memory.py --json out.json
    python scripts/bench_memory.py --models 40x2560 --optimizers cpu-offload-fused --steps 10

FP32 weights and gradients, AdamW. Models are decoders of 16 h² parameters per layer (four h × h matrices of attention, three
h × 4 h of a gated MLP) with an untied vocabulary of 32,000. *Extra memory* is the allocator's peak inside ``step()`` less
weights and gradients, and less nothing else: buffers that were allocated before count. The *link's time* is what the
state that a step moves would take at the rate of copies in both directions at once, measured here.

Every model has a fresh process, in which its rows follow each other: what one of them left behind would count as extra
memory of the next. Without a GPU there is neither an allocator to ask nor a link to measure.
"""

from __future__ import annotations

import _environment  # isort: skip  (sets variables that torch reads when it is loaded)

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _measure import format_table, synchronize, write_json

import offload
from offload.transfer.cuda import CudaTransport
from offload.transfer.pinned import allocate
from offload.transfer.transport import Copy

MIB = 1 << 20
MODELS = {
    "14x768": (14, 768, 32_000),
    "28x1024": (28, 1024, 32_000),
    "40x2560": (40, 2560, 32_000),
    "tiny": (2, 16, 64),
}
"""Layers, width, vocabulary."""

PUBLISHED_MIB = {"14x768": (2_076, 564), "28x1024": (6_132, 756), "40x2560": (50_350, 2_462)}
"""Extra memory published for chunked state offload: everything at once, and chunked."""

MODES = ("all-at-once", "chunked-sync", "chunked-stream")
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
PIECE_BYTES = 32 * MIB

Named = list[tuple[str, torch.nn.Parameter]]


def cpu_offload(mode: str, named: Named, **flags: Any) -> torch.optim.Optimizer:
    return offload.CPUOffloadOptimizer(torch.optim.AdamW(named, **SETTINGS, **flags), mode=mode)


OPTIMIZERS: dict[str, Callable[[str, Named], torch.optim.Optimizer]] = {
    "cpu-offload-fused": lambda mode, named: cpu_offload(mode, named, fused=True),
    "cpu-offload-foreach": lambda mode, named: cpu_offload(mode, named),
    "offload-adamw": lambda mode, named: offload.AdamW(named, **SETTINGS, mode=mode),
    "torch-fused": lambda mode, named: torch.optim.AdamW(named, **SETTINGS, fused=True),
}
"""The last one keeps its state on the device, in any mode: for comparison."""


# One model after another, each in its own process -----------------------------------------------------------


def main() -> None:
    args = parse_arguments()
    if args.rows:
        for row in args.rows.split(";"):
            with args.json.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(measure_row(args, *row.split(","))) + "\n")
        return
    link = measure_link(torch.device(args.device))
    rows = [with_ratio(row, link) for model in args.models for row in measure_model(args, model)]
    print(format_table(HEADERS, [table_row(row) for row in rows]))
    if link is not None:
        print(f"link, both directions at once: {link / 1e9:.1f} GB/s")
    environment = _environment.describe(torch.device(args.device))
    result = {
        "script": "bench_memory",
        "link_bytes_per_s": link,
        "published_mib": PUBLISHED_MIB,
        "rows": rows,
    }
    write_json(args.json, {**result, "environment": environment})
    if any(row["status"] == "error" for row in rows):
        raise SystemExit(1)


def measure_model(args: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """All rows of a model, in a process of their own. One that ends it leaves a row that says so, and the others go on."""
    waiting = [(model, optimizer, mode) for optimizer in args.optimizers for mode in args.modes]
    rows: list[dict[str, Any]] = []
    while waiting:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            options = ["--device", args.device, "--steps", str(args.steps), "--json", str(path)]
            process = subprocess.run(
                [sys.executable, __file__, *options, "--rows", ";".join(",".join(row) for row in waiting)],
                capture_output=True,
                text=True,
                check=False,
            )
            done = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows += [json.loads(line) for line in done]
        waiting = waiting[len(done) :]
        if process.returncode and waiting:
            reason = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            failed = dict(zip(("model", "optimizer", "mode"), waiting.pop(0), strict=True))
            rows.append({**failed, "status": "error", "reason": reason})
    for row in rows:
        print(
            " ".join((model, row["optimizer"], row["mode"], row["status"], row.get("reason", ""))), flush=True
        )
    return rows


def with_ratio(row: dict[str, Any], link: float | None) -> dict[str, Any]:
    """The row with the time that its bytes take on the link, and the step's time over that."""
    if link is None or not row.get("moved_bytes"):
        return row
    ideal = row["moved_bytes"] / link
    return {**row, "link_s": ideal, "step_over_link": row["step_s"] / ideal}


# One row, in the process made for its model ------------------------------------------------------------------------


def measure_row(args: argparse.Namespace, model: str, optimizer_name: str, mode: str) -> dict[str, Any]:
    """First step, then ``--steps`` more, with new gradients in the same memory before each."""
    device = torch.device(args.device)
    before = allocated(device)
    named = list(parameters(*MODELS[model], device))
    weights_and_gradients = (
        allocated(device) - before
    )  # as the allocator counts them: it rounds large ones up
    params = [parameter for _, parameter in named]
    row: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer_name,
        "mode": mode,
        "parameters": sum(p.numel() for p in params),
    }
    try:
        optimizer = OPTIMIZERS[optimizer_name](mode, named)
    except offload.ConfigError as error:
        return {**row, "status": "not available", "reason": str(error)}
    extra, seconds, reserved = [], [], []
    for step in range(args.steps + 1):
        for parameter in params:
            fill(parameter, step)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        optimizer.step()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        if device.type == "cuda":
            extra.append(torch.cuda.max_memory_allocated() - weights_and_gradients)
            reserved.append(torch.cuda.memory_reserved())
    state = [
        t
        for entry in optimizer.state.values()
        for key, t in entry.items()
        if key != "master" and torch.is_tensor(t)
    ]
    report = getattr(optimizer, "last_step", None)
    moved = report.bytes_to_device + report.bytes_to_host if report is not None else 0
    state_bytes = sum(t.nbytes for t in state)
    close = getattr(optimizer, "close", None)
    if close is not None:
        close()
    del optimizer, named, params, parameter, state
    gc.collect()
    return {
        **row,
        "status": "ok",
        "state_bytes": state_bytes,
        "first_extra_bytes": extra[0] if extra else None,
        "later_extra_bytes": max(extra[1:]) if extra else None,
        "reserved_growth_bytes": reserved[-1] - reserved[1] if reserved else None,
        "first_step_s": seconds[0],
        "step_s": statistics.median(seconds[1:]),
        "moved_bytes": moved,
    }


def parameters(
    layers: int, width: int, vocabulary: int, device: torch.device
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The decoder's weights, with their names and gradients; there is no model, since no forward is run."""

    def make(*shape: int) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.full(shape, 0.02, device=device))
        parameter.grad = torch.zeros_like(parameter)
        return parameter

    yield "embedding.weight", make(vocabulary, width)
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            yield f"layers.{layer}.attention.{name}.weight", make(width, width)
        for name in ("gate", "up"):
            yield f"layers.{layer}.mlp.{name}.weight", make(4 * width, width)
        yield f"layers.{layer}.mlp.down.weight", make(width, 4 * width)
        for name in ("attention_norm", "mlp_norm"):
            yield f"layers.{layer}.{name}.weight", make(width)
    yield "norm.weight", make(width)
    yield "head.weight", make(vocabulary, width)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def fill(parameter: torch.nn.Parameter, step: int) -> None:
    """A new gradient, also for an optimizer that has taken the old one away; in place where it has not."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.fill_(1e-3 * (1 + step % 3))


# The link ---------------------------------------------------------------------------------------------------


def measure_link(device: torch.device, *, num_pieces: int = 64) -> float | None:
    """Bytes per second of pinned copies, both directions at once; None without a GPU."""
    if device.type != "cuda":
        return None
    slab = allocate(4 * PIECE_BYTES, name="link", pin=True, fallback_pageable=False, device=device)
    on_host = slab.tensor(torch.uint8).view(4, PIECE_BYTES)
    on_device = torch.zeros(4, PIECE_BYTES, dtype=torch.uint8, device=device)
    transport = CudaTransport(device)

    def run() -> float:
        torch.cuda.synchronize()
        ready = [transport.record_ready()]
        started = time.perf_counter()
        transfers = []
        for piece in range(num_pieces):
            one, other = piece % 2, 2 + piece % 2
            transfers.append(transport.issue_to_device([Copy(on_device[one], on_host[one])], ready))
            transfers.append(transport.issue_to_host([Copy(on_host[other], on_device[other])], ready))
        for transfer in transfers:
            transport.wait(transfer)
        return time.perf_counter() - started

    rate = 2 * num_pieces * PIECE_BYTES / min(run() for _ in range(4))
    transport.close()
    slab.close()
    return rate


# The table --------------------------------------------------------------------------------------------------

HEADERS = ("model, optimizer, mode", "state MiB", "first extra MiB", "later extra MiB", "published MiB", "first step ms",
           "step ms", "moved MiB", "step / link")  # fmt: skip


def table_row(row: dict[str, Any]) -> list[str]:
    name = f"{row['model']} {row['optimizer']} {row['mode']}"
    if row["status"] != "ok":
        return [name, row["status"], *["-"] * (len(HEADERS) - 2)]
    published = PUBLISHED_MIB.get(row["model"])
    return [
        name,
        in_mib(row["state_bytes"]),
        in_mib(row["first_extra_bytes"]),
        in_mib(row["later_extra_bytes"]),
        "-" if published is None else f"{published[row['mode'] != 'all-at-once']:,}",
        f"{1e3 * row['first_step_s']:.1f}",
        f"{1e3 * row['step_s']:.1f}",
        in_mib(row["moved_bytes"]),
        f"{row['step_over_link']:.2f}" if "step_over_link" in row else "-",
    ]


def in_mib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / MIB:,.1f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    device = str(_environment.default_device())
    large = [model for model in MODELS if model != "tiny"]
    parser.add_argument("--models", type=_words(MODELS), default=large if device != "cpu" else ["tiny"], metavar="M,M",
                        help=", ".join(MODELS))  # fmt: skip
    parser.add_argument("--optimizers", type=_words(OPTIMIZERS), default=list(OPTIMIZERS)[:3], metavar="O,O",
                        help=", ".join(OPTIMIZERS))  # fmt: skip
    parser.add_argument(
        "--modes", type=_words(MODES), default=list(MODES), metavar="M,M", help=", ".join(MODES)
    )
    parser.add_argument("--steps", type=int, default=5, help="after the first one")
    parser.add_argument("--device", default=device)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    return parser.parse_args()


def _words(known: Any) -> Callable[[str], list[str]]:
    def words(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(known)
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(sorted(unknown))}; choose among {', '.join(known)}"
            )
        return text.split(",")

    return words


if __name__ == "__main__":
    main()
