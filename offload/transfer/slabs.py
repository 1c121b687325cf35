"""Slabs for one engine, ready for use: mapped, first touched by a team of threads, pinned for the engine's device.

A touch is a write to each page, after which the system has zeroed it and put it where the writing thread runs; nothing
else is written. The threads are plain ones: the kernels' team may be compiling meanwhile, and with as many threads as
that has, memory is touched at the rate at which the system can zero it. One that is touched is pinned while the next
is being touched.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from offload.construction import PIN, TOUCH, Stage, no_stage
from offload.errors import DeadlineError
from offload.transfer.helpers import Helpers
from offload.transfer.pinned import Slab, pin_slab

__all__ = ["SlabMaker", "Wanted", "close_all"]

PARTS_PER_THREAD = 2
"""So that a thread whose core is busy with something else leaves the rest to the others."""

PART_BYTES = 16 << 20
"""Of the smallest piece of memory that is worth a thread."""

STUCK_S = 10.0
"""After an error, seconds that a pin which is under way has to end."""

Bytes = npt.NDArray[np.uint8]


class Wanted(NamedTuple):
    """A slab to be made; `pin`: where the maker has a device to pin for."""

    num_bytes: int
    name: str
    pin: bool = False


class SlabMaker:
    """Makes slabs for one engine.

    Args:
        num_threads: that touch memory.
        bind: called by each of these first: to run where the memory shall lie.
        device: for which slabs are pinned; None: there is none that copies from them, and nothing is pinned.
        timeout_s: longest wait for a touch or a pin, in seconds.
        stage: told what is under way.
    """

    def __init__(
        self,
        *,
        num_threads: int = 1,
        bind: Callable[[], object] | None = None,
        device: torch.device | None = None,
        timeout_s: float = threading.TIMEOUT_MAX,
        stage: Stage = no_stage,
    ) -> None:
        self._num_threads, self._bind, self._stage = num_threads, bind, stage
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        #: For which slabs are pinned.
        self.device = device

    def make(self, num_bytes: int, name: str, *, pin: bool = False) -> Slab:
        """One slab."""
        return self.make_all([Wanted(num_bytes, name, pin)])[0]

    def make_all(self, wanted: Sequence[Wanted]) -> list[Slab]:
        """Slabs in the order of `wanted`. On an error none of them stays, and no more of them is touched.

        Where pinning is refused the slab is pageable, and that is logged.

        Raises:
            MemoryBudgetError: the system refused to map that much.
            DeadlineError: touching or pinning did not end in time. What is still being pinned stays mapped: it must not
                be unmapped under the driver.
        """
        slabs: list[Slab] = []
        pins: dict[Slab, Future[None]] = {}
        with (
            Helpers("offload-touch", self._num_threads, self._bind) as touchers,
            Helpers("offload-pin", 1) as pinner,
        ):
            try:
                for each in wanted:
                    is_pinned = each.pin and self.device is not None
                    slab = Slab(each.num_bytes, name=each.name, pin=is_pinned)
                    slabs.append(slab)
                    self._touch(slab, touchers)
                    if is_pinned:
                        pins[slab] = pinner.submit(partial(self._pin, slab))
                for slab, pin in pins.items():
                    self._wait(pin, f"pinning {slab!r}")
            except BaseException:
                touchers.cancel()  # a part that is being touched keeps its memory mapped until that has ended
                for pin in pins.values():
                    pin.cancel()
                stuck = wait(pins.values(), timeout=min(self._timeout_s, STUCK_S)).not_done
                close_all([slab for slab in slabs if pins.get(slab) not in stuck])
                raise
        return slabs

    def _touch(self, slab: Slab, threads: Helpers) -> None:
        parts = _parts(slab.array(np.uint8), self._num_threads)
        with self._stage(TOUCH):
            if len(parts) == 1:  # not worth a thread
                _touch(parts[0])
                return
            for part in [threads.submit(partial(_touch, part)) for part in parts]:
                self._wait(part, f"touching {slab!r}")

    def _pin(self, slab: Slab) -> None:
        with self._stage(PIN):
            pin_slab(slab, self.device, fallback_pageable=True)

    def _wait(self, future: Future[None], what: str) -> None:
        try:
            error = future.exception(self._timeout_s)
        except FutureTimeout:
            raise DeadlineError(
                f"{what} did not end within timeout_s={self._timeout_s} s (config.timeout_s): the machine may be "
                "swapping, or short of memory"
            ) from None
        if error is not None:
            raise error


def close_all(slabs: list[Slab]) -> None:
    """Release all of them, and empty the list."""
    for slab in slabs:
        slab.close()
    slabs.clear()


def _parts(data: Bytes, num_threads: int) -> list[Bytes]:
    """Even parts on page boundaries, each worth a thread; none where there is nothing."""
    most = PARTS_PER_THREAD * num_threads
    number = max(min(most, data.size // PART_BYTES), 1)
    step = -(-data.size // number)
    step += -step % PART_BYTES if number > 1 else 0
    return [data[start : start + step] for start in range(0, data.size, max(step, 1))]


def _touch(data: Bytes) -> None:
    """NumPy gives the interpreter's lock away for it."""
    data[:: mmap.PAGESIZE] = 0
