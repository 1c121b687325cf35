"""A short run of ``scripts/soak.py``; the long one is its command line's."""

from __future__ import annotations

from typing import Any

import pytest
import soak
from _soak import World

from tests.training import KERNEL_CACHE

STEPS = 70
"""About 20 s, most of which is compiling."""


def test_a_short_soak_ends_with_the_bits_of_the_reference() -> None:
    result = soak.soak(STEPS, seed=1, kernel_cache=KERNEL_CACHE)
    assert result["steps"] == STEPS
    assert result["grown"] == []
    events = result["events"]
    assert events["checks"] > 3
    for event in ("checkpoints", "recoveries", "skipped", "clipped", "frozen or unfrozen", "groups added"):
        assert events[event] > 0, f"{event} never happened: {events}"


def test_a_lost_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak's own control: a run in which the reference takes one step more than the optimizer."""
    check = World.check

    def step_behind_its_back(self: Any) -> None:
        parameter = self._named["scale"]
        hyper = {"scale": {**self.optimizer.param_groups[0], "lr": 0.1}}
        self._reference.step({"scale": [parameter.detach() + 1]}, hyper)
        check(self)

    monkeypatch.setattr(World, "check", step_behind_its_back)
    with pytest.raises(AssertionError, match="scale"):
        soak.soak(10, seed=1, kernel_cache=KERNEL_CACHE)


@pytest.mark.parametrize(("grown", "found"), [(0, []), (3 * 2**20, ["rss"])])
def test_growth_is_found(monkeypatch: pytest.MonkeyPatch, grown: int, found: list[str]) -> None:
    """Nothing but the books: 40 samples of a run in which memory rises by `grown` over the second half."""
    samples = iter(
        soak.Sample(step, 10**8 + max(0, step - 1000) * grown // 1000, 0, 9, 3)
        for step in range(50, 2001, 50)
    )
    monkeypatch.setattr(soak, "World", lambda *_: None)
    monkeypatch.setattr(soak, "_live", lambda *_: 50)
    monkeypatch.setattr(soak, "_sample", lambda _: next(samples))
    assert soak.soak(2000, seed=0)["grown"] == found
