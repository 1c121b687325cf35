"""A deadline for calls that have none of their own.

CUDA's waits cannot be given one, and a wait of the main thread inside the driver is deaf to Ctrl-C. So they run on a
helper thread, for which Python waits: 0.1 ms more, once or twice in a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from offload.errors import DeadlineError

__all__ = ["run_within", "synchronize_device"]


def run_within(timeout_s: float, function: Callable[[], object], what: str) -> None:
    """Run `function`, and raise what it raises.

    Raises:
        DeadlineError: `what` did not end within `timeout_s` seconds; the thread is left behind.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - carried to the calling thread
            failures.append(error)

    helper = threading.Thread(target=run, name="offload-wait", daemon=True)
    helper.start()
    helper.join(min(timeout_s, threading.TIMEOUT_MAX))
    if helper.is_alive():
        raise DeadlineError(f"{what} did not end within timeout_s={timeout_s} s")
    if failures:
        raise failures[0]


def synchronize_device(device: torch.device, timeout_s: float) -> None:
    """Block until all streams of a CUDA device are empty.

    Raises:
        DeadlineError: they are not, after `timeout_s` seconds.
    """
    run_within(timeout_s, lambda: torch.cuda.synchronize(device), f"work on {device}")
