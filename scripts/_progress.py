"""A progress bar: rich's where rich is installed and the output is a terminal, else plain text."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Advance = Callable[[str], None]

PLAIN_WIDTH = 30
LINES_WITHOUT_TERMINAL = 20


@contextlib.contextmanager
def progress(total: int, label: str) -> Iterator[Advance]:
    """Yields a function to call once per step with the text to show beside the bar."""
    if not sys.stdout.isatty():
        yield _line_printer(total, label)
        return
    try:
        import rich.progress as rich_progress
    except ImportError:
        yield _plain_bar(total, label)
        print()
        return
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[text]}"),
    )
    with rich_progress.Progress(*columns) as bar:
        task = bar.add_task(label, total=total, text="")
        yield lambda text: bar.update(task, advance=1, text=text)


def _plain_bar(total: int, label: str) -> Advance:
    done = 0

    def advance(text: str) -> None:
        nonlocal done
        done += 1
        filled = PLAIN_WIDTH * done // total
        bar = "#" * filled + "." * (PLAIN_WIDTH - filled)
        print(f"\r{label} [{bar}] {done}/{total} {text}  ", end="", flush=True)

    return advance


def _line_printer(total: int, label: str) -> Advance:
    """A log has no cursor to move: now and then a line instead."""
    done, start = 0, time.perf_counter()
    every = max(1, total // LINES_WITHOUT_TERMINAL)

    def advance(text: str) -> None:
        nonlocal done
        done += 1
        if done == 1 or done % every == 0 or done == total:
            elapsed = time.perf_counter() - start
            print(f"{label} {done:>{len(str(total))}}/{total}  {text}  {elapsed:.0f} s", flush=True)

    return advance
