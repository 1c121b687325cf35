"""What bench_step.py makes of its runs: shares of the baseline, rooflines, and the tables that it prints."""

from __future__ import annotations

from typing import Any

from _measure import format_table, in_gib, stage_rows
from _optimizers import ALONE, BASELINE
from _published import print_beside
from _resume import describe
from _roofline import CAUSES, Compute, exposed, roofline, turn_shares

from offload.cli.model_shape import ModelShape

RATES = {"kernel_numel": "host Gparam/s", "duplex_bytes": "link GB/s each way"}


def compare_with_first(runs: list[dict[str, Any]], shape: ModelShape, batch: int) -> None:
    """Adds to each run its share of the baseline's throughput and its losses' distance from the first mode's.

    Args:
        shape, batch: of the model and of a step, for the roofline.
    """
    done = [run for run in runs if run["status"] == "ok"]
    for run in done:
        peers = [peer for peer in done if peer["seq"] == run["seq"]]
        reference = next((peer for peer in peers if peer["mode"] != ALONE), run)["losses"]
        run["max_loss_difference"] = max(abs(a - b) for a, b in zip(run["losses"], reference, strict=True))
        run["bit_equal_losses"] = run["losses"] == reference
        baseline = next((peer for peer in peers if peer["mode"] == BASELINE), None)
        run["share_of_resident"] = baseline and baseline["step_s"] / run["step_s"]
        if baseline is not None:
            forward_s, backward_s = baseline["forward_s"], baseline["backward_s"]
            of_forward, of_backward = turn_shares(shape, batch * run["seq"], run["seq"])
            turn_s = of_forward * forward_s + of_backward * backward_s
            add_roofline(run, Compute(forward_s, backward_s, turn_s))


def add_roofline(run: dict[str, Any], compute: Compute) -> None:
    """The time that the rates allow, the share of it reached, and the exposed seconds by cause."""
    run["exposed_s"] = exposed(run, compute)
    update = run.get("update")
    if update is None:
        return
    run["roofline_s"] = roofline(
        run["mode"],
        compute,
        update["seconds"],
        num_chunks=update["chunks"],
        num_tiles=update["tiles"],
        overlaps_forward=update["overlaps_forward"],
    )
    run["share_of_roofline"] = run["roofline_s"] / run["step_s"]


def print_tables(result: dict[str, Any]) -> None:
    done = [run for run in result["runs"] if run["status"] == "ok"]
    for run in result["runs"]:
        if run["status"] != "ok":
            print(f"{run['mode']} at {run.get('seq', 'start')}: {run['status']}: {run['error']}")
    if not done:
        return
    sharded = f", FSDP2 on {result['ranks']} rank(s), figures of rank 0" if result["sharded"] else ""
    size = f"{result['layers']} layers, {result['parameters'] / 1e9:.3f} G parameters"
    print(f"\n{result['model']}, {size}, {result['implementation']}{sharded}\n")
    headers = (
        "mode", "seq", "step s", "mean s", "of resident", "tokens/s", "forward s", "backward s", "optimizer s",
        "device GiB", "reserved GiB", "pinned GiB", "host GiB",
    )  # fmt: skip
    print(format_table(headers, [table_row(run) for run in done]))
    print_rooflines([run for run in done if "exposed_s" in run])
    print_machine(result)
    print_construction(result)
    print_beside(result, done)
    print_threads(result["threads"])
    for mode, check in result["checkpoints"].items():
        print(f"\nCheckpoint, {describe(mode, check)}")
    for run in done:
        if run["long_run"] is not None:
            gained = ", ".join(f"{name} {num:+,}" for name, num in run["long_run"]["growth_bytes"].items())
            slower = f"{run['long_run']['slowdown']:+.1%}"
            print(
                f"\n{run['mode']} at {run['seq']} tokens, long run: bytes gained: {gained}; last steps {slower}"
            )
    for length in dict.fromkeys(run["seq"] for run in done):
        print_losses(length, [run for run in done if run["seq"] == length and run["mode"] != ALONE])
    for run in done:
        if run["stages"]:
            title = f"{run['mode']}, {run['seq']} tokens"
            print("\n" + format_table((title, "median"), stage_rows(run["stages"])))


