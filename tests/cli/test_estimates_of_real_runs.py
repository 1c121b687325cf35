"""Predictions against measured runs: the committed ones on an H200, and those that others have published.

What goes in is measured too, each with its source; nothing is fitted to the rows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _shapes import SHAPES

from offload.cli.hybrid import HybridEstimate, hybrid_estimate
from offload.cli.model_shape import ModelShape, shape_of_config
from offload.cli.recommend import ModeRow, mode_rows
from offload.cli.workload import Run, arrivals_of, flops_of, forward_share_of, workload_of
from offload.config import OffloadConfig
from offload.rates import UPDATE_BYTES, Rates
from offload.schedule.mode_costs import PLACEMENTS, Machine
from offload.schedule.step_estimate import Passes, estimate_step, passes_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"

FILES = (
    "step",
    "step-13-threads",
    "8k",
    "32k",
    "32k-floor",
    "32k-plain",
    "no-clipping",
    "speculate",
    "x2-step",
)
"""Those of docs/results with whole steps. Not `h200-deterministic*`, whose model has no resident row."""

LEANER = "32k-plain"
"""Of a decoder whose norms keep nothing in FP32; the estimate has those of ``transformers``."""

MODES = {
    "resident": "resident",
    "offload-resident": "resident",
    "wavefront": "wavefront",
    "hybrid": "hybrid",
}
"""Names in the results and what they are here; other modes of the files are not predicted."""

OLD_FILES = ("no-clipping", "speculate", "x2-step")
"""Those of an earlier version, with other defaults and rates."""

NOTHING_MOVES = ("step-13-threads", "8k", "32k", "32k-plain")
"""Hybrids of these had nothing pinned beyond their planned share: with the forward overlapped shares were not corrected."""

OLD_DEFAULTS = OffloadConfig(ring_slots=8, backlog_tiles=32)
"""Today there are 16 slots, and 48 tiles where the forward overlaps."""

IN_PLACE = 4 / 3
"""`rates` of `OLD_FILES` counted three of the four bytes that a store to a third array moves."""

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

#: Of the same runs: tokens, peak of device memory in GiB, resident and offloaded.
PUBLISHED_MEMORY = [(8192, 63.1, 17.5), (16384, 67.0, 21.5), (32768, 73.7, 29.0), (65536, 90.3, 44.9)]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"h200-{name}.json").read_text(encoding="utf-8"))


STEPS = {name: read(name) for name in FILES}
KERNEL_RATE = 1e9 * read("kernel")["update_gparam_per_s"]


class Case(NamedTuple):
    """A row of a results file."""

    file: str
    row: dict[str, Any]

    @property
    def mode(self) -> str:
        return MODES[self.row["mode"]]

    @property
    def resident(self) -> dict[str, Any]:
        """The resident step of the same machine and length, which another file may have."""
        names = (self.file, "step")
        runs = (run for name in names for run in STEPS[name]["runs"])
        return next(run for run in runs if run["mode"] == "resident" and run["seq"] == self.row["seq"])

    @property
    def rates(self) -> Rates:
        update = self.row.get("update")
        if update is None:  # the file has none, or the row is resident: those of the kernel's own file
            return make_rates(KERNEL_RATE, H200_LINK)
        rates = Rates(**update["rates"])
        is_old = self.file in OLD_FILES
        return replace(rates, kernel_numel=IN_PLACE * rates.kernel_numel) if is_old else rates

    @property
    def as_run(self) -> OffloadConfig:
        """What the run had, or its defaults."""
        return OLD_DEFAULTS if self.file in OLD_FILES else OffloadConfig(**STEPS[self.file]["config"])


def make_rates(kernel: float, link: float, memory: float = H200_MEMORY) -> Rates:
    return Rates(kernel, UPDATE_BYTES * kernel, link, link, link, memory)


def cases(*modes: str) -> list[Any]:
    """All rows that are predicted, or those of some modes."""
    found = [Case(name, row) for name in FILES for row in STEPS[name]["runs"]]
    found = [case for case in found if case.row["status"] == "ok" and case.row["mode"] in MODES]
    chosen = [case for case in found if case.mode in (modes or MODES.values())]
    return [pytest.param(case, id=f"{case.file}-{case.row['mode']}-{case.row['seq']}") for case in chosen]


def run_of(case: Case) -> Run:
    """scripts/bench_step.py has activation checkpointing and a loss in chunks."""
    results = STEPS[case.file]
    made = SHAPES[results["model"]]
    shape = ModelShape(
        made.num_layers, made.hidden, made.intermediate, made.vocabulary, made.num_heads, made.num_kv_heads,
        made.head_dim, tied=True, qk_norm=True,
    )  # fmt: skip
    assert shape.numel == results["parameters"]
    options = results["optimizer"]
    return Run(
        shape,
        results["batch"] * case.row["seq"],
        case.row["seq"],
        ranks=results.get("ranks", 1),
        chunked_loss=True,
        holds_gradients="max_grad_norm" in options,
        overlap_forward=options.get("overlap_forward", False),
    )


def passes_for(case: Case, *, measured_share: bool) -> Passes:
    resident, run = case.resident, run_of(case)
    both = resident["forward_s"] + resident["backward_s"]
    share = resident["forward_s"] / both if measured_share else forward_share_of(run)
    return passes_of(resident["step_s"], workload_of(run, OffloadConfig()), case.rates, forward_share=share)


def predict(case: Case, config: OffloadConfig, *, measured_share: bool = False) -> ModeRow:
    """The row of `offload plan`."""
    passes = passes_for(case, measured_share=measured_share)
    rows = mode_rows(run_of(case), config=config, budgets={}, rates=case.rates, passes=passes)
    return next(row for row in rows if row.mode == case.mode)


def hybrid_of(case: Case, config: OffloadConfig) -> HybridEstimate:
    passes = passes_for(case, measured_share=True)
    machine = replace(MACHINE, device_budget=config.device_budget)
    return hybrid_estimate(run_of(case), config, machine, case.rates, passes)


def test_there_are_rows_to_predict() -> None:
    assert len(cases("resident")) >= 4
    assert len(cases("wavefront")) >= 6
    assert len(cases("hybrid")) >= 3


@pytest.mark.parametrize("measured_share", [True, False])
@pytest.mark.parametrize("case", cases())
def test_step_on_an_h200(case: Case, measured_share: bool) -> None:
    """Also where the division into forward and backward is not measured."""
    step_s = predict(case, case.as_run, measured_share=measured_share).step_s
    assert step_s is not None
    assert step_s == pytest.approx(case.row["step_s"], rel=0.15)


@pytest.mark.parametrize("case", cases())
def test_device_memory_on_an_h200(case: Case) -> None:
    predicted, measured = predict(case, case.as_run).device_bytes, case.row["peak_device_bytes"]
    if case.mode == "hybrid":  # both of its queues full: a bound
        most = 1.16 if case.file == LEANER else 1.15
        assert measured <= predicted <= most * measured
    else:
        assert predicted == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("case", cases("wavefront", "hybrid"))
def test_host_memory_on_an_h200(case: Case) -> None:
    """The plan counts the gradients of the first step, so it is the peak that it foresees."""
    row = predict(case, case.as_run)
    assert row.host_bytes == pytest.approx(case.row["peak_host_bytes"], rel=0.15)
    if case.file not in NOTHING_MOVES or case.mode != "hybrid":
        assert row.pinned_bytes == pytest.approx(case.row["pinned_bytes"], rel=0.15)


@pytest.mark.parametrize("case", cases("hybrid"))
def test_a_hybrid_is_planned_as_the_optimizer_does(case: Case) -> None:
    """The same chunks, cut as `assembly` cuts them; the embedding, which comes last, on the device where it has room."""
    run = run_of(case)
    made = hybrid_of(case, case.as_run).plan
    assert sum(chunk.numel for chunk in made.chunks) == pytest.approx(run.shape.numel, rel=1e-3)
    assert max(chunk.numel for chunk in made.chunks[:-2]) <= 32 * 2**20
    on_device = [chunk.name for chunk in made.chunks if chunk.placement is PLACEMENTS["resident"]]
    assert on_device == ([] if case.as_run.device_budget else ["misc.0"])
    assert made.stream_share is not None
    assert 0.4 < made.stream_share < 0.7


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


@pytest.mark.parametrize(("tokens", "resident_gib", "offloaded_gib"), PUBLISHED_MEMORY)
def test_published_memory(tokens: int, resident_gib: float, offloaded_gib: float) -> None:
    """Reductions are FP32 there by default (``reduce_dtype`` of its model configuration), logits never whole."""
    run = Run(shape_of_config(QWEN3_30B_A3B), tokens, tokens, ranks=8, chunked_loss=True, reduce_dtype="fp32")
    rows = {row.mode: row for row in mode_rows(run, config=OffloadConfig(), budgets={})}
    assert rows["resident"].device_bytes / 2**30 == pytest.approx(resident_gib, rel=0.15)
    assert rows["wavefront"].device_bytes / 2**30 == pytest.approx(offloaded_gib, rel=0.15)


def test_every_mode_has_an_estimate() -> None:
    run = Run(shape_of_config(QWEN3_30B_A3B), 8192, 8192, ranks=8)
    rates = make_rates(4e9, H200_LINK)
    both = sum(flops_of(run)) / 4e14
    rows = mode_rows(
        run, config=OffloadConfig(), budgets={}, rates=rates, passes=Passes(0.3 * both, 0.7 * both)
    )
    assert {row.mode for row in rows} == {*PLACEMENTS, "hybrid"}
    assert all(row.step_s is not None and row.step_s >= both - 1e-9 for row in rows)
