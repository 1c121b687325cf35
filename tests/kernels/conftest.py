"""Backends shared by all kernel tests (compiling is what these tests spend their time on), in one worker thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from offload.kernels.backend import Variant
from offload.kernels.numba_backend import NumbaBackend
from offload.kernels.rule import AdamWRule, SignSGDRule
from offload.kernels.torch_backend import TorchBackend

PLAIN = Variant()
FULL = Variant(acc=True, sums=True)
FP32 = Variant(grad="fp32", weight="fp32", sums=True)
FP32_MASTER = Variant(grad="fp32", acc=True, weight=None)
ADAMW_VARIANTS = (PLAIN, FULL, FP32, FP32_MASTER)
SIGN_SGD_VARIANTS = (FULL, FP32)
REDUCED_VARIANTS = (PLAIN, FULL)


class InWorker:
    """A backend whose every method runs in one worker thread, as the scheduler has it."""

    def __init__(self, backend: Any, start: bool = True) -> None:
        self._backend = backend
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="test-worker")
        if start:
            self.start()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if not callable(value) or name == "rule":
            return value
        return lambda *arguments, **options: self._executor.submit(value, *arguments, **options).result()

    def stop(self) -> None:
        self.close()
        self._executor.shutdown()


@pytest.fixture(scope="session")
def start_backend() -> Iterator[Callable[..., Any]]:
    """Start (once) and share a backend by its kind, rule and denormal mode."""
    started: dict[tuple[str, str, bool], InWorker] = {}

    def start(rule: Any = AdamWRule, *, kind: str = "numba", flush: bool = True) -> InWorker:
        key = (kind, rule.name, flush)
        if key not in started:
            if kind == "torch":
                backend: Any = TorchBackend(rule, num_threads=2, flush_denormals=flush)
            else:
                variants = SIGN_SGD_VARIANTS if rule is SignSGDRule else ADAMW_VARIANTS
                variants = REDUCED_VARIANTS if rule.is_reduced else variants
                backend = NumbaBackend(rule, num_threads=2, flush_denormals=flush, variants=variants)
            started[key] = InWorker(backend)
        return started[key]

    yield start
    for backend in started.values():
        backend.stop()
