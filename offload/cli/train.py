"""``offload train``: the example training run."""

from __future__ import annotations

import typer

from offload.cli.scripts import run_script

__all__ = ["train"]


def train(context: typer.Context) -> None:
    """Train a byte-level GPT on real text with offloaded AdamW, and report what it cost. See --help for options."""
    raise typer.Exit(run_script("train.py", context.args))
