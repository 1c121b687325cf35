"""Compute weights of STREAM chunks outside of updates: taken as masters, written anew from them.

Masters lie on the host, but for FP32 weights, which are their own and stay where they are. The caller sees to it that no
tile is on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from offload.parameters import ParamRecord
from offload.schedule.stream_tiles import StreamState
from offload.schedule.weights import check_given_master, load_weight, store_weight

__all__ = ["StreamWeights"]


class StreamWeights:
    """Of all parameters of one `StreamState`."""

    def __init__(self, state: StreamState) -> None:
        self._state = state

    def begin(self, records: Iterable[ParamRecord], masters: Mapping[int, torch.Tensor]) -> None:
        """The first masters of `records`: those given, by parameter index, else from the weights.

        Raises:
            ParameterError: a given master does not round to its weight.
        """
        for record in records:
            given = masters.get(record.index)
            if given is None:
                load_weight(self._master(record), record.weight(), force=True)
            else:
                self._take_given(record, given)

    def load(self, records: Iterable[ParamRecord], *, force: bool) -> set[int]:
        """Take masters anew from weights that they do not round to, or from all where `force`; the indices taken."""
        return {r.index for r in records if load_weight(self._master(r), r.weight(), force=force)}

    def store(self, records: Iterable[ParamRecord]) -> None:
        """Write weights anew from the masters."""
        for record in records:
            store_weight(record.weight(), self._master(record))
            record.note_write()

    def _master(self, record: ParamRecord) -> torch.Tensor:
        return self._state.places[record.index].state()["master"]

    def _take_given(self, record: ParamRecord, given: torch.Tensor) -> None:
        if record.kind.weight == "fp32":
            flat = torch.empty_like(record.weight(), device="cpu")
            record.local(flat).copy_(given)
            check_given_master(record, flat)
        else:
            record.local(self._master(record)).copy_(given)
            check_given_master(record, self._master(record))
