"""What is said of an environment in which streams cannot run side by side."""

from __future__ import annotations

import pytest

from offload.streams import QUEUES, queue_advice


@pytest.mark.parametrize("value", ["1", "7"])
def test_few_queues_are_remarked_on(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(QUEUES, value)
    advice = queue_advice()
    assert advice is not None
    assert f"{QUEUES}={value}" in advice


@pytest.mark.parametrize("value", ["8", "32", "", "many"])
def test_enough_queues_are_not(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(QUEUES, value)
    assert queue_advice() is None


def test_the_driver_s_own_number_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(QUEUES, raising=False)
    assert queue_advice() is None