def table_row(run: dict[str, Any]) -> list[str]:
    share = run["share_of_resident"]
    return [
        run["mode"],
        str(run["seq"]),
        f"{run['step_s']:.3f}",
        f"{run['mean_step_s']:.3f}",
        "-" if share is None else f"{share:.1%}",
        f"{run['tokens_per_s']:.0f}",
        *(f"{run[name]:.3f}" for name in ("forward_s", "backward_s", "optimizer_s")),
        *(in_gib(run[f"{name}_bytes"]) for name in ("peak_device", "peak_reserved", "pinned", "host")),
    ]


def print_rooflines(runs: list[dict[str, Any]]) -> None:
    """See docs/roofline.md."""
    if not runs:
        return
    rows = [
        [
            run["mode"],
            str(run["seq"]),
            *(f"{run[name]:.3f}" if name in run else "-" for name in ("step_s", "roofline_s")),
            f"{run['share_of_roofline']:.1%}" if "share_of_roofline" in run else "-",
            *(f"{run['exposed_s'][cause]:.3f}" for cause in CAUSES),
        ]
        for run in runs
    ]
    headers = (
        "mode",
        "seq",
        "step s",
        "roofline s",
        "of roofline",
        *(f"exposed: {cause} s" for cause in CAUSES),
    )
    print("\nRoofline, and the time above forward and backward alone, by cause (docs/roofline.md):\n")
    print(format_table(headers, rows))


def print_machine(result: dict[str, Any]) -> None:
    """What the host and its link gave before and after each mode's steps, and how long its optimizer took to make."""
    billions = result["parameters"] / 1e9
    rows = [
        [
            mode,
            *(f"{rates[when][name] / 1e9:.2f}" for name in RATES for when in ("before", "after")),
            f"{result['construction_s'][mode]:.1f}",
            f"{result['construction_s'][mode] / billions:.2f}",
        ]
        for mode, rates in result["rates"].items()
    ]
    if rows:
        columns = [f"{words} {when}" for words in RATES.values() for when in ("before", "after")]
        print("\nThe machine before and after each mode's steps, and the optimizer's construction:\n")
        print(format_table(("mode", *columns, "construction s", "s per G"), rows))


def print_construction(result: dict[str, Any]) -> None:
    """Where the time went while each optimizer was made; stages overlap."""
    built = result["construction"]
    stages = list(dict.fromkeys(stage for each in built.values() for stage in each["stages"]))
    rows = [
        [
            mode,
            *(f"{each['stages'][stage]:.2f}" if stage in each["stages"] else "-" for stage in stages),
            "-" if each["close_s"] is None else f"{each['close_s']:.2f}",
            "-" if each["huge_page_bytes"] is None else f"{each['huge_page_bytes'] / 2**30:.1f}",
            f"{each['host_bytes_built'] / 2**30:.1f}",
        ]
        for mode, each in built.items()
    ]
    if rows:
        print(
            "\nThe optimizer's construction in seconds, by stage (they overlap), and the process's memory after it:\n"
        )
        headers = ("mode", *stages, "close", "GiB on huge pages", "of GiB")
        print(format_table(headers, rows))


def print_losses(length: int, runs: list[dict[str, Any]]) -> None:
    print(f"\nLosses at {length} tokens, warm-up included:\n")
    steps = zip(*(run["losses"] for run in runs), strict=True)
    rows = [[str(step), *(f"{loss:.6f}" for loss in losses)] for step, losses in enumerate(steps)]
    rows.append(["max difference", *(f"{run['max_loss_difference']:.2g}" for run in runs)])
    rows.append(["bit-equal", *("yes" if run["bit_equal_losses"] else "no" for run in runs)])
    print(format_table(["step", *(run["mode"] for run in runs)], rows))


def print_threads(budgets: list[dict[str, Any]] | None) -> None:
    """How many CPU threads each rank's optimizer has, and why."""
    if not budgets:
        return
    rows = [
        [str(rank), str(budget["num_threads"]), str(len(budget["cpus"])), budget["reason"]]
        for rank, budget in enumerate(budgets)
    ]
    print("\nThread budget of the host kernels:\n")
    print(format_table(("rank", "threads", "CPUs", "why"), rows))
