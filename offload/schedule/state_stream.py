"""Chunk after chunk: state in, the base's step, state out. One loop for all three modes.

::

    host to device   | 0 | 1 |   2   |   3   |
    step                 |0|   |1|     |2|     |3|
    device to host         |   0   |   1   |   2   |   3   |

The host starts the copies of the next chunk before it steps the present one. It waits for a copy to the host only when
its place is needed again, and for all of them at the end of the step. With a transport that copies at once, on the
caller's own stream (``chunked-sync``, ``all-at-once``), nothing is ahead of anything.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.distributed import local_shard
from offload.errors import StateError
from offload.schedule.base_step import BaseStep
from offload.schedule.state_buffer import DeviceBuffer, Stay
from offload.schedule.state_chunks import Place, StateChunk
from offload.schedule.state_memory import HostMemory

__all__ = ["Progress", "StateReport", "StateStream"]

State = MutableMapping[Any, Any]


@dataclass(frozen=True)
class StateReport:
    """One step, after the fact."""

    step: int
    """Steps taken so far, this one included."""

    mode: str
    """The mode that ran."""

    num_chunks: int
    """Parts in which the parameters were stepped."""

    bytes_to_device: int
    """State bytes that crossed to the device."""

    bytes_to_host: int
    """State bytes that crossed back; more than that where the step has made state."""

    seconds: float
    """From the first chunk's first copy to the last one's last."""


class Progress:
    """How far a step has come, for the message when it fails."""

    def __init__(self) -> None:
        self.stepped: list[str] = []
        self.current: str | None = None

    @property
    def untouched(self) -> bool:
        """Whether the base was not called yet: weights and state are as before the step."""
        return self.current is None


class _Visit:
    """A chunk, its state's places, and its stay on the device, where it has state that must go there."""

    def __init__(self, chunk: StateChunk, places: list[Place], stay: Stay | None) -> None:
        self.chunk = chunk
        self.places = places
        self.stay = stay


