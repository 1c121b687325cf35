"""How arguments lie in memory for compiled kernels, which get their address and nothing else.

They are laid out here as Numba lays out a tuple. That is no promise of Numba's, so `check_layout` compares both whenever a
kernel is compiled or taken from a cache: another layout must be an error, never a pointer read from the wrong place.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.registry import cpu_target

from offload.errors import KernelError

__all__ = ["UNUSABLE", "check_layout", "describe", "kinds_of", "lay_out", "numba_type"]

WORD_BYTES = 8
#: What Numba's arrays consist of, in this order, each a word but for the last two, of a word per dimension.
ARRAY_FIELDS = ("meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides")
UNUSABLE = "unusable"

_first_byte: Any = ctypes.c_char.from_buffer
_address_of = ctypes.addressof


def kinds_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a compiled function depends on; arguments that none can take get a kind of their own, `UNUSABLE`."""
    kinds: list[Any] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            kinds.append((argument.dtype, argument.ndim) if argument.flags.carray else UNUSABLE)
        elif argument is None:
            kinds.append(None)
        else:
            kinds.append(int if isinstance(argument, (int, np.integer, np.bool_)) else UNUSABLE)
    return tuple(kinds)


def numba_type(argument: Any) -> Any:
    """The Numba type of an argument; each is some 64-bit words in memory, without padding (see `lay_out`)."""
    if isinstance(argument, np.ndarray):
        return numba.typeof(argument)
    return types.none if argument is None else types.intp


def lay_out(arguments: tuple[Any, ...]) -> array[int]:
    """Arguments as Numba lays out a tuple of them. An array is (owner, parent, size, item size, address, shape, strides).

    In the worker's gap between two kernels, as `kinds_of`: what is called here was chosen by its time, and ``.ctypes.data``
    takes 3 us.
    """
    words: list[int] = []
    for argument in arguments:
        if argument is None:
            words.append(0)
        elif isinstance(argument, np.ndarray):
            size, width = argument.size, argument.itemsize
            first = _address_of(_first_byte(argument)) if size else 0
            if argument.ndim == 1:
                words += (0, 0, size, width, first, size, width)
            else:
                words += (0, 0, size, width, first, *argument.shape, *argument.strides)
        else:
            words.append(int(argument))
    return array("q", words)


def check_layout(arguments: tuple[Any, ...]) -> None:
    """Compare `lay_out` with Numba's data model of the types of ``arguments``.

    Raises:
        KernelError: they differ: a newer Numba, or a machine whose words have another size.
    """
    num_words = len(lay_out(arguments))
    whole = types.Tuple([numba_type(argument) for argument in arguments])
    arrays = [numba_type(argument) for argument in arguments if isinstance(argument, np.ndarray)]
    if _num_bytes(whole) != WORD_BYTES * num_words or not all(map(_is_as_expected, arrays)):
        raise KernelError(
            f"Numba {numba.__version__} lays out arrays in another way than this release expects ({whole}, "
            f"{_num_bytes(whole)} bytes for {num_words} words): take an older numba, or backend='torch'"
        )


def _is_as_expected(kind: Any) -> bool:
    model = cpu_target.target_context.data_model_manager[kind]
    try:
        order = [model.get_field_position(field) for field in ARRAY_FIELDS]
        sizes = [_num_bytes(model.get_member_fe_type(field)) for field in ARRAY_FIELDS]
    except (AttributeError, KeyError):  # no struct any more, or one of other fields
        return False
    expected = [WORD_BYTES] * 5 + [WORD_BYTES * kind.ndim] * 2
    return order == list(range(model.field_count)) and sizes == expected


def _num_bytes(kind: Any) -> int:
    context = cpu_target.target_context
    return int(context.get_abi_sizeof(context.get_data_type(kind)))


def describe(argument: Any) -> str:
    """An argument's type for a message."""
    if not isinstance(argument, np.ndarray):
        return type(argument).__name__
    return f"{argument.dtype}{list(argument.shape)}" + ("" if argument.flags.carray else " (unusable)")
