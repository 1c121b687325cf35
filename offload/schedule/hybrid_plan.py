"""Which chunk of a hybrid goes where, and what that takes. Pure.

On the device goes what comes last in backward, so that the end of a step is short: the embedding, and more if the user
gives room. The rest is divided between the host's kernels and the link, chunk by chunk in turn, so that both are busy
all the time. A large chunk at the end of backward, where there is no other to take turns with, is divided tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.rates import Rates
from offload.schedule.mode_costs import (
    BLOCK_NUMEL,
    SUMS_BYTES,
    ChunkSize,
    Machine,
    Needs,
    Placement,
    Workload,
    gib,
)

__all__ = [
    "BESIDE_KERNELS",
    "BESIDE_LINK",
    "Balance",
    "Division",
    "at_share",
    "balance",
    "device_room",
    "divide",
    "hybrid_needs",
    "num_stream_slots",
    "place",
]

MAX_SLOTS = 8
MIN_SLOTS = 4

DEFAULT_DEVICE_SHARE = 0.1
"""Of the free device memory that the last chunk of backward may take where the user gives no budget."""

BESIDE_LINK, BESIDE_KERNELS = 0.75, 0.85
"""Of their rates alone that the host kernels reach beside a busy link and backward, and the link beside them: 2.7 of 3.7
Gparam/s, and 42 of 50 GB/s each way, were measured on a 16-core host. Steps then correct the balance (`balancer`)."""

HIDDEN_MARGIN = 0.9
"""Of backward that an update may fill and still count as hidden: the first gradient is late, the last one is last."""

STEPS = 100
"""Shares that are tried."""


class Balance(NamedTuple):
    """The share of host state that is streamed, and the seconds that the host's kernels and the link then take."""

    share: float
    host_s: float
    link_s: float

    @property
    def step_s(self) -> float:
        """Both work at the same time."""
        return max(self.host_s, self.link_s)


def balance(
    numel: int, *, stream_bytes: int, edge_bytes: int, rates: Rates, backward_s: float | None = None
) -> Balance:
    """The share with the shortest update; of those that are hidden behind backward, the smallest.

    Args:
        numel: elements to be divided.
        stream_bytes: that cross per streamed element, each way.
        edge_bytes: gradient or weight of an element stepped on the host, each way.
        backward_s: seconds of backward; None: not known.
    """
    tried = [
        at_share(step / STEPS, numel, stream_bytes=stream_bytes, edge_bytes=edge_bytes, rates=rates)
        for step in range(STEPS + 1)
    ]
    if backward_s is not None:
        hidden = [each for each in tried if each.step_s <= HIDDEN_MARGIN * backward_s]
        if hidden:
            return hidden[0]
    return min(tried, key=lambda each: each.step_s)


def at_share(
    share: float,
    numel: int,
    *,
    stream_bytes: int,
    edge_bytes: int,
    rates: Rates,
    beside_link: float = BESIDE_LINK,
    beside_kernels: float = BESIDE_KERNELS,
) -> Balance:
    """What one share gives; `beside_link`, `beside_kernels`: what is left of both rates where both are at work."""
    streamed, stepped = share * numel, (1 - share) * numel
    host_rate = rates.kernel_numel * (beside_link if streamed else 1.0)
    moved = stream_bytes * streamed + edge_bytes * stepped
    link_rate = rates.duplex_bytes * (beside_kernels if stepped and streamed else 1.0)
    return Balance(share, stepped / host_rate, moved / link_rate)


class Division(NamedTuple):
    """`chunk`: index of one that both sides step. `host_numel`: elements from its front that the host steps, whole tiles of
    `tile_numel`; the others are streamed."""

    chunk: int
    host_numel: int
    tile_numel: int

    def words(self, chunk: ChunkSize) -> str:
        """For a plan."""
        host, tiles = self.host_numel // self.tile_numel, -(-chunk.numel // self.tile_numel)
        return (
            f"{chunk.name} comes last and is divided: the host steps {host} of its {tiles} tiles while the link streams "
            f"{tiles - host}"
        )


