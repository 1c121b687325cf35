"""The clock of a wavefront against arithmetic on paper."""

from __future__ import annotations

import pytest

from offload.errors import ConfigError
from offload.rates import Rates
from offload.schedule.hybrid_plan import BESIDE_KERNELS, BESIDE_LINK
from offload.schedule.mode_costs import Placement, Workload, cost_of
from offload.schedule.step_estimate import (
    TILE_NUMEL,
    Arrival,
    Passes,
    StepEstimate,
    estimate_step,
    finish_of_wavefront,
    passes_of,
)

TILES = 10
NUMEL = TILES * TILE_NUMEL
COPIED = 32 / 28  # the kernel's 28 bytes an element, and 4 that the link takes of the same memory


def make_workload(numel: int = NUMEL) -> Workload:
    return Workload(
        numel=numel,
        state_arrays=3,
        ring_bytes=0,
        holds_gradients=False,
        gradient_bytes=2 * numel,
        accumulates=False,
        weight_bytes=2 * numel,
    )


def make_rates(tile_s: float = 1.0, link_s: float = 1e-9, device_s: float = 1e-9) -> Rates:
    """`tile_s`, `link_s`, `device_s`: seconds of one tile in the kernel (alone), on the link one way, on the device."""
    link = 2 * TILE_NUMEL / link_s
    return Rates(TILE_NUMEL / tile_s, 28 * TILE_NUMEL / tile_s, link, link, link, 28 * TILE_NUMEL / device_s)


def test_a_long_backward_leaves_only_the_last_tile() -> None:
    arrivals = [Arrival(TILE_NUMEL, (index + 1) / TILES) for index in range(TILES)]
    end = finish_of_wavefront(arrivals, 100.0, make_workload(), make_rates())
    assert end == pytest.approx(100.0 + COPIED)


def test_a_short_backward_leaves_all_but_what_it_hides() -> None:
    """The kernel starts when the first gradient is there, and never waits again."""
    arrivals = [Arrival(TILE_NUMEL, (index + 1) / TILES) for index in range(TILES)]
    end = finish_of_wavefront(arrivals, 5.0, make_workload(), make_rates())
    assert end == pytest.approx(0.5 + TILES * COPIED)


def test_what_comes_last_is_exposed_whole() -> None:
    """A tied embedding: a third of all, complete only when backward ends."""
    arrivals = [Arrival(7 * TILE_NUMEL, 0.1), Arrival(3 * TILE_NUMEL, 1.0)]
    end = finish_of_wavefront(arrivals, 50.0, make_workload(), make_rates())
    assert end == pytest.approx(50.0 + 3 * COPIED)


def test_what_comes_last_and_is_divided_keeps_both_sides_busy() -> None:
    """Two arrivals at one time: six tiles on the host, four streamed, beside each other."""
    rates = make_rates(tile_s=1.0, link_s=0.2)

    def exposed(*last: Arrival) -> float:
        return finish_of_wavefront([Arrival(0, 0.1), *last], 50.0, make_workload(), rates) - 50.0

    host, streamed = Arrival(6 * TILE_NUMEL, 1.0), Arrival(4 * TILE_NUMEL, 1.0, Placement.STREAM)
    divided = exposed(host, streamed)
    assert divided == pytest.approx(6 / BESIDE_LINK, rel=0.2)  # gradients queue behind state for a while
    assert divided < 0.8 * exposed(Arrival(NUMEL, 1.0))
    assert divided < 0.8 * exposed(Arrival(NUMEL, 1.0, Placement.STREAM))


def test_a_slow_link_bounds_the_step() -> None:
    """Ten tiles in at 3 s each; the last one's kernel and its way out follow."""
    arrivals = [Arrival(NUMEL, 0.0)]
    end = finish_of_wavefront(arrivals, 0.0, make_workload(), make_rates(tile_s=1.0, link_s=3.0))
    assert end == pytest.approx(TILES * 3.0 + COPIED + 3.0)


