"""The command line: ``offload`` and ``python -m offload``. Needs the extra ``cli`` (typer and rich), which `main` checks."""

from __future__ import annotations

import importlib.util

__all__ = ["main"]

NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line with the arguments of this process.

    Raises:
        SystemExit: always; with the command that installs what is missing, where something is.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"offload: the command line needs {' and '.join(missing)}, not installed here: pip install 'offload[cli]'"
        )
    from offload.cli.app import run

    run()
