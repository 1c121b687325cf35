"""Compute weights of HOST chunks outside of updates: taken as masters, written anew from them; and when all have arrived.

Weights of updates leave through the same ring, in order: who waits here waits for them too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future

from offload.errors import ParameterError
from offload.parameters import ParamRecord
from offload.schedule.host_chunks import HostChunks
from offload.schedule.host_jobs import LoadTile, StoreTile
from offload.schedule.pipeline import Arrival, Pipeline, TilePlan
from offload.schedule.worker import Call, Worker
from offload.transfer.transport import Ready, Signal

__all__ = ["HostWeights"]


class HostWeights:
    """Submits the jobs that read or write weights and no gradient."""

    def __init__(self, pipe: Pipeline, worker: Worker, chunks: HostChunks) -> None:
        self._pipe, self._worker, self._chunks = pipe, worker, chunks

    # In ---------------------------------------------------------------------------------------------------------

    def load(
        self, records: Sequence[ParamRecord], *, changed: set[int] | None = None, check_only: bool = False
    ) -> None:
        """Take masters from the weights, and wait until it is done.

        Args:
            changed, check_only: as `LoadTile` takes them.
        """
        ready = self.now(records)
        arrivals = {record.index: Arrival(record.weight(), ready[0]) for record in records}
        for plan in self._aimed(records):
            self._worker.submit(LoadTile(self._pipe, plan, arrivals, changed=changed, check_only=check_only))
        self.finish()

    def check(self, records: Sequence[ParamRecord]) -> None:
        """Compare masters that were given with the weights.

        Raises:
            ParameterError: some do not round to their weights.
        """
        changed: set[int] = set()
        self.load(records, changed=changed, check_only=True)
        if changed:
            names = ", ".join(self._chunks.records[index].name for index in sorted(changed)[:3])
            raise ParameterError(
                f"masters= of {len(changed)} parameter(s) do not round to the model's weights ({names}): the weights "
                "were changed after cast_compute_weights; cast again, or leave masters out to start from the weights"
            )

    # Out --------------------------------------------------------------------------------------------------------

    def store(self, records: Sequence[ParamRecord]) -> None:
        """Write weights anew from the masters, and wait until they have arrived."""
        self._store(self._aimed(records), records, self.now(records))

    def restore(self, tiles: Sequence[TilePlan], records: Sequence[ParamRecord]) -> None:
        """The same for what updates that are rolled back have written: `tiles`, with pieces of `records`."""
        self._store(tiles, records, self.now(self._chunks.records))

    def _store(
        self, tiles: Iterable[TilePlan], records: Sequence[ParamRecord], after: Sequence[Ready]
    ) -> None:
        params = {record.index for record in records}
        for plan in tiles:
            self._worker.submit(StoreTile(self._pipe, plan, params, after))
        for record in records:
            record.note_write()
        self.finish()

    # Arrived ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Until all weights that were sent have arrived."""
        self._worker.call(self._pipe.finish_returns, on_copier=True)

    def settle_later(self) -> Future[float]:
        """`finish` without blocking; the result is when it was done, by ``time.perf_counter``."""

        def settle() -> float:
            self._pipe.finish_returns()
            return time.perf_counter()

        call = Call(settle, on_copier=True)
        self._worker.submit(call)
        return call.future

    def mark(self, group: int | None) -> Future[Signal]:
        """When the weights have arrived of all jobs of `group`, as `Worker.submit` takes it, that were submitted so far.

        Copies to the device end in order.
        """
        call = Call(self._mark, on_copier=True)
        self._worker.submit(call, group=group)
        return call.future

    def _mark(self) -> Signal:
        signal = self._pipe.transport.issue_to_device((), ()).signal
        assert signal is not None
        return signal

    def now(self, records: Sized) -> list[Ready]:
        """The point that the device's work has come to; none where there are no `records` to wait for it."""
        return [self._pipe.transport.record_ready()] if len(records) else []

    def _aimed(self, records: Sequence[ParamRecord]) -> Iterator[TilePlan]:
        """Tiles of `records`, whose weights may have moved."""
        for plan in self._chunks.tiles_of(records):
            plan.aim()
            yield plan
