"""The ranks that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for as many ranks as a test asks for; see `tests.distributed.ranks`."""
    made = Ranks()
    yield made
    made.close()
