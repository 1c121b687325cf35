"""The commands, put together; each lives in its own module."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import offload
from offload.cli.bench import bench
from offload.cli.doctor import doctor
from offload.cli.plan import plan
from offload.cli.train import train
from offload.errors import OffloadError

__all__ = ["app", "run"]

app = typer.Typer(
    name="offload",
    help="AdamW for PyTorch with FP32 state in host memory, stepped while backward is still running.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

#: Commands that hand their arguments on, ``--help`` too.
HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app.command()(doctor)
app.command()(plan)
app.command(context_settings=HANDED_ON)(bench)
app.command(context_settings=HANDED_ON)(train)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(offload.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the command."""


def run() -> None:
    """Run with the arguments of this process; a user's mistake is one line and exit status 2, not a traceback."""
    try:
        app(prog_name="offload")
    except OffloadError as error:
        typer.echo(f"offload: {error}", err=True)
        sys.exit(2)
