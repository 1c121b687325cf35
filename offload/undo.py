"""What was built before something that fails is closed again."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, TypeVar

__all__ = ["Undo"]

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """What holds threads or memory until it is closed; closing it twice is fine."""

    def close(self) -> None:
        """End threads, release memory."""


C = TypeVar("C", bound=Closable)


class Undo:
    """Closes all that was added, the last first, when its ``with`` block ends with an exception; that one is raised.

    The last first, because what was built later may be at work on memory of what was built before. A part may be closed
    by one that owns it, too.
    """

    def __init__(self) -> None:
        self._built: list[Closable] = []

    def add(self, part: C) -> C:
        """Close `part`, which is returned, on an error from now on."""
        self._built.append(part)
        return part

    def hand_over(self, owner: C) -> C:
        """`owner`, which is returned, closes all that was added so far; so on an error only it is closed."""
        self._built = [owner]
        return owner

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        built, self._built = self._built, []
        if error is not None:
            with ExitStack() as last_first:  # goes on where closing is interrupted
                for part in built:
                    last_first.callback(_close, part, error)


def _close(part: Closable, reason: BaseException) -> None:
    """What is raised is the reason, whatever happens here."""
    try:
        part.close()
    except Exception:
        logger.exception("closing a %s after %s: %s", type(part).__name__, type(reason).__name__, reason)
