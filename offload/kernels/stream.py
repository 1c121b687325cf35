"""Non-temporal stores: results that nobody reads soon go past the caches.

An ordinary store first reads its cache line from memory. For the update kernel that is 2 of 30 bytes per element, so
the weight is staged in the L1 cache (`buffers.make_stage`) and copied out in whole 64-byte lines (`drain`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from offload.kernels.jit import in_llvm, inner

__all__ = ["drain", "fence", "put"]

LINE_BYTES = 64
LINE_MASK = LINE_BYTES - 1


def put(stage: Any, old: Any, i: Any, value: Any) -> None:
    """Store a new value: in ``stage`` where the old state is kept, else in place.

    A choice per element, made at compile time. One array passed as both old and new would be an alias, and the loop scalar.
    """
    if stage is None:
        old[i] = value
    else:
        stage[i] = value


@overload(put)
def _put_overload(stage, old, i, value):
    if isinstance(stage, types.NoneType):

        def put_in_place(stage, old, i, value):
            old[i] = value

        return put_in_place

    def put_in_stage(stage, old, i, value):
        stage[i] = value

    return put_in_stage


@inner
def copy_span(source, target):
    """``target = source``."""
    for i in range(target.size):
        target[i] = source[i]


def drain(stage: Any, target: Any, first: Any, last: Any) -> None:
    """Copy ``stage[: last - first]`` to ``target[first:last]``, past the caches where the address allows it.

    ``first`` is a multiple of 64 bytes of elements. Call `fence` before another thread or device may read.
    """
    if target is not None:
        target[first:last] = stage[: last - first]


@overload(drain)
def _drain_overload(stage, target, first, last):
    if isinstance(target, types.NoneType):
        return lambda stage, target, first, last: None
    per_line = LINE_BYTES // (target.dtype.bitwidth // 8)

    def drain_lines(stage, target, first, last):
        num_lines = 0
        if target.ctypes.data & LINE_MASK == 0:  # a streaming store to any other address faults
            num_lines = (last - first) // per_line
            for line in range(num_lines):
                _stream_line(target, first // per_line + line, stage, line)
        copy_span(stage[num_lines * per_line : last - first], target[first + num_lines * per_line : last])

    return drain_lines


def fence() -> None:
    """Order streamed lines before whatever this thread does next."""


@in_llvm(fence)
def _fence(typing_context):
    def codegen(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _stream_line(typing_context, target, target_line, source, source_line):
    """``target[64-byte line] = source[64-byte line]`` with a non-temporal store; ``target`` is 64-byte aligned."""

    def codegen(context, builder, signature, arguments):
        target_value, target_line_value, source_value, source_line_value = arguments
        line = ir.VectorType(ir.IntType(32), LINE_BYTES // 4)

        def address(array_type, array_value, index):
            data = context.make_array(array_type)(context, builder, array_value).data
            return builder.gep(builder.bitcast(data, line.as_pointer()), [index])

        value = builder.load(address(source, source_value, source_line_value), align=4)
        store = builder.store(value, address(target, target_value, target_line_value), align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), codegen