def test_placements_work_side_by_side() -> None:
    """Streamed state uses the link alone: twelve bytes an element each way, six times a gradient's two."""
    arrivals = [Arrival(5 * TILE_NUMEL, 0.0), Arrival(5 * TILE_NUMEL, 0.0, Placement.STREAM)]
    rates = make_rates(tile_s=1.0, link_s=0.01)
    both = finish_of_wavefront(arrivals, 0.0, make_workload(), rates)
    host = finish_of_wavefront([Arrival(NUMEL, 0.0)], 0.0, make_workload(), rates)
    streamed = finish_of_wavefront([Arrival(NUMEL, 0.0, Placement.STREAM)], 0.0, make_workload(), rates)
    assert streamed == pytest.approx((TILES + 1) * 0.06)
    # Neither reaches its rate beside the other; the planner's shares go by the same numbers.
    assert both == pytest.approx(5 / BESIDE_LINK, rel=0.02)
    assert both < host
    slow_link = make_rates(tile_s=1e-3, link_s=0.1)
    both = finish_of_wavefront(arrivals, 0.0, make_workload(), slow_link)
    # Five tiles of state in, and the last one's way out; gradients and weights find room beside them.
    assert both == pytest.approx(6 * 0.6 / BESIDE_KERNELS, rel=0.01)


def test_device_chunks_cost_device_time_only() -> None:
    arrivals = [Arrival(NUMEL, 0.0, Placement.DEVICE)]
    assert finish_of_wavefront(arrivals, 0.0, make_workload(), make_rates(device_s=0.2)) == pytest.approx(2.0)


def test_other_modes_add_their_update_to_both_passes() -> None:
    workload, rates, passes = make_workload(), make_rates(link_s=0.1, device_s=0.01), Passes(2.0, 5.0)
    for mode in ("resident", "all-at-once", "chunked-sync", "chunked-stream"):
        estimate = estimate_step(mode, workload, rates, passes, ())
        assert estimate.exposed_s == estimate.update_s == cost_of(mode, workload, rates)
        assert estimate.step_s == pytest.approx(7.0 + estimate.update_s)
    with pytest.raises(ConfigError, match="no-such-mode"):
        estimate_step("no-such-mode", workload, rates, passes, ())


def test_a_wavefront_reports_what_it_exposes() -> None:
    arrivals = [Arrival(TILE_NUMEL, (index + 1) / TILES) for index in range(TILES)]
    estimate = estimate_step("wavefront", make_workload(), make_rates(), Passes(3.0, 5.0), arrivals)
    assert estimate.update_s == pytest.approx(TILES * COPIED)
    assert estimate.exposed_s == pytest.approx(0.5 + TILES * COPIED - 5.0)
    assert estimate.step_s == pytest.approx(3.0 + 5.0 + estimate.exposed_s)


def test_a_forward_that_overlaps_hides_the_update_behind_both_passes() -> None:
    """From the last layer's forward to a tile's worth of gradients there is nothing to do; a norm's are none."""
    arrivals = [Arrival(1024, 0.0), *(Arrival(TILE_NUMEL, (index + 1) / TILES) for index in range(TILES))]
    update_s = TILES * COPIED

    def estimate(forward_s: float, backward_s: float, last_forward: float = 0.0) -> StepEstimate:
        return estimate_step(
            "wavefront",
            make_workload(),
            make_rates(),
            Passes(forward_s, backward_s),
            arrivals,
            overlaps_forward=True,
            last_forward=last_forward,
        )

    short = estimate(1.0, 5.0)
    assert short.step_s == pytest.approx(5.0 / TILES + update_s, rel=1e-3)
    assert short.exposed_s == pytest.approx(short.step_s - 6.0)
    assert estimate(1.0, 5.0, 0.25).step_s == pytest.approx(short.step_s + 0.25)
    long = estimate(4.0, 9.0)
    assert long.step_s == 13.0
    assert long.exposed_s == 0.0


def test_passes_are_the_resident_step_without_its_update() -> None:
    workload, rates = make_workload(), make_rates(device_s=0.1)
    passes = passes_of(9.0, workload, rates, forward_share=0.25)
    assert passes.forward_s == pytest.approx(2.0)
    assert passes.backward_s == pytest.approx(6.0)
    with pytest.raises(ConfigError, match=r"0\.500 s"):
        passes_of(0.5, workload, rates, forward_share=0.25)
    with pytest.raises(ConfigError, match="forward_share=1"):
        passes_of(9.0, workload, rates, forward_share=1.0)
