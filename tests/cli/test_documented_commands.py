"""The commands of docs/command-line.md and of the README: those that take no time are run, the others' options exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line's extra is not installed")
pytest.importorskip("rich", reason="the command line's extra is not installed")

from typer.testing import CliRunner

from offload.cli.app import app
from offload.cli.scripts import script_folder

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip


def commands(*, quick: bool) -> list[list[str]]:
    """Arguments of each ``offload`` command that stands on a line of its own, continued lines joined."""
    text = "\n".join(
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/command-line.md")
    )
    lines = re.findall(
        r"^ *offload ((?:doctor|plan|bench|train)\b.*)$", text.replace("\\\n", " "), re.MULTILINE
    )
    found = [shlex.split(line, comments=True) for line in lines]
    return [arguments for arguments in found if (arguments[0] in ("doctor", "plan")) == quick]


@pytest.mark.parametrize("arguments", commands(quick=True), ids=" ".join)
def test_plan_and_doctor_run(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "path" / "to" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    if arguments[0] == "doctor" and "--no-measure" not in arguments:
        arguments = [*arguments, "--no-measure"]  # measured elsewhere
    if arguments[0] == "plan" and "--link-rate" not in arguments:
        arguments = [*arguments, "--kernel-rate", "1", "--link-rate", "10"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.parametrize("arguments", commands(quick=False), ids=" ".join)
def test_benchmarks_and_training_know_their_options(arguments: list[str]) -> None:
    name = "train.py" if arguments[0] == "train" else f"bench_{arguments[1]}.py"
    source = (script_folder() / name).read_text(encoding="utf-8")
    for option in (word for word in arguments if word.startswith("--")):
        assert f'"{option}"' in source


def test_both_kinds_are_there() -> None:
    assert len(commands(quick=True)) >= 6
    assert len(commands(quick=False)) >= 4


def test_the_documented_table_is_what_plan_prints() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    (arguments,) = [found for found in commands(quick=True) if "--resident-step" in found]
    result = CliRunner().invoke(app, arguments)
    printed = {words[0]: words[1:] for words in map(cells, result.output.splitlines()) if len(words) == 8}
    documented = {words[0]: words[1:] for words in map(str.split, text.splitlines()) if len(words) == 8}
    modes = ("resident", "all-at-once", "chunked-sync", "chunked-stream", "wavefront", "hybrid")
    assert {mode: printed[mode] for mode in modes} == {mode: documented[mode] for mode in modes}


def cells(line: str) -> list[str]:
    """Words of a table's row, whatever the lines between them are drawn with."""
    return re.sub(r"[^\w.,%/-]", " ", line).split()
