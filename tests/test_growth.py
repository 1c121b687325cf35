"""Growth and drift of long runs, from made-up steps."""

from __future__ import annotations

import pytest
from _growth import FIRST, Memory, growth, is_sampled


def samples(num_steps: int) -> list[int]:
    return [step for step in range(num_steps) if is_sampled(step, num_steps)]


def test_few_steps_tell_nothing() -> None:
    assert samples(2 * FIRST - 1) == []
    assert growth([], [1.0] * (2 * FIRST - 1)) is None


def test_what_is_gained_after_the_first_steps_and_how_the_pace_changes() -> None:
    assert samples(50) == [FIRST - 1, 49]
    memory = [Memory(100, 7, 1000), Memory(100, 7, 1040)]
    found = growth(memory, [1.0] * 40 + [1.03] * 10)
    assert found is not None
    assert found["growth_bytes"] == {"device": 0, "pinned": 0, "host": 40}
    assert found["slowdown"] == pytest.approx(0.03)
