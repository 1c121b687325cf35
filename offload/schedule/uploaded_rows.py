"""Hyperparameters of a step where its kernels read them, for the placement whose tiles come one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offload.schedule.stepper import Rows
from offload.schedule.stream_tiles import Place
from offload.schedule.updater import Updater

__all__ = ["UploadedRows"]


class UploadedRows:
    """All rows of a step in one upload, made when its first tile needs them.

    Used by the thread that computes, so that they are written in line with what reads them.

    Args:
        places: by parameter index, which row is whose; parameters may come later.
    """

    def __init__(self, updater: Updater, places: Mapping[int, Place]) -> None:
        self._updater, self._places = updater, places
        self._uploaded: tuple[Rows, dict[int, Any]] | None = None

    def of(self, params: Sequence[int], rows: Rows) -> Mapping[int, Any]:
        """Uploaded rows of `params`, at least one of a chunk, and of all others in `rows`; by parameter index.

        Uploaded anew where `rows` is not the table of the last call, or has got chunks since.
        """
        if self._uploaded is None or self._uploaded[0] is not rows or params[0] not in self._uploaded[1]:
            places = {param: place for param, place in self._places.items() if place.chunk_index in rows}
            table = np.stack([rows[place.chunk_index][place.span.row] for place in places.values()])
            self._uploaded = rows, dict(zip(places, self._updater.upload(table), strict=True))
        return self._uploaded[1]

    def forget(self) -> None:
        """The step is over: a table that is the same object may hold other numbers in the next one."""
        self._uploaded = None
