"""A tile's trip as a job of a worker: how STREAM chunks are stepped inside backward."""

from __future__ import annotations

from collections.abc import Callable

from offload.errors import ClosedError

__all__ = ["Gate", "TileJob"]


class Gate:
    """Counts jobs that are between their stages; used by the copier's thread alone.

    Args:
        most: jobs that may be inside. What waits in front of it fills the worker's bounded queue, and that holds up
            backward: gradients on the device stay bounded.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside = 0

    def try_enter(self) -> bool:
        """Enter, if there is room."""
        if self._inside >= self._most:
            return False
        self._inside += 1
        return True

    def leave(self) -> None:
        """Make room."""
        self._inside -= 1


class TileJob:
    """Runs a function on the worker's thread, see `worker.Job` for the stages.

    Args:
        function: keeps its gradients alive until it has run.
        gate: shared by all jobs of one stepper.
        on_drop: told why the job will not run, unless that is because everything is being closed.
    """

    def __init__(
        self, function: Callable[[], None], gate: Gate, on_drop: Callable[[BaseException], None]
    ) -> None:
        self._function, self._gate, self._on_drop = function, gate, on_drop

    def issue(self) -> bool:
        """False while enough others are running."""
        return self._gate.try_enter()

    def compute(self) -> None:
        """Run it."""
        self._function()

    def deliver(self) -> None:
        """It has run."""
        self._gate.leave()

    def drop(self, error: BaseException) -> None:
        """It will not run."""
        if not isinstance(error, ClosedError):
            self._on_drop(error)
