"""Every mode with its memory and its step, and which of them to take. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from offload.cli.hybrid import hybrid_estimate
from offload.cli.units import as_gib
from offload.cli.workload import Run, activations_of, arrivals_of, last_forward_of, workload_of
from offload.config import OffloadConfig
from offload.rates import Rates
from offload.schedule.memory_estimate import device_peak_bytes
from offload.schedule.mode_costs import (
    PLACEMENTS,
    Machine,
    Needs,
    Placement,
    Workload,
    cost_of,
    needs_of,
)
from offload.schedule.plan import HIDDEN_SHARE
from offload.schedule.step_estimate import Passes, StepEstimate, estimate_step

__all__ = ["ModeRow", "Recommendation", "mode_rows", "recommend"]

SAME_SHARE = 0.01
"""Steps that differ by less are called equal. Among equals resident is taken, which has the least that can go wrong; then
the one with the least device memory."""


@dataclass(frozen=True)
class ModeRow:
    """One mode. Bytes of one rank; seconds; None: not known.

    `words`: what else there is to say. `missing`: by budget, the bytes that it lacks; empty where the mode fits.
    """

    mode: str
    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    step_s: float | None = None
    exposed_s: float | None = None
    update_s: float | None = None
    share_of_resident: float | None = None
    words: tuple[str, ...] = ()
    missing: Mapping[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether it keeps to all budgets."""
        return not self.missing


@dataclass(frozen=True)
class Recommendation:
    """The mode to take (None: no mode fits), and why."""

    mode: str | None
    reason: str


def mode_rows(
    run: Run,
    *,
    config: OffloadConfig,
    budgets: Mapping[str, int | None],
    rates: Rates | None = None,
    passes: Passes | None = None,
) -> list[ModeRow]:
    """All modes but ``auto``, in the order of the documentation; with reduced moments those that keep them.

    Args:
        config: its ``device_budget`` is for a hybrid's state on the device.
        budgets: bytes of one rank by ``device``, ``host`` and ``pinned``; the device's are for everything on it.
        rates: without them no times are given.
        passes: forward and backward; without them the update's time alone is given.
    """
    row_of = partial(_mode_row, run=run, budgets=budgets, rates=rates, passes=passes)
    if config.moments != "fp32":
        # Only a wavefront keeps them so; the resident step is the one with whole ones.
        base = row_of("resident", config=replace(config, moments="fp32")).step_s
        return [_beside(base, row_of("wavefront", config=config))]
    rows = [row_of(mode, config=config) for mode in PLACEMENTS]
    hybrid = hybrid_estimate(run, config, _machine(run, config, budgets), rates, passes)
    row = _row("hybrid", Placement.HOST, hybrid.needs, run, workload_of(run, config), budgets)
    row = replace(row, update_s=hybrid.update_s, words=hybrid.words)
    rows.append(row if hybrid.step is None else _timed(row, hybrid.step))
    return [_beside(rows[0].step_s, row) for row in rows]


def _beside(base: float | None, row: ModeRow) -> ModeRow:
    """With its share of the resident step's speed; `base`: seconds of that step."""
    return replace(row, share_of_resident=base and row.step_s and base / row.step_s)


def _mode_row(
    mode: str,
    *,
    run: Run,
    config: OffloadConfig,
    budgets: Mapping[str, int | None],
    rates: Rates | None,
    passes: Passes | None,
) -> ModeRow:
    workload = workload_of(run, config)
    needs = needs_of(mode, workload, _machine(run, config, budgets))
    row = _row(mode, PLACEMENTS[mode], needs, run, workload, budgets)
    if rates is None:
        return row
    if passes is None:
        return replace(row, update_s=cost_of(mode, workload, rates))
    step = estimate_step(
        mode,
        workload,
        rates,
        passes,
        arrivals_of(run),
        overlaps_forward=run.overlap_forward and mode == "wavefront",
        last_forward=last_forward_of(run),
    )
    return _timed(row, step)


def _machine(run: Run, config: OffloadConfig, budgets: Mapping[str, int | None]) -> Machine:
    """A GPU that holds the weights already, as when the optimizer is built."""
    device = budgets.get("device")
    weights = workload_of(run, config).weight_bytes
    return Machine(
        device="cuda",
        free_device_bytes=None if device is None else max(device - weights, 0),
        available_host_bytes=1 << 62,
        device_budget=config.device_budget,
        host_budget=budgets.get("host"),
        pinned_budget=budgets.get("pinned"),
    )


