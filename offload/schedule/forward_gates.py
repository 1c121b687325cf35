"""Forward waits for weights that are still on their way: for each module its own, and for no others.

A chunk of one layer is awaited where that layer's module is called; what belongs to no layer, where the model is called, and
where the modules that own it are. A pre-hook sees calls of modules only: not weights that other code reads, nor compiled
code. So at the end of each forward of the model every chunk in flight must have been awaited, else it is an error: something
read weights past the hooks, and what it read may have been old.

It and the errors of the update are raised by the hook that meets them; but not among ranks in a forward that trains.
There the others would wait for this rank's shards until their deadline, since it may be this rank alone: each may call
other modules, such as experts of its own. It goes on with weights that are old in part, none of its gradients is taken,
and ``step()`` raises the error and tells all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from offload.config import sample
from offload.errors import ConfigError, OffloadError, StateError, WorkerError
from offload.layout import Chunk
from offload.parameters import ParamRecord
from offload.schedule import messages
from offload.schedule.flight import Flight

__all__ = ["ForwardGates"]

logger = logging.getLogger(__name__)


class ForwardGates:
    """Hooks on the modules of `model`.

    Args:
        layer_of: from a parameter's name to its layer's name, or None.
        flight: the flight that is under way, if any.
        land: completes it.
        switch_off: makes steps complete at ``step()`` from now on.
        alone: whether no other rank waits for this one.
        fail: has ``step()`` raise an error that a forward did not raise.

    Raises:
        ConfigError: parts of the model are compiled already, so that hooks would not be seen.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layer_of: Callable[[str], str | None],
        flight: Callable[[], Flight | None],
        land: Callable[[], None],
        switch_off: Callable[[], None],
        alone: Callable[[], bool],
        fail: Callable[[OffloadError], None],
    ) -> None:
        compiled = [name or "the model" for name, module in model.named_modules() if _is_compiled(module)]
        if compiled:
            raise ConfigError(
                f"overlap_forward=True: {sample(compiled)} is compiled, and compiled code does not see hooks that "
                "are added later; build the optimizer first and compile then, or leave overlap_forward False"
            )
        self._model, self._layer_of = model, layer_of
        self._flight, self._land, self._switch_off, self._alone = flight, land, switch_off, alone
        self._fail = fail
        self._hooks: list[RemovableHandle] = []
        self._names: dict[int, str] = {}
        self._warned = False
        self._trains: bool | None = None
        """Inside a forward of the model: whether it was called with gradients."""

    def attach(self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord]) -> None:
        """Place the hooks, anew where there were some; these go when all new ones are there.

        Raises:
            ConfigError: a parameter is not in the model.
        """
        gates = self._gates(chunks, records)
        on_host = any(isinstance(record.param, DTensor) for record in records.values())
        old = len(self._hooks)
        self._names = {chunk.index: chunk.name for chunk in chunks}
        for path, indices in gates.items():
            module = self._model.get_submodule(path)
            hook = self._gate(module, tuple(indices), on_host=on_host)
            # In front of what gathers sharded weights.
            self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))
        # Functions, not methods: a deep copy of the model shares them, where it would copy what a method belongs to.
        self._hooks.append(self._model.register_forward_hook(lambda module, *_: self._check(module)))
        self._hooks.append(
            self._model.register_forward_hook(lambda module, *_: self._leave(module), always_call=True)
        )
        for module in self._model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self._land()))
            self._hooks.append(module.register_load_state_dict_pre_hook(lambda *_: self._land()))
        for replaced in self._hooks[:old]:
            replaced.remove()
        del self._hooks[:old]

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def require_members(self, records: Iterable[ParamRecord]) -> None:
        """Raise where a forward would not wait for one of `records`, which are to come.

        Raises:
            ConfigError: a parameter is not in the model.
        """
        owners = _owners(self._model)
        for record in records:
            _paths_of(record, owners)

    def _gates(self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord]) -> dict[str, list[int]]:
        """Indices of the chunks that are awaited where a module is called, by its path; the model's own, which is first."""
        owners, units = _owners(self._model), _units(self._model)
        gates: dict[str, list[int]] = {"": []}
        for layer, members in self._by_layer(chunks, records).items():
            params = [records[span.param] for chunk in members for span in chunk.spans]
            paths = {path for record in params for path in _paths_of(record, owners)}
            at = paths | {""} if layer is None else {_called(self._model, _common(paths))}
            gathers = {each for path in paths for each in _gathered_with(path, units)}
            at |= {path for path in gathers if not any(_is_inside(path, gate) for gate in at)}
            for path in at:
                gates.setdefault(path, []).extend(chunk.index for chunk in members)
        return gates

    def _by_layer(
        self, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord]
    ) -> dict[str | None, list[Chunk]]:
        """Chunks of one layer share a gate, whatever their dtypes."""
        layers: dict[str | None, list[Chunk]] = {}
        for chunk in chunks:
            names = {_layer(records[span.param], self._layer_of) for span in chunk.spans}
            layers.setdefault(names.pop() if len(names) == 1 else None, []).append(chunk)
        return layers

    def _gate(
        self, owner: nn.Module, chunks: tuple[int, ...], *, on_host: bool
    ) -> Callable[[nn.Module, Any], None]:
        """Sharded weights are gathered on streams of their own, which a wait of the current one does not order."""

        def gate(module: nn.Module, arguments: Any) -> None:
            if module is not owner:  # a copy has weights of its own
                return
            if module is self._model:
                self._trains = torch.is_grad_enabled()
            flight = self._flight()
            if flight is None:
                return
            try:
                self._await(flight, module, chunks, on_host=on_host)
            except WorkerError as error:
                if self._raises_here:
                    raise
                self._hand_over(error, flight)

        return gate

    @property
    def _raises_here(self) -> bool:
        """Whether no other rank waits for what comes after this forward."""
        # By what the model was called with: checkpoints (use_reentrant=True) call their layers without gradients.
        trains = torch.is_grad_enabled() if self._trains is None else self._trains
        return self._alone() or not trains

    def _hand_over(self, error: OffloadError, flight: Flight) -> None:
        self._fail(error)  # a deadline too: an update that comes late mends no forward that went on
        if flight.missed:  # its first error
            logger.error("%s; this forward goes on, and step() raises the error", error)
        flight.passed.update(flight.marks)

    def _await(self, flight: Flight, module: nn.Module, chunks: tuple[int, ...], *, on_host: bool) -> None:
        if module is self._model and _prefetches(module):
            self._warn_of_prefetches()
            self._land()
        else:
            flight.wait(chunks, on_host=on_host)

    def _warn_of_prefetches(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "overlap_forward: FSDP prefetches weights in forward explicitly, ahead of their modules; the update is "
                "awaited before each forward"
            )

    def _leave(self, module: nn.Module) -> None:
        if module is self._model:
            self._trains = None

    def _check(self, module: nn.Module) -> None:
        flight = self._flight()
        if module is not self._model or flight is None or not flight.missed:
            return
        missed = sample([self._names[index] for index in flight.missed])
        if self._raises_here:
            self._switch_off()
            raise StateError(messages.left_out(missed, handed_over=False))
        self._hand_over(StateError(messages.left_out(missed, handed_over=True)), flight)
        try:
            self._switch_off()
        except WorkerError as error:
            self._fail(error)


