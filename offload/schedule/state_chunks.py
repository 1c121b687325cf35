"""State of a foreign optimizer, chunk by chunk: which parameters go together, and their block of host memory.

What an optimizer keeps per parameter is learned from ``optimizer.state`` itself, after it was created there: every plain
tensor (or `DTensor`) that lies on the parameter's device, also in nested dicts and lists, gets a `Slot` in its chunk's
`StateBlock`. Whatever else is there (step counts on the CPU, numbers, tensors in tuples) stays where it is.

Between steps ``optimizer.state`` names the block's host tensors. Every step compares by identity, so state that was
replaced behind our back, by anybody, is found and taken in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from offload.distributed import local_shard, shard_like
from offload.layout import layer_namer
from offload.schedule.state_memory import HostMemory

__all__ = [
    "CHUNK_BYTES",
    "SLOT_ALIGN_BYTES",
    "Place",
    "Slot",
    "StateBlock",
    "StateChunk",
    "find_tensors",
    "plan_chunks",
]

CHUNK_BYTES = 128 << 20
"""Parameter bytes of a chunk, unless a single parameter is larger: parts of a layer are smaller than the layer."""

SLOT_ALIGN_BYTES = 512
"""As the CUDA allocator aligns: kernels see the addresses that they see with the optimizer alone."""

Path = tuple[Any, ...]
Groups = Sequence[Mapping[str, Any]]


class Place(NamedTuple):
    """A tensor of a state: ``container[key]``, reached over `path` from the state of the chunk's `param`-th parameter."""

    param: int
    path: Path
    container: Any
    key: Any

    @property
    def tensor(self) -> torch.Tensor:
        """What stands there now."""
        found: torch.Tensor = self.container[self.key]
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Let `tensor` stand there."""
        self.container[self.key] = tensor


class Slot(NamedTuple):
    """A tensor's form, and its bytes [start, stop) in the block."""

    param: int
    path: Path
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.start + self.shape.numel() * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in `memory`, the block's bytes."""
        return memory[self.start : self.stop].view(self.dtype).as_strided(self.shape, self.stride)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` can be copied here without a change of form."""
        return tensor.dtype == self.dtype and tensor.shape == self.shape


class StateBlock:
    """A chunk's state in one piece of host memory. One copy moves all of it, step counts included.

    Args:
        tensors: what to make room for, by parameter and path; nothing is copied.
    """

    def __init__(
        self, tensors: Sequence[tuple[int, Path, torch.Tensor]], memory: HostMemory, name: str
    ) -> None:
        self.slots = _lay_out(tensors)
        self.num_bytes = _aligned(self.slots[-1].stop) if self.slots else 0
        self._memory = memory
        self._slab = memory.allocate(self.num_bytes, name)
        self.bytes_host = self._slab.tensor(torch.uint8)
        self.host = [
            shard_like(like, slot.view(self.bytes_host))
            for slot, (*_, like) in zip(self.slots, tensors, strict=True)
        ]
        self._on_device: tuple[int, list[torch.Tensor]] = (0, [])

    def on_device(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The same tensors in `memory`, ``num_bytes`` on the device; made anew only where its address changes."""
        address = memory.data_ptr()
        if self._on_device[0] != address or len(self._on_device[1]) != len(self.slots):
            views = [
                shard_like(host, slot.view(memory)) for host, slot in zip(self.host, self.slots, strict=True)
            ]
            self._on_device = address, views
        return self._on_device[1]

    def forget_device(self) -> None:
        """Let go of the views that `on_device` made."""
        self._on_device = 0, []

    def ranges(self, params: Collection[int]) -> list[tuple[int, int]]:
        """Bytes of the state of `params`, adjacent ranges joined."""
        joined: list[tuple[int, int]] = []
        previous = -1
        for index, slot in enumerate(self.slots):
            if slot.param not in params:
                continue
            if joined and previous == index - 1:
                joined[-1] = joined[-1][0], slot.stop
            else:
                joined.append((slot.start, slot.stop))
            previous = index
        return [(start, stop) for start, stop in joined if stop > start]

    def close(self) -> None:
        """Give the memory back."""
        self.forget_device()
        self._memory.release(self._slab)


class StateChunk:
    """Some parameters, and the block that holds their state once there is any."""

    def __init__(self, name: str, params: Sequence[torch.Tensor], device: torch.device) -> None:
        self.name = name
        self.params = tuple(params)
        self.device = device
        self.block: StateBlock | None = None
        self.paths: dict[torch.Tensor, set[Path]] = {}
        """By parameter, what of its state goes to the device, also where it stands on the host just now."""

    def places(self, state: Mapping[Any, Any]) -> list[Place]:
        """Tensors of this chunk's `state` that are on the device while it is stepped, in the order of the slots."""
        return [
            place
            for place in self.all_places(state)
            if place.tensor.device == self.device or self.expects(place)
        ]

    def all_places(self, state: Mapping[Any, Any]) -> list[Place]:
        """All tensors of this chunk's `state` that could be moved."""
        found = []
        for index, param in enumerate(self.params):
            entry = state.get(param)
            if isinstance(entry, dict | list):
                found += [place for place in find_tensors(entry, index) if place.tensor is not param]
        return found

    def expects(self, place: Place) -> bool:
        """Whether what stands there goes to the device, as `paths` says."""
        return place.path in self.paths.get(self.params[place.param], ())

    def holds(self, places: Sequence[Place]) -> bool:
        """Whether `places` are the block's host tensors, all of them and nothing else."""
        host = self.block.host if self.block else []
        return len(places) == len(host) and all(p.tensor is h for p, h in zip(places, host, strict=True))

    def settle(
        self,
        places: Sequence[Place],
        memory: HostMemory,
        copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
    ) -> None:
        """Move what stands at `places` into a new block; the old one is given back.

        Args:
            copy: fills its first argument, host tensors, with its second one.
        """
        tensors = [place.tensor for place in places]
        old, self.block = self.block, None
        if tensors:
            found = [(place.param, place.path, tensor) for place, tensor in zip(places, tensors, strict=True)]
            block = StateBlock(found, memory, f"state of {self.name}")
            copy([local_shard(host) for host in block.host], [local_shard(tensor) for tensor in tensors])
            self.block = block
            for place, host in zip(places, block.host, strict=True):
                place.put(host)
                self.paths.setdefault(self.params[place.param], set()).add(place.path)
        if old is not None:
            old.close()

    def release(self) -> None:
        """Forget the state and give its memory back."""
        if self.block is not None:
            self.block.close()
            self.block = None


def find_tensors(entry: Any, param: int = 0, path: Path = ()) -> Iterator[Place]:
    """Tensors of one parameter's state that can be moved: dense ones without a class of their own, but for `DTensor`."""
    items: Iterable[tuple[Any, Any]] = entry.items() if isinstance(entry, dict) else enumerate(entry)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from find_tensors(value, param, (*path, key))
        elif isinstance(value, torch.Tensor) and _can_move(value):
            yield Place(param, (*path, key), entry, key)


def plan_chunks(
    groups: Groups,
    *,
    whole: bool,
    chunk_by: str | Callable[[str], str | None] | None = None,
    max_bytes: int = CHUNK_BYTES,
) -> list[tuple[str, list[torch.Tensor]]]:
    """Names and parameters of the chunks: layers, then what is in no layer.

    A layer of more than `max_bytes` is cut between parameters, and so is the rest, which is cut at the size of the
    largest layer too. Parameters without names are put together by size alone.
    """
    params = _named(groups)
    if whole:
        return [("all", [param for param, _ in params])]
    name_of = layer_namer(chunk_by)
    layers: dict[str, list[torch.Tensor]] = {}
    rest: list[torch.Tensor] = []
    for param, name in params:
        layer = None if name is None else name_of(name)
        (rest if layer is None else layers.setdefault(layer, [])).append(param)
    largest = max((sum(map(_bytes_of, members)) for members in layers.values()), default=max_bytes)
    chunks = [part for layer, members in layers.items() for part in _cut(layer, members, max_bytes)]
    return chunks + _cut("misc", rest, min(largest, max_bytes))


def _named(groups: Groups) -> list[tuple[torch.Tensor, str | None]]:
    """Parameters in order, each once, with the names that the optimizer was given."""
    named: dict[torch.Tensor, str | None] = {}
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for param, name in zip(group["params"], names, strict=True):
            named.setdefault(param, name)
    return list(named.items())


def _cut(name: str, params: Iterable[torch.Tensor], limit: int) -> list[tuple[str, list[torch.Tensor]]]:
    parts: list[list[torch.Tensor]] = []
    size = 0
    for param in params:
        if not parts or size + _bytes_of(param) > limit:
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += _bytes_of(param)
    if len(parts) == 1:
        return [(name, parts[0])]
    return [(f"{name} ({number} of {len(parts)})", part) for number, part in enumerate(parts, 1)]


def _bytes_of(param: torch.Tensor) -> int:
    return local_shard(param).nbytes


def _lay_out(tensors: Iterable[tuple[int, Path, torch.Tensor]]) -> tuple[Slot, ...]:
    slots = []
    start = 0
    for param, path, tensor in tensors:
        local = local_shard(tensor)
        stride = torch.empty_like(local, device="meta").stride()  # its own where it is dense, else contiguous
        slots.append(Slot(param, path, local.dtype, local.shape, stride, start))
        start = _aligned(slots[-1].stop)
    return tuple(slots)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def _can_move(tensor: torch.Tensor) -> bool:
    local = tensor if type(tensor) is torch.Tensor else local_shard(tensor)
    return type(local) is torch.Tensor and local.layout is torch.strided and local.device.type != "meta"
