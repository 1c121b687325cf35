"""Whether state is whole: the call that is changing it, or was cut short doing so.

Owns that one word. It is set before a call makes its first change and taken back after its last, so an exception
in between (Ctrl-C, a deadline) leaves it standing, and whatever would go on with a mixture of two steps raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offload.errors import MidStepError, NoGradientError, StateError
from offload.schedule import messages

__all__ = ["ChangeGuard"]


class ChangeGuard:
    """Set and asked by the thread that calls the optimizer, asked in gradient hooks."""

    def __init__(self) -> None:
        self._changing: str | None = None

    @property
    def changing(self) -> str | None:
        """The call that is changing state, or was cut short doing so."""
        return self._changing

    def begin(self, call: str) -> None:
        """`call` is about to change state."""
        self._changing = call

    def end(self) -> None:
        """State is whole: the change is complete, or was refused before it began."""
        self._changing = None

    @contextmanager
    def refusable(self) -> Iterator[None]:
        """Around what may turn out to have nothing to change: a `StateError` is a stepper's word that nothing was changed,
        a `NoGradientError` is that of all ranks.
        """
        try:
            yield
        except (StateError, NoGradientError):
            self.end()
            raise

    def require_whole(self, what: str) -> None:
        """Raise where an earlier call was cut short while it changed state: what it left may be a mixture.

        Raises:
            MidStepError: names both calls.
        """
        if self._changing is not None:
            raise MidStepError(messages.cut_short(what, self._changing))
