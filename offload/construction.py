"""Where the time goes while an optimizer is built: stages with seconds, and word of what is under way when it takes long.

Stages run on several threads at the same time, so their seconds add up to more than the whole. A stage's seconds are
those in which it was under way on any thread; `OTHER` are those in which none was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

__all__ = [
    "COMPILE",
    "DEVICE_KERNELS",
    "MASTERS",
    "OTHER",
    "PIN",
    "RATES",
    "SLOW_S",
    "STAGES",
    "TOUCH",
    "Construction",
    "Stage",
    "no_stage",
]

logger = logging.getLogger(__name__)

RATES, COMPILE, DEVICE_KERNELS, TOUCH, PIN, MASTERS = STAGES = (
    "rates",  # the machine's, where the plan depends on them
    "compile",  # the host's kernels
    "device kernels",
    "touch",  # fresh host memory, a write to each page
    "pin",
    "masters",  # copied from the weights, or from what was given
)
OTHER = "other"

RATED_NUMEL = 10_000_000
"""Parameters from which on seconds per billion of them say something."""

SLOW_S = 10.0
"""Seconds between two lines that say what is under way."""

END_S = 1.0
"""Seconds that the watching thread has to end: it is asleep, but for a line that it may be writing."""

Stage = Callable[[str], AbstractContextManager[None]]
"""What `Construction.stage` is: a context in which a stage of this name is under way."""


def no_stage(name: str) -> AbstractContextManager[None]:
    """A `Stage` for what is not timed."""
    return nullcontext()


class Construction:
    """Times what happens inside ``with construction:``; stages outside of it, or after it, are not timed.

    Args:
        slow_s: seconds after which, and after each further so many, a line is logged.
        now: a clock, in seconds.
    """

    def __init__(self, *, slow_s: float = SLOW_S, now: Callable[[], float] = time.perf_counter) -> None:
        self._slow_s, self._now = slow_s, now
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._watch: threading.Thread | None = None
        self._began = self._since = 0.0
        self._is_running = False
        self._under_way: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._other_s = 0.0

    def __enter__(self) -> Construction:
        with self._lock:
            self._began = self._since = self._now()
            self._is_running = True
            self._under_way, self._seconds, self._other_s = {}, {}, 0.0
        self._ended.clear()
        self._watch = threading.Thread(target=self._say_all, name="offload-construction", daemon=True)
        try:
            self._watch.start()
        except BaseException:  # interrupted, it runs
            self._ended.set()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._advance()
            self._is_running = False
        self._ended.set()
        if self._watch is not None:
            self._watch.join(END_S)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """While inside, ``name`` is under way; from any thread, and several at once."""
        self._note(name, 1)
        try:
            yield
        finally:
            self._note(name, -1)

    @property
    def total_s(self) -> float:
        """Seconds from beginning to end, or until now."""
        with self._lock:
            return (self._now() if self._is_running else self._since) - self._began

    @property
    def seconds(self) -> dict[str, float]:
        """By stage, in the order in which they began, `OTHER` last."""
        with self._lock:
            self._advance()
            return {**self._seconds, OTHER: self._other_s}

    def log(self, numel: int) -> None:
        """One line: what was built of `numel` parameters, and what took how long. Small models say nothing per billion."""
        rate = f" ({self.total_s * 1e9 / numel:.2f} s per billion parameters)" if numel >= RATED_NUMEL else ""
        logger.info("built in %.1f s%s: %s; stages overlap", self.total_s, rate, _listed(self.seconds))

    def _note(self, name: str, change: int) -> None:
        with self._lock:
            self._advance()
            if self._is_running:
                self._seconds.setdefault(name, 0.0)
                self._under_way[name] = self._under_way.get(name, 0) + change

    def _advance(self) -> None:
        """Give the time since the last call to what was under way in it."""
        if self._is_running:
            now = self._now()
            names = [name for name, count in self._under_way.items() if count > 0]
            for name in names:
                self._seconds[name] += now - self._since
            if not names:
                self._other_s += now - self._since
            self._since = now

    def _say_all(self) -> None:
        """The watching thread: it wakes when the time has come or all has ended, and not otherwise."""
        while not self._ended.wait(self._slow_s):
            self.say()

    def say(self) -> None:
        """Log what is under way."""
        with self._lock:
            if not self._is_running:
                return
            self._advance()
            under_way = [name for name, count in self._under_way.items() if count > 0]
            total_s, seconds = self._since - self._began, {**self._seconds, OTHER: self._other_s}
        logger.info(
            "the optimizer is being built, %.0f s so far; under way: %s; so far: %s",
            total_s,
            ", ".join(under_way) or OTHER,
            _listed(seconds),
        )


def _listed(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
