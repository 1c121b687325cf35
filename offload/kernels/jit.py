"""The one home of JIT flags: what is compiled, how, and where it is cached.

A *kernel* is compiled to a C function of two words, the worker's number and the address of the arguments, and knows nothing
of teams; one small launcher, the same for all kernels, runs such functions on Numba's team (`offload.kernels.team`). Were
each kernel a parallel function of its own, LLVM would optimize its loops three more times on their way through Numba's
wrappers, and Numba would lower a parallel region each time: construction on a new machine would take twice as long.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.utils import pysignature
from numba.extending import lower_builtin, type_callable

from offload.errors import KernelError

__all__ = ["Call", "Kernel", "cache_folder", "caching_in", "in_llvm", "inner", "jit_disabled", "parallel"]

logger = logging.getLogger(__name__)

#: Flags of every function here. There is no ``fastmath``: the bits are the contract, and contraction, reassociation or
#: ``rsqrt`` estimates would change them; ``nnan`` would remove the NaN tests. No ``cache``: see `cache_folder`.
FLAGS: dict[str, Any] = {
    "nopython": True,
    # Division by zero gives inf or NaN. The default, an exception, is a branch in the loop, which then stays scalar.
    "error_model": "numpy",
    # Negative indices and bounds are never tested.
    "boundscheck": False,
}
#: Flags of the functions that only kernels call: no entry points for Python and C, which take time to compile.
INNER: dict[str, Any] = {**FLAGS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
#: Flags of the launcher, which the worker calls: it must not hold up the training thread. Only ``prange`` is made parallel:
#: looking for other parallelism takes a third of the time to compile.
OUTER: dict[str, Any] = {
    **FLAGS,
    "nogil": True,
    "no_cfunc_wrapper": True,
    "parallel": {
        "prange": True,
        **dict.fromkeys(
            ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion"), False
        ),
    },
}

_compile_lock = threading.Lock()


def jit_disabled() -> bool:
    """Whether ``NUMBA_DISABLE_JIT`` makes every kernel run as plain Python (slowly, with the same bits)."""
    return bool(numba.config.DISABLE_JIT)


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call; LLVM decides about inlining.

    Numba's own ``inline="always"`` turns loops around a helper that writes into scalar ones.
    """
    return _jit(function, INNER)


