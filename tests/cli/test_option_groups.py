"""Options in groups: typer sees their fields, the command sees the groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from offload.cli.option_groups import grouped


@dataclass(frozen=True)
class Place:
    """One argument that must be given, one option."""

    city: Annotated[str, typer.Argument()]
    floor: Annotated[int, typer.Option(help="Counted from 0.")] = 3


@dataclass(frozen=True)
class Visit:
    """Options alone."""

    guests: Annotated[int | None, typer.Option()] = None
    evening: Annotated[bool, typer.Option()] = True


def invoke(*arguments: str) -> list[object]:
    app, seen = typer.Typer(add_completion=False), []

    def go(place: Place, visit: Visit, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        """Somewhere."""
        seen.extend([place, visit, loud])

    app.command()(grouped(go))
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == (0 if seen else 2), result.output
    return seen or [result.output]


def test_values_reach_their_group() -> None:
    assert invoke("Rome", "--guests", "2", "--no-evening", "--loud") == [
        Place("Rome"),
        Visit(guests=2, evening=False),
        True,
    ]


def test_defaults_are_those_of_the_fields() -> None:
    assert invoke("Rome") == [Place("Rome", floor=3), Visit(guests=None, evening=True), False]


def test_a_field_without_a_default_must_be_given() -> None:
    (output,) = invoke("--floor", "1")
    assert "CITY" in str(output).upper()


def test_help_is_that_of_the_command_in_the_order_of_the_fields() -> None:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    def go(visit: Visit, place: Place) -> None:
        """Somewhere."""

    app.command()(grouped(go))
    text = CliRunner().invoke(app, ["--help"]).output
    assert "Somewhere." in text
    assert "Counted from 0." in text
    assert text.index("--guests") < text.index("--evening") < text.index("--floor")


def test_groups_with_a_field_in_common_are_refused() -> None:
    def go(visit: Visit, other: Visit) -> None:
        """Somewhere."""

    with pytest.raises(ValueError, match="guests"):
        grouped(go)
