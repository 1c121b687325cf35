"""Memory of the two rings of placement HOST: gradients in, weights out."""

from __future__ import annotations

from offload.config import OffloadConfig
from offload.transfer.pinned import Slab
from offload.transfer.ring import Ring
from offload.transfer.slabs import SlabMaker, Wanted, close_all

__all__ = ["HostRings"]

NAMES = ("ring: gradients in", "ring: weights out")


class HostRings:
    """Owns the slabs of both rings; there are none until `make`.

    Args:
        slabs: makes them, pinned where there is a device.
        config: slots of a ring, and elements in each.
    """

    def __init__(self, slabs: SlabMaker, config: OffloadConfig) -> None:
        self._maker, self._num_slots, self._slot_numel = slabs, config.ring_slots, config.tile_numel
        self._slabs: list[Slab] = []
        #: Bytes of the widest element that a slot holds ``tile_numel`` of.
        self.element_bytes = 0

    def make(self, element_bytes: int) -> tuple[Ring, Ring]:
        """Rings to the host and to the device for elements of so many bytes; slabs of rings before them are released."""
        slot_bytes = self._slot_numel * element_bytes
        num_bytes = Ring.required_bytes(self._num_slots, slot_bytes)
        before = self._slabs
        self._slabs = self._maker.make_all([Wanted(num_bytes, name, pin=True) for name in NAMES])
        self.element_bytes = element_bytes
        close_all(before)
        to_host, to_device = (Ring(slab, self._num_slots, slot_bytes) for slab in self._slabs)
        return to_host, to_device

    @property
    def num_bytes(self) -> int:
        """Bytes mapped."""
        return sum(slab.num_bytes for slab in self._slabs)

    def close(self) -> None:
        """Unmap; no copy may be running."""
        close_all(self._slabs)
