"""Methods as callbacks that do not keep their object alive.

Hooks on a model and the engine call their optimizer, and live longer than it may: an optimizer that is dropped must be
collected, since that is what ends its threads and gives its memory back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

__all__ = ["weakly"]


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls the bound `method` as long as something else keeps its object alive; nothing after that."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
