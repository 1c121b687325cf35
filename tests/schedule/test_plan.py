"""The planner on made-up machines."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from offload.config import MODES
from offload.errors import MemoryBudgetError
from offload.rates import Rates
from offload.schedule.plan import ChunkSize, Machine, Placement, Plan, Workload, needs_rates, plan

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


# State that is streamed through the device

MIB = 2**20
STREAMED = change(
    WORKLOAD,
    weight_bytes=2 * NUMEL,
    tile_bytes=48 * MIB,
    num_slots=4,
    backlog_bytes=GIB // 2,
    chunks=(ChunkSize("layers.0", NUMEL // 2), ChunkSize("layers.1", NUMEL // 2)),
)
SUMS = 9 * NUMEL // 1024

#: A fast host and a PCIe 5 link, as bytes and elements per second.
FAST = Rates(
    kernel_numel=4.0e9,
    host_bytes=116e9,
    to_device_bytes=55e9,
    to_host_bytes=55e9,
    duplex_bytes=48e9,
    device_bytes=3300e9,
)
SLOW_HOST = change(FAST, kernel_numel=0.3e9, host_bytes=8.4e9)
SMALL_GPU = change(GPU, free_device_bytes=20 * GIB)


@pytest.mark.parametrize(
    ("mode", "device", "peak"),
    [
        ("resident", 12 * GIB, 16 * GIB),
        ("all-at-once", 12 * GIB, 16 * GIB),
        ("chunked-sync", 48 * MIB, 4 * GIB + 48 * MIB),
        ("chunked-stream", 192 * MIB, 4 * GIB + 192 * MIB),
        ("wavefront", 0, 2 * GIB + GIB // 2),
    ],
)
def test_device_memory_of_every_mode(mode: str, device: int, peak: int) -> None:
    made = plan(mode, STREAMED, GPU)
    assert made.device_bytes == device
    assert made.peak_device_bytes == peak


@pytest.mark.parametrize("mode", ["all-at-once", "chunked-sync", "chunked-stream"])
def test_streamed_state_is_pinned(mode: str) -> None:
    made = plan(mode, STREAMED, GPU)
    assert made.host_bytes == made.pinned_bytes == 12 * GIB + SUMS
    with pytest.raises(MemoryBudgetError, match="pinned_budget is 0 bytes"):
        plan(mode, STREAMED, change(GPU, pinned_budget=0))


def test_fp32_weights_are_their_own_masters() -> None:
    made = plan("chunked-stream", change(STREAMED, own_master_numel=NUMEL), GPU)
    assert made.host_bytes == 8 * GIB + SUMS
    assert "4.00 GiB less to keep and to move" in str(made)
    assert plan("wavefront", change(STREAMED, own_master_numel=NUMEL), GPU).host_bytes == 15 * GIB


def test_buffers_are_no_larger_than_the_state() -> None:
    assert plan("chunked-stream", change(STREAMED, numel=1024), GPU).device_bytes == 4 * 12 * 1024


def test_accumulators_stay_on_the_device_with_the_gradients() -> None:
    made = plan("chunked-stream", change(STREAMED, accumulates=True), GPU)
    assert made.host_bytes == 12 * GIB + SUMS
    assert made.peak_device_bytes == 8 * GIB + 192 * MIB


def test_without_a_gpu_everything_is_host_memory_and_nothing_is_pinned() -> None:
    made = plan("chunked-stream", STREAMED, CPU)
    assert (made.device_bytes, made.pinned_bytes, made.peak_device_bytes) == (0, 0, 0)
    assert made.host_bytes == 14 * GIB + 192 * MIB + SUMS


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "auto"])
def test_without_a_gpu_the_plan_speaks_of_no_device(mode: str, clips: bool) -> None:
    text = str(plan(mode, change(STREAMED, holds_gradients=clips, speculates=clips), CPU))
    assert "no GPU: all is in host memory" in text.splitlines()[0]
    for word in ("device", "pinned "):
        assert word not in text.replace("nothing is pinned)", "").replace("as a device would", "")
    # Only what steps inside backward has use for a second set of state.
    assert ("second set of state" in text) is (clips and mode == "wavefront")


@pytest.mark.parametrize(
    ("mode", "placement"),
    [("resident", Placement.DEVICE), ("chunked-stream", Placement.STREAM), ("wavefront", Placement.HOST)],
)
def test_every_chunk_has_a_placement(mode: str, placement: Placement) -> None:
    made = plan(mode, STREAMED, GPU)
    assert [(chunk.name, chunk.placement) for chunk in made.chunks] == [
        ("layers.0", placement),
        ("layers.1", placement),
    ]
    assert f"2 chunks: {placement.value}" in str(made)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("resident", (24 + 2 + 2) * GIB / 3300e9),
        ("chunked-sync", 2 * 12 * GIB / 55e9 + 28 * GIB / 3300e9),
        ("chunked-stream", 12 * GIB / 48e9 + 48 * MIB / 55e9),
        ("wavefront", GIB / 4.0e9),
    ],
)
def test_expected_update_times(mode: str, expected: float) -> None:
    made = plan(mode, STREAMED, GPU, FAST)
    assert made.step_s == pytest.approx(expected)
    assert f"expected update: {1e3 * expected:.0f} ms" in str(made)
    assert plan(mode, STREAMED, GPU).step_s is None


def test_a_wavefront_is_no_faster_than_its_link() -> None:
    assert plan("wavefront", STREAMED, GPU, change(FAST, duplex_bytes=1e9)).step_s == pytest.approx(
        2 * GIB / 1e9
    )


# What auto chooses by rates and memory


@pytest.mark.parametrize(
    ("rates", "backward_s", "mode"),
    [
        (FAST, None, "wavefront"),
        (SLOW_HOST, None, "chunked-stream"),
        (SLOW_HOST, 10.0, "wavefront"),  # all of it hides
        (SLOW_HOST, 1.0, "chunked-stream"),
        (FAST, 0.0, "wavefront"),
        (change(FAST, duplex_bytes=4e9), None, "wavefront"),
        (None, None, "wavefront"),
    ],
)
def test_auto_weighs_the_host_against_the_link(
    rates: Rates | None, backward_s: float | None, mode: str
) -> None:
    workload = change(STREAMED, backward_s=backward_s)
    made = plan("auto", workload, SMALL_GPU, rates)
    assert made.mode == mode
    if rates is not None:
        assert "an update on the host takes" in str(made)


def test_auto_streams_where_only_that_fits_into_host_memory() -> None:
    """A wavefront needs rings and gradients on the host besides the state."""
    limit = 13 * GIB
    made = plan("auto", STREAMED, change(SMALL_GPU, host_budget=limit), FAST)
    assert made.mode == "chunked-stream"
    assert "a wavefront would need 2.00 GiB more of host memory" in str(made)


def test_auto_keeps_to_the_wavefront_where_gradients_do_not_fit_on_the_device() -> None:
    made = plan("auto", STREAMED, change(SMALL_GPU, device_budget=2 * GIB), SLOW_HOST)
    assert made.mode == "wavefront"
    assert "no room" in str(made)


def test_auto_heeds_the_pinned_budget() -> None:
    made = plan("auto", STREAMED, change(SMALL_GPU, pinned_budget=GIB), SLOW_HOST)
    assert made.mode == "wavefront"
    with pytest.raises(MemoryBudgetError, match="1 bytes are missing"):
        plan("auto", STREAMED, change(SMALL_GPU, pinned_budget=GIB - 1), SLOW_HOST)


@pytest.mark.parametrize(
    ("requested", "machine", "needed"),
    [
        ("auto", SMALL_GPU, True),
        ("auto", GPU, False),
        ("auto", CPU, False),
        ("wavefront", SMALL_GPU, False),
    ],
)
def test_rates_are_only_asked_for_where_they_decide(requested: str, machine: Machine, needed: bool) -> None:
    assert needs_rates(requested, STREAMED, machine) is needed


@pytest.mark.parametrize("mode", ["resident", "all-at-once"])
def test_what_the_device_cannot_hold_is_refused_before_it_is_allocated(mode: str) -> None:
    with pytest.raises(MemoryBudgetError, match=r"the free device memory is .*: 5 bytes are missing"):
        plan(mode, STREAMED, change(GPU, free_device_bytes=12 * GIB - 5))
