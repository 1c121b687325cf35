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


class BackwardWatch:
    """Calls `on_end` once after each outermost backward pass in which `note_fire` was called.

    A backward that raises has no end: `interrupted` tells. Every method may be called from any thread, hooks of one
    optimizer one at a time.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._open: set[int] = set()  # outermost passes that have begun
        self._known: set[int] = set()  # these, and passes nested in them
        self._lost = False
        self._warned = False

    @property
    def interrupted(self) -> bool:
        """Outside backward: whether a pass never ended."""
        return self._lost or self.running

    @property
    def running(self) -> bool:
        """Whether a pass has begun and neither ended nor been given up by autograd: in another thread, seen from outside."""
        return bool(self._open)

    def follows_interruption(self) -> bool:
        """In a hook: whether this is a new pass though an earlier one was cut short."""
        task = torch._C._current_graph_task_id()
        return self._lost and task not in self._known and not _is_nested(sys._getframe(1))

    def note_fire(self) -> None:
        """To be called in every gradient hook whose gradient is taken."""
        task = torch._C._current_graph_task_id()
        if task in self._known:
            return
        if _is_nested(sys._getframe(1)):
            self._known.add(task)
            return
        if not self._open:
            self._known.clear()
        self._known.add(task)
        self._lost = False
        self._queue_end(task)

    def reset(self) -> None:
        """Forget passes that were cut short."""
        self._open.clear()
        self._known.clear()
        self._lost = False

    def _queue_end(self, task: int) -> None:
        try:
            Variable._execution_engine.queue_callback(_PassEnd(self, task))
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "autograd takes no end-of-backward callback here (%s): backward passes are told apart "
                    "by counts alone",
                    error,
                )
        else:
            self._open.add(task)

    def ended(self, task: int) -> None:
        """The pass is over."""
        self._open.discard(task)
        self._on_end()

    def lost(self, task: int) -> None:
        """The pass was given up."""
        if task in self._open:
            self._open.discard(task)
            self._lost = True


class _PassEnd:
    """What autograd calls at the end of a pass, or lets go of when the pass raised.

    It asks to be called once more, and last: FSDP reduces its last gradients in a callback of its own, which may have been
    queued after ours.
    """

    __slots__ = ("_is_last", "_task", "_watch")

    def __init__(self, watch: BackwardWatch, task: int) -> None:
        self._watch: BackwardWatch | None = watch
        self._task = task
        self._is_last = False

    def __call__(self) -> None:
        if not self._is_last:
            self._is_last = True
            Variable._execution_engine.queue_callback(self)
            return
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.ended(self._task)

    def __del__(self) -> None:
        if self._watch is not None:
            self._watch.lost(self._task)


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
