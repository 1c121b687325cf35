"""Rows of hyperparameters: one upload for a step, of all that the step's table has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from offload.schedule.uploaded_rows import UploadedRows


class Uploads:
    """An updater that only uploads, and what it was given."""

    def __init__(self) -> None:
        self.tables: list[list[list[float]]] = []

    def upload(self, rows: Any) -> list[tuple[int, list[float]]]:
        self.tables.append(rows.tolist())
        return [(len(self.tables), row) for row in rows.tolist()]


def place(chunk: int, row: int) -> Any:
    return SimpleNamespace(chunk_index=chunk, span=SimpleNamespace(row=row))


def rows(*chunks: int) -> dict[int, Any]:
    """Two rows each: chunk and row make the numbers."""
    return {chunk: np.array([[10 * chunk], [10 * chunk + 1]], np.float32) for chunk in chunks}


PLACES = {7: place(0, 1), 8: place(0, 0), 9: place(2, 0)}


def test_all_rows_of_a_table_go_in_one_upload_each_to_its_parameter() -> None:
    updater = Uploads()
    uploaded, table = UploadedRows(updater, PLACES), rows(0, 2)
    found = uploaded.of([8], table)
    assert {param: row for param, (_, row) in found.items()} == {7: [1.0], 8: [0.0], 9: [20.0]}
    assert uploaded.of([7, 8], table) is uploaded.of([9], table) is found
    assert updater.tables == [[[1.0], [0.0], [20.0]]]


def test_another_table_is_uploaded_anew_even_if_it_is_equal() -> None:
    updater = Uploads()
    uploaded = UploadedRows(updater, PLACES)
    first, second = rows(0), rows(0)
    uploaded.of([7], first)
    assert uploaded.of([7], second)[7] == (2, [1.0])
    assert uploaded.of([7], second)[7] == (2, [1.0])
    assert uploaded.of([7], first)[7] == (3, [1.0])


def test_chunks_that_a_table_does_not_have_are_uploaded_when_it_has_got_them() -> None:
    """A table grows within a step: with the chunks whose first gradient has come."""
    updater, table = Uploads(), rows(0)
    uploaded = UploadedRows(updater, PLACES)
    assert uploaded.of([7], table).keys() == {7, 8}
    table |= rows(2)
    assert uploaded.of([8], table).keys() == {7, 8}
    assert uploaded.of([9], table).keys() == {7, 8, 9}
    assert len(updater.tables) == 2


def test_the_same_table_may_hold_other_numbers_in_the_next_step() -> None:
    updater, table = Uploads(), rows(0)
    uploaded = UploadedRows(updater, PLACES)
    uploaded.of([7], table)
    table[0][1] = 5.0
    uploaded.forget()
    assert uploaded.of([7], table)[7] == (2, [5.0])
