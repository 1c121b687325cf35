"""What the documentation shows is run: every Python block, and every command that a test machine can run.

A fenced block is run unless the line before it is a comment ``<!-- not run: the reason -->``. Blocks of one page share their
names, as a reader would type them one after the other. Of commands that are not run, the script and its options must exist.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import offload

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
HIDDEN_COMMAND = re.compile(r"^ {4,}(?:python|pip|scripts/\w+|torchrun|offload) .*", re.MULTILINE)
PROSE = {"", "text", "mermaid", "json"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    reason: str | None


def blocks(page: Path) -> Iterator[Block]:
    source = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(source):
        line = source[: match.start("text")].count("\n") + 1
        yield Block(page, line, match["language"], match["text"], match["reason"])


ALL = [block for page in PAGES for block in blocks(page)]


class MyModel(torch.nn.Module):
    """The reader's own: gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))
        self.norm = torch.nn.LayerNorm(32)
        self.router = torch.nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        logits = self.router(self.norm(x.float()).to(self.router.weight.dtype))
        return torch.nn.functional.cross_entropy(logits.float(), ids.roll(-1))


def readers_names() -> dict[str, Any]:
    """What stands for the reader's own."""
    torch.manual_seed(0)
    batches = [torch.randint(64, (16,)) for _ in range(3)]
    return {
        "__name__": "docs",
        "offload": offload,
        "torch": torch,
        "MyModel": MyModel,
        "model": MyModel(),
        "batches": batches,
        "device": "cpu",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = readers_names()
    for block in blocks(page):
        if block.language == "python" and block.reason is None:
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize(
    "block",
    [block for block in ALL if block.language == "bash"],
    ids=lambda block: f"{block.page.name}:{block.line}",
)
def test_commands_run_or_exist(block: Block) -> None:
    for command in commands(block.text):
        words = shlex.split(command, comments=True)
        if block.reason is None:
            words[0] = sys.executable if words[0] == "python" else words[0]
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        else:
            script = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
            assert_exists(words[script:] if words[0] == "torchrun" else words)  # its own options come first


def commands(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def assert_exists(words: list[str]) -> None:
    script = next((word for word in words if word.startswith("scripts/")), None)
    if script is None:
        return
    source = (ROOT / script).read_text(encoding="utf-8")
    missing = [
        word for word in words if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source
    ]
    assert not missing, f"{script} has no {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_blocks_that_say_what_they_are(page: Path) -> None:
    """A command in an indented block, or in a fence without a language, would not be run."""
    assert {block.language for block in blocks(page)} <= {"python", "bash", *PROSE}
    source = FENCE.sub("", page.read_text(encoding="utf-8"))
    unmarked = "".join(block.text for block in blocks(page) if block.language in PROSE)
    assert not HIDDEN_COMMAND.findall(source + unmarked)


def test_every_page_is_in_the_index_and_links_lead_somewhere() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert page.name == "README.md" or f"({page.name})" in index
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_error_has_a_remedy() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    errors = [name for name in offload.__all__ if name.endswith("Error")]
    assert errors
    for name in errors:
        assert re.search(rf"^\| `{name}\b.*\|.*\|.*\|$", page, re.MULTILINE), name


def test_documented_messages_are_those_of_the_code() -> None:
    """What stands between the gaps of a quoted message is in the source, as it is or in parts."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "offload").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"|\{[^}]*\}', "", sources)
    for message in re.findall(r"^\| (?:warning )?`(?:\w+Error: )?([^`]+)`", page, re.MULTILINE):
        for part in re.split(r"…|\s*=\s*…", message):
            words = part.strip(" .[]=")
            assert len(words) < 4 or words.endswith("Error") or words in code, f"no message says {words!r}"
