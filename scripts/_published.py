"""What has been published for a native full offload of Qwen3-30B-A3B under FSDP2 on eight H200: PrimeIntellect-ai/prime-rl,
pull request 3234. Forty-eight layers, 3.8 G parameters a rank."""

from __future__ import annotations

from typing import Any, NamedTuple

from _measure import GIB, format_table, in_gib

MODEL = "qwen3-30b-a3b"
RANKS = 8
LAYERS = 48


class Row(NamedTuple):
    """One sequence length: share of the resident throughput that is kept (1.0: parity was reported), peaks in GiB, seconds
    of a step (middles of reported ranges; None: not known)."""

    seq: int
    share: float
    resident_gib: float
    offloaded_gib: float
    resident_s: float | None
    offloaded_s: float | None


ROWS = (
    Row(8192, 0.44, 63.1, 17.5, 1.75, 3.96),
    Row(16_384, 0.90, 67.0, 21.5, 5.17, 5.73),
    Row(32_768, 1.0, 73.7, 29.0, 18.5, 16.05),
    Row(65_536, 1.0, 90.3, 44.9, None, None),
)

STAGES_AT_8K_S = {"kernel": 1.86, "widening of gradients": 0.62, "exposed drain": 0.92}


def beside(model: str, runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """For the JSON: the published rows of the lengths that were run; None for another model."""
    lengths = {run["seq"] for run in runs if "seq" in run}
    rows = [row._asdict() for row in ROWS if row.seq in lengths]
    if model != MODEL or not rows:
        return None
    return {"source": " ".join((__doc__ or "").split()), "rows": rows, "stages_at_8k_s": STAGES_AT_8K_S}


def print_beside(result: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Each finished run next to the published row of its length."""
    if result.get("published") is None:
        return
    rows = {row["seq"]: row for row in result["published"]["rows"]}
    print("\n" + _title(result) + "\n")
    headers = (
        "mode", "seq", "step s", "published", "of resident", "published", "device GiB", "published",
    )  # fmt: skip
    print(format_table(headers, [_cells(run, rows[run["seq"]]) for run in runs if run["seq"] in rows]))
    stages = ", ".join(f"{name} {seconds} s" for name, seconds in STAGES_AT_8K_S.items())
    print(f"\nPublished stages at 8,192 tokens: {stages}.")


def _title(result: dict[str, Any]) -> str:
    words = (
        "Next to what was published for 48 layers on 8 ranks (a native full offload; resident for resident)"
    )
    if (result["ranks"], result["layers"]) == (RANKS, LAYERS):
        return f"{words}:"
    return f"{words}. Not the same size: this is {result['layers']} layers on {result['ranks']} rank(s):"


def _cells(run: dict[str, Any], row: dict[str, Any]) -> list[str]:
    kind = "resident" if "resident" in run["mode"] else "offloaded"
    share, seconds = run["share_of_resident"], row[f"{kind}_s"]
    return [
        run["mode"],
        str(run["seq"]),
        f"{run['step_s']:.3f}",
        "-" if seconds is None else f"{seconds:.2f}",
        "-" if share is None else f"{share:.1%}",
        "100%" if kind == "resident" else f"{row['share']:.0%}",
        in_gib(run["peak_device_bytes"]),
        in_gib(row[f"{kind}_gib"] * GIB),
    ]
