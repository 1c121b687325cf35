"""Where one backward pass ends and the next begins, as far as autograd shows it.

Autograd numbers its graph tasks and runs queued callbacks when a task ends. A reentrant checkpoint runs a task of
its own inside the outer one, so the end of a nested task says nothing; a nested task is recognised by an autograd
function's frame between two runs of the engine on the Python stack. Compiled autograd may refuse callbacks. So the
end of a backward pass is a *hint*: where it stays unseen, the ledger goes by counts alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch.autograd import Variable

__all__ = ["BackwardWatch"]

logger = logging.getLogger(__name__)

NO_TASK = -1


class BackwardWatch:
    """Calls `on_end` once after each outermost backward pass in which `note_fire` was called.

    A backward that raises has no end, because autograd runs no callbacks then: `interrupted` tells.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._task = NO_TASK
        self._open_task = NO_TASK
        self._warned = False

    @property
    def interrupted(self) -> bool:
        """Outside backward: whether the last pass never ended."""
        return self._open_task != NO_TASK

    def follows_interruption(self) -> bool:
        """In a hook: whether this is a new pass though the last one never ended."""
        task = torch._C._current_graph_task_id()
        return (
            self.interrupted
            and task not in (self._task, self._open_task)
            and not _is_nested(sys._getframe(1))
        )

    def note_fire(self) -> None:
        """To be called in every gradient hook whose gradient is taken."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            if task != self._open_task and not _is_nested(sys._getframe(1)):
                self._queue_end(task)

    def reset(self) -> None:
        """Forget a pass that was cut short."""
        self._task = self._open_task = NO_TASK

    def _queue_end(self, task: int) -> None:
        try:
            Variable._execution_engine.queue_callback(self._let_others_end)
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "autograd takes no end-of-backward callback here (%s): backward passes are told apart "
                    "by counts alone",
                    error,
                )
        else:
            self._open_task = task

    def _let_others_end(self) -> None:
        """FSDP reduces its last gradients in a callback of its own, which may have been queued after ours."""
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.reset()
        self._on_end()


def _is_nested(frame: FrameType | None) -> bool:
    """Whether the running graph task was started by an autograd function inside another backward."""
    in_engine = False
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            in_engine = True
        elif in_engine and code.co_name == "apply" and code.co_filename == torch.autograd.function.__file__:
            return True
        frame = frame.f_back
    return False
