"""Thread teams: who runs a kernel's work items.

Preferred is a Numba threading layer that two Python threads may enter at once: ``omp``, then ``tbb``. Without either, an
executor's threads run the serial form of the same kernels. Never ``workqueue``, in which two threads abort the process.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numba

from offload.kernels.jit import Kernel, jit_disabled
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
    parallel: bool  #: which form of a kernel `run` needs

    def start(self) -> None:
        """Prepare; called once, in the thread that will call `run`."""

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


class LayerTeam:
    """Numba's own team."""

    parallel = True

    def __init__(self, layer: str, num_threads: int) -> None:
        self.name = layer
        limit = kernel_thread_limit()
        if num_threads > limit:
            logger.warning("%d kernel threads asked for, Numba was imported with %d", num_threads, limit)
        self.num_threads = max(1, min(num_threads, limit))

    def start(self) -> None:
        # In the worker, never in the main thread: a first launch there would change torch's thread count, and the number
        # of threads is a property of the thread that sets it.
        with _preferred(self.name):
            numba.set_num_threads(self.num_threads)
        self.name = str(numba.threading_layer())

    def run(self, kernel: Kernel, count: int, arguments: tuple[Any, ...]) -> None:
        kernel(0, self.num_threads, make_shares(count, self.num_threads), arguments, parallel=True)

    def close(self) -> None:
        pass


class ExecutorTeam:
    """A team of Python threads, each in a serial kernel without the GIL."""

    name = "executor"
    parallel = False

    def __init__(self, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self._executor: ThreadPoolExecutor | None = None

    def start(self) -> None:
        # The calling thread takes a share itself.
        if self.num_threads > 1:
            self._executor = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="offload-kernel")

    def run(self, kernel: Kernel, count: int, arguments: tuple[Any, ...]) -> None:
        shares = make_shares(count, self.num_threads)
        futures = []
        if self._executor is not None:
            futures = [
                self._executor.submit(kernel, worker, worker + 1, shares, arguments, parallel=False)
                for worker in range(1, self.num_threads)
            ]
        kernel(0, 1, shares, arguments, parallel=False)
        for future in futures:
            future.result()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


class PythonTeam:
    """No team: ``NUMBA_DISABLE_JIT`` is set, and the kernels are plain Python in the calling thread."""

    name = "python"
    num_threads = 1
    parallel = False

    def start(self) -> None:
        pass

    def run(self, kernel: Kernel, count: int, arguments: tuple[Any, ...]) -> None:
        kernel(0, 1, make_shares(count, 1), arguments, parallel=False)

    def close(self) -> None:
        pass
