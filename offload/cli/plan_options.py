"""The options of ``offload plan``, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["BudgetOptions", "ModelOptions", "RateOptions", "RunOptions"]


@dataclass(frozen=True)
class ModelOptions:
    """What model. Numbers that are given go before those of the config."""

    config: Annotated[
        Path | None,
        typer.Argument(help="A Hugging Face config.json, or its folder; or give the numbers below."),
    ] = None
    layers: Annotated[int | None, typer.Option(help="Layers (without a config).")] = None
    hidden: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None
    intermediate: Annotated[int | None, typer.Option(help="Width of the MLP; 4 times hidden by default.")] = (
        None
    )
    vocab: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None
    heads: Annotated[int | None, typer.Option(help="Query heads; one per 128 of hidden by default.")] = None
    kv_heads: Annotated[
        int | None, typer.Option(help="Key and value heads; as many as heads by default.")
    ] = None
    head_dim: Annotated[int | None, typer.Option(help="Width of a head; hidden over heads by default.")] = (
        None
    )
    tied: Annotated[
        bool | None,
        typer.Option("--tied/--no-tied", help="Whether the head is the embedding; not by default."),
    ] = None


@dataclass(frozen=True)
class RunOptions:
    """How it is trained."""

    ranks: Annotated[int, typer.Option(help="Ranks that share the parameters (FSDP).")] = 1
    tokens: Annotated[int, typer.Option(help="Tokens of one rank's backward pass.")] = 8192
    sequence: Annotated[int | None, typer.Option(help="Tokens of one sequence; all of them by default.")] = (
        None
    )
    dtype: Annotated[str, typer.Option(help="Of weights and gradients: bf16 or fp32.")] = "bf16"
    reduce_dtype: Annotated[
        str | None, typer.Option(help="Of FSDP's reductions: bf16 or fp32; as --dtype by default.")
    ] = None
    checkpointing: Annotated[bool, typer.Option(help="Activation checkpointing, a layer at a time.")] = True
    chunked_loss: Annotated[
        bool, typer.Option(help="A loss that never holds all logits (Liger and the like).")
    ] = False
    accumulation_steps: Annotated[int, typer.Option(help="Backward passes per step.")] = 1
    clipping: Annotated[bool, typer.Option(help="Whether gradients are clipped by their norm.")] = False
    overlap_forward: Annotated[
        bool, typer.Option(help="Of wavefront and hybrid: the next forward overlaps the update.")
    ] = False
    moments: Annotated[
        str, typer.Option(help="Of wavefront, as in OffloadConfig: how they are kept, fp32, bf16 or int8.")
    ] = "fp32"
    stream_share: Annotated[
        float | None,
        typer.Option(help="Of hybrid, as in OffloadConfig: the host's state that is streamed; else planned."),
    ] = None


@dataclass(frozen=True)
class BudgetOptions:
    """Memory that may be used, as people write it."""

    device_budget: Annotated[
        str | None,
        typer.Option(help="Of one GPU, for everything on it, as 80GiB; this machine's by default."),
    ] = None
    device_state: Annotated[
        str | None,
        typer.Option(
            help="Of hybrid, the device_budget of OffloadConfig: state and buffers on the device; else planned."
        ),
    ] = None
    host_budget: Annotated[
        str | None, typer.Option(help="Host memory of one rank; as much as it takes if not given.")
    ] = None
    pinned_budget: Annotated[str | None, typer.Option(help="Pinned memory of one rank.")] = None


@dataclass(frozen=True)
class RateOptions:
    """How fast the machine is. What is not given is measured, by arithmetic, or left out."""

    kernel_rate: Annotated[
        float | None, typer.Option(help="Gparam/s of the host kernel, as bench kernel says.")
    ] = None
    link_rate: Annotated[float | None, typer.Option(help="GB/s between host and device, each way.")] = None
    device_memory_rate: Annotated[float | None, typer.Option(help="GB/s of device memory.")] = None
    resident_step: Annotated[
        float | None,
        typer.Option(help="Seconds of a step with everything on the device, as bench step says."),
    ] = None
    forward_share: Annotated[
        float | None, typer.Option(help="Of forward in forward and backward; by arithmetic by default.")
    ] = None
    device_rate: Annotated[
        float | None,
        typer.Option(help="TFLOP/s over forward and backward, where the resident step is not known."),
    ] = None
