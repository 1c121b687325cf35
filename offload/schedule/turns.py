"""One thread at a time accumulates into a parameter.

Autograd reads ``param.grad`` between the hook before it and the hook after it, under a lock of its own that Python cannot
take. Both our hooks write to ``param.grad``, so a second thread's first hook must not run in between: it would free the
tensor that the first thread is adding to.
"""

from __future__ import annotations

import logging
import threading

__all__ = ["Turns"]

logger = logging.getLogger(__name__)

LONGEST_S = 10.0
"""Between the two hooks lie microseconds. One that waits longer is not needed any more: `torch.autograd.grad` calls only the
first hook."""


class Turns:
    """Who is between the two hooks of which parameter.

    Args:
        lock: is held by callers; a thread that waits lets go of it.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._changed = threading.Condition(lock)
        self._owners: dict[int, int] = {}

    def take(self, param: int) -> None:
        """In the hook before: wait until no other thread is between its hooks."""
        me = threading.get_ident()
        if not self._changed.wait_for(lambda: self._owners.get(param, me) == me, LONGEST_S):
            logger.debug("parameter %d: another thread's gradient was announced and never came", param)
        self._owners[param] = me

    def give(self, param: int) -> None:
        """In the hook after."""
        if self._owners.pop(param, None) is not None:
            self._changed.notify_all()
