"""One way to make the optimizer of a mode: torch's own for ``resident``, none for ``model-alone``, else the library's."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from _baseline import NoOptimizer, ResidentAdamW
from _roofline import BESIDE_LINK, LINK_SHARE
from torch import Tensor, nn

BASELINE = "resident"
LIBRARY_RESIDENT = "offload-resident"  # the library's own resident mode, beside the baseline
ALONE = "model-alone"  # forward and backward without an update: what no optimizer can go below
NOT_OURS = (BASELINE, ALONE)
OVERLAPPING = ("wavefront", "hybrid", "auto")  # modes for which overlap_forward means something
BASELINE_OPTIONS = {"lr", "betas", "eps", "weight_decay", "maximize", "max_grad_norm"}


def make_optimizer(
    mode: str,
    model: nn.Module,
    *,
    masters: Mapping[str, Tensor] | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An AdamW over all parameters of ``model``; ``config`` holds fields of ``offload.OffloadConfig``."""
    if mode == BASELINE:
        known = {name: value for name, value in options.items() if name in BASELINE_OPTIONS}
        return ResidentAdamW(model.named_parameters(), masters=masters, **known)
    if mode == ALONE:
        return NoOptimizer(model.parameters())
    offload = importlib.import_module("offload")
    if options.get("overlap_forward") and mode in OVERLAPPING:
        options["model"] = model
    else:  # a run compares modes of both kinds
        options.pop("overlap_forward", None)
    return offload.AdamW(
        model.named_parameters(),
        masters=masters,
        mode="resident" if mode == LIBRARY_RESIDENT else mode,
        config=offload.OffloadConfig(**(config or {})),
        **options,
    )


def measure_rates(device: torch.device, threads: int | None) -> Any:
    """What this machine does per second; None without a GPU. Before the optimizer: its plan then tells seconds."""
    if device.type != "cuda":
        return None
    device = torch.device("cuda", torch.cuda.current_device())  # with its index, as parameters have it
    offload = importlib.import_module("offload")
    num_threads = threads or offload.configure_cpu_optimizer_threads().num_threads
    return importlib.import_module("offload.rates").measured(device, num_threads)


def measure_rates_anew(device: torch.device, threads: int | None) -> Any:
    """As `measure_rates`, now: whether the machine is what it was when the plan was made. Neighbours come and go."""
    device = torch.device("cuda", torch.cuda.current_device())
    importlib.import_module("offload.rates").override(device, None)
    return measure_rates(device, threads)


def thread_budget(device: torch.device, config: Mapping[str, Any]) -> dict[str, Any]:
    """How many CPU threads the library takes on this rank, on which CPUs, and why."""
    budget = importlib.import_module("offload").configure_cpu_optimizer_threads(
        num_threads=config.get("threads"), numa_bind=config.get("numa_bind", True), device=device
    )
    return {**vars(budget), "cpus": sorted(budget.cpus)}


def update_seconds(
    mode: str, optimizer: Any, rates: Any, config: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """What a roofline needs of an optimizer: seconds of its update at `rates`, chunks, tiles; None where not known."""
    if rates is None or mode in NOT_OURS or optimizer.plan.step_s is None:
        return None
    plan, offload = optimizer.plan, importlib.import_module("offload")
    hybrid_plan = importlib.import_module("offload.schedule.hybrid_plan")
    seconds = plan.step_s
    if plan.mode == "hybrid":
        on_host = sum(chunk.numel for chunk in plan.chunks if chunk.placement.name != "DEVICE")
        seconds = hybrid_plan.at_share(
            plan.stream_share,
            on_host,
            stream_bytes=12,
            edge_bytes=2,
            rates=rates,
            beside_link=BESIDE_LINK,
            beside_kernels=1.0,
        ).step_s
    elif plan.mode == "wavefront":  # what the link moves through host memory is not there for the kernels
        seconds /= 1.0 - LINK_SHARE
    numel = sum(chunk.numel for chunk in plan.chunks)
    return {
        "seconds": seconds,
        "chunks": len(plan.chunks),
        "tiles": max(numel // config.get("tile_numel", offload.OffloadConfig().tile_numel), 1),
        "overlaps_forward": bool(options.get("overlap_forward")) and mode in OVERLAPPING,
        "rates": vars(rates),
    }


def pinned_bytes(mode: str) -> int:
    """Host memory that the optimizer of this process has pinned; torch's own pins none."""
    if mode in NOT_OURS:
        return 0
    return int(importlib.import_module("offload.transfer.pinned").pinned_bytes())


def parse_assignments(texts: list[str]) -> dict[str, Any]:
    """``["tile_numel=4194304", "clip=defer"]`` as a dict; values are Python literals where they can be."""
    return {name.strip(): _literal(value) for name, _, value in (text.partition("=") for text in texts)}


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
