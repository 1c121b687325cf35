"""Growth and drift of long runs, from made-up steps."""

from __future__ import annotations

import pytest
from _growth import FIRST, Memory, growth


def test_few_steps_tell_nothing() -> None:
    assert growth([Memory(0, 0, 0)] * (2 * FIRST - 1), [1.0] * (2 * FIRST - 1)) is None


def test_what_is_gained_after_the_first_steps_and_how_the_pace_changes() -> None:
    memory = [Memory(100 + min(step, FIRST - 1), 7, 1000 + step) for step in range(50)]
    found = growth(memory, [1.0] * 40 + [1.03] * 10)
    assert found is not None
    assert found["growth_bytes"] == {"device": 0, "pinned": 0, "host": 50 - FIRST}
    assert found["slowdown"] == pytest.approx(0.03)
