"""The hybrid's plan on made-up machines: shares, placements, amounts, and when `auto` takes it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from offload.errors import MemoryBudgetError
from offload.rates import Rates
from offload.schedule.balancer import FIRST_STEPS, WORTH_S, Balancer
from offload.schedule.hybrid_plan import MAX_SLOTS, balance, place
from offload.schedule.plan import SPARE_SHARE, ChunkSize, Machine, Placement, Workload, needs_rates, plan

MIB, GIB = 2**20, 2**30
LAYER, EMBEDDING, NUM_LAYERS = 100 * MIB, 380 * MIB, 36
CHUNKS = (
    *(ChunkSize(f"layers.{i}", LAYER, 1 + i) for i in range(NUM_LAYERS)),
    ChunkSize("misc", EMBEDDING, 0),
)
NUMEL = NUM_LAYERS * LAYER + EMBEDDING
WORKLOAD = Workload(
    numel=NUMEL,
    state_arrays=3,
    ring_bytes=256 * MIB,
    holds_gradients=False,
    gradient_bytes=2 * NUMEL,
    accumulates=False,
    weight_bytes=2 * NUMEL,
    backlog_bytes=512 * MIB,
    tile_bytes=48 * MIB,
    num_slots=4,
    chunks=CHUNKS,
    stream_tile_numel=4 * MIB,
    tile_numel=4 * MIB,
    can_mix=True,
)
GPU = Machine(device="cuda", free_device_bytes=70 * GIB, available_host_bytes=500 * GIB)
RATES = Rates(
    kernel_numel=4.0e9,
    host_bytes=116e9,
    to_device_bytes=55e9,
    to_host_bytes=55e9,
    duplex_bytes=48e9,
    device_bytes=3300e9,
)


def change(value: Any, **fields: Any) -> Any:
    return dataclasses.replace(value, **fields)


def numel_of(placements: Any, placement: Placement) -> int:
    return sum(chunk.numel for chunk, each in zip(CHUNKS, placements, strict=True) if each is placement)


# Shares


def test_both_sides_end_together_at_the_best_share() -> None:
    found = balance(NUMEL, stream_bytes=12, edge_bytes=2, rates=RATES)
    assert 0.45 <= found.share <= 0.65
    assert found.host_s == pytest.approx(found.link_s, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "low", "high"), [({"kernel_numel": 40e9}, 0.0, 0.2), ({"duplex_bytes": 400e9}, 0.9, 1.0)]
)
def test_the_faster_side_gets_more(fields: dict[str, float], low: float, high: float) -> None:
    assert low <= balance(NUMEL, stream_bytes=12, edge_bytes=2, rates=change(RATES, **fields)).share <= high


def test_a_long_backward_needs_no_more_streaming_than_it_takes_to_hide() -> None:
    shares = [
        balance(NUMEL, stream_bytes=12, edge_bytes=2, rates=RATES, backward_s=seconds).share
        for seconds in (0.3, 1.0, 1.5, 5.0)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0.0
    assert shares[0] == balance(NUMEL, stream_bytes=12, edge_bytes=2, rates=RATES).share


# Placements


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0])
def test_the_share_is_spread_over_the_layers(share: float) -> None:
    placements = place(CHUNKS, share, EMBEDDING)
    assert placements[-1] is Placement.DEVICE
    streamed = [placement is Placement.STREAM for placement in placements[:-1]]
    for stop in range(1, NUM_LAYERS + 1):
        assert abs(sum(streamed[:stop]) - share * stop) <= 1
    assert sum(streamed) == pytest.approx(share * NUM_LAYERS, abs=0.5)


def test_room_on_the_device_goes_to_what_backward_reaches_last() -> None:
    placements = place(CHUNKS, 0.5, EMBEDDING + 2 * LAYER + 5)
    assert [c.name for c, p in zip(CHUNKS, placements, strict=True) if p is Placement.DEVICE] == [
        "layers.0",
        "layers.1",
        "misc",
    ]
    assert Placement.DEVICE not in place(CHUNKS, 0.5, EMBEDDING - 1)


# Division

DIVIDING = change(WORKLOAD, divide_numel=64 * MIB)
NO_ROOM = change(GPU, device_budget=MAX_SLOTS * 48 * MIB)  # buffers, and no room for a chunk
TILES = EMBEDDING // (4 * MIB)


def test_a_large_last_chunk_is_divided_as_the_share_is() -> None:
    made = plan("hybrid", DIVIDING, NO_ROOM, RATES)
    assert made.stream_share is not None
    assert list(made.divisions) == [NUM_LAYERS]
    tiles, rest = divmod(made.divisions[NUM_LAYERS], 4 * MIB)
    assert rest == 0
    assert tiles == pytest.approx((1 - made.stream_share) * TILES, abs=0.5)
    assert made.placements[-1] is Placement.STREAM
    assert f"misc comes last and is divided: the host steps {tiles} of its {TILES} tiles while" in str(made)
    on_device = plan("hybrid", DIVIDING, GPU, RATES)
    assert on_device.placements[-1] is Placement.DEVICE
    assert NUM_LAYERS not in on_device.divisions


def test_with_room_for_the_last_chunk_the_one_before_it_is_last() -> None:
    room = change(NO_ROOM, device_budget=NO_ROOM.device_budget + 13 * EMBEDDING)
    assert list(plan("hybrid", DIVIDING, room, RATES).divisions) == [0]
    large = change(DIVIDING, divide_numel=LAYER)
    assert plan("hybrid", large, room, RATES).divisions == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"divide_numel": None},
        {"divide_numel": EMBEDDING},
        {"accumulates": True},
        {"holds_gradients": True},
        {"stream_share": 0.0},
        {"stream_share": 1.0},
        {"stream_share": 0.4 / TILES},  # less than half a tile
        {"chunks": (*CHUNKS[:-1], CHUNKS[-1]._replace(num_params=2))},
        {"chunks": (*CHUNKS[:-1], CHUNKS[-1]._replace(weight_bytes=4, grad_bytes=4))},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_not_divided(fields: dict[str, Any]) -> None:
    made = plan("hybrid", change(DIVIDING, **fields), NO_ROOM, RATES)
    assert made.divisions == {}
    assert "divided" not in str(made)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_other_chunks_take_their_turns_without_it(share: float) -> None:
    made = plan("hybrid", change(DIVIDING, stream_share=share), NO_ROOM)
    assert made.placements[:-1] == place(CHUNKS[:-1], share, 0)
    assert made.num_streamed == made.placements[:-1].count(Placement.STREAM)


def test_all_state_of_a_divided_chunk_is_pinned() -> None:
    made = plan("hybrid", change(DIVIDING, stream_share=0.25), NO_ROOM)
    streamed = numel_of(made.placements, Placement.STREAM)
    assert streamed > EMBEDDING
    assert made.pinned_bytes == 12 * streamed + 9 * streamed // 1024 + 256 * MIB
    stepped = numel_of(made.placements, Placement.HOST)
    assert made.host_bytes == made.pinned_bytes + 12 * stepped + 2 * NUMEL
    on_host = stepped + made.divisions[NUM_LAYERS]
    assert f"{on_host / 1e6:.1f} M parameters: state on the host, stepped there" in str(made)


def test_a_budget_that_leaves_no_room_to_pin_it_whole_leaves_it_undivided() -> None:
    workload = change(DIVIDING, stream_share=0.05)
    made = plan("hybrid", workload, NO_ROOM)
    assert made.divisions
    tight = plan("hybrid", workload, change(NO_ROOM, pinned_budget=made.pinned_bytes - 1))
    assert tight.divisions == {}
    assert tight.placements == place(CHUNKS, 0.05, 0)
    spare = plan("hybrid", change(DIVIDING, rebalances=True), NO_ROOM, RATES)
    less = plan(
        "hybrid",
        change(DIVIDING, rebalances=True),
        change(NO_ROOM, pinned_budget=spare.pinned_bytes - 1),
        RATES,
    )
    assert less.divisions == spare.divisions  # what is pinned to spare goes first


# Amounts


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_amounts(share: float) -> None:
    made = plan("hybrid", change(WORKLOAD, stream_share=share), GPU)
    streamed, stepped = (numel_of(made.placements, each) for each in (Placement.STREAM, Placement.HOST))
    buffers = 48 * MIB * (made.num_slots)
    assert made.num_slots == (MAX_SLOTS if share else 4)
    assert made.device_bytes == 12 * EMBEDDING + 9 * EMBEDDING // 1024 + buffers
    assert made.pinned_bytes == 12 * streamed + 9 * streamed // 1024 + 256 * MIB
    assert made.host_bytes == made.pinned_bytes + 12 * stepped + 2 * (
        stepped + streamed
    )  # the first step's gradients
    waiting = min(512 * MIB, 2 * stepped) + min(512 * MIB, 2 * streamed)
    assert made.peak_device_bytes == made.device_bytes + 2 * NUMEL + 2 * EMBEDDING + waiting
    assert made.stream_share == share
    assert f"stream_share={share} was asked for" in str(made)


def test_accumulators_are_where_gradients_are() -> None:
    fixed = change(WORKLOAD, stream_share=0.5)
    plain, accumulating = (plan("hybrid", change(fixed, accumulates=each), GPU) for each in (False, True))
    assert accumulating.host_bytes - plain.host_bytes == 4 * (NUMEL - EMBEDDING)
    streamed = numel_of(plain.placements, Placement.STREAM)
    assert accumulating.peak_device_bytes - plain.peak_device_bytes == 4 * (EMBEDDING + streamed)


def test_gradients_that_wait_for_a_verdict_do_so_where_their_state_is_stepped() -> None:
    fixed = change(WORKLOAD, stream_share=0.5)
    plain, held = (plan("hybrid", change(fixed, holds_gradients=each), GPU) for each in (False, True))
    streamed = numel_of(plain.placements, Placement.STREAM)
    assert held.peak_device_bytes - plain.peak_device_bytes == 2 * streamed - min(512 * MIB, 2 * streamed)


@pytest.mark.parametrize("field", ["pinned_budget", "host_budget", "device_budget"])
def test_a_budget_is_kept_to_the_byte(field: str) -> None:
    workload = change(WORKLOAD, stream_share=0.5)
    budgeted = change(GPU, device_budget=MAX_SLOTS * 48 * MIB)  # buffers, and no room for a chunk
    made = plan("hybrid", workload, budgeted if field == "device_budget" else GPU)
    amounts = {
        "pinned_budget": made.pinned_bytes,
        "host_budget": made.host_bytes,
        "device_budget": made.device_bytes,
    }
    plan("hybrid", workload, change(GPU, **{field: amounts[field]}))
    with pytest.raises(MemoryBudgetError, match=rf"{field} is .*: 7 bytes are missing"):
        plan("hybrid", workload, change(GPU, **{field: amounts[field] - 7}))


def test_a_large_embedding_stays_off_a_small_device_unless_the_user_gives_room() -> None:
    small = change(GPU, free_device_bytes=20 * GIB)
    assert Placement.DEVICE not in plan("hybrid", WORKLOAD, small).placements
    given = change(small, device_budget=6 * GIB)
    assert plan("hybrid", WORKLOAD, given).placements[-1] is Placement.DEVICE


# Choice


def test_rates_decide_unless_the_user_does() -> None:
    assert needs_rates("hybrid", WORKLOAD, GPU)
    assert not needs_rates("hybrid", change(WORKLOAD, stream_share=0.5), GPU)
    made = plan("hybrid", WORKLOAD, GPU, RATES)
    assert made.stream_share == balance(NUMEL - EMBEDDING, stream_bytes=12, edge_bytes=2, rates=RATES).share
    assert "the link" in str(made)
    assert plan("hybrid", WORKLOAD, GPU).stream_share == 0.5


def test_auto_takes_a_hybrid_where_rates_say_that_it_is_faster() -> None:
    small = change(GPU, free_device_bytes=60 * GIB)
    assert plan("auto", WORKLOAD, small).mode == "wavefront"  # no rates
    made = plan("auto", WORKLOAD, small, RATES)
    assert made.mode == "hybrid"
    assert "a hybrid would leave" in str(made)
    assert plan("auto", change(WORKLOAD, can_mix=False), small, RATES).mode != "hybrid"
    long = change(WORKLOAD, backward_s=5.0)
    assert plan("auto", long, small, RATES).mode == "wavefront"  # all is hidden: nothing to gain


def test_auto_leaves_a_hybrid_that_does_not_fit() -> None:
    small = change(GPU, free_device_bytes=60 * GIB, pinned_budget=GIB)
    made = plan("auto", WORKLOAD, small, RATES)
    assert made.mode == "wavefront"


# Balance


def test_the_later_side_gives_a_chunk_after_two_steps_that_agree() -> None:
    balancer = Balancer(5)
    counts = [balancer.note(0.0, 1.5 * WORTH_S) for _ in range(6)]
    assert counts == [5, 4, 4, 3, 3, 2]


def test_a_large_difference_moves_half_of_what_the_smaller_of_two_steps_calls_for() -> None:
    balancer = Balancer(30)
    lates = [20, 9, 9, 9, 3, 3]
    assert [balancer.note(0.0, late * 1.01 * WORTH_S) for late in lates] == [30, 26, 26, 22, 22, 21]


def test_either_side_may_be_given_more_than_was_planned() -> None:
    more, less = Balancer(9, 5), Balancer(9, 5)
    assert [more.note(9.0, 0.0) for _ in range(4)] == [5, 9, 9, 9]
    assert [less.note(0.0, 9.0) for _ in range(4)] == [5, 0, 0, 0]


def test_more_is_pinned_than_is_streamed_at_first() -> None:
    moving = change(WORKLOAD, rebalances=True)
    made = plan("hybrid", moving, GPU, RATES)
    movable = made.placements.count(Placement.STREAM)
    assert made.num_streamed is not None
    assert made.num_streamed < movable
    assert made.num_streamed / movable == pytest.approx(
        made.stream_share / (made.stream_share + SPARE_SHARE), abs=0.5 / movable
    )
    fixed = plan("hybrid", WORKLOAD, GPU, RATES)
    assert fixed.num_streamed == fixed.placements.count(Placement.STREAM)
    tight = plan("hybrid", moving, change(GPU, pinned_budget=made.pinned_bytes - 1), RATES)
    assert tight.num_streamed == tight.placements.count(Placement.STREAM)
    assert tight.stream_share == made.stream_share


def test_a_move_back_ends_it() -> None:
    balancer = Balancer(5)
    ends = [(0.0, 0.1)] * 2 + [(0.1, 0.0)] * 2 + [(0.0, 0.1)] * 10
    counts = [balancer.note(*end) for end in ends]
    assert counts[1:4] == [2, 2, 5]
    assert set(counts[3:]) == {5}


@pytest.mark.parametrize("end", [(0.1, 0.1 + WORTH_S / 2), (0.0, 0.0)])
def test_small_differences_move_nothing(end: tuple[float, float]) -> None:
    balancer = Balancer(3)
    assert {balancer.note(*end) for _ in range(10)} == {3}


def test_noise_moves_nothing_and_the_first_steps_are_all() -> None:
    balancer = Balancer(100)
    noise = itertools.cycle([(0.1, 0.0), (0.0, 0.1)])
    assert {balancer.note(*next(noise)) for _ in range(FIRST_STEPS)} == {100}
    assert {balancer.note(0.0, 0.1) for _ in range(10)} == {100}


def test_the_count_stays_within_what_can_move() -> None:
    balancer = Balancer(2)
    assert min(balancer.note(0.0, 0.1) for _ in range(20)) == 0
    assert Balancer(2).note(0.1, 0.0) == 2
