"""A bounded set of equal slots in one slab: what bounds memory in flight, whatever the model's size.

Used by the worker thread alone, hence without locks.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from offload.errors import ConfigError, StateError
from offload.transfer.pinned import Slab

__all__ = ["SLOT_ALIGNMENT_BYTES", "Ring", "Slot", "SlotState"]

#: Slots start on pages, so that no two of them share one (DMA and first touch work on pages).
SLOT_ALIGNMENT_BYTES = 4096


class SlotState(enum.Enum):
    """Lifecycle of a :class:`Slot`. Only its ring changes it."""

    #: Acquired: its bytes belong to the holder.
    HELD = "held"
    #: Given back: its bytes may already belong to another holder, so it shows them no more.
    RELEASED = "released"


class Slot:
    """One lease of a slot's bytes, from ``try_acquire`` to ``release``.

    Every acquisition makes a new object: a stale one can neither show nor free the next holder's bytes.
    """

    __slots__ = ("index", "ring", "state")

    def __init__(self, ring: Ring, index: int) -> None:
        """Made by :meth:`Ring.try_acquire`."""
        self.ring = ring
        self.index = index
        self.state = SlotState.HELD

    @property
    def num_bytes(self) -> int:
        """Usable bytes: what the ring was asked for, without the padding to pages."""
        return self.ring.slot_bytes

    def array(self, dtype: npt.DTypeLike, count: int | None = None) -> npt.NDArray[Any]:
        """The first ``count`` elements (all that fit, if None) as a NumPy view."""
        whole = self.ring.array_of(self.index, dtype)
        return whole[: self._count(whole.itemsize, count)]

    def tensor(self, dtype: torch.dtype, count: int | None = None) -> torch.Tensor:
        """The first ``count`` elements (all that fit, if None) as a tensor view."""
        count = self._count(dtype.itemsize, count)
        whole = self.ring.tensor_of(self.index, dtype)
        return whole if count == whole.numel() else whole[:count]

    def _count(self, itemsize: int, count: int | None) -> int:
        if self.state is not SlotState.HELD:
            raise StateError(f"slot {self.index} was released: its bytes may belong to another holder")
        fits = self.num_bytes // itemsize
        if count is None:
            return fits
        if not 0 <= count <= fits:
            raise ConfigError(
                f"slot {self.index} holds {fits} elements of {itemsize} bytes, {count} were asked for"
            )
        return count

    def __repr__(self) -> str:
        """Index and state, for messages."""
        return f"Slot({self.index}, {self.state.value})"


class Ring:
    """``num_slots`` slots of ``slot_bytes`` each, handed out first released, first reused."""

    def __init__(self, slab: Slab, num_slots: int, slot_bytes: int) -> None:
        """Cut the start of ``slab``, which stays the caller's to close, into slots."""
        if num_slots < 1 or slot_bytes < 1:
            raise ConfigError(f"a ring needs slots and bytes, got {num_slots} slots of {slot_bytes} bytes")
        needed = self.required_bytes(num_slots, slot_bytes)
        if slab.num_bytes < needed:
            raise ConfigError(
                f"slab {slab.name!r} of {slab.num_bytes} bytes is too small for {num_slots} slots of "
                f"{slot_bytes} bytes: allocate Ring.required_bytes(...) = {needed}"
            )
        self.slab = slab
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.stride_bytes = needed // num_slots
        self._free = deque(range(num_slots))
        self._arrays: dict[tuple[int, np.dtype[Any]], npt.NDArray[Any]] = {}
        self._tensors: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def array_of(self, index: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A slot's bytes as an array; made once, since the worker asks for it at every tile."""
        key = index, np.dtype(dtype)
        if key not in self._arrays:
            count = self.slot_bytes // key[1].itemsize
            self._arrays[key] = self.slab.array(dtype, index * self.stride_bytes, count)
        return self._arrays[key]

    def tensor_of(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """The same as a tensor."""
        key = index, dtype
        if key not in self._tensors:
            count = self.slot_bytes // dtype.itemsize
            self._tensors[key] = self.slab.tensor(dtype, index * self.stride_bytes, count)
        return self._tensors[key]

    @staticmethod
    def required_bytes(num_slots: int, slot_bytes: int) -> int:
        """Bytes of the slab that such a ring needs: each slot is padded to whole pages."""
        num_pages = -(-slot_bytes // SLOT_ALIGNMENT_BYTES)
        return num_slots * num_pages * SLOT_ALIGNMENT_BYTES

    @property
    def num_free(self) -> int:
        """Slots that ``try_acquire`` could still hand out."""
        return len(self._free)

    def try_acquire(self) -> Slot | None:
        """A free slot, or None: the caller then waits for its oldest transfer and releases that slot."""
        return Slot(self, self._free.popleft()) if self._free else None

    def release(self, slot: Slot) -> None:
        """Give ``slot`` back. Releasing again does nothing, even if its bytes have a new holder by then."""
        if slot.ring is not self:
            raise ConfigError(f"{slot!r} belongs to another ring")
        if slot.state is SlotState.HELD:
            slot.state = SlotState.RELEASED
            self._free.append(slot.index)
