"""``offload plan``: before a run, what each mode takes and how long a step lasts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from offload import rates as machine_rates
from offload.cli.model_shape import ModelShape, read_config
from offload.cli.recommend import ModeRow, Recommendation, mode_rows, recommend
from offload.cli.units import as_gib, parse_bytes
from offload.cli.workload import Run, flops_of, forward_share_of, workload_of
from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.rates import UPDATE_BYTES, Rates
from offload.schedule.step_estimate import Passes, passes_of
from offload.threads import configure_cpu_optimizer_threads

__all__ = ["plan"]

DEVICE_MEMORY_RATE = 3300.0
"""GB/s at which the device's update kernel moves memory on an H200; used where nothing is measured or given. It enters
with the update of a resident step alone, a few hundredths of it."""


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(help="A Hugging Face config.json, or its folder; or give the numbers below."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Layers (without a config).")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    intermediate: Annotated[
        int | None, typer.Option(help="Width of the MLP; 4 times hidden by default.")
    ] = None,
    vocab: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; one per 128 of hidden by default.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key and value heads; as many as heads by default.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Width of a head; hidden over heads by default.")
    ] = None,
    tied: Annotated[bool, typer.Option(help="Whether the head is the embedding.")] = False,
    ranks: Annotated[int, typer.Option(help="Ranks that share the parameters (FSDP).")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens of one rank's backward pass.")] = 8192,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens of one sequence; all of them by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and gradients: bf16 or fp32.")] = "bf16",
    reduce_dtype: Annotated[
        str | None, typer.Option(help="Of FSDP's reductions: bf16 or fp32; as --dtype by default.")
    ] = None,
    checkpointing: Annotated[bool, typer.Option(help="Activation checkpointing, a layer at a time.")] = True,
    chunked_loss: Annotated[
        bool, typer.Option(help="A loss that never holds all logits (Liger and the like).")
    ] = False,
    accumulation_steps: Annotated[int, typer.Option(help="Backward passes per step.")] = 1,
    clipping: Annotated[bool, typer.Option(help="Whether gradients are clipped by their norm.")] = False,
    overlap_forward: Annotated[
        bool, typer.Option(help="Of wavefront and hybrid: the next forward overlaps the update.")
    ] = False,
    stream_share: Annotated[
        float | None,
        typer.Option(help="Of hybrid, as in OffloadConfig: the host's state that is streamed; else planned."),
    ] = None,
    device_budget: Annotated[
        str | None,
        typer.Option(help="Of one GPU, for everything on it, as 80GiB; this machine's by default."),
    ] = None,
    host_budget: Annotated[str | None, typer.Option(help="Host memory of one rank.")] = None,
    pinned_budget: Annotated[str | None, typer.Option(help="Pinned memory of one rank.")] = None,
    kernel_rate: Annotated[
        float | None, typer.Option(help="Gparam/s of the host kernel, as bench kernel says.")
    ] = None,
    link_rate: Annotated[float | None, typer.Option(help="GB/s between host and device, each way.")] = None,
    device_memory_rate: Annotated[float | None, typer.Option(help="GB/s of device memory.")] = None,
    resident_step: Annotated[
        float | None,
        typer.Option(help="Seconds of a step with everything on the device, as bench step says."),
    ] = None,
    forward_share: Annotated[
        float | None, typer.Option(help="Of forward in forward and backward; by arithmetic by default.")
    ] = None,
    device_rate: Annotated[
        float | None,
        typer.Option(help="TFLOP/s over forward and backward, where the resident step is not known."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Memory and step time of every mode for a model, and the mode to take.

    Rates of this machine are measured unless given. Without --resident-step or --device-rate the update alone is timed.
    """
    shape = _shape(
        config,
        {
            "num_layers": layers,
            "hidden": hidden,
            "vocabulary": vocab,
            "intermediate": intermediate,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
        },
        tied,
    )
    run = Run(
        shape,
        tokens,
        sequence or tokens,
        ranks,
        dtype,
        checkpointing,
        chunked_loss,
        accumulation_steps,
        clipping,
        overlap_forward,
        reduce_dtype,
    )
    options = OffloadConfig(stream_share=stream_share)
    notes: list[str] = []
    rates = _rates(kernel_rate, link_rate, device_memory_rate, notes)
    passes = _passes(run, rates, resident_step, forward_share, device_rate, notes)
    budgets = {
        "device": _device_budget(device_budget, notes),
        "host": None if host_budget is None else parse_bytes(host_budget),
        "pinned": None if pinned_budget is None else parse_bytes(pinned_budget),
    }
    rows = mode_rows(run, config=options, budgets=budgets, rates=rates, passes=passes)
    advice = recommend(rows)
    if as_json:
        typer.echo(json.dumps(_as_dict(run, rates, passes, budgets, rows, advice, notes), indent=1))
    else:
        _print(run, rows, advice, notes)
    if advice.mode is None:
        raise typer.Exit(1)


# Input --------------------------------------------------------------------------------------------------------------


