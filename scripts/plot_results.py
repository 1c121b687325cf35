"""Draw the figures of the documentation from benchmark results, or the timeline of a trace.

    python scripts/plot_results.py                                  # docs/results/*.json to docs/images
    python scripts/plot_results.py out.json --out figures --format png
    python scripts/plot_results.py --trace trace.json --window 0,1500   # milliseconds

What a file holds is told by its content: whole steps (bench_step.py, bench_peers.py) give step time and memory by tokens
and mode, the kernel's figures (bench_kernel.py) its roofline. Other files are named and left out. A trace is a Chrome
trace: complete events (``ph`` is ``X``) with ``ts`` and ``dur`` in microseconds, a row for each ``tid``.

Needs matplotlib: ``pip install 'offload[plots]'``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30

#: Okabe and Ito's colours, which the colour-blind can tell apart; a mode has the same one in every figure.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
MODES = (
    "resident", "wavefront", "hybrid", "chunked-stream", "chunked-sync", "all-at-once", "offload-resident", "auto",
)  # fmt: skip

#: Bytes that each variant of the kernel has to move per parameter: read, then written.
VARIANT_BYTES = {
    "bf16 -> bf16": 14 + 14,  # gradient 2, master and moments 12; the same and the weight 2
    "bf16 -> bf16, norm": 14 + 14,
    "bf16 -> bf16, accumulator": 18 + 14,
    "bf16 -> bf16, accumulator, norm": 18 + 14,
    "bf16 -> bf16, old state kept": 14 + 14,
    "fp32 -> fp32": 16 + 16,
    "fp32, master is the weight": 16 + 12,
}
FUSED_PIPELINE_BYTES = (2 + 4) + (16 + 12) + (4 + 2)  # widen, step, narrow


def main() -> None:
    args = parse_arguments()
    pyplot = load_matplotlib()
    args.out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def save(figure: Any, name: str) -> None:
        for suffix in args.format:
            path = args.out / f"{name}.{suffix}"
            # Without a date, so that the same results give the same file.
            metadata = {"Date": None} if suffix == "svg" else None
            figure.savefig(path, dpi=150, metadata=metadata)
            written.append(path)
        pyplot.close(figure)

    for path in args.files:
        result = json.loads(path.read_text(encoding="utf-8"))
        for name, figure in figures_of(result, path.stem, pyplot):
            save(figure, name)
    if args.trace is not None:
        trace = json.loads(args.trace.read_text(encoding="utf-8"))
        save(timeline(trace, pyplot, args.window), f"{args.trace.stem}-timeline")
    for path in written:
        print(path)


def figures_of(result: Any, name: str, pyplot: Any) -> Iterable[tuple[str, Any]]:
    """The figures that a result file gives, with their names."""
    runs = finished_runs(result)
    if runs:
        yield name, steps_figure(result, runs, pyplot)
    elif isinstance(result, Mapping) and "gparam_per_s_by_variant" in result:
        yield f"{name}-roofline", roofline(result, pyplot)
    else:
        print(f"{name}: nothing to draw in it")


# Steps ------------------------------------------------------------------------------------------------------


def finished_runs(result: Any) -> list[dict[str, Any]]:
    """Steps that were timed, each with a `label`; those of failed or skipped modes are left out."""
    runs = result.get("runs") if isinstance(result, Mapping) else None
    found = []
    for run in runs if isinstance(runs, list) else ():
        label = run.get("mode") or run.get("peer")
        if label and run.get("status", "ok") == "ok" and run.get("seq") and run.get("step_s"):
            found.append({**run, "label": label})
    return found


def steps_figure(result: Mapping[str, Any], runs: Sequence[dict[str, Any]], pyplot: Any) -> Any:
    """Two panels of bars, grouped by tokens: seconds of a step, and peak memory of the device where it was measured."""
    batch = result.get("batch") or 1
    labels = sorted({run["label"] for run in runs}, key=order_of)
    lengths = sorted({run["seq"] for run in runs})
    has_memory = any(run.get("peak_device_bytes") for run in runs)
    figure, axes = pyplot.subplots(1, 1 + has_memory, figsize=(5 + 4.2 * has_memory, 3.8), squeeze=False)
    draw_bars(axes[0][0], runs, lengths, labels, "step_s", 1.0)
    axes[0][0].set(title="one step", ylabel="seconds")
    if has_memory:
        draw_bars(axes[0][1], runs, lengths, labels, "peak_device_bytes", GIB)
        axes[0][1].set(title="peak device memory", ylabel="GiB")
    for axis in axes[0]:
        axis.set_xticks(range(len(lengths)), [f"{batch * length:,}" for length in lengths])
        axis.set_xlabel("tokens")
        axis.spines[["top", "right"]].set_visible(False)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    figure.suptitle(title_of(result), fontsize=10)
    return figure


def draw_bars(
    axis: Any,
    runs: Sequence[dict[str, Any]],
    lengths: Sequence[int],
    labels: Sequence[str],
    key: str,
    unit: float,
) -> None:
    """A bar for each run that has `key`; of several runs of one kind the last counts."""
    width = 0.8 / len(labels)
    for index, label in enumerate(labels):
        values = {run["seq"]: run[key] / unit for run in runs if run["label"] == label and run.get(key)}
        places = [lengths.index(length) + (index - (len(labels) - 1) / 2) * width for length in values]
        bars = axis.bar(places, list(values.values()), width, label=label, color=colour_of(label))
        axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)


def title_of(result: Mapping[str, Any]) -> str:
    environment = result.get("environment") or {}
    parameters = result.get("parameters")
    words = [
        str(result.get("model", "")),
        f"{parameters / 1e9:.2f} G parameters" if parameters else "",
        str(environment.get("gpu") or environment.get("cpu") or ""),
    ]
    return ", ".join(word for word in words if word)


def order_of(label: str) -> tuple[int, str]:
    return (MODES.index(label) if label in MODES else len(MODES), label)


def colour_of(label: str) -> str:
    """The same in every figure; for names that are not known here, one that depends on the name alone."""
    place = MODES.index(label) if label in MODES else sum(label.encode())
    return COLOURS[place % len(COLOURS)]


# Roofline ---------------------------------------------------------------------------------------------------


def roofline(result: Mapping[str, Any], pyplot: Any) -> Any:
    """Parameters per second over bytes per parameter, under what the measured bandwidth allows."""
    bandwidth = result["bandwidth_2r1w_gb_per_s"]
    known = {name: size for name, size in VARIANT_BYTES.items() if name in result["gparam_per_s_by_variant"]}
    figure, axis = pyplot.subplots(figsize=(6.4, 4))
    span = [24 + index / 4 for index in range(80)]
    axis.plot(
        span,
        [bandwidth / size for size in span],
        color="#555555",
        label=f"{bandwidth:.0f} GB/s, 2 reads 1 write",
    )
    for index, (name, size) in enumerate(known.items()):
        rate = result["gparam_per_s_by_variant"][name]
        # Variants of equal traffic stand side by side.
        shift = 0.28 * (list(known.values())[:index].count(size) - (list(known.values()).count(size) - 1) / 2)
        axis.plot(size + shift, rate, "o", color=COLOURS[index % len(COLOURS)], label=name)
    pipeline = result.get("fused_pipeline_gparam_per_s")
    if pipeline:
        axis.plot(FUSED_PIPELINE_BYTES, pipeline, "s", color="#000000", label="fused torch pipeline")
    axis.set(xlabel="bytes moved per parameter", ylabel="Gparam/s", ylim=(0, None), title="the update kernel")
    axis.set_xticks(range(24, 45, 4))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False, loc="lower left")
    environment = result.get("environment") or {}
    figure.suptitle(
        f"{result.get('numel', 0) / 1e6:.0f} M parameters, {environment.get('threads', '?')} threads, "
        f"{environment.get('cpu', '')}",
        fontsize=9,
    )
    return figure


# Timeline ---------------------------------------------------------------------------------------------------


def timeline(trace: Any, pyplot: Any, window: tuple[float, float] | None = None) -> Any:
    """A bar for each complete event, a row for each thread; `window` in milliseconds from the first event."""
    events = complete_events(trace)
    if not events:
        raise SystemExit("the trace holds no complete events (ph: X)")
    start = min(event["ts"] for event in events)
    first, last = window or (0.0, max(event["ts"] + event["dur"] for event in events) / 1e3 - start / 1e3)
    rows = row_names(trace, events)
    names = list(dict.fromkeys(event["name"] for event in events))
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.45 * len(rows)))
    for name, colour in zip(names, distinct_colours(len(names), pyplot), strict=True):
        label: str | None = name
        for place, row in enumerate(rows):
            spans = [
                ((event["ts"] - start) / 1e3, event["dur"] / 1e3)
                for event in events
                if event["name"] == name and row_of(event) == row
            ]
            if spans:
                axis.broken_barh(spans, (place - 0.4, 0.8), color=colour, label=label)
                label = None
    axis.set_yticks(range(len(rows)), [str(title) for title in rows.values()])
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds", xlim=(first, last))
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=min(6, len(names)), fontsize=7, frameon=False)
    return figure


def distinct_colours(number: int, pyplot: Any) -> list[Any]:
    """A colour for each of `number` kinds, told apart without seeing red or green as well.

    Matplotlib's list of ten for that (``tableau-colorblind10``) as far as it goes; for more, points of ``viridis``, which
    differ in lightness, in strides of which kinds that follow each other lie far apart.
    """
    few = pyplot.style.library["tableau-colorblind10"]["axes.prop_cycle"].by_key()["color"]
    if number <= len(few):
        return list(few[:number])
    stride = next(each for each in range(round(0.382 * number), number) if math.gcd(each, number) == 1)
    return [pyplot.colormaps["viridis"](index * stride % number / (number - 1)) for index in range(number)]


def complete_events(trace: Any) -> list[dict[str, Any]]:
    """Events with a beginning and a length; a trace is a list of events, or an object that holds one."""
    events = trace.get("traceEvents", []) if isinstance(trace, Mapping) else trace
    return [
        {**event, "name": str(event.get("name", "?"))}
        for event in events
        if event.get("ph") == "X" and "ts" in event and "dur" in event
    ]


def row_of(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("pid", "")), str(event.get("tid", ""))


def row_names(trace: Any, events: Sequence[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Rows in the order of their first events, named by the trace's own metadata where it has any."""
    rows = {
        row_of(event): str(event.get("tid", "")) for event in sorted(events, key=lambda event: event["ts"])
    }
    for event in trace.get("traceEvents", []) if isinstance(trace, Mapping) else trace:
        if event.get("ph") == "M" and event.get("name") == "thread_name" and row_of(event) in rows:
            rows[row_of(event)] = str(event.get("args", {}).get("name", rows[row_of(event)]))
    return rows


def load_matplotlib() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("plot_results needs matplotlib: pip install 'offload[plots]'") from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    # Element names that depend on the content alone, and letters as letters: files that can be compared.
    plt.rcParams.update({"svg.hashsalt": "offload", "svg.fonttype": "none", "font.size": 9})
    plt.rcParams["figure.constrained_layout.use"] = True
    return plt


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "files", type=Path, nargs="*", metavar="JSON", help="results; docs/results/*.json by default"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder for the figures")
    parser.add_argument(
        "--format", type=lambda text: text.split(","), default=["svg"], help="svg, png, or both"
    )
    parser.add_argument("--trace", type=Path, help="a Chrome trace to draw a timeline of")
    parser.add_argument("--window", type=_window, metavar="MS,MS", help="of the trace, from its beginning")
    args = parser.parse_args()
    if not args.files and args.trace is None:
        args.files = sorted((ROOT / "docs" / "results").glob("*.json"))
    return args


def _window(text: str) -> tuple[float, float]:
    first, last = (float(part) for part in text.split(","))
    if not first < last:
        raise argparse.ArgumentTypeError(f"{text}: the second must be larger")
    return first, last


if __name__ == "__main__":
    main()
