"""Reports for people and for loggers, and the clock behind them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from offload import report
from offload.report import StageClock, StepReport

REPORT = StepReport(
    step=3,
    grad_norm=2.5,
    clipped=True,
    clip_coefficient=0.4,
    mode="wavefront",
    early_tiles=7,
    late_tiles=1,
    bytes_to_host=2_000_000,
    bytes_to_device=3_000_000,
    timings={"kernel": 0.004},
)


def test_str_is_one_line_with_the_numbers() -> None:
    assert str(REPORT) == (
        "step 3 (wavefront, clipped): norm 2.5, tiles 7 early 1 late, 2.0 MB in 3.0 MB out, ms: kernel 4.0"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "(resident)"),
        ({"skipped": True}, "(resident, skipped)"),
        ({"clipped": True, "skipped": True}, "(resident, clipped, skipped)"),
    ],
)
def test_str_names_what_happened(flags: dict[str, bool], words: str) -> None:
    assert f"step 1 {words}:" in str(StepReport(1, math.nan, mode="resident", **flags))


def test_as_dict_is_flat_and_complete() -> None:
    numbers = REPORT.as_dict()
    fields = {field.name for field in dataclasses.fields(StepReport)} - {"mode", "timings"}
    assert set(numbers) == {f"offload/{name}" for name in fields} | {"offload/seconds/kernel"}
    assert all(type(value) is float for value in numbers.values())
    assert numbers["offload/clipped"] == 1.0
    assert REPORT.as_dict("")["seconds/kernel"] == 0.004


def test_clock_adds_up_and_starts_again() -> None:
    clock = StageClock()
    clock.add("kernel", 1.0)
    clock.add("kernel", 2.0)
    clock.count("tiles", 2)
    clock.count("tiles", 3)
    assert clock.take() == ({"kernel": 3.0}, {"tiles": 5})
    assert clock.take() == ({}, {})


def test_what_was_taken_does_not_change() -> None:
    clock = StageClock()
    clock.add("kernel", 1.0)
    seconds, _ = clock.take()
    clock.add("kernel", 1.0)
    assert seconds == {"kernel": 1.0}


def test_stage_measures_also_a_block_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StageClock()
    times = iter([10.0, 10.5, 20.0, 22.0])
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(times))
    with clock.stage("issue"):
        pass
    with pytest.raises(KeyError), clock.stage("issue"):
        raise KeyError
    assert clock.take()[0] == {"issue": 2.5}
