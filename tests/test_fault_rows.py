"""The table in README.md and the tests' names agree: every row of the fault list is tested, or says whose it is."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
NUM_ROWS = 46
OTHERS = ("distributed", "packaging")
"""What marks a row as belonging to another part of the project."""


def rows() -> dict[int, str]:
    """By number, what the table says after it."""
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| F(\d+) \|(.*)\|$", text, re.MULTILINE)
    numbers = [int(number) for number, _ in found]
    assert numbers == sorted(set(numbers)), "rows are out of order, or stand twice"
    return {int(number): rest for number, rest in found}


def listed(row: str) -> list[tuple[str, str]]:
    """`file`::name in a row."""
    return re.findall(r"`([\w/]+\.py)`::(\w+)", row)


def is_another_parts(row: str) -> bool:
    return any(f"*{mark}*" in row for mark in OTHERS)


@cache
def functions(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def row_numbers(name: str) -> list[int]:
    """``test_f26_f29_resumed…`` is of rows 26 and 29."""
    match = re.match(r"test((?:_f\d+)+)_", name)
    return [int(number) for number in re.findall(r"\d+", match.group(1))] if match else []


def test_the_table_has_every_row() -> None:
    assert list(rows()) == list(range(1, NUM_ROWS + 1))


@pytest.mark.parametrize("number", range(1, NUM_ROWS + 1))
def test_a_row_names_tests_that_exist(number: int) -> None:
    row = rows()[number]
    tests = listed(row)
    assert tests or is_another_parts(row), f"F{number} names no test, and no part that it belongs to"
    for file, name in tests:
        assert name in functions(TESTS / file), f"F{number}: {file} has no {name}"


def test_tests_that_are_named_after_a_row_stand_in_it() -> None:
    table = rows()
    missing = [
        f"F{number}: {path.relative_to(TESTS)}::{name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for name in functions(path)
        for number in row_numbers(name)
        if not is_another_parts(table[number])
        and (path.relative_to(TESTS).as_posix(), name) not in listed(table[number])
    ]
    assert not missing, "add to the table:\n" + "\n".join(missing)


def test_names_are_read() -> None:
    assert row_numbers("test_f26_f29_resumed_training") == [26, 29]
    assert row_numbers("test_fires") == row_numbers("test_f") == []
