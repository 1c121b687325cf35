"""Predictions against measured runs: the committed ones on an H200, and those that others have published.

What goes in is measured too, each with its source; nothing is fitted to the rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _shapes import SHAPES

from offload.cli.model_shape import ModelShape, shape_of_config
from offload.cli.workload import Run, activations_of, arrivals_of, forward_share_of, workload_of
from offload.config import OffloadConfig
from offload.rates import UPDATE_BYTES, Rates
from offload.schedule.memory_estimate import device_peak_bytes
from offload.schedule.mode_costs import PLACEMENTS, Machine, needs_of
from offload.schedule.step_estimate import StepEstimate, estimate_step, passes_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STEPS = json.loads((RESULTS / "h200-step.json").read_text(encoding="utf-8"))
KERNEL = json.loads((RESULTS / "h200-kernel.json").read_text(encoding="utf-8"))

MODES = {"resident": "resident", "offload-resident": "resident", "wavefront": "wavefront"}
"""Names in the results and what they are here; other modes of the file are not predicted."""

MACHINE = Machine(device="cuda", free_device_bytes=None, available_host_bytes=1 << 62)
H200_LINK = 48e9  # each way with both busy
H200_MEMORY = 3.3e12  # of the update kernel on the device

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False,
}  # fmt: skip

#: Of PrimeIntellect-ai/prime-rl, pull request 3234, 8 H200: tokens, seconds resident, seconds offloaded (middles of the
#: ranges that it gives). A native kernel, 2.04 Gparam/s a rank, a link of 55 GB/s, 3.8 G parameters a rank.
PUBLISHED = [(8192, 1.75, 3.96), (16384, 5.17, 5.73), (32768, 18.5, 16.05)]

#: Of the same: tokens, peaks of device memory in GiB, resident and offloaded.
PUBLISHED_PEAKS = [(8192, 63.1, 17.5), (16384, 67.0, 21.5), (32768, 73.7, 29.0), (65536, 90.3, 44.9)]


def make_rates(kernel: float, link: float, memory: float = H200_MEMORY) -> Rates:
    return Rates(kernel, UPDATE_BYTES * kernel, link, link, link, memory)


def rows() -> list[dict[str, Any]]:
    plain = not STEPS["optimizer"] and not STEPS["config"]
    return [run for run in STEPS["runs"] if plain and run["status"] == "ok" and run["mode"] in MODES]


def resident_of(row: dict[str, Any]) -> dict[str, Any]:
    return next(run for run in STEPS["runs"] if run["mode"] == "resident" and run["seq"] == row["seq"])


def run_of(row: dict[str, Any]) -> Run:
    """scripts/bench_step.py has activation checkpointing and a loss in chunks."""
    made = SHAPES[STEPS["model"]]
    shape = ModelShape(
        made.num_layers, made.hidden, made.intermediate, made.vocabulary, made.num_heads, made.num_kv_heads,
        made.head_dim, tied=True, qk_norm=True,
    )  # fmt: skip
    assert shape.numel == STEPS["parameters"]
    return Run(shape, STEPS["batch"] * row["seq"], row["seq"], chunked_loss=True)


def predict(row: dict[str, Any], *, measured_share: bool) -> StepEstimate:
    resident, run = resident_of(row), run_of(row)
    workload = workload_of(run, OffloadConfig())
    rates = make_rates(1e9 * KERNEL["update_gparam_per_s"], H200_LINK)
    both = resident["forward_s"] + resident["backward_s"]
    share = resident["forward_s"] / both if measured_share else forward_share_of(run)
    passes = passes_of(resident["step_s"], workload, rates, forward_share=share)
    return estimate_step(MODES[row["mode"]], workload, rates, passes, arrivals_of(run))


def named(row: dict[str, Any]) -> str:
    return f"{row['mode']}-{row['seq']}"


def test_there_are_rows_to_predict() -> None:
    assert {row["mode"] for row in rows()} >= {"resident", "wavefront"}


@pytest.mark.parametrize("measured_share", [True, False])
@pytest.mark.parametrize("row", rows(), ids=named)
def test_step_on_an_h200(row: dict[str, Any], measured_share: bool) -> None:
    """Also where the division into forward and backward is not measured."""
    assert predict(row, measured_share=measured_share).step_s == pytest.approx(row["step_s"], rel=0.15)


@pytest.mark.parametrize("row", rows(), ids=named)
def test_device_memory_on_an_h200(row: dict[str, Any]) -> None:
    run = run_of(row)
    workload = workload_of(run, OffloadConfig())
    mode = MODES[row["mode"]]
    needs = needs_of(mode, workload, MACHINE)
    peak = device_peak_bytes(PLACEMENTS[mode], needs, workload, activations_of(run))
    assert peak == pytest.approx(row["peak_device_bytes"], rel=0.15)


@pytest.mark.parametrize("row", [row for row in rows() if row["mode"] == "wavefront"], ids=named)
def test_host_memory_on_an_h200(row: dict[str, Any]) -> None:
    """The plan counts the gradients of the first step, so it is the peak that it foresees."""
    needs = needs_of("wavefront", workload_of(run_of(row), OffloadConfig()), MACHINE)
    assert needs.host == pytest.approx(row["peak_host_bytes"], rel=0.15)
    assert needs.pinned == pytest.approx(row["pinned_bytes"], rel=0.15)


@pytest.mark.parametrize(("tokens", "resident_s", "offloaded_s"), PUBLISHED)
def test_published_steps(tokens: int, resident_s: float, offloaded_s: float) -> None:
    """At 8 K it is lower than what they measured: their pipeline widens gradients in a pass of its own, 0.62 s there."""
    run = Run(shape_of_config(QWEN3_30B_A3B), tokens, tokens, ranks=8)
    workload = workload_of(run, OffloadConfig())
    assert workload.numel == pytest.approx(3.8e9, rel=0.01)
    rates = make_rates(2.04e9, 55e9)
    passes = passes_of(resident_s, workload, rates, forward_share=forward_share_of(run))
    estimate = estimate_step("wavefront", workload, rates, passes, arrivals_of(run))
    assert estimate.step_s == pytest.approx(offloaded_s, rel=0.35)


@pytest.mark.parametrize(("tokens", "resident_gib", "offloaded_gib"), PUBLISHED_PEAKS)
def test_published_device_memory(tokens: int, resident_gib: float, offloaded_gib: float) -> None:
    run = Run(shape_of_config(QWEN3_30B_A3B), tokens, tokens, ranks=8, chunked_loss=True)
    workload = workload_of(run, OffloadConfig())
    for mode, measured_gib in (("resident", resident_gib), ("wavefront", offloaded_gib)):
        needs = needs_of(mode, workload, MACHINE)
        peak = device_peak_bytes(PLACEMENTS[mode], needs, workload, activations_of(run))
        assert peak / 2**30 == pytest.approx(measured_gib, rel=0.15)


def test_every_mode_has_an_estimate() -> None:
    run = run_of({"seq": 8192})
    workload, rates = workload_of(run, OffloadConfig()), make_rates(4e9, H200_LINK)
    passes = passes_of(1.0, workload, rates, forward_share=0.3)
    for mode in PLACEMENTS:
        assert estimate_step(mode, workload, rates, passes, arrivals_of(run)).step_s >= 1.0 - 1e-9
