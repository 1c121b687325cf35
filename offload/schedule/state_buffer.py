"""The device side of state that lives on the host: one flat buffer, and the copies to and from it.

Note [Two ends]
The buffer is as large as the two largest blocks. Blocks are put at its two ends in turn, so a block never touches the one
before it, and shares bytes only with the one before that. Blocks move piece by piece, and a piece comes in as soon as what
lay in its place has left: both directions of the link stay busy with no more than two blocks on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from offload.parameters import flat_view
from offload.schedule.state_chunks import StateBlock
from offload.transfer.transport import Copy, Transfer, Transport

__all__ = ["DeviceBuffer", "Stay"]

Range = tuple[int, int]


class _Leaving(NamedTuple):
    """Bytes [start, stop) of the buffer that are being copied to the host."""

    start: int
    stop: int
    transfer: Transfer


class Stay:
    """A block's stay on the device, from byte `start` of the buffer on.

    Attributes:
        active: parameters, by their index in the chunk, whose state moves; that of the others stays on the host.
        to_come: pieces of the block that are not yet on their way.
        transfers: copies to the device, issued and not yet waited for by the host.
    """

    def __init__(
        self, block: StateBlock, active: Collection[int], start: int, pieces: Sequence[Range]
    ) -> None:
        self.block = block
        self.active = active
        self.start = start
        self.pieces = pieces
        self.to_come = deque(pieces)
        self.transfers: list[Transfer] = []


class DeviceBuffer:
    """See Note [Two ends].

    Args:
        transport: copies between the parameters' device and the host.
        two_ended: whether a block comes while the one before it is still there.
        piece_bytes: largest copy.
    """

    def __init__(self, transport: Transport, *, two_ended: bool, piece_bytes: int) -> None:
        self._transport = transport
        self._two_ended = two_ended
        self._piece_bytes = piece_bytes
        self._memory = self._allocate(0)
        self._mine = transport.record_ready()
        self._at_end = False
        self._leaving: deque[_Leaving] = deque()
        self._stays: list[Stay] = []
        self.bytes_in = 0
        self.bytes_out = 0

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._memory.nbytes

    def reserve(self, sizes: Collection[int]) -> None:
        """Make room for the two largest blocks, or the largest one. Does nothing where there is room enough."""
        needed = sum(sorted(sizes, reverse=True)[: 2 if self._two_ended else 1])
        if needed > self.num_bytes:
            self.release()
            self._memory = self._allocate(needed)

    def release(self) -> None:
        """Give the memory back. Views of it that are still out keep it."""
        self._memory = self._allocate(0)

    def begin(self) -> None:
        """A step begins: its copies come after all that the current stream has been given so far."""
        self._mine = self._transport.record_ready()
        self._at_end = False
        self.bytes_in = self.bytes_out = 0

    def enter(self, block: StateBlock, active: Collection[int]) -> Stay:
        """Choose the block's place. Nothing is copied yet."""
        start = self.num_bytes - block.num_bytes if self._at_end else 0
        self._at_end = self._two_ended and not self._at_end
        stay = Stay(block, active, start, list(_cut(block.ranges(active), self._piece_bytes)))
        self._stays.append(stay)
        return stay

    def issue_fetch(self, stay: Stay, *, block: bool) -> None:
        """Start the copies to the device: all, waiting for room, or those for which there is room already."""
        while stay.to_come and self._make_room(stay, *stay.to_come[0], block=block):
            piece = stay.to_come.popleft()
            copies = [Copy(dst=self._bytes(stay, piece), src=stay.block.bytes_host[slice(*piece)])]
            stay.transfers.append(self._transport.issue_to_device(copies, after=[self._mine]))
            self.bytes_in += copies[0].src.nbytes

    def wait_fetch_on_stream(self, stay: Stay) -> list[torch.Tensor]:
        """Make the current stream wait for the block; its tensors on the device."""
        for transfer in stay.transfers:
            self._transport.wait_on_stream(transfer)
        return stay.block.on_device(self._bytes(stay, (0, stay.block.num_bytes)))

    def issue_evict(self, stay: Stay) -> None:
        """Start the copies to the host, after all that the current stream has been given so far."""
        ready = self._transport.record_ready()
        for piece in stay.pieces:
            copies = [Copy(dst=stay.block.bytes_host[slice(*piece)], src=self._bytes(stay, piece))]
            transfer = self._transport.issue_to_host(copies, after=[ready])
            self._leaving.append(_Leaving(stay.start + piece[0], stay.start + piece[1], transfer))
            self.bytes_out += copies[0].src.nbytes

    def end(self, stay: Stay) -> None:
        """Block until nothing reads the stay's block any more, which is not evicted."""
        for transfer in stay.transfers:
            self._transport.wait(transfer)

    def copy_to_host(self, hosts: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Fill `hosts` with `tensors`, which lie on the device or anywhere else. Blocks."""
        copies = []
        for host, tensor in zip(hosts, tensors, strict=True):
            if tensor.device == self._transport.device:
                source = (
                    tensor if tensor.stride() == host.stride() else torch.empty_like(tensor).copy_(tensor)
                )
                copies.append(Copy(flat_view(host, "state"), flat_view(source.detach(), "state")))
            else:
                host.copy_(tensor)
        self._transport.wait(self._transport.issue_to_host(copies, after=[self._transport.record_ready()]))
        self.bytes_out += sum(copy.src.nbytes for copy in copies)

    def drain(self) -> list[Exception]:
        """Block until every copy has ended; the errors with which some of them have."""
        transfers = [transfer for stay in self._stays for transfer in stay.transfers]
        transfers += [leaving.transfer for leaving in self._leaving]
        self._stays.clear()
        self._leaving.clear()
        errors: list[Exception] = []
        for transfer in transfers:
            try:
                self._transport.wait(transfer)
            except Exception as error:  # noqa: BLE001 - kept until nothing is on its way any more
                errors.append(error)
        return errors

    def _make_room(self, stay: Stay, start: int, stop: int, *, block: bool) -> bool:
        """Wait until nothing leaves from the piece's place any more; False where that would block and must not."""
        start, stop = stay.start + start, stay.start + stop
        while any(leaving.start < stop and start < leaving.stop for leaving in self._leaving):
            oldest = self._leaving[0].transfer
            if not block and not self._transport.is_done(oldest):
                return False
            self._transport.wait(oldest)
            self._leaving.popleft()
        return True

    def _bytes(self, stay: Stay, piece: Range) -> torch.Tensor:
        return self._memory[stay.start + piece[0] : stay.start + piece[1]]

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._transport.device)


def _cut(ranges: Sequence[Range], num_bytes: int) -> list[Range]:
    return [
        (first, min(first + num_bytes, stop))
        for start, stop in ranges
        for first in range(start, stop, num_bytes)
    ]
