"""``offload plan``: before a run, what each mode takes and how long a step lasts."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from offload.cli.option_groups import grouped
from offload.cli.plan_input import read_input
from offload.cli.plan_options import BudgetOptions, ModelOptions, RateOptions, RunOptions
from offload.cli.plan_output import as_dict, print_plan
from offload.cli.recommend import mode_rows, recommend

__all__ = ["plan"]


@grouped
def plan(
    model: ModelOptions,
    training: RunOptions,
    memory: BudgetOptions,
    speed: RateOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Memory and step time of every mode for a model, and the mode to take.

    Rates of this machine are measured unless given, and its host memory is reported; only budgets bound what is planned.
    Without --resident-step or --device-rate the update alone is timed.
    """
    given = read_input(model, training, memory, speed)
    rows = mode_rows(
        given.run, config=given.config, budgets=given.budgets, rates=given.rates, passes=given.passes
    )
    advice = recommend(rows)
    if as_json:
        typer.echo(json.dumps(as_dict(given, rows, advice), indent=1))
    else:
        print_plan(given, rows, advice)
    if advice.mode is None:
        raise typer.Exit(1)
