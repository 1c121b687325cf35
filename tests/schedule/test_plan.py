"""The planner on made-up machines."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from offload.errors import MemoryBudgetError
from offload.schedule.plan import Machine, Plan, Workload, plan

GIB = 2**30
NUMEL = GIB  # elements, so that bytes per element read as GiB
WORKLOAD = Workload(
    numel=NUMEL,
    state_arrays=3,
    ring_bytes=GIB,
    holds_gradients=False,
    gradient_bytes=2 * NUMEL,
    accumulates=False,
)
GPU = Machine(device="cuda", free_device_bytes=80 * GIB, available_host_bytes=500 * GIB)
CPU = Machine(device="cpu", free_device_bytes=None, available_host_bytes=500 * GIB)


def change(value: Any, **fields: Any) -> Any:
    return dataclasses.replace(value, **fields)


def amounts(made: Plan) -> tuple[int, int, int]:
    return made.device_bytes // GIB, made.host_bytes // GIB, made.pinned_bytes // GIB


@pytest.mark.parametrize(
    ("machine", "mode"),
    [
        (GPU, "resident"),
        (change(GPU, free_device_bytes=24 * GIB), "resident"),
        (change(GPU, free_device_bytes=24 * GIB - 2), "wavefront"),
        (change(GPU, device_budget=12 * GIB), "resident"),
        (change(GPU, device_budget=12 * GIB - 1), "wavefront"),
        (change(GPU, device_budget=0), "wavefront"),
        (change(GPU, free_device_bytes=GIB, device_budget=12 * GIB), "resident"),
        (CPU, "wavefront"),
        (change(CPU, device_budget=100 * GIB), "wavefront"),
    ],
)
def test_auto_takes_resident_where_state_fits(machine: Machine, mode: str) -> None:
    assert plan("auto", WORKLOAD, machine).mode == mode


@pytest.mark.parametrize(
    ("mode", "machine", "workload", "expected"),
    [
        ("resident", GPU, WORKLOAD, (12, 0, 0)),
        ("wavefront", GPU, WORKLOAD, (0, 15, 1)),
        ("wavefront", GPU, change(WORKLOAD, accumulates=True), (0, 19, 1)),
        ("wavefront", GPU, change(WORKLOAD, state_arrays=1), (0, 7, 1)),
        ("wavefront", CPU, WORKLOAD, (0, 15, 0)),
        ("resident", CPU, WORKLOAD, (0, 15, 0)),
    ],
)
def test_amounts(mode: str, machine: Machine, workload: Workload, expected: tuple[int, int, int]) -> None:
    made = plan(mode, workload, machine)
    assert made.mode == mode
    assert amounts(made) == expected


LIMITS = [
    ("resident", "device_budget", 12 * GIB, "device_budget"),
    ("wavefront", "host_budget", 15 * GIB, "host_budget"),
    ("wavefront", "pinned_budget", GIB, "pinned_budget"),
    ("wavefront", "host_limit_bytes", 15 * GIB, "the cgroup's memory limit"),
]


@pytest.mark.parametrize(("mode", "field", "need", "words"), LIMITS)
def test_a_budget_is_kept_to_the_byte(mode: str, field: str, need: int, words: str) -> None:
    plan(mode, WORKLOAD, change(GPU, **{field: need}))
    with pytest.raises(
        MemoryBudgetError, match=f"{words} is {need - 7} bytes .*: 7 bytes are missing"
    ) as caught:
        plan(mode, WORKLOAD, change(GPU, **{field: need - 7}))
    assert f"mode='{mode}' needs {need} bytes" in str(caught.value)


@pytest.mark.parametrize("field", ["host_budget", "host_limit_bytes", "pinned_budget"])
def test_resident_on_a_gpu_needs_no_host_memory(field: str) -> None:
    assert plan("resident", WORKLOAD, change(GPU, **{field: 0})).mode == "resident"


def test_nothing_is_pinned_on_the_cpu() -> None:
    assert plan("wavefront", WORKLOAD, change(CPU, pinned_budget=0)).pinned_bytes == 0


def test_auto_is_refused_where_neither_fits() -> None:
    with pytest.raises(MemoryBudgetError, match="host_budget"):
        plan("auto", WORKLOAD, change(GPU, device_budget=0, host_budget=0))


def test_host_memory_that_may_still_grow_is_only_remarked_on() -> None:
    short = plan("wavefront", WORKLOAD, change(GPU, available_host_bytes=15 * GIB - 1))
    assert any("beware" in reason for reason in short.reasons)
    enough = plan("wavefront", WORKLOAD, change(GPU, available_host_bytes=15 * GIB))
    assert not any("beware" in reason for reason in enough.reasons)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (GPU, "state of 12.00 GiB fits into 50% of the 80.00 GiB free on the device (40.00 GiB)"),
        (change(GPU, device_budget=2**20), "state of 12.00 GiB does not fit into device_budget (1.0 MiB)"),
        (CPU, "parameters are on the CPU"),
    ],
)
def test_reasons_say_why(machine: Machine, words: str) -> None:
    assert words in str(plan("auto", WORKLOAD, machine))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "gradients 2.00 GiB (of the observed first step only)"),
        ({"holds_gradients": True}, "gradients 2.00 GiB (kept until the verdict of each step)"),
        ({"accumulates": True}, "accumulators 4.00 GiB"),
    ],
)
def test_host_memory_is_itemized(fields: dict[str, bool], words: str) -> None:
    made = plan("wavefront", change(WORKLOAD, **fields), GPU)
    assert words in str(made)
    assert str(made).startswith("mode wavefront: device 0.0 MiB, host ")
    assert "wavefront was asked for" in made.reasons