class StateStream:
    """Moves chunks through the device.

    Args:
        buffer: the device side.
        memory: where blocks come from.
        ahead: whether the next chunk is fetched before the present one is stepped.
        keep_buffer: whether the device buffer stays between steps.
    """

    def __init__(self, buffer: DeviceBuffer, memory: HostMemory, *, ahead: bool, keep_buffer: bool) -> None:
        self._buffer = buffer
        self._memory = memory
        self._ahead = ahead
        self._keep_buffer = keep_buffer
        self.progress = Progress()

    def step(self, chunks: Sequence[StateChunk], base: BaseStep) -> None:
        """Step all of `chunks`. On return all state is on the host and complete.

        Whatever is raised, every copy has ended by then and ``state`` names host tensors. `progress` says whether that is
        the state from before the step.
        """
        self.progress = Progress()
        state = base.base.state
        self.take_in(chunks, state)
        self._reserve(chunks)
        self._buffer.begin()
        try:
            following: _Visit | None = None
            for index, chunk in enumerate(chunks):
                visit = following or self._enter(chunk, state)
                self._fetch(visit, block=True)
                following = (
                    self._enter(chunks[index + 1], state) if self._ahead and index + 1 < len(chunks) else None
                )
                if following is not None:
                    self._fetch(following, block=False)
                self._step_chunk(visit, base)
        except BaseException:
            self._buffer.drain()
            raise
        else:
            for error in self._buffer.drain():
                raise error
        finally:
            if self._keep_buffer:
                self._reserve(chunks)  # for blocks that were made in this step
            else:
                self.release(chunks)

    def take_in(self, chunks: Iterable[StateChunk], state: State) -> None:
        """Let each chunk's block hold what `state` says: state may be new, or replaced by somebody."""
        for chunk in chunks:
            places = chunk.places(state)
            if not chunk.holds(places):
                self.settle(chunk, places)

    def settle(self, chunk: StateChunk, places: Sequence[Place]) -> None:
        """Move what stands at `places` into a new block of `chunk`."""
        chunk.settle(places, self._memory, self._buffer.copy_to_host)

    def release(self, chunks: Iterable[StateChunk]) -> None:
        """Give the device buffer back."""
        for chunk in chunks:
            if chunk.block is not None:
                chunk.block.forget_device()
        self._buffer.release()

    def _reserve(self, chunks: Sequence[StateChunk]) -> None:
        sizes = [chunk.block.num_bytes for chunk in chunks if chunk.block is not None]
        if sizes:
            self._buffer.reserve(sizes)

    def _enter(self, chunk: StateChunk, state: State) -> _Visit:
        places = chunk.places(state)
        if not chunk.holds(places):
            raise StateError(
                f"the state of chunk {chunk.name!r} was changed while another was stepped: this optimizer "
                'looks across parameters, use mode="all-at-once"'
            )
        if chunk.block is None:
            return _Visit(chunk, places, None)
        active = {index for index, param in enumerate(chunk.params) if param.grad is not None}
        return _Visit(chunk, places, self._buffer.enter(chunk.block, active))

    def _fetch(self, visit: _Visit, *, block: bool) -> None:
        if visit.stay is not None:
            self._buffer.issue_fetch(visit.stay, block=block)

    def _step_chunk(self, visit: _Visit, base: BaseStep) -> None:
        chunk, stay, state = visit.chunk, visit.stay, base.base.state
        if stay is None:
            before = _shallow_copies(chunk.params, state)
            try:
                self._run(chunk, base)
            except BaseException:
                _restore(state, before)
                raise
            self.settle(chunk, chunk.places(state))
            return
        views = self._buffer.wait_fetch_on_stream(stay)
        before = _shallow_copies(chunk.params, state)
        try:
            for place, view in zip(visit.places, views, strict=True):
                if place.param in stay.active:
                    place.put(view)
            self._run(chunk, base)
        except BaseException:
            for place, host in zip(visit.places, stay.block.host, strict=True):
                place.put(host)
            _restore(state, before)
            raise
        self._leave(chunk, stay, chunk.places(state), views)

    def _run(self, chunk: StateChunk, base: BaseStep) -> None:
        self.progress.current = chunk.name
        base.run(chunk.params)
        self.progress.stepped.append(chunk.name)

    def _leave(
        self, chunk: StateChunk, stay: Stay, places: Sequence[Place], views: Sequence[torch.Tensor]
    ) -> None:
        """Send the state home; where the base has made state of another form than before, to a new block."""
        if not _take_over(stay, places, views):
            self._buffer.end(stay)
            self.settle(chunk, places)
            return
        for place, host in zip(places, stay.block.host, strict=True):
            place.put(host)
        self._buffer.issue_evict(stay)


def _take_over(stay: Stay, places: Sequence[Place], views: Sequence[torch.Tensor]) -> bool:
    """Bring tensors that the base has replaced into the buffer; False where the state has lost the block's form."""
    slots = stay.block.slots
    if [(place.param, place.path) for place in places] != [(slot.param, slot.path) for slot in slots]:
        return False
    replaced = []
    for place, slot, view, host in zip(places, slots, views, stay.block.host, strict=True):
        if place.tensor is (view if place.param in stay.active else host):
            continue
        if place.param not in stay.active or not slot.fits(local_shard(place.tensor)):
            return False
        replaced.append((view, place.tensor))
    with torch.no_grad():
        for view, tensor in replaced:
            local_shard(view).copy_(local_shard(tensor))
    return True


def _shallow_copies(params: Iterable[torch.Tensor], state: State) -> dict[torch.Tensor, Any]:
    """The entries of `params`, None where there is none; taken while they name host tensors."""
    return {param: dict(state[param]) if isinstance(state.get(param), dict) else None for param in params}


def _restore(state: State, before: dict[torch.Tensor, Any]) -> None:
    """Forget what a failed step has added to the entries."""
    for param, entry in before.items():
        if entry is None:
            state.pop(param, None)
        else:
            state[param].clear()
            state[param].update(entry)
