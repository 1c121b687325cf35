"""From the options of ``offload plan`` to what the estimates take; what is not given is measured or found out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from offload import rates as machine_rates
from offload.cli.here import HostMemory, host_memory
from offload.cli.model_shape import ModelShape, read_config
from offload.cli.plan_options import BudgetOptions, ModelOptions, RateOptions, RunOptions
from offload.cli.units import as_gib, parse_bytes
from offload.cli.workload import Run, flops_of, forward_share_of, workload_of
from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.rates import UPDATE_BYTES, Rates
from offload.schedule.step_estimate import Passes, passes_of
from offload.threads import configure_cpu_optimizer_threads

__all__ = ["PlanInput", "read_input"]

DEVICE_MEMORY_RATE = 3300.0
"""GB/s at which the device's update kernel moves memory on an H200; used where nothing is measured or given. It enters
with the update of a resident step alone, a few hundredths of it."""


@dataclass(frozen=True)
class PlanInput:
    """What is planned, and with what.

    `rates`, `passes`: None where they are not known, and no times are given, or those of the update alone. `budgets`: bytes
    of one rank by ``device``, ``host`` and ``pinned``; None: no bound. `here`: of this machine, which bounds nothing.
    `notes`: what was measured, assumed or left out.
    """

    run: Run
    config: OffloadConfig
    rates: Rates | None
    passes: Passes | None
    budgets: dict[str, int | None]
    here: HostMemory
    notes: tuple[str, ...]


def read_input(
    model: ModelOptions, training: RunOptions, memory: BudgetOptions, speed: RateOptions
) -> PlanInput:
    """What the options say, with what they leave out.

    Raises:
        ConfigError: an option is wrong, or the model is not known.
    """
    run = _run(_shape(model), training)
    state_bytes = _bytes("--device-state", memory.device_state)
    config = OffloadConfig(
        stream_share=training.stream_share, device_budget=state_bytes, moments=training.moments
    )
    notes: list[str] = []
    if config.moments != "fp32":
        notes.append(
            f"--moments {config.moments}: only the wavefront keeps them so; it is timed as with FP32 ones"
        )
    rates = _rates(speed, notes)
    passes = _passes(run, rates, speed, notes)
    budgets = {
        "device": _device_budget(memory.device_budget, notes),
        "host": _bytes("--host-budget", memory.host_budget),
        "pinned": _bytes("--pinned-budget", memory.pinned_budget),
    }
    return PlanInput(run, config, rates, passes, budgets, host_memory(), tuple(notes))


# Model and run ------------------------------------------------------------------------------------------------------


def _shape(model: ModelOptions) -> ModelShape:
    numbers = {
        "num_layers": model.layers,
        "hidden": model.hidden,
        "vocabulary": model.vocab,
        "intermediate": model.intermediate,
        "num_heads": model.heads,
        "num_kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "tied": model.tied,
    }
    given = {name: number for name, number in numbers.items() if number is not None}
    if model.config is not None:
        return replace(read_config(model.config), **given)  # type: ignore[arg-type]
    needed = {"num_layers": "--layers", "hidden": "--hidden", "vocabulary": "--vocab"}
    lacking = [option for name, option in needed.items() if name not in given]
    if lacking:
        raise ConfigError(
            "the model is not known: name a config.json, or give --layers, --hidden and --vocab "
            f"(missing: {', '.join(lacking)})"
        )
    return ModelShape(**{**_usual_widths(given), **given})  # type: ignore[arg-type]


def _usual_widths(given: dict[str, int]) -> dict[str, int]:
    hidden = given["hidden"]
    heads = given.get("num_heads", max(1, hidden // 128))
    if heads < 1:
        raise ConfigError(f"--heads={heads} must be at least 1")
    return {
        "intermediate": 4 * hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
    }


def _run(shape: ModelShape, training: RunOptions) -> Run:
    return Run(
        shape,
        tokens=training.tokens,
        sequence=training.tokens if training.sequence is None else training.sequence,
        ranks=training.ranks,
        dtype=training.dtype,
        checkpointing=training.checkpointing,
        chunked_loss=training.chunked_loss,
        accumulation_steps=training.accumulation_steps,
        holds_gradients=training.clipping,
        overlap_forward=training.overlap_forward,
        reduce_dtype=training.reduce_dtype,
    )


# Rates --------------------------------------------------------------------------------------------------------------


def _rates(speed: RateOptions, notes: list[str]) -> Rates | None:
    """Given rates first, then measured ones; None where the link's is neither."""
    kernel, link = speed.kernel_rate, speed.link_rate
    _check_rates(speed)
    measured = _measured(notes) if torch.cuda.is_available() and (kernel is None or link is None) else None
    if link is None and measured is None:
        notes.append("no GPU here and no --link-rate: no times are given")
        return None
    host_bytes = _host_bytes(kernel, measured, notes)
    device_bytes = _device_bytes(speed.device_memory_rate, measured)
    if link is None and measured is not None:
        return replace(
            measured, kernel_numel=host_bytes / UPDATE_BYTES, host_bytes=host_bytes, device_bytes=device_bytes
        )
    ways = 1e9 * (link or 0.0)
    return Rates(host_bytes / UPDATE_BYTES, host_bytes, ways, ways, ways, device_bytes)


