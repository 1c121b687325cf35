"""Rings: slots never overlap, never leak, and a stale lease can do no harm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError, StateError
from offload.transfer.pinned import Slab
from offload.transfer.ring import SLOT_ALIGNMENT_BYTES, Ring, Slot, SlotState


@pytest.fixture
def ring() -> Iterator[Ring]:
    slab = Slab(Ring.required_bytes(3, 5000), name="test-ring")
    yield Ring(slab, 3, 5000)
    slab.close()


def acquire(ring: Ring) -> Slot:
    slot = ring.try_acquire()
    assert slot is not None
    return slot


def test_slots_are_page_aligned_and_disjoint(ring: Ring) -> None:
    slots = [acquire(ring) for _ in range(3)]
    assert ring.try_acquire() is None
    assert sorted(slot.index for slot in slots) == [0, 1, 2]
    for slot in slots:
        assert slot.array(np.uint8).ctypes.data % SLOT_ALIGNMENT_BYTES == 0
        slot.array(np.uint8)[:] = slot.index + 1
    for slot in slots:
        data = slot.array(np.uint8)
        assert data.size == slot.num_bytes == 5000
        assert (data == slot.index + 1).all()


def test_array_and_tensor_show_the_same_bytes(ring: Ring) -> None:
    slot = acquire(ring)
    slot.tensor(torch.bfloat16, 8).fill_(1.0)
    np.testing.assert_array_equal(slot.array(np.uint16, 8), np.full(8, 0x3F80, np.uint16))
    assert slot.tensor(torch.float32).numel() == 1250


def test_more_elements_than_fit_are_refused(ring: Ring) -> None:
    slot = acquire(ring)
    with pytest.raises(ConfigError, match="holds 1250 elements"):
        slot.array(np.float32, 1251)
    with pytest.raises(ConfigError, match="-1 were asked for"):
        slot.tensor(torch.float32, -1)


def test_a_released_slot_shows_nothing(ring: Ring) -> None:
    slot = acquire(ring)
    ring.release(slot)
    assert slot.state is SlotState.RELEASED
    with pytest.raises(StateError, match="was released"):
        slot.array(np.uint8)


def test_a_stale_release_does_not_free_the_next_holders_slot(ring: Ring) -> None:
    slots = [acquire(ring) for _ in range(3)]
    ring.release(slots[0])
    heir = acquire(ring)
    assert heir.index == slots[0].index
    ring.release(slots[0])
    assert ring.num_free == 0
    assert heir.state is SlotState.HELD


def test_slots_of_another_ring_are_refused(ring: Ring) -> None:
    other = Ring(ring.slab, 1, 16)
    with pytest.raises(ConfigError, match="another ring"):
        ring.release(acquire(other))


def test_a_slab_that_is_too_small_is_refused() -> None:
    slab = Slab(2 * SLOT_ALIGNMENT_BYTES, name="small")
    with pytest.raises(ConfigError, match=r"'small'.*too small for 2 slots.*= 16384"):
        Ring(slab, 2, SLOT_ALIGNMENT_BYTES + 1)
    with pytest.raises(ConfigError, match="0 slots"):
        Ring(slab, 0, 1)
    slab.close()


@given(num_slots=st.integers(1, 5), actions=st.lists(st.integers(-1, 30), max_size=60))
def test_any_sequence_keeps_slots_unique_and_counted(num_slots: int, actions: list[int]) -> None:
    """-1 acquires; n releases the n-th lease ever made, stale ones too."""
    slab = Slab(Ring.required_bytes(num_slots, 64), name="any")
    ring = Ring(slab, num_slots, 64)
    leases: list[Slot] = []
    for action in actions:
        if action < 0:
            had_free = ring.num_free > 0
            slot = ring.try_acquire()
            assert (slot is not None) == had_free
            leases += [slot] if slot else []
        elif leases:
            ring.release(leases[action % len(leases)])
        held = [lease.index for lease in leases if lease.state is SlotState.HELD]
        assert len(held) == len(set(held))
        assert len(held) + ring.num_free == num_slots
    slab.close()
