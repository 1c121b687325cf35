"""Flush-to-zero, switched per block of work in whichever thread runs it.

Moments of rows whose gradient stays zero decay into denormals and stay there; some CPUs then run the update eleven
times slower. Setting the mode inside the kernel, around each block, is right for every thread team, whoever started it,
and leaves the threads of the program as they were.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from offload.kernels.jit import in_llvm

__all__ = ["restore_mode", "set_flush"]

#: Bits of the control register that make denormal inputs and results zero: x86 MXCSR (DAZ and FTZ), Arm FPCR (FZ).
_FLUSH_BITS = {"x86_64": 0x8040, "amd64": 0x8040, "aarch64": 1 << 24, "arm64": 1 << 24}
_MACHINE = platform.machine().lower()
_IS_X86 = _MACHINE in ("x86_64", "amd64")
_MASK = _FLUSH_BITS.get(_MACHINE, 0)


def set_flush(flush: Any) -> Any:
    """Set or clear flush-to-zero for this thread; returns the previous mode for `restore_mode`."""
    previous: int = _read_mode()
    _write_mode((previous & ~_MASK) | (_MASK if flush else 0))
    return previous


def restore_mode(mode: Any) -> None:
    """Put back what `set_flush` returned."""
    _write_mode(int(mode))


@in_llvm(set_flush)
def _set_flush(typing_context, flush):
    word = ir.IntType(32)

    def codegen(context, builder, signature, arguments):
        previous = _read_control(builder)
        mode = builder.select(builder.trunc(arguments[0], ir.IntType(1)), word(_MASK), word(0))
        _write_control(builder, builder.or_(builder.and_(previous, word(0xFFFFFFFF ^ _MASK)), mode))
        return previous

    return types.uint32(types.boolean), codegen


@in_llvm(restore_mode)
def _restore_mode(typing_context, mode):
    def codegen(context, builder, signature, arguments):
        _write_control(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.uint32), codegen


def _read_control(builder: Any) -> Any:
    """The control register (uint32), or 0 on a machine where it is not known."""
    if not _MASK:
        return ir.IntType(32)(0)
    return _read_mxcsr(builder) if _IS_X86 else _read_fpcr(builder)


def _write_control(builder: Any, value: Any) -> None:
    if _MASK:
        write = _write_mxcsr if _IS_X86 else _write_fpcr
        write(builder, value)


def _read_mxcsr(builder: Any) -> Any:
    slot = cgutils.alloca_once(builder, ir.IntType(32))
    _call_mxcsr(builder, "llvm.x86.sse.stmxcsr", slot)
    return builder.load(slot)


def _write_mxcsr(builder: Any, value: Any) -> None:
    _call_mxcsr(builder, "llvm.x86.sse.ldmxcsr", cgutils.alloca_once_value(builder, value))


def _read_fpcr(builder: Any) -> Any:
    read = ir.InlineAsm(ir.FunctionType(ir.IntType(64), []), "mrs $0, fpcr", "=r", side_effect=True)
    return builder.trunc(builder.call(read, []), ir.IntType(32))


def _write_fpcr(builder: Any, value: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    write = ir.InlineAsm(kind, "msr fpcr, $0", "r,~{memory}", side_effect=True)
    builder.call(write, [builder.zext(value, ir.IntType(64))])


def _call_mxcsr(builder: Any, name: str, slot: Any) -> None:
    pointer = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [pointer]), name)
    builder.call(function, [builder.bitcast(slot, pointer)])


# With the JIT off the same register is reached through the C library's fenv_t (glibc): MXCSR is its eighth word on
# x86-64, FPCR its first on aarch64. Elsewhere the plain-Python kernels keep denormals.
_Environment = ctypes.c_uint32 * 16
_WORD = 7 if _IS_X86 else 0


def _math_library() -> Any:
    name = ctypes.util.find_library("m") if platform.system() == "Linux" and _MASK else None
    return ctypes.CDLL(name) if name else None


_libm = _math_library()


def _read_mode() -> int:
    environment = _Environment()
    if _libm is not None:
        _libm.fegetenv(ctypes.byref(environment))
    return int(environment[_WORD])


def _write_mode(mode: int) -> None:
    environment = _Environment()
    if _libm is not None:
        _libm.fegetenv(ctypes.byref(environment))
        environment[_WORD] = mode
        _libm.fesetenv(ctypes.byref(environment))
