"""Thread teams: who runs a kernel's work items.

Preferred is a Numba threading layer that two Python threads may enter at once: ``omp``, then ``tbb``. Without either, an
executor's threads run the same kernels. Never ``workqueue``, in which two threads abort the process.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numba
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from offload.kernels.jit import Call, Kernel, caching_in, jit_disabled, parallel
from offload.kernels.shares import make_shares

__all__ = [
    "ExecutorTeam",
    "LayerTeam",
    "PythonTeam",
    "Team",
    "available_layers",
    "kernel_thread_limit",
    "make_team",
]

logger = logging.getLogger(__name__)

THREAD_SAFE_LAYERS = ("omp", "tbb")


class Team(Protocol):
    """Runs work items ``[0, count)`` of a kernel; returns when all are done."""

    name: str
    num_threads: int

    def start(self, cache: Path | None = None) -> None:
        """Prepare; called once, in the thread that will call `run`. What has to be compiled is kept in ``cache``."""

    def run(self, kernel: Kernel, count: int, arguments: tuple[Any, ...]) -> None:
        """Run all items."""

    def close(self) -> None:
        """Release threads; harmless when repeated."""


def make_team(num_threads: int) -> Team:
    """The best team this process can have; calling it starts no thread."""
    if jit_disabled():
        return PythonTeam()
    layer = find_layer()
    return ExecutorTeam(num_threads) if layer is None else LayerTeam(layer, num_threads)


def find_layer() -> str | None:
    """The Numba layer to use: the one already running, else the first that loads; None where there is no safe one."""
    running = running_layer()
    if running is not None:
        return running if running in THREAD_SAFE_LAYERS else None
    return next((layer for layer in THREAD_SAFE_LAYERS if _loads(layer)), None)


def available_layers() -> tuple[str, ...]:
    """The safe layers that load here, the preferred one first."""
    return tuple(layer for layer in THREAD_SAFE_LAYERS if _loads(layer))


def kernel_thread_limit() -> int:
    """Threads that a Numba layer can have at most: frozen when Numba was imported."""
    return int(numba.config.NUMBA_NUM_THREADS)


def running_layer() -> str | None:
    """The layer that the program has launched already, if any: a process has one."""
    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


def _loads(layer: str) -> bool:
    if layer == "tbb":
        _preload_tbb()
    try:
        importlib.import_module(f"numba.np.ufunc.{layer}pool")
    except ImportError as error:
        logger.info("Numba's %s threading layer cannot be loaded: %s", layer, error)
        return False
    return True


def _preload_tbb() -> None:
    """Load the library of the ``tbb`` wheel, which lies where the dynamic linker does not look."""
    try:
        files = importlib.metadata.files("tbb") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name in ("libtbb.so.12", "libtbb.12.dylib"):
            try:
                ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                logger.info("the tbb package's library cannot be loaded: %s", error)


@contextmanager
def _preferred(layer: str) -> Iterator[None]:
    """Numba's choice of layer, pinned while it launches; the program's configuration is put back."""
    previous = numba.config.THREADING_LAYER
    numba.config.THREADING_LAYER = layer
    try:
        yield
    finally:
        numba.config.THREADING_LAYER = previous


@intrinsic
def _call_address(typing_context, function, worker, arguments):
    """Call the C function ``void (int64_t, void *)`` at an address."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [values[1].type, values[2].type])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@parallel
def launch(num_workers, function, arguments):
    """Run a `Call` on Numba's team."""
    for worker in prange(num_workers):
        _call_address(function, worker, arguments)


LAUNCH_TYPES = (types.intp,) * 3

run_in_c = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)
"""Makes of an address what Python can call, without the GIL."""


class LayerTeam:
    """Numba's own team."""

    def __init__(self, layer: str, num_threads: int) -> None:
        self.name = layer
        limit = kernel_thread_limit()
        if num_threads > limit:
            logger.warning("%d kernel threads asked for, Numba was imported with %d", num_threads, limit)
        self.num_threads = max(1, min(num_threads, limit))

    def start(self, cache: Path | None = None) -> None:
        """Take up Numba's threads and have the launcher compiled, from `cache` or into it.

        In the worker, never in the main thread: a first launch there would change torch's thread count, and the number of
        threads is a property of the thread that sets it.
        """
        with _preferred(self.name):
            numba.set_num_threads(self.num_threads)
        self.name = str(numba.threading_layer())
        if LAUNCH_TYPES not in launch.overloads:
            if cache is not None:
                with caching_in(cache):
                    launch.enable_caching()
            try:
                launch.compile(LAUNCH_TYPES)
            except OSError as error:
                if LAUNCH_TYPES not in launch.overloads:  # compiled first, cached then
                    raise
                logger.warning("the launcher is not cached: %s cannot be written (%s)", cache, error)

    def run(self, kernel: Kernel, count: int, arguments: tuple[Any, ...]) -> None:
        """See `Team.run`. Only from the thread that called `start`: the layer may know no other."""
        call = kernel.bind(make_shares(count, self.num_threads), arguments)
        launch(self.num_threads, call.function, call.arguments)

    def close(self) -> None:
        """The threads are Numba's, and stay."""


def _work(call: Call, worker: int) -> None:
    """Be a worker of a call, which stays alive meanwhile even if whoever waits for it is interrupted."""
    run_in_c(call.function)(worker, call.arguments)


class ExecutorTeam:
    """A team of Python threads, each in a kernel without the GIL."""

    name = "executor"

    def __init__(self, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self._executor: ThreadPoolExecutor | None = None

    def start(self, cache: Path | None = None) -> None:
        """One thread fewer than the team has: the calling thread takes a share itself. Nothing is compiled."""
        if self.num_threads > 1:
            self._executor = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="offload-kernel")

    def run(self, kernel: Kernel, count: int, arguments: tuple[Any, ...]) -> None:
        call = kernel.bind(make_shares(count, self.num_threads), arguments)
        futures: list[Future[None]] = []
        try:
            if self._executor is not None:
                for worker in range(1, self.num_threads):
                    futures.append(self._executor.submit(_work, call, worker))  # noqa: PERF401 (a submit may raise)
        finally:
            # Also where a thread cannot be started: nobody may be at work on these arrays after the return, and a worker
            # that comes late finds no item left.
            try:
                _work(call, 0)
            finally:
                wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads; nothing is running then, since `run` waits for all."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


class PythonTeam:
    """No team: ``NUMBA_DISABLE_JIT`` is set, and the kernels are plain Python in the calling thread."""

    name = "python"
    num_threads = 1

    def start(self, cache: Path | None = None) -> None:
        """Nothing to take up."""

    def run(self, kernel: Kernel, count: int, arguments: tuple[Any, ...]) -> None:
        """See `Team.run`."""
        kernel.run_python(make_shares(count, 1), arguments)

    def close(self) -> None:
        """Nothing to end."""
