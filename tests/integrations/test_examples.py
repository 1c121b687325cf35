"""The examples run as they are, on the CPU, and are short enough to read."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "scripts" / "examples"
LIBRARY = {
    "accelerate_loop.py": "accelerate",
    "huggingface_trainer.py": "transformers",
    "lightning_module.py": "lightning",
}
BY_HAND = {"trl_sft.py"}
"""Needs TRL, which brings pandas and pyarrow: not in CI."""


def test_every_example_is_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == LIBRARY.keys() | BY_HAND


@pytest.mark.parametrize("name", sorted(LIBRARY.keys() | BY_HAND))
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("name", sorted(LIBRARY))
def test_example_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(LIBRARY[name]) is None:
        pytest.skip(f"{LIBRARY[name]} is not installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert "norm" in capsys.readouterr().out
