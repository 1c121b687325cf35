"""What ``mode="hybrid"`` would be: the optimizer's own plan, and the step that it makes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.cli.units import as_gib
from offload.cli.workload import Run, arrivals_at, last_forward_of, workload_of
from offload.config import OffloadConfig
from offload.rates import Rates
from offload.schedule.mode_costs import Machine, Needs, Placement, Workload
from offload.schedule.plan import Plan, draft
from offload.schedule.step_estimate import Passes, StepEstimate, estimate_step

__all__ = ["HybridEstimate", "hybrid_estimate"]

WORTH_NAMING = 0.05
"""By so much a share that backward would hide is smaller than the planned one, to be named."""


@dataclass(frozen=True)
class HybridEstimate:
    """`plan`: as the optimizer makes it when it is built. `step`, `update_s`: None where rates or passes are not known.
    `words`: how the state is divided, and whether backward would hide a smaller share too."""

    plan: Plan
    needs: Needs
    words: tuple[str, ...]
    step: StepEstimate | None = None
    update_s: float | None = None


def hybrid_estimate(
    run: Run,
    config: OffloadConfig,
    machine: Machine,
    rates: Rates | None = None,
    passes: Passes | None = None,
) -> HybridEstimate:
    """The hybrid on `machine`, whether it fits or not."""
    workload = workload_of(run, config)
    made = draft("hybrid", workload, machine, rates)
    needs = Needs(
        made.device_bytes,
        made.host_bytes,
        made.pinned_bytes,
        made.peak_device_bytes - made.device_bytes - workload.weight_bytes,
    )
    how = made.reasons[1 : 2 + bool(made.divisions)]  # the share, and what is divided
    found = HybridEstimate(made, needs, how, update_s=made.step_s)
    if rates is None or passes is None:
        return found
    step = _step(run, workload, made, rates, passes)
    words = found.words
    if config.stream_share is None:
        words += _smaller_share(run, config, machine, rates, passes, made)
    return replace(found, step=step, update_s=step.update_s, words=words)


def first_placements(made: Plan) -> tuple[Placement, ...]:
    """Where the chunks of a hybrid are stepped at first: of those whose state is pinned, some wait for the balance."""
    movable = made.placements.count(Placement.STREAM) - len(made.divisions)
    streamed = movable if made.num_streamed is None else made.num_streamed
    placements, number = [], 0
    for chunk in made.chunks:
        placement = chunk.placement
        if placement is Placement.STREAM and not chunk.host_numel:
            turn = (number + 1) * streamed // movable > number * streamed // movable
            placement = Placement.STREAM if turn else Placement.HOST
            number += 1
        placements.append(placement)
    return tuple(placements)


def _step(run: Run, workload: Workload, made: Plan, rates: Rates, passes: Passes) -> StepEstimate:
    arrivals = arrivals_at(run, workload.parts, first_placements(made), made.divisions)
    return estimate_step(
        "hybrid",
        workload,
        rates,
        passes,
        arrivals,
        overlaps_forward=run.overlap_forward,
        last_forward=last_forward_of(run),
    )


def _smaller_share(
    run: Run, config: OffloadConfig, machine: Machine, rates: Rates, passes: Passes, made: Plan
) -> tuple[str, ...]:
    """The optimizer does not know how long backward takes; whoever does may pin less. A share of 0 is a wavefront."""
    hidden_s = passes.backward_s + passes.forward_s * run.overlap_forward
    less = draft("hybrid", workload_of(run, config, backward_s=hidden_s), machine, rates)
    share, planned = less.stream_share, made.stream_share
    if not share or planned is None or share > planned - WORTH_NAMING:
        return ()
    workload = workload_of(run, replace(config, stream_share=share))
    pinned = draft("hybrid", workload, machine, rates)
    step_s = _step(run, workload, pinned, rates, passes).step_s
    return (
        f"backward hides OffloadConfig(stream_share={share:.2f}) too: {step_s:.2f} s, with "
        f"{as_gib(pinned.pinned_bytes)} GiB pinned",
    )
