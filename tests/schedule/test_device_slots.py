"""Device buffers: how large, in which order they are used, and what a tile finds in one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.layout import ALIGN
from offload.schedule.device_slots import BUFFER_BYTES, NUM_SLOTS, FixedSlots, FreshSlots, stream_tile_numel
from offload.transfer.host import HostTransport
from tests.numbered_tiles import Numbered, cut

SIZES = [2 * ALIGN, ALIGN + 7]


def tile_with_state(tile: Numbered, num_arrays: int) -> Any:
    """Arrays of one number each: 1, 2, …"""
    blocks = tile.tile.numel // ALIGN
    return SimpleNamespace(
        key=tile.key,
        tile=tile.tile,
        state=tuple(torch.full((tile.tile.numel,), float(n + 1)) for n in range(num_arrays)),
        sums=torch.zeros(blocks, dtype=torch.float64),
        nonfinite=torch.zeros(blocks, dtype=torch.uint8),
    )


[WHOLE] = cut([ALIGN + 7, 0, 2 * ALIGN], 8 * ALIGN)
"""Two parameters: `ALIGN + 7` elements behind two blocks of the other."""


@pytest.mark.parametrize("num_arrays", range(6))
def test_buffers_stay_within_their_bound(num_arrays: int) -> None:
    numel = stream_tile_numel(2**40, num_arrays)
    one_more = numel + ALIGN
    assert numel % ALIGN == 0
    assert NUM_SLOTS * 4 * max(num_arrays, 1) * numel <= BUFFER_BYTES
    assert NUM_SLOTS * 4 * max(num_arrays, 1) * one_more > BUFFER_BYTES
    assert stream_tile_numel(ALIGN, num_arrays) == ALIGN


def test_a_tile_finds_its_pieces_and_their_blocks() -> None:
    slots = FixedSlots(HostTransport(), 1)
    slots.fit(8 * ALIGN, 4)
    slot, tile = slots.take(WHOLE), tile_with_state(WHOLE, 3)  # type: ignore[arg-type]
    view = slot.view(tile)
    assert [piece.param for piece in WHOLE.tile.pieces] == [2, 0]
    for copy in view.copies_in:
        copy.dst.copy_(copy.src)
    first, second = view.pieces
    assert all(array.eq(n + 1.0).all() for n, array in enumerate(second.state))
    for number, (piece, numel, blocks) in enumerate([(first, 2 * ALIGN, 2), (second, ALIGN + 7, 2)]):
        assert [array.numel() for array in piece.state] == [numel] * 3
        assert piece.sums.numel() == piece.nonfinite.numel() == blocks
        for array in piece.state:
            array.fill_(100.0 + number)
        piece.sums.fill_(10.0 + number)
        piece.nonfinite.fill_(1 + number)
    for copy in (*view.copies_out, *view.sums_out):
        copy.dst.copy_(copy.src)
    assert tile.sums.tolist() == [10.0, 10.0, 11.0, 11.0]
    assert tile.nonfinite.tolist() == [1, 1, 2, 2]
    for index, array in enumerate(tile.state):
        padding = array[3 * ALIGN + 7 :]
        assert array[: 2 * ALIGN].eq(100.0).all()
        assert array[2 * ALIGN : 3 * ALIGN + 7].eq(101.0).all()
        assert padding.eq(index + 1.0).all()
    assert slot.view(tile) is view


def test_a_view_is_made_once_for_each_tile() -> None:
    slots = FixedSlots(HostTransport(), 1)
    slots.fit(8 * ALIGN, 1)
    slot = slots.take(WHOLE)  # type: ignore[arg-type]
    views = [slot.view(tile_with_state(tile, 1)) for tile in cut(SIZES, ALIGN)]
    assert len({id(view) for view in views}) == len(views)
    assert [view.copies_in[0].dst.numel() for view in views] == [ALIGN] * len(views)


def test_slots_are_used_first_back_first_out() -> None:
    slots = FixedSlots(HostTransport(), 3)
    slots.fit(ALIGN, 1)
    assert (slots.ahead, slots.num_idle) == (2, 3)
    first, second, third = (slots.take(WHOLE) for _ in range(3))  # type: ignore[arg-type]
    assert slots.num_idle == 0
    slots.give(second)
    slots.give(first)
    assert slots.num_idle == 2
    assert slots.take(WHOLE) is second  # type: ignore[arg-type]
    slots.rewind()
    assert [slots.take(WHOLE) for _ in range(3)] == [first, second, third]  # type: ignore[arg-type]


def test_slots_grow_in_both_directions_and_never_shrink() -> None:
    slots = FixedSlots(HostTransport(), 2)
    slots.fit(2 * ALIGN, 1)
    before = slots.take(WHOLE)  # type: ignore[arg-type]
    slots.rewind()
    slots.fit(ALIGN, 1)
    assert slots.take(WHOLE) is before  # type: ignore[arg-type]
    slots.fit(ALIGN, 3)
    assert slots.num_idle == 2
    after = slots.take(WHOLE)  # type: ignore[arg-type]
    assert [array.numel() for array in after.state] == [2 * ALIGN] * 3
    assert after.sums.numel() == after.nonfinite.numel() == 2


def test_one_slot_lets_one_tile_in() -> None:
    assert FixedSlots(HostTransport(), 1).ahead == 1


class Points(HostTransport):
    """Each point is another one."""

    def record_ready(self) -> Any:
        return object()


def test_once_copies_are_at_rest_nobody_waits_for_those_that_failed() -> None:
    slots = FixedSlots(Points(), 2)
    slots.fit(ALIGN, 1)
    taken = [slots.take(WHOLE) for _ in range(2)]  # type: ignore[arg-type]
    before = [slot.free for slot in taken]
    slots.release()
    assert all(slot.free is not free for slot, free in zip(taken, before, strict=True))


def test_buffers_go_when_they_are_cleared() -> None:
    slots = FixedSlots(HostTransport(), 2)
    slots.fit(ALIGN, 1)
    slots.clear()
    assert slots.num_idle == 0
    slots.rewind()
    assert slots.num_idle == 0


def test_all_at_once_is_a_slot_for_each_tile_of_its_size() -> None:
    slots = FreshSlots(HostTransport())
    assert slots.ahead is None
    tiles = [tile_with_state(tile, 2) for tile in cut(SIZES, 2 * ALIGN)]
    taken = [slots.take(tile) for tile in tiles]
    assert len({id(slot) for slot in taken}) == len(tiles)
    assert [[array.numel() for array in slot.state] for slot in taken] == [
        [tile.tile.numel] * 2 for tile in tiles
    ]
    assert slots.num_idle > 0
