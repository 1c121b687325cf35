"""What ``offload plan`` says: a table with reasons, or the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from offload.cli.here import remark
from offload.cli.plan_input import PlanInput
from offload.cli.recommend import ModeRow, Recommendation
from offload.cli.units import as_gib
from offload.cli.workload import Run

__all__ = ["as_dict", "print_plan"]

COLUMNS = ("device", "host", "pinned", "update", "step", "speed", "fits")


def as_dict(given: PlanInput, rows: Sequence[ModeRow], advice: Recommendation) -> dict[str, Any]:
    """The plan for ``--json``."""
    run, rates, passes = given.run, given.rates, given.passes
    return {
        "model": {**asdict(run.shape), "parameters": run.shape.numel},
        "run": {name: value for name, value in asdict(run).items() if name != "shape"},
        "rates": rates and asdict(rates),
        "passes": passes and asdict(passes),
        "budgets": given.budgets,
        "here": asdict(given.here),
        "modes": [
            {
                **asdict(row),
                "fits": row.fits,
                "fits_host_here": given.here.holds(row, run.ranks),
                "tokens_per_s": row.step_s and run.tokens / row.step_s,
            }
            for row in rows
        ],
        "recommended": advice.mode,
        "reason": advice.reason,
        "notes": [_remark(given, rows, advice), *given.notes],
    }


def print_plan(given: PlanInput, rows: Sequence[ModeRow], advice: Recommendation) -> None:
    """The table, the mode to take, what others lack, and the notes."""
    console = Console()
    console.print(_table(given.run, rows, advice.mode))
    console.print(f"recommended: {advice.mode or 'none'}: {advice.reason}", highlight=False)
    console.print(f"- {_remark(given, rows, advice)}", highlight=False)
    for row in rows:
        for name, number in row.missing.items():
            console.print(f"- {row.mode} lacks {as_gib(number)} GiB of {name} memory", highlight=False)
        for words in row.words:
            console.print(f"- {row.mode}: {words}", highlight=False)
    for note in given.notes:
        console.print(f"- {note}", highlight=False)


def _remark(given: PlanInput, rows: Sequence[ModeRow], advice: Recommendation) -> str:
    bounded = given.budgets["host"] is not None
    return remark(given.here, rows, advice.mode, ranks=given.run.ranks, bounded=bounded)


def _table(run: Run, rows: Sequence[ModeRow], chosen: str | None) -> Table:
    ranks = f"{run.ranks} rank{'s' * (run.ranks > 1)}"
    title = f"{run.shape.numel / 1e9:.2f} G parameters over {ranks}, {run.tokens:,} tokens (GiB, seconds)"
    table = Table(title=title)
    table.add_column("mode", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.mode,
            *(as_gib(number) for number in (row.device_bytes, row.host_bytes, row.pinned_bytes)),
            _seconds(row.update_s),
            _seconds(row.step_s),
            "-" if row.share_of_resident is None else f"{row.share_of_resident:.0%}",
            "yes" if row.fits else "no",
            style="bold" if row.mode == chosen else None,
        )
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