def place(
    chunks: Sequence[ChunkSize], share: float, device_numel: int, division: Division | None = None
) -> tuple[Placement, ...]:
    """Placements, in the order of `chunks`.

    Args:
        share: of the elements that do not go to the device, how many are streamed.
        device_numel: elements that the device has room for.
        division: of a chunk that takes no turn; its state is streamed state.
    """
    on_device = _on_device(chunks, device_numel)
    divided = set() if division is None else {division.chunk}
    rest = [index for index in range(len(chunks)) if index not in on_device | divided]
    streamed = _take_turns([chunks[index].numel for index in rest], share)
    placements = dict.fromkeys(on_device, Placement.DEVICE) | dict.fromkeys(divided, Placement.STREAM)
    placements |= {
        index: Placement.STREAM if turn else Placement.HOST
        for index, turn in zip(rest, streamed, strict=True)
    }
    return tuple(placements[index] for index in range(len(chunks)))


def divide(workload: Workload, device_numel: int, share: float) -> Division | None:
    """The chunk that backward completes last of all that are not on the device, if it is large; its tiles by `share`.

    Only where its gradient may be applied as soon as it is there: what is accumulated or waits for a verdict is on one side.
    An FP32 weight has no master among streamed state, so the host cannot step a part of it.
    """
    if workload.divide_numel is None or workload.accumulates or workload.holds_gradients:
        return None
    chunks, tile_numel = workload.chunks, workload.tile_numel
    on_device = _on_device(chunks, device_numel)
    last = next((index for index in _last_gradients_first(chunks) if index not in on_device), None)
    if last is None or chunks[last].num_params != 1 or chunks[last].weight_bytes == 4:
        return None
    tiles = -(-chunks[last].numel // tile_numel)
    host = round((1 - share) * tiles)
    if chunks[last].numel <= workload.divide_numel or not 0 < host < tiles:
        return None
    return Division(last, host * tile_numel, tile_numel)


def _on_device(chunks: Sequence[ChunkSize], numel: int) -> set[int]:
    """What comes last in backward, as long as there is room for it."""
    on_device = set()
    for index in _last_gradients_first(chunks):
        if chunks[index].numel > numel:
            break
        numel -= chunks[index].numel
        on_device.add(index)
    return on_device


def device_room(workload: Workload, machine: Machine) -> int:
    """Elements whose state may stay on the device: what the budget leaves beside the buffers, or the last chunk alone."""
    per_block = 4 * workload.state_arrays * BLOCK_NUMEL + SUMS_BYTES
    if machine.device_budget is not None:
        buffers = MAX_SLOTS * workload.tile_bytes if machine.has_gpu else 0
        return max(machine.device_budget - buffers, 0) * BLOCK_NUMEL // per_block
    order = _last_gradients_first(workload.chunks)
    last = workload.chunks[order[0]].numel if order else 0
    free = machine.free_device_bytes
    fits = free is None or per_block * last <= DEFAULT_DEVICE_SHARE * free * BLOCK_NUMEL
    return last if fits else 0


def num_stream_slots(chunks: Sequence[ChunkSize], placements: Sequence[Placement], tile_numel: int) -> int:
    """Device buffers: enough for about a layer's state to come in ahead; no more than there are tiles."""
    streamed = [c.numel for c, p in zip(chunks, placements, strict=True) if p is Placement.STREAM]
    num_tiles = sum(-(-numel // tile_numel) for numel in streamed)
    return max(MIN_SLOTS, min(MAX_SLOTS, num_tiles + 1)) if num_tiles else MIN_SLOTS


def hybrid_needs(
    workload: Workload, machine: Machine, placements: Sequence[Placement], division: Division | None = None
) -> Needs:
    """What chunks placed like this take. Gradients of the observed first step wait for ``step()`` where they are used.

    All state of a divided chunk is pinned, since its parts are those of one array. Its gradient is on the device once, and
    counts as one that waits for its state to be streamed.
    """
    arrays = workload.state_arrays
    sums = dict.fromkeys(Placement, 0)
    state, gradients, sizes = dict(sums), dict(sums), dict(sums)
    for chunk, placement in zip(workload.chunks, placements, strict=True):
        travelling = arrays - (chunk.weight_bytes == 4) if placement is Placement.STREAM else arrays
        state[placement] += 4 * travelling * chunk.numel
        sums[placement] += SUMS_BYTES * chunk.numel // BLOCK_NUMEL
        gradients[placement] += (chunk.grad_bytes + 4 * workload.accumulates) * chunk.numel
        sizes[placement] += chunk.numel
    host, stream, device = Placement.HOST, Placement.STREAM, Placement.DEVICE
    slots = num_stream_slots(workload.chunks, placements, workload.stream_tile_numel)
    buffers = slots * workload.tile_bytes
    on_device = state[device] + sums[device] + buffers
    # Of streamed gradients, those of FP32 weights and those that wait for a verdict do so on the device.
    moving = [
        chunk
        for chunk, placement in zip(workload.chunks, placements, strict=True)
        if placement is stream and chunk.weight_bytes != 4
    ]
    last = sum(chunk.grad_bytes * chunk.numel for chunk in moving)
    accumulated = 4 * workload.accumulates * sum(chunk.numel for chunk in moving)
    movable = last + accumulated
    observed = gradients[host] + movable
    on_host = state[host] + state[stream] + sums[stream] + observed + workload.ring_bytes
    pinned = state[stream] + sums[stream] + workload.ring_bytes
    waiting = _waiting_bytes(workload, placements, host, gradients[host])
    kept = gradients[device] + gradients[stream] - last
    if workload.holds_gradients:
        kept += last
    else:
        waiting += _waiting_bytes(workload, placements, stream, last)
    pinned_words = f"streamed state {gib(state[stream] + sums[stream])}, rings {gib(workload.ring_bytes)}; "
    if division is not None:  # by who steps it
        for side, moved in ((host, division.host_numel), (stream, -division.host_numel)):
            sizes[side] += moved
            state[side] += 4 * arrays * moved
    words = [
        f"{_count(sizes[placement])} parameters: "
        f"{placement.words() if machine.has_gpu else placement.words_without_gpu()} ({gib(state[placement])})"
        for placement in Placement
    ]
    if not machine.has_gpu:
        words.append(f"{pinned_words}{slots} buffers of {gib(workload.tile_bytes)}")
        return Needs(0, on_host + on_device + kept, 0, 0, tuple(words))
    words.append(f"pinned: {pinned_words}{slots} device buffers of {gib(workload.tile_bytes)}")
    words.append(f"gradients on the device at a time, at most: {gib(kept + waiting)}")
    return Needs(on_device, on_host, pinned, kept + waiting, tuple(words))


def _waiting_bytes(
    workload: Workload, placements: Sequence[Placement], side: Placement, gradient_bytes: int
) -> int:
    """Of a side's gradients, those that may wait on the device: its queue, and the largest chunk of which some are in it."""
    sizes = [
        chunk.grad_bytes * chunk.numel
        for chunk, placement in zip(workload.chunks, placements, strict=True)
        if placement is side
    ]
    largest = min(max(sizes, default=0), workload.largest_gradient_bytes)
    return min(workload.backlog_bytes + largest, gradient_bytes)


def _count(numel: int) -> str:
    return f"{numel / 1e6:.1f} M" if numel >= 10**5 else f"{numel:,}"


def _last_gradients_first(chunks: Sequence[ChunkSize]) -> list[int]:
    """Backward goes through parameters about in reverse: the chunk of the first parameter is complete last."""
    return sorted(range(len(chunks)), key=lambda index: chunks[index].first_param)


def _take_turns(sizes: Sequence[int], share: float) -> list[bool]:
    """A choice of about `share` of the total, spread evenly; each one lowers or keeps the distance to the share so far."""
    chosen, taken, total = [], 0.0, 0
    for size in sizes:
        total += size
        turn = abs(taken + size - share * total) < abs(taken - share * total)
        chosen.append(turn)
        taken += size * turn
    return chosen
