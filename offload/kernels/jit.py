"""The one home of JIT flags: what is compiled, how, and where it is cached."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

from offload.errors import KernelError

__all__ = ["Kernel", "cache_folder", "inner", "jit_disabled"]

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
#: Flags of the functions that Python calls: the worker's launch must not hold up the training thread.
OUTER: dict[str, Any] = {**FLAGS, "nogil": True, "no_cfunc_wrapper": True}
#: Only ``prange`` is made parallel. Looking for other parallelism takes a third of the time to compile.
PARALLEL = {
    "prange": True,
    **dict.fromkeys(
        ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion"), False
    ),
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


def _jit(function: Callable[..., Any], flags: dict[str, Any]) -> Any:
    decorate: Any = numba.jit(**flags)
    return decorate(function)


class Kernel:
    """A function ``(first, last, shares, *arrays)`` for workers ``prange(first, last)``, compiled in one of two forms.

    Each worker takes work items from ``shares``, see `offload.kernels.shares`. ``parallel``: the workers are threads of
    Numba's team. ``serial``: the caller's thread is all of them, and the team is an executor (see `offload.kernels.team`).
    Both come from the same Python function, hence give the same bits.
    Nothing is compiled until `compile`, and a call with types that were not compiled raises.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self.python = function
        self.parallel = _jit(function, {**OUTER, "parallel": PARALLEL})
        self.serial = _jit(function, OUTER)

    def form(self, parallel: bool) -> Any:
        """The dispatcher of one form."""
        return self.parallel if parallel else self.serial

    def is_compiled(self, arguments: tuple[Any, ...], *, parallel: bool) -> bool:
        """Whether a call with arguments of these types would run at once."""
        return jit_disabled() or _signature(arguments) in self.form(parallel).overloads

    def compile(self, arguments: tuple[Any, ...], *, parallel: bool, cache: Path | None = None) -> None:
        """Compile for the types of ``arguments`` (the values do not matter), or load that from the cache."""
        if self.is_compiled(arguments, parallel=parallel):
            return
        dispatcher = self.form(parallel)
        with _compile_lock:
            if cache is not None:
                _enable_cache(dispatcher, cache)
            dispatcher.disable_compile(False)
            try:
                dispatcher.compile(_signature(arguments))
            finally:
                if dispatcher.signatures:
                    # From now on an unexpected type raises, instead of compiling for a second inside backward.
                    dispatcher.disable_compile()

    def __call__(
        self, first: int, last: int, shares: np.ndarray, arguments: tuple[Any, ...], *, parallel: bool
    ) -> None:
        """Run as workers ``first`` to ``last``, until no item is left in ``shares``."""
        if jit_disabled():
            with np.errstate(all="ignore"):
                self.python(first, last, shares, *arguments)
            return
        try:
            self.form(parallel)(first, last, shares, *arguments)
        except TypeError as error:
            raise KernelError(
                f"kernel {self.name} was not compiled for these argument types: {_describe(arguments)}. "
                "Arrays must be 1-D, contiguous, aligned and writable, of a variant that start() was given"
            ) from error


def _signature(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The Numba types of a call; both bounds are Python ints."""
    return tuple(numba.typeof(argument) for argument in (0, 0, np.zeros((1, 1), np.int64), *arguments))


def _describe(arguments: tuple[Any, ...]) -> str:
    return ", ".join(str(numba.typeof(argument)) for argument in arguments)


def cache_folder(root: str | os.PathLike[str], *, parallel: bool) -> Path | None:
    """The folder below ``root`` for compiled kernels of exactly this source, or None where it cannot be written.

    Numba's index only knows the file of the outermost function: a change in a helper of another file would run stale
    code. So the folder is named by a hash of all kernel sources; and by the form, which Numba's key leaves out.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = Path(root).expanduser() / f"{digest.hexdigest()[:16]}-{'parallel' if parallel else 'serial'}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory to expand
        logger.warning("kernels are not cached: %s cannot be written (%s)", folder, error)
        return None
    return folder


def _enable_cache(dispatcher: Any, folder: Path) -> None:
    """Let a dispatcher cache in ``folder``. Numba reads the folder from its configuration when the cache is made."""
    previous = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        dispatcher.enable_caching()
    finally:
        numba.config.CACHE_DIR = previous
