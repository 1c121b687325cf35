"""The thread on which streamed tiles travel, and what an error there means.

On a GPU everything is enqueued by the calling thread, or by a thread of its own where chunks are stepped inside
backward: a trip costs 0.2 ms of Python, which a gradient hook must not pay. Without a GPU, the device buffers are plain
memory, the host kernels compute, and the same code runs on the worker's thread, the only one that may run them.

An error before anything of a step was changed leaves the step to be called again. Any other one ends the optimizer, and
that is known to the worker, whoever met it: all placements ask there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

from offload.errors import DeadlineError, StateError, WorkerError
from offload.schedule.backlog import always
from offload.schedule.tile_job import Gate, TileJob
from offload.schedule.worker import Call, Worker
from offload.transfer.transport import Transport

__all__ = ["StreamThread"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

RUNNING_JOBS = 2
"""Jobs, of the tiles that one gradient completes, that the computing thread may have before it: one that it runs, one
next. All others wait in the queue."""


class StreamThread:
    """Runs functions in the order in which they are given, but for chunks that are in a hurry.

    Args:
        worker: told of what ends the optimizer.
        issuer: a worker for this alone, closed with it, whose thread runs all; None: the calling thread does, or without a
            GPU the worker's.
        recover: brings the tiles to rest after an error that has changed nothing.
        alone: False where others update other chunks in the same step, so that no failure leaves all as it was.
        in_groups: whether jobs of chunks in a hurry go before those of others that still wait.
    """

    def __init__(
        self,
        worker: Worker,
        issuer: Worker | None,
        *,
        on_gpu: bool,
        recover: Callable[[], None],
        alone: bool,
        in_groups: bool,
    ) -> None:
        self._worker, self._issuer, self._recover = worker, issuer, recover
        self._runner = issuer if issuer is not None else None if on_gpu else worker
        self._alone, self._in_groups = alone, in_groups
        self._gate = Gate(RUNNING_JOBS)
        self._urgent: set[int] = set()
        self._changed = False

    @property
    def is_callers(self) -> bool:
        """Whether all runs on the calling thread, at once."""
        return self._runner is None

    def start(self, transport: Transport, stream: torch.cuda.Stream | None) -> None:
        """Let an issuer be known to `transport`, and work on `stream`."""
        if self._issuer is not None:
            self._issuer.call(partial(_attach, transport, stream))
            # its copier asks whether gradients are there
            self._issuer.call(transport.attach_thread, on_copier=True)

    @property
    def waited_s(self) -> float:
        """Seconds that backward was held up by an issuer since the beginning."""
        return 0.0 if self._issuer is None else self._issuer.waited_s

    # The step under way -----------------------------------------------------------------------------------------

    def note_change(self) -> None:
        """From here on an error ends the optimizer: parts of the step were applied."""
        self._changed = True

    def hurry(self, chunk: int) -> None:
        """What comes for `chunk` in this step goes first: the next forward needs it at once."""
        self._urgent.add(chunk)

    def end_step(self) -> None:
        """Nothing of the next step was changed, and nobody is in a hurry."""
        self._urgent = set()
        self._changed = False

    # Functions --------------------------------------------------------------------------------------------------

    def run(self, function: Callable[[], None]) -> None:
        """Run `function` after all that was given before, and wait for it.

        Raises:
            StateError: it failed, and nothing had been changed since the last step.
            WorkerError: it failed otherwise: some tiles hold the new step, others the old one.
        """
        try:
            if self._runner is None:
                self.guard(function)
            else:
                self._runner.call(lambda: self.guard(function))
        except WorkerError as error:
            self._give_up(error)
            raise
        except Exception:
            self._worker.raise_error()
            raise

    def run_later(
        self,
        function: Callable[[], None],
        *,
        changes: bool = True,
        chunk: int | None = None,
        ready: Callable[[], bool] = always,
    ) -> None:
        """The same from a gradient hook, in which nothing may be raised: the next public call does.

        Args:
            changes: whether it changes state, which counts as changed from now on.
            chunk: whose tiles it is for; None: of many.
            ready: whether its gradient is there, see `Worker.submit`.
        """
        self._changed |= changes
        if self._runner is not None:
            job = TileJob(lambda: self.guard(function), self._gate, self._give_up)
            self._runner.submit(job, group=self._group(chunk), ready=ready)
            return
        try:
            self.guard(function)
        except Exception:
            logger.debug("kept for the next public call", exc_info=True)

    def ask_later(self, function: Callable[[], T], chunk: int | None = None) -> Future[T]:
        """The outcome of `function` after all that was given before for `chunk` (None: for all chunks).

        An error is the future's; not for the calling thread.
        """
        assert self._runner is not None
        call = Call(function)
        self._runner.submit(call, group=self._group(chunk))
        return call.future

    def guard(self, function: Callable[[], None]) -> None:
        """Run `function` here and now, unless the optimizer has ended; what its errors mean is decided here.

        Raises:
            StateError: see `run`.
            Exception: its own; the worker has been told.
        """
        if self._worker.failed:
            return
        try:
            function()
        except BaseException as error:
            if self._changed or not self._alone or not isinstance(error, Exception):
                self._worker.fail(error)
                raise
            self._recover()
            raise StateError(
                f"the step did not begin ({type(error).__name__}: {error}); nothing was changed and the "
                "gradients are kept: call step() again, or zero_grad() to drop them"
            ) from error

    def _group(self, chunk: int | None) -> int | None:
        """Of an issuer's jobs: two, of which the second goes first."""
        if chunk is None or self._issuer is None or not self._in_groups:
            return None
        return int(chunk in self._urgent)

    def _give_up(self, error: BaseException) -> None:
        """What ended the thread that issues ends the whole optimizer."""
        if self._runner is not self._worker:
            cause = error.__cause__ if isinstance(error, WorkerError) else None
            self._worker.fail(error if isinstance(error, DeadlineError) else cause or error)

    def close(self) -> None:
        """End the issuer."""
        if self._issuer is not None:
            self._issuer.close()


def _attach(transport: Transport, stream: torch.cuda.Stream | None) -> None:
    """On the thread that enqueues and does nothing else."""
    transport.attach_thread()
    if stream is not None:
        torch.cuda.set_stream(stream)