def in_llvm(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorator of a code generator that compiled code has in place of ``function``, which runs with the JIT off.

    As `numba.extending.intrinsic` wants it: ``(typing context, *types of arguments)`` to ``(signature, generator)``. But it
    stands for the Python function at once: an intrinsic would need an overload that calls it, and each such hop is one more
    function to compile, some 50 ms.
    """

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        def typer_of(context: Any) -> Callable[..., Any]:
            def typer(*arguments: Any) -> Any:
                return make(context, *arguments)[0]

            typer.pysig = pysignature(function)
            return typer

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            generator = make(context.typing_context, *signature.args)[1]
            return generator(context, builder, signature, arguments)

        type_callable(function)(typer_of)
        lower_builtin(function, types.VarArg(types.Any))(generate)
        return make

    return register


def parallel(function: Callable[..., Any]) -> Any:
    """Compile a function with a ``prange`` loop, which Numba's team runs without the GIL."""
    return _jit(function, OUTER)


def _jit(function: Callable[..., Any], flags: dict[str, Any]) -> Any:
    decorate: Any = numba.jit(**flags)
    return decorate(function)


class Call:
    """A compiled kernel with its arguments, as a launcher takes them: the addresses of the function and of its arguments.

    To be kept until the call has ended; it keeps the arrays, of which the shares are nobody else's.
    """

    def __init__(self, function: int, arguments: tuple[Any, ...]) -> None:
        self.function, self._arrays = function, arguments
        self._layout = _layout(arguments)
        self.arguments, _ = self._layout.buffer_info()


class Kernel:
    """A function ``(worker, call)`` that does one worker's part of a call; ``call[0]`` are shares and all other arguments.

    Workers may be any threads. Each takes work items from the shares, see `offload.kernels.shares`, until none is left.
    Arguments are C-contiguous, aligned, writable arrays, or None, or whole numbers (int64). One C function
    ``void (int64_t worker, void *arguments)`` is compiled for each combination of their types, by `compile` and never later:
    a call with types that were not compiled raises.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self.python = function
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def is_compiled(self, arguments: tuple[Any, ...]) -> bool:
        """Whether a call with arguments of these types would run at once."""
        return jit_disabled() or _kinds(arguments) in self._compiled

    def compile(self, arguments: tuple[Any, ...], *, cache: Path | None = None) -> None:
        """Compile for the types of ``arguments`` (the values do not matter), or load that from the cache."""
        if self.is_compiled(arguments):
            return
        if UNUSABLE in _kinds(arguments):
            raise self._refusal(arguments)
        signature = types.void(types.intp, types.CPointer(types.Tuple([*map(_type, (SHARES, *arguments))])))
        with _compile_lock, caching_in(cache):
            decorate: Any = numba.cfunc(signature, cache=cache is not None, **FLAGS)
            self._compiled[_kinds(arguments)] = decorate(self.python)

    def bind(self, shares: np.ndarray, arguments: tuple[Any, ...]) -> Call:
        """What a launcher needs to run this on ``arguments``.

        Raises:
            KernelError: it was not compiled for their types.
        """
        compiled = self._compiled.get(_kinds(arguments))
        if compiled is None:
            raise self._refusal(arguments)
        return Call(compiled.address, (shares, *arguments))

    def run_python(self, shares: np.ndarray, arguments: tuple[Any, ...]) -> None:
        """Run all work items as plain Python: slowly, with the same bits."""
        with np.errstate(all="ignore"):
            self.python(0, [(shares, *arguments)])

    def assembly(self) -> dict[tuple[Any, ...], str]:
        """By the types of the arguments, where they were compiled here and not taken from a cache."""
        return {kinds: compiled._library.get_asm_str() for kinds, compiled in self._compiled.items()}

    def _refusal(self, arguments: tuple[Any, ...]) -> KernelError:
        return KernelError(
            f"kernel {self.name} was not compiled for these arguments: {', '.join(map(_describe, arguments))}. "
            "Arrays must be C-contiguous, aligned, writable and of native byte order, of a variant that start() was given"
        )


SHARES = np.zeros((1, 1), np.int64)
UNUSABLE = "unusable"


def _kinds(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a compiled function depends on; arrays that none can take get a kind of their own."""
    return tuple([_kind(argument) for argument in arguments])


def _kind(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return (argument.dtype, argument.ndim) if argument.flags.carray else UNUSABLE
    return None if argument is None else int


def _type(argument: Any) -> Any:
    """The Numba type of an argument; each is some 64-bit words in memory, without padding (see `_layout`)."""
    if isinstance(argument, np.ndarray):
        return numba.typeof(argument)
    return types.none if argument is None else types.intp


def _layout(arguments: tuple[Any, ...]) -> array[int]:
    """Arguments as Numba lays out a tuple of them. An array is (owner, parent, size, item size, address, shape, strides).

    In the worker's gap between two kernels: each of the calls here was chosen by its time, ``.ctypes.data`` takes 3 us.
    """
    words: list[int] = []
    for argument in arguments:
        if argument is None:
            words.append(0)
        elif isinstance(argument, np.ndarray):
            memory: Any = argument
            first = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if argument.size else 0
            words += (0, 0, argument.size, argument.itemsize, first, *argument.shape, *argument.strides)
        else:
            words.append(int(argument))
    return array("q", words)


def _describe(argument: Any) -> str:
    if not isinstance(argument, np.ndarray):
        return type(argument).__name__
    return f"{argument.dtype}{list(argument.shape)}" + ("" if argument.flags.carray else " (unusable)")


@contextmanager
def caching_in(folder: Path | None) -> Iterator[None]:
    """Where functions that are made in here with a cache will look; Numba reads that from its configuration."""
    previous = numba.config.CACHE_DIR
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = previous


def cache_folder(root: str | os.PathLike[str]) -> Path | None:
    """The folder below ``root`` for compiled kernels of exactly this source, or None where it cannot be written.

    Numba's index only knows the file of the outermost function: a change in a helper of another file would run stale
    code. So the folder is named by a hash of all kernel sources.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    try:
        folder = Path(root).expanduser() / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory to expand
        logger.warning("kernels are not cached: %s cannot be written (%s)", root, error)
        return None
    return folder