def _row(
    mode: str,
    placement: Placement,
    needs: Needs,
    run: Run,
    workload: Workload,
    budgets: Mapping[str, int | None],
) -> ModeRow:
    takes = {
        "device": device_peak_bytes(placement, needs, workload, activations_of(run)),
        "host": needs.host,
        "pinned": needs.pinned,
    }
    return ModeRow(mode, takes["device"], takes["host"], takes["pinned"], missing=_missing(takes, budgets))


def _timed(row: ModeRow, step: StepEstimate) -> ModeRow:
    return replace(row, step_s=step.step_s, exposed_s=step.exposed_s, update_s=step.update_s)


def _missing(takes: Mapping[str, int], budgets: Mapping[str, int | None]) -> dict[str, int]:
    limits = {name: limit for name, limit in budgets.items() if limit is not None}
    return {name: taken - limits[name] for name, taken in takes.items() if taken > limits.get(name, taken)}


def recommend(rows: Sequence[ModeRow]) -> Recommendation:
    """The fastest that fits; where times are not known, the one that exposes least of its update, half of a wavefront's
    (a hybrid's too) taken to be hidden; without rates, resident before wavefront before the others."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        closest = min(rows, key=lambda row: sum(row.missing.values()))
        return Recommendation(
            None,
            f"no mode fits; {closest.mode} comes closest and lacks {_lacks(closest)}: shard over more ranks, or take "
            "fewer tokens",
        )
    best = min(_costs(row) for row in fitting)
    equal = [row for row in fitting if _costs(row) <= best * (1 + SAME_SHARE)]
    leanest = min(equal, key=lambda row: row.device_bytes)
    chosen = next((row for row in equal if row.mode == "resident"), leanest)
    return Recommendation(chosen.mode, _reason(chosen, leanest, rows, fitting))


def _costs(row: ModeRow) -> float:
    if row.step_s is not None:
        return row.step_s
    if row.update_s is not None:
        return row.update_s * (HIDDEN_SHARE if row.mode in ("wavefront", "hybrid") else 1.0)
    return {"resident": 1.0, "wavefront": 2.0, "chunked-stream": 3.0}.get(row.mode, 4.0)


def _reason(chosen: ModeRow, leanest: ModeRow, rows: Sequence[ModeRow], fitting: Sequence[ModeRow]) -> str:
    words = []
    resident = next((row for row in rows if row.mode == "resident"), None)
    if resident is not None and not resident.fits:
        words.append(f"resident lacks {_lacks(resident)}")
    if len(rows) == 1:
        words.append("no other mode keeps moments so")
        if chosen.step_s is not None:
            words.append(f"a step of {chosen.step_s:.2f} s")
    elif chosen.step_s is not None:
        among = f"{_among(fitting)} has"
        shortest = min(fitting, key=_costs)
        if chosen is shortest:
            words.append(f"{among} the shortest step, {chosen.step_s:.2f} s")
        else:
            words.append(
                f"{among} a step as short as {shortest.mode}'s within {SAME_SHARE:.0%}, {chosen.step_s:.2f} s"
            )
    elif chosen.update_s is not None:
        words.append(f"{_among(fitting)} exposes least of its update")
    else:
        words.append(
            f"of the {len(fitting)} modes that fit, the first of resident, wavefront, chunked-stream and the others: rates "
            "are not known"
            if len(fitting) > 1
            else "it alone fits"
        )
    if chosen is not resident and chosen.share_of_resident is not None:
        words.append(f"{chosen.share_of_resident:.0%} of the resident speed")
    if leanest is not chosen:
        less = as_gib(chosen.device_bytes - leanest.device_bytes)
        words.append(f"{leanest.mode} is as fast with {less} GiB less on the device")
    return "; ".join(words)


def _among(fitting: Sequence[ModeRow]) -> str:
    return f"of the {len(fitting)} modes that fit, it" if len(fitting) > 1 else "it alone fits, and"


def _lacks(row: ModeRow) -> str:
    return ", ".join(f"{as_gib(number)} GiB of {name} memory" for name, number in row.missing.items())
