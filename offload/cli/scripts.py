"""The scripts that benchmark and train, where they are installed, and how they are run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from offload.errors import ConfigError

__all__ = ["run_script", "script_folder"]

PACKAGE = "offload_scripts"
"""Name under which the repository's ``scripts`` are installed."""


def script_folder() -> Path:
    """Where the scripts are: beside the package in a source tree, else as installed.

    Raises:
        ConfigError: neither has them.
    """
    in_tree = Path(__file__).resolve().parents[2] / "scripts"
    if (in_tree / "train.py").exists():
        return in_tree
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        if (Path(folder) / "train.py").exists():
            return Path(folder)
    raise ConfigError(f"the scripts are neither in {in_tree} nor installed as {PACKAGE}: reinstall offload")


def run_script(name: str, arguments: Sequence[str]) -> int:
    """Run a script in a process of its own; its exit status.

    Its own, because it sets variables that torch reads when it is loaded, and torch is loaded here.
    """
    return subprocess.run([sys.executable, str(script_folder() / name), *arguments]).returncode
