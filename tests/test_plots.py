"""Figures from results as they are, and from results as they may come."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the extra for plots is not installed")

import plot_results

ROOT = Path(__file__).parent.parent
TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "worker"}},
        {"ph": "X", "name": "backward", "pid": 1, "tid": 1, "ts": 1000, "dur": 9000},
        {"ph": "X", "name": "kernel", "pid": 1, "tid": 2, "ts": 3000, "dur": 2000},
        {"ph": "X", "name": "kernel", "pid": 1, "tid": 2, "ts": 6000, "dur": 2000},
        {"ph": "i", "name": "verdict", "pid": 1, "tid": 2, "ts": 8000},
    ]
}


def draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Path]:
    monkeypatch.setattr(sys, "argv", ["plot_results.py", *arguments, "--out", str(tmp_path / "figures")])
    plot_results.main()
    return sorted((tmp_path / "figures").iterdir())


def result(*runs: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"script": "bench_step", "model": "tiny", "batch": 2, "runs": list(runs), **fields}


def test_committed_results_are_drawn_and_their_figures_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {path.name: path for path in draw(tmp_path, monkeypatch)}
    assert drawn.keys() >= {"h200-kernel-roofline.svg", "h200-step.svg"}
    for name, path in drawn.items():
        committed = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        assert texts_of(committed) == texts_of(path.read_text(encoding="utf-8")), (
            f"{name}: run scripts/plot_results.py"
        )
    assert {"wavefront", "8,192"} <= texts_of(drawn["h200-step.svg"].read_text(encoding="utf-8"))
    assert "docs/images/h200-step.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_same_results_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = str(ROOT / "docs" / "results" / "h200-step.json")
    first, second = (draw(tmp_path / name, monkeypatch, results)[0].read_bytes() for name in ("one", "two"))
    assert first == second


def test_new_modes_failed_runs_and_missing_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        {"mode": "resident", "seq": 8, "status": "ok", "step_s": 1.0, "peak_device_bytes": 1 << 30},
        {"mode": "a-new-mode", "seq": 8, "status": "ok", "step_s": 2.0, "peak_device_bytes": None},
        {"mode": "a-new-mode", "seq": 16, "status": "out of memory", "error": "no room"},
        {"mode": "wavefront", "status": "error", "error": "exit status 1"},
    ]
    path = tmp_path / "new.json"
    path.write_text(json.dumps(result(*runs)), encoding="utf-8")
    drawn = draw(tmp_path, monkeypatch, str(path), "--format", "svg,png")
    assert [file.name for file in drawn] == ["new.png", "new.svg"]
    words = drawn[1].read_text(encoding="utf-8")
    assert "a-new-mode" in words
    assert "wavefront" not in words
    assert drawn[0].read_bytes().startswith(b"\x89PNG")


def test_bars_are_where_the_values_are() -> None:
    pyplot = plot_results.load_matplotlib()
    runs = [{"mode": mode, "seq": seq, "step_s": seconds} for mode, seq, seconds in
            (("wavefront", 16, 3.0), ("resident", 8, 1.0), ("resident", 16, 2.0))]  # fmt: skip
    made = result(*runs)
    figure = plot_results.steps_figure(made, plot_results.finished_runs(made), pyplot)
    axes = figure.axes
    assert len(axes) == 1  # nothing was measured of memory
    heights = {(round(bar.get_x() + bar.get_width() / 2, 1), bar.get_height()) for bar in axes[0].patches}
    assert heights == {(-0.2, 1.0), (0.8, 2.0), (1.2, 3.0)}
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["16", "32"]
    pyplot.close(figure)


def test_peers_are_drawn_as_modes_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "peers.json"
    run = {"peer": "torchao", "seq": 8, "status": "ok", "step_s": 1.0, "peak_device_bytes": 5}
    path.write_text(
        json.dumps(result(run, {"peer": "fsdp", "status": "skipped", "reason": "no"})), encoding="utf-8"
    )
    (drawn,) = draw(tmp_path, monkeypatch, str(path))
    assert "torchao" in drawn.read_text(encoding="utf-8")


def test_a_file_of_another_kind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("other", {"script": "train"}), ("list", [1, 2])):
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    assert not draw(tmp_path, monkeypatch, str(tmp_path / "other.json"), str(tmp_path / "list.json"))
    assert capsys.readouterr().out.count("nothing to draw") == 2


@pytest.mark.parametrize("trace", [TRACE, TRACE["traceEvents"]], ids=["object", "list"])
def test_a_timeline_has_a_row_for_each_thread(trace: Any) -> None:
    pyplot = plot_results.load_matplotlib()
    figure = plot_results.timeline(trace, pyplot)
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["1", "worker"]
    spans = {
        (round(box.x0, 3), round(box.x1, 3))
        for bars in axis.collections
        for box in map(box_of, bars.get_paths())
    }
    assert spans == {(0.0, 9.0), (2.0, 4.0), (5.0, 7.0)}
    assert axis.get_xlim() == (0.0, 9.0)
    pyplot.close(figure)


@pytest.mark.parametrize("number", [1, 9, 10, 11, 22, 40])
def test_every_kind_of_stage_has_a_colour_of_its_own(number: int) -> None:
    events = [
        {"ph": "X", "name": f"stage {n % number}", "pid": 1, "tid": n % 3, "ts": n, "dur": 1}
        for n in range(3 * number)
    ]
    pyplot = plot_results.load_matplotlib()
    figure = plot_results.timeline(events, pyplot)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    colours = [patch.get_facecolor() for patch in legend.get_patches()]
    assert names == [f"stage {n}" for n in range(number)]
    assert len({to_bytes(colour) for colour in colours}) == number
    assert {to_bytes(bars.get_facecolor()[0]) for bars in figure.axes[0].collections} == set(
        map(to_bytes, colours)
    )
    if number > 10:  # without colours still in as many shades
        assert len({round(lightness(colour), 3) for colour in colours}) == number
        assert all(abs(lightness(a) - lightness(b)) > 0.1 for a, b in itertools.pairwise(colours))
    pyplot.close(figure)


def to_bytes(colour: Any) -> tuple[int, ...]:
    return tuple(round(255 * part) for part in colour)


def lightness(colour: Any) -> float:
    red, green, blue, *_ = colour
    return float(0.299 * red + 0.587 * green + 0.114 * blue)


def test_a_timeline_of_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(TRACE), encoding="utf-8")
    (drawn,) = draw(tmp_path, monkeypatch, "--trace", str(path), "--window", "2,5")
    assert drawn.name == "step-timeline.svg"
    with pytest.raises(SystemExit, match="no complete events"):
        plot_results.timeline({"traceEvents": []}, plot_results.load_matplotlib())


def texts_of(svg: str) -> set[str]:
    """Names and numbers in a figure; the shapes depend on matplotlib's release."""
    return set(re.findall(r"<text[^>]*>([^<]+)</text>", svg))


def box_of(path: Any) -> Any:
    return path.get_extents()