def _owners(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Paths of the modules that own each parameter; tied ones have several."""
    owners: dict[torch.Tensor, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(path)
    return owners


def _paths_of(record: ParamRecord, owners: Mapping[torch.Tensor, list[str]]) -> list[str]:
    paths = owners.get(record.param)
    if not paths:
        raise ConfigError(
            f"overlap_forward=True: {record.name} is not a parameter of model=, so no forward would wait for it; pass the "
            "model that has all of the optimizer's parameters"
        )
    return paths


def _layer(record: ParamRecord, layer_of: Callable[[str], str | None]) -> str | None:
    return layer_of(record.name) if record.has_name else None


def _common(paths: Iterable[str]) -> str:
    """The innermost module that contains all of `paths`."""
    parts = [path.split(".") if path else [] for path in paths]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def _called(model: nn.Module, path: str) -> str:
    """The innermost module from `path` outwards that can be called: lists and dicts of modules cannot."""
    while path and not _has_forward(model.get_submodule(path)):
        path = _parent(path)
    return path


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _is_inside(path: str, outer: str) -> bool:
    """Whether one is the other, or inside of it; but nothing counts as inside of the model."""
    return path == outer or (bool(outer) and path.startswith(f"{outer}."))


def _units(model: nn.Module) -> dict[str, list[str]]:
    """By path of each module under FSDP2: those of all modules whose calls gather the same weights, it among them."""
    units: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None:
            units.setdefault(id(state()), []).append(path)
    return {path: paths for paths in units.values() for path in paths}


def _gathered_with(path: str, units: Mapping[str, list[str]]) -> list[str]:
    """Paths of the modules whose calls gather what the module at `path` owns: those of the innermost unit around it."""
    while path and path not in units:
        path = _parent(path)
    return units.get(path, [])


def _is_compiled(module: nn.Module) -> bool:
    return (
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
    )


def _prefetches(model: nn.Module) -> bool:
    """Whether some FSDP2 module gathers others' weights ahead of their calls."""
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None and getattr(state(), "_states_to_forward_prefetch", None):
            return True
    return False
