"""Chunk after chunk: state in, the base's step, state out. One loop for all three modes.

::

    host to device   | 0 | 1 |   2   |   3   |
    step                 |0|   |1|     |2|     |3|
    device to host         |   0   |   1   |   2   |   3   |

State on the device lives in one flat buffer that is as large as the two largest chunks: chunks are put at its two ends in
turn, so a chunk never touches the one before it, and shares bytes only with the one before that. These are copied piece
by piece: a piece comes in as soon as what lay there has left, which is what keeps both directions of the link busy with
no more than two chunks on the device.

The host waits for a copy to the host only when its place is needed again, and for all of them at the end of the step.
With a transport that copies at once, on the caller's own stream (``chunked-sync``, ``all-at-once``), nothing is ahead of
anything, and the buffer holds one chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from offload.distributed import local_shard
from offload.parameters import flat_view
from offload.schedule.base_step import BaseStep
from offload.schedule.state_chunks import Place, StateBlock, StateChunk
from offload.schedule.state_memory import HostMemory
from offload.transfer.transport import Copy, Ready, Transfer, Transport

__all__ = ["Progress", "StateStream"]


class Progress:
    """How far a step has come, for the message when it fails."""

    def __init__(self) -> None:
        self.stepped: list[str] = []
        self.current: str | None = None
        self.num_bytes_in = 0
        self.num_bytes_out = 0

    @property
    def untouched(self) -> bool:
        """Whether the base was not yet called: every weight and state is as before the step."""
        return self.current is None


class _Leaving(NamedTuple):
    """Bytes [start, stop) of the buffer that are being copied to the host."""

    start: int
    stop: int
    transfer: Transfer


class _Visit:
    """A chunk's stay on the device: what comes, where it goes, what is on its way."""

    def __init__(self, chunk: StateChunk, places: list[Place], start: int) -> None:
        self.chunk = chunk
        self.block = chunk.block
        self.places = places
        self.start = start
        self.active = {index for index, param in enumerate(chunk.params) if param.grad is not None}
        self.transfers: list[Transfer] = []

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.block.slots if self.block else ()

    @property
    def host(self) -> list[torch.Tensor]:
        return self.block.host if self.block else []

    def pieces(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Ranges of the block that move, each of at most `num_bytes`: the state of parameters that have a gradient."""
        for start, stop in self.block.ranges(self.active) if self.block else ():
            for first in range(start, stop, num_bytes):
                yield first, min(first + num_bytes, stop)


class StateStream:
    """Moves chunks through the device.

    Args:
        transport: copies between the parameters' device and the host.
        memory: where blocks come from.
        ahead: whether the next chunk is fetched before the present one is stepped.
        keep_buffer: whether the device buffer stays between steps.
        piece_bytes: largest copy.
    """

    def __init__(
        self, transport: Transport, memory: HostMemory, *, ahead: bool, keep_buffer: bool, piece_bytes: int
    ) -> None:
        self._transport = transport
        self._memory = memory
        self._ahead = ahead
        self._keep_buffer = keep_buffer
        self._piece_bytes = piece_bytes
        self._buffer = self._no_buffer()
        self._start = transport.record_ready()
        self._leaving: deque[_Leaving] = deque()
        self._arriving: list[Transfer] = []
        self._at_end = False
        self.progress = Progress()

    @property
    def device_bytes(self) -> int:
        """Bytes of the device buffer, as it is now."""
        return self._buffer.nbytes

    def step(self, chunks: Sequence[StateChunk], base: BaseStep) -> None:
        """Step all of `chunks`. On return all state is on the host and complete.

        Whatever is raised, every copy has ended by then and ``state`` names host tensors. `progress` says whether that is
        the state from before the step.
        """
        self.progress = Progress()
        self.take_in(chunks, base.base.state)
        self._reserve(chunks)
        self._start = self._transport.record_ready()
        try:
            self._step_all(chunks, base)
        except BaseException:
            self._drain()
            raise
        else:
            for error in self._drain():
                raise error
        finally:
            if self._keep_buffer:
                self._reserve(chunks)  # blocks that are new since this step
            else:
                self.release(chunks)

    def take_in(self, chunks: Iterable[StateChunk], state: State) -> None:
        """Let each chunk's block hold what `state` says: state is new, or somebody has replaced it."""
        for chunk in chunks:
            places = chunk.places(state)
            if not chunk.holds(places):
                self.settle(chunk, places)

    def settle(self, chunk: StateChunk, places: Sequence[Place]) -> None:
        """Move what stands at `places` into a new block of `chunk`."""
        chunk.settle(places, self._memory, self._copy_to_host)

    def release(self, chunks: Iterable[StateChunk]) -> None:
        """Give the device buffer back."""
        for chunk in chunks:
            if chunk.block is not None:
                chunk.block.forget_device()
        self._buffer = self._no_buffer()

    # Stations of a visit ----------------------------------------------------------------------------------------

    def _step_all(self, chunks: Sequence[StateChunk], base: BaseStep) -> None:
        following: Iterator[None] | None = None
        visits = [self._enter(chunk, base) for chunk in chunks]
        fetches = [self._fetch(visit) for visit in visits]

    def _enter(self, chunk: StateChunk, state: State) -> _Visit:
        """Choose the chunk's place in the buffer."""
        places = chunk.places(state)
        if not chunk.holds(places):
            raise StateError(f"the state of {chunk.name} was changed while other parameters were stepped: this optimizer "
                             'looks across parameters; use mode="all-at-once"')
        num_bytes = chunk.block.num_bytes if chunk.block else 0
        start = self.device_bytes - num_bytes if self._at_end else 0
        self._at_end = self._ahead and not self._at_end
        return _Visit(chunk, places, start)
