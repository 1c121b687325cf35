"""The host's kernels, compiled before the jobs that need them, on the worker's thread: it alone may run them.

The backend starts, and compiles what the layout lets foresee, while memory is made ready on the constructing thread.
What was not foreseen is compiled when the first job that needs it is about to be submitted.
"""

from __future__ import annotations

from offload.errors import OffloadError
from offload.kernels.backend import Backend, Variant
from offload.layout import Kind
from offload.schedule.worker import Call, Worker

__all__ = ["HostKernels"]


class HostKernels:
    """Of one backend.

    Args:
        fused_sums: see `offload.schedule.stepper.Stepper`.
    """

    def __init__(self, backend: Backend, worker: Worker, *, fused_sums: bool) -> None:
        #: Computes; on the worker's thread alone.
        self.backend = backend
        self._worker, self._fused_sums = worker, fused_sums
        self._ensured: set[Variant] = set()
        self._is_started = False
        self._refusal: OffloadError | None = None

    def start(self) -> None:
        """Let the worker start the backend; `wait_started` has the outcome."""
        self._worker.submit(Call(self._start))

    def wait_started(self) -> None:
        """Until the kernels are compiled; jobs that need them are submitted after this.

        Raises:
            KernelError: they cannot run here.
        """
        if not self._is_started:
            self._worker.call(self._require_started)
            self._is_started = True

    def ensure(self, kind: Kind, *, fresh: bool, adds: bool, new_state: bool = False) -> None:
        """Have a kernel compiled that the layout did not foresee, ahead of the job that needs it.

        Args:
            kind: of the chunk.
            fresh, adds: as in `offload.schedule.pipeline.Launch`.
            new_state: the update writes a shadow.
        """
        variant = Variant(
            grad=kind.grad if fresh else "fp32",  # type: ignore[arg-type]
            acc=adds,
            weight=kind.weight,  # type: ignore[arg-type]
            sums=self._fused_sums,
            new_state=new_state,
        )
        if variant not in self._ensured:
            self._ensured.add(variant)
            self._worker.submit(Call(lambda: self.backend.prepare(variant)))

    def _start(self) -> None:
        """On the worker's thread, whose team inherits what the worker set."""
        try:
            self.backend.start()
        except OffloadError as error:  # ours do not end the worker; `wait_started` raises it
            self._refusal = error

    def _require_started(self) -> None:
        if self._refusal is not None:
            raise self._refusal
