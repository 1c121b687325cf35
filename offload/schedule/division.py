"""Chunks that host and link divide: the host steps the first tiles, while the others are streamed. Pure.

Such a chunk is one large parameter whose gradient is complete when backward has little else left, a tied embedding: on one
side alone the other one would stand still, and the next forward waits for all of it. It is divided where its gradient comes
complete and may be applied at once. In all other steps (the observed one, accumulation, clipping) the host steps it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from offload.layout import Chunk

__all__ = ["Divisions", "Parts"]


class Parts(NamedTuple):
    """Elements of a chunk, by who steps the tiles that begin there."""

    host: range
    streamed: range


class Divisions:
    """The divided chunks of one optimizer, and which of them the step under way does divide.

    Args:
        host_numel: by chunk index, elements from the front that are the host's: whole tiles, and not all of them.
    """

    def __init__(self, host_numel: Mapping[int, int]) -> None:
        self._host_numel = dict(host_numel)
        self._parts: dict[int, Parts] = {}
        self._whole: set[int] = set()
        self._stepped: set[int] = set()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._parts

    def add(self, chunk: Chunk) -> bool:
        """Take in a chunk whose state both sides know; False where it is not to be divided."""
        if chunk.index not in self._host_numel:
            return False
        first = self._host_numel[chunk.index]
        self._parts[chunk.index] = Parts(range(first), range(first, chunk.numel))
        return True

    def keep_whole(self, chunk: int) -> None:
        """Some of the chunk's gradient is on the host: so is all of its update in this step."""
        self._whole.add(chunk)

    def step(self, chunk: int) -> Parts | None:
        """Who steps what of a chunk whose gradient has come; None: it is not divided in this step."""
        if chunk in self._whole or chunk not in self._parts:
            return None
        self._stepped.add(chunk)
        return self._parts[chunk]

    def is_stepped(self, chunk: int) -> bool:
        """Whether both sides are at work on the chunk in this step."""
        return chunk in self._stepped

    @property
    def expected(self) -> Mapping[int, range]:
        """By chunk, the elements that will probably be streamed in this step."""
        return {chunk: parts.streamed for chunk, parts in self._parts.items() if chunk not in self._whole}

    @property
    def chunks(self) -> frozenset[int]:
        """Indices of the divided chunks."""
        return frozenset(self._parts)

    def end_step(self) -> None:
        """The step is over, or dropped."""
        self._whole.clear()
        self._stepped.clear()