def _check_rates(speed: RateOptions) -> None:
    for name, value in (
        ("--kernel-rate", speed.kernel_rate),
        ("--link-rate", speed.link_rate),
        ("--device-memory-rate", speed.device_memory_rate),
        ("--resident-step", speed.resident_step),
        ("--device-rate", speed.device_rate),
        ("--forward-share", speed.forward_share),
    ):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value} must be more than 0, and finite")
    if speed.forward_share is not None and speed.forward_share >= 1:
        raise ConfigError(
            f"--forward-share={speed.forward_share} must be less than 1: the rest is backward's"
        )


def _measured(notes: list[str]) -> Rates:
    device = torch.device("cuda", torch.cuda.current_device())
    measured = machine_rates.measured(device, configure_cpu_optimizer_threads(device=device).num_threads)
    notes.append("rates that were not given were measured on this machine")
    return measured


def _host_bytes(kernel: float | None, measured: Rates | None, notes: list[str]) -> float:
    """Bytes per second of the host's memory."""
    if kernel is not None:
        return UPDATE_BYTES * 1e9 * kernel
    if measured is not None:
        return measured.host_bytes
    host_bytes = machine_rates.measure_host_bytes(configure_cpu_optimizer_threads().num_threads)
    notes.append(f"this host's memory was measured: {host_bytes / 1e9:.1f} GB/s")
    return host_bytes


def _device_bytes(memory: float | None, measured: Rates | None) -> float:
    """Bytes per second of the device's memory."""
    if memory is None and measured is not None:
        return measured.device_bytes
    return 1e9 * (memory or DEVICE_MEMORY_RATE)


def _passes(run: Run, rates: Rates | None, speed: RateOptions, notes: list[str]) -> Passes | None:
    if rates is None:
        return None
    share = forward_share_of(run) if speed.forward_share is None else speed.forward_share
    if speed.resident_step is not None:
        return passes_of(speed.resident_step, workload_of(run, OffloadConfig()), rates, forward_share=share)
    if speed.device_rate is not None:
        both = sum(flops_of(run)) / (1e12 * speed.device_rate)
        return Passes(share * both, (1 - share) * both)
    notes.append("neither --resident-step nor --device-rate: the update alone is timed, not the step")
    return None


# Memory -------------------------------------------------------------------------------------------------------------


def _bytes(option: str, given: str | None) -> int | None:
    try:
        return None if given is None else parse_bytes(given)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _device_budget(given: str | None, notes: list[str]) -> int | None:
    if given is not None:
        return _bytes("--device-budget", given)
    if not torch.cuda.is_available():
        notes.append(
            "no GPU here and no --device-budget: the plan is for a GPU with as much memory as a mode takes"
        )
        return None
    total = int(torch.cuda.mem_get_info()[1])
    notes.append(f"device budget: all {as_gib(total)} GiB of this GPU")
    return total