def _shape(config: Path | None, numbers: dict[str, int | None], tied: bool) -> ModelShape:
    given = {name: number for name, number in numbers.items() if number is not None}
    if config is not None:
        return replace(read_config(config), **given)  # type: ignore[arg-type]
    needed = ("num_layers", "hidden", "vocabulary")
    lacking = [name for name in needed if name not in given]
    if lacking:
        raise ConfigError(
            f"the model is not known: name a config.json, or give {', '.join(needed)} (missing: {', '.join(lacking)}; "
            "options --layers, --hidden, --vocab)"
        )
    heads = given.get("num_heads", max(1, given["hidden"] // 128))
    defaults = {
        "intermediate": 4 * given["hidden"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": given["hidden"] // heads,
    }
    return replace(ModelShape(**{**defaults, **given}), tied=tied)  # type: ignore[arg-type]


def _rates(kernel: float | None, link: float | None, memory: float | None, notes: list[str]) -> Rates | None:
    """Given rates first, then measured ones; None where the link's is neither."""
    on_gpu = torch.cuda.is_available()
    for name, value in (("--kernel-rate", kernel), ("--link-rate", link), ("--device-memory-rate", memory)):
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value} must be more than 0")
    measured: Rates | None = None
    if on_gpu and (kernel is None or link is None):
        device = torch.device("cuda", torch.cuda.current_device())
        measured = machine_rates.measured(device, configure_cpu_optimizer_threads(device=device).num_threads)
        notes.append("rates that were not given were measured on this machine")
    if link is None and measured is None:
        notes.append("no GPU here and no --link-rate: no times are given")
        return None
    if kernel is not None:
        host_bytes = UPDATE_BYTES * 1e9 * kernel
    elif measured is not None:
        host_bytes = measured.host_bytes
    else:
        host_bytes = machine_rates.measure_host_bytes(configure_cpu_optimizer_threads().num_threads)
        notes.append(f"this host's memory was measured: {host_bytes / 1e9:.1f} GB/s")
    device_bytes = 1e9 * (memory or DEVICE_MEMORY_RATE)
    if memory is None and measured is not None:
        device_bytes = measured.device_bytes
    if link is None and measured is not None:
        return replace(
            measured, kernel_numel=host_bytes / UPDATE_BYTES, host_bytes=host_bytes, device_bytes=device_bytes
        )
    ways = 1e9 * (link or 0.0)
    return Rates(host_bytes / UPDATE_BYTES, host_bytes, ways, ways, ways, device_bytes)


def _passes(
    run: Run,
    rates: Rates | None,
    resident_step: float | None,
    forward_share: float | None,
    device_rate: float | None,
    notes: list[str],
) -> Passes | None:
    if rates is None:
        return None
    share = forward_share_of(run) if forward_share is None else forward_share
    if resident_step is not None:
        return passes_of(resident_step, workload_of(run, OffloadConfig()), rates, forward_share=share)
    if device_rate is not None:
        both = sum(flops_of(run)) / (1e12 * device_rate)
        return Passes(share * both, (1 - share) * both)
    notes.append("neither --resident-step nor --device-rate: the update alone is timed, not the step")
    return None


def _device_budget(given: str | None, notes: list[str]) -> int | None:
    if given is not None:
        return parse_bytes(given)
    if not torch.cuda.is_available():
        return None
    total = int(torch.cuda.mem_get_info()[1])
    notes.append(f"device budget: all {as_gib(total)} GiB of this GPU")
    return total


# Output -------------------------------------------------------------------------------------------------------------


def _as_dict(
    run: Run,
    rates: Rates | None,
    passes: Passes | None,
    budgets: dict[str, int | None],
    rows: list[ModeRow],
    advice: Recommendation,
    notes: list[str],
) -> dict[str, Any]:
    return {
        "model": {**asdict(run.shape), "parameters": run.shape.numel},
        "run": {name: value for name, value in asdict(run).items() if name != "shape"},
        "rates": rates and asdict(rates),
        "passes": passes and asdict(passes),
        "budgets": budgets,
        "modes": [
            {**asdict(row), "fits": row.fits, "tokens_per_s": row.step_s and run.tokens / row.step_s}
            for row in rows
        ],
        "recommended": advice.mode,
        "reason": advice.reason,
        "notes": notes,
    }


def _print(run: Run, rows: list[ModeRow], advice: Recommendation, notes: list[str]) -> None:
    console = Console()
    ranks = f"{run.ranks} rank{'s' * (run.ranks > 1)}"
    title = f"{run.shape.numel / 1e9:.2f} G parameters over {ranks}, {run.tokens:,} tokens (GiB, seconds)"
    table = Table(title=title)
    table.add_column("mode", no_wrap=True)
    columns = ("device", "host", "pinned", "update", "step", "speed", "fits")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        chosen = row.mode == advice.mode
        table.add_row(
            row.mode,
            *(as_gib(number) for number in (row.device_bytes, row.host_bytes, row.pinned_bytes)),
            _seconds(row.update_s),
            _seconds(row.step_s),
            "-" if row.share_of_resident is None else f"{row.share_of_resident:.0%}",
            "yes" if row.fits else "no",
            style="bold" if chosen else None,
        )
    console.print(table)
    console.print(f"recommended: {advice.mode or 'none'}: {advice.reason}", highlight=False)
    for row in rows:
        for name, number in row.missing.items():
            console.print(f"- {row.mode} lacks {as_gib(number)} GiB of {name} memory", highlight=False)
        for words in row.words:
            console.print(f"- {row.mode}: {words}", highlight=False)
    for note in notes:
        console.print(f"- {note}", highlight=False)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
