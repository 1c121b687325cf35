"""Scratch arrays of a work item, on the stack of the thread that does it.

They stay in the L1 cache, and the compiler sees that nothing else points to them. ``np.empty`` would ask the allocator once
per item, and takes half a second to compile. All of a work item's are below 64 KiB, so that threads of 128 KiB, the least
that platforms give unasked, have room. They end with the function that made them: it must not return them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import populate_array

from offload.kernels.blocks import LINE, NORM_BLOCK
from offload.kernels.jit import in_llvm

__all__ = ["make_buffer", "make_stage"]

ALIGNMENT = 64


def make_buffer() -> Any:
    """Uninitialised float32[1024], for a norm block."""
    return np.empty(NORM_BLOCK, np.float32)


@in_llvm(make_buffer)
def _buffer(typing_context):
    return _stack_array(types.float32, NORM_BLOCK)


def make_stage(target: Any) -> Any:
    """An uninitialised array of a line for ``target``'s elements, or None where the variant has no target."""
    return None if target is None else np.empty(LINE, target.dtype)


@in_llvm(make_stage)
def _stage(typing_context, target):
    if isinstance(target, types.NoneType):
        return types.none(target), lambda context, builder, signature, arguments: context.get_dummy_value()
    return _stack_array(target.dtype, LINE, target)


def _stack_array(dtype: Any, numel: int, *arguments: Any) -> Any:
    """What makes an array of a function called with ``arguments``; made once, however often a loop comes by."""
    kind = types.Array(dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        element = context.get_data_type(dtype)
        data = cgutils.alloca_once(builder, element, size=ir.Constant(ir.IntType(64), numel))
        data.align = ALIGNMENT
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(element))
        array = context.make_array(kind)(context, builder)
        shape, strides = (context.get_constant(types.intp, numel),), (itemsize,)
        populate_array(array, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
        return array._getvalue()

    return kind(*arguments), codegen
