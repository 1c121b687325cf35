"""Which mode is recommended, for made-up machines."""

from __future__ import annotations

import re

import pytest

from offload.cli.model_shape import ModelShape
from offload.cli.recommend import ModeRow, mode_rows, recommend
from offload.cli.units import as_gib, parse_bytes
from offload.cli.workload import Run
from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.rates import Rates
from offload.schedule.mode_costs import PLACEMENTS
from offload.schedule.step_estimate import Passes

SHAPE = ModelShape(36, 2560, 9728, 151_936, 32, 8, 128, tied=True, qk_norm=True)
RATES = Rates(4e9, 112e9, 48e9, 48e9, 48e9, 3.3e12)
LONG, SHORT = Passes(1.2, 3.9), Passes(0.05, 0.1)
GIB = 2**30


def rows(passes: Passes | None = LONG, rates: Rates | None = RATES, **budgets: int) -> list[ModeRow]:
    return mode_rows(
        Run(SHAPE, 8192, 8192, chunked_loss=True),
        config=OffloadConfig(),
        budgets=budgets,
        rates=rates,
        passes=passes,
    )


def test_every_mode_has_a_row() -> None:
    made = rows()
    assert [row.mode for row in made] == [*PLACEMENTS, "hybrid"]
    assert all(row.fits for row in made)
    assert made[0].share_of_resident == 1.0
    shares = {row.mode: row.share_of_resident or 0.0 for row in made}
    # What hides its whole update is quicker by the resident one's, which hides none.
    assert 1.0 < shares.pop("hybrid") < 1.02
    assert all(0.0 < share <= 1.0 for share in shares.values())


def test_the_shortest_step_that_fits_is_taken() -> None:
    assert recommend(rows(SHORT)).mode == "resident"
    # Nothing to hide behind: host and link together are quicker than either, and with 1 GiB pinned the host has to do.
    short = recommend(rows(SHORT, device=30 * GIB))
    assert short.mode == "hybrid"
    assert "resident lacks" in short.reason
    assert recommend(rows(SHORT, device=30 * GIB, pinned=GIB)).mode == "wavefront"
    assert recommend(rows(LONG, device=30 * GIB)).mode == "wavefront"


def test_of_equal_steps_resident_is_taken_and_the_leaner_one_named() -> None:
    """Where passes are long enough, the embedding, all that a wavefront exposes, is less than a hundredth."""
    advice = recommend(rows(Passes(10.0, 30.0)))
    assert advice.mode == "resident"
    assert "wavefront is as fast with" in advice.reason
    assert "wavefront is as fast" not in recommend(rows(LONG)).reason


def test_a_hybrid_says_how_it_divides_and_when_less_would_do() -> None:
    passes = Passes(0.3, 0.9)
    made = {row.mode: row for row in rows(passes)}["hybrid"]
    assert any("of the host's state is streamed" in words for words in made.words)
    (hint,) = [words for words in made.words if "backward hides" in words]
    share = float(re.findall(r"stream_share=([\d.]+)\)", hint)[0])
    asked = mode_rows(
        Run(SHAPE, 8192, 8192, chunked_loss=True),
        config=OffloadConfig(stream_share=share),
        budgets={},
        rates=RATES,
        passes=passes,
    )[-1]
    assert asked.step_s == pytest.approx(made.step_s, rel=0.03)
    assert f"{asked.step_s:.2f} s" in hint
    assert asked.pinned_bytes < made.pinned_bytes
    assert f"{as_gib(asked.pinned_bytes)} GiB pinned" in hint
    assert not any("backward hides" in words for words in asked.words)


def test_an_overlapped_forward_hides_more_and_takes_more_of_the_device() -> None:
    def made(overlap: bool) -> dict[str, ModeRow]:
        run = Run(SHAPE, 8192, 8192, chunked_loss=True, overlap_forward=overlap)
        chosen = mode_rows(run, config=OffloadConfig(), budgets={}, rates=RATES, passes=Passes(0.3, 0.6))
        return {row.mode: row for row in chosen}

    plain, overlapped = made(False), made(True)
    for mode in ("wavefront", "hybrid"):
        assert (overlapped[mode].step_s or 0.0) < (plain[mode].step_s or 0.0)
        assert overlapped[mode].device_bytes > plain[mode].device_bytes  # 96 tiles may wait instead of 32
    assert overlapped["chunked-stream"] == plain["chunked-stream"]


def test_what_is_missing_is_named() -> None:
    made = {row.mode: row for row in rows(device=20 * GIB, pinned=GIB)}
    assert set(made["resident"].missing) == {"device"}
    assert set(made["chunked-stream"].missing) == {"pinned"}
    assert made["wavefront"].fits
    assert made["chunked-stream"].missing["pinned"] == made["chunked-stream"].pinned_bytes - GIB


def test_no_mode_may_fit() -> None:
    advice = recommend(rows(device=GIB, host=GIB))
    assert advice.mode is None
    assert "comes closest" in advice.reason


def test_without_a_step_time_half_of_a_wavefront_is_taken_to_hide() -> None:
    made = rows(None, device=30 * GIB)
    assert all(row.step_s is None and row.update_s for row in made)
    assert recommend(made).mode == "hybrid"
    assert recommend([row for row in made if row.mode != "hybrid"]).mode == "wavefront"
    assert recommend(rows(None, None, device=30 * GIB)).mode == "wavefront"
    assert recommend(rows(None, None)).mode == "resident"


@pytest.mark.parametrize(
    ("text", "amount"),
    [("80GiB", 80 * GIB), ("24 GB", 24 * 10**9), ("4096", 4096), ("1.5k", 1500), ("2tib", 2**41)],
)
def test_amounts_of_memory(text: str, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 bytes", "1e9"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no amount"):
        parse_bytes(text)


def test_amounts_are_readable() -> None:
    assert [as_gib(number) for number in (None, GIB // 4, 12 * GIB, 345 * GIB)] == [
        "-",
        "0.25",
        "12.0",
        "345",
    ]
