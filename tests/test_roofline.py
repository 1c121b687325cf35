"""The roofline's formula, and exposed time that adds up."""

from __future__ import annotations

import pytest
from _roofline import CAUSES, Compute, exposed, roofline, turn_shares
from _shapes import SHAPES

COMPUTE = Compute(forward_s=0.25, backward_s=0.6, turn_s=0.07)


@pytest.mark.parametrize(
    ("mode", "update_s", "overlaps", "expected"),
    [
        ("offload-resident", 0.05, False, 0.9),
        ("chunked-stream", 1.0, False, 1.85),
        ("wavefront", 0.3, False, 0.25 + 0.6 + 0.003),  # hidden, but for the last tile
        ("wavefront", 1.0, False, 0.25 + 0.06 + 1.0),  # the update is longer than backward
        ("hybrid", 0.5, True, 0.85),
        ("hybrid", 1.0, True, 1.07),
    ],
)
def test_what_the_rates_allow(mode: str, update_s: float, overlaps: bool, expected: float) -> None:
    found = roofline(mode, COMPUTE, update_s, num_chunks=10, num_tiles=100, overlaps_forward=overlaps)
    assert found == pytest.approx(expected)


def test_the_turn_is_the_head_and_the_last_layer() -> None:
    """At 8,192 tokens Qwen3-4B's head is 19 of the 98 TFLOP of forward, a layer 2.2; it is recomputed once in backward."""
    of_forward, of_backward = turn_shares(SHAPES["qwen3-4b"].counted(), 8192, 8192)
    assert of_forward == pytest.approx((2.2 + 19.1) / (36 * 2.2 + 19.1), rel=0.02)
    assert of_backward == pytest.approx(1 / 108)
    long, _ = turn_shares(SHAPES["qwen3-4b"].counted(), 32768, 32768)
    assert long < of_forward  # attention is of the layers


def test_exposed_time_adds_up_to_what_a_step_takes_longer() -> None:
    run = {"forward_s": 0.3, "backward_s": 0.9, "optimizer_s": 0.1, "stages": {"timings.hook": 0.2}}
    found = exposed(run, COMPUTE)
    assert found.keys() == CAUSES.keys()
    assert sum(found.values()) == pytest.approx(0.3 + 0.9 + 0.1 - 0.85)
    assert found["hooks"] == 0.2
