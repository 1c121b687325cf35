"""What ``optimizer.state[parameter]`` is: a dict whose tensors belong to the engine and stay where they are.

Frameworks move optimizer state by assignment: Lightning, for one, puts every entry on the root device before training.
Of a plain dict that would quietly make the entry name a copy which no step ever touches, fill the device with state
that was to stay off it, and save that copy in the next checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from offload.errors import StateError

__all__ = ["CopiedEntry", "StateEntry"]

logger = logging.getLogger(__name__)


class StateEntry(dict[str, Any]):
    """State of one parameter by name: ``step``, the moments, ``master``. Write into its tensors, not over them.

    Args:
        tensors: name → tensor, as the engine has them.
        parameter: the parameter's name, for messages.
        moved_to: devices of which was warned already; shared by all entries of an optimizer.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], parameter: str, moved_to: set[torch.device]
    ) -> None:
        super().__init__(tensors)
        self._parameter, self._moved_to = parameter, moved_to

    def __setitem__(self, name: str, value: Any) -> None:
        """Keep a tensor that somebody tries to move; refuse every other assignment.

        Raises:
            StateError: the value is no copy of the entry on another device.
        """
        own = self.get(name)
        if value is own:
            return
        if not _is_moved(own, value):
            self._refuse(f"state[{self._parameter}][{name!r}] = ...")
        if value.device not in self._moved_to:
            self._moved_to.add(value.device)
            logger.warning(
                "something moves optimizer state to %s (first %s of %s): the copies are dropped, the state stays on %s",
                value.device,
                name,
                self._parameter,
                own.device if own is not None else "",
            )

    def exchange(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Name other tensors of the engine from now on: a speculative step was committed."""
        super().update(tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """A plain dict of clones: what is copied or pickled is nobody's memory, and no view of a whole slab."""
        return {name: value.detach().clone() for name, value in self.items()}

    def __copy__(self) -> dict[str, Any]:
        """A plain dict that names the same tensors."""
        return dict(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickled as `__deepcopy__` copies."""
        return dict, (self.__deepcopy__({}),)

    def __delitem__(self, name: str) -> None:
        self._refuse(f"del state[{self._parameter}][{name!r}]")

    def _refuse(self, what: str) -> NoReturn:
        raise StateError(
            f"{what}: these tensors are the optimizer's own memory; write into them (tensor.copy_(...)), or use "
            "load_state_dict()"
        )


class CopiedEntry(StateEntry):
    """An entry with moments that are kept in less than FP32: each look at one makes an FP32 copy of it.

    Writing into such a copy changes nothing; ``load_state_dict`` does.

    Args:
        copied: names of the moments that are copied.
        read: makes copies of those that it is given the names of.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        parameter: str,
        moved_to: set[torch.device],
        *,
        copied: tuple[str, ...],
        read: Callable[[Sequence[str]], dict[str, torch.Tensor]],
    ) -> None:
        # Placeholders, so that keys, length and membership are the dict's own.
        super().__init__({**tensors, **dict.fromkeys(copied, _PLACEHOLDER)}, parameter, moved_to)
        self._copied, self._read = copied, read

    def __getitem__(self, name: str) -> Any:
        return self._read([name])[name] if name in self._copied else super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        """Overridden so that ``dict(entry)`` and ``{**entry}`` go through `__getitem__`."""
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """See ``dict.get``."""
        return self[name] if name in self.keys() else default

    def items(self) -> Any:
        """Names and tensors, the copied ones read at once."""
        return self._whole().items()

    def values(self) -> Any:
        """Tensors, the copied ones read at once."""
        return self._whole().values()

    def __copy__(self) -> dict[str, Any]:
        """A plain dict with copies."""
        return self._whole()

    def __repr__(self) -> str:
        return repr(self._whole())

    def _refuse(self, what: str) -> NoReturn:
        raise StateError(
            f"{what}: moments of this optimizer are kept in less than FP32, what is read here are copies; use "
            "load_state_dict() to change them"
        )

    def _whole(self) -> dict[str, Any]:
        copies = self._read(self._copied)
        return {name: copies.get(name, own) for name, own in super().items()}


_PLACEHOLDER = torch.empty(0)


def _is_moved(own: Any, value: Any) -> bool:
    return (
        isinstance(own, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and value.device != own.device
        and value.shape == own.shape
    )
