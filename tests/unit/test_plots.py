"""Pictures of a run: that what is in them is what was measured, without warnings, whatever is missing."""

import math
import runpy
import struct
from itertools import pairwise
from pathlib import Path

import pytest

from smelt_budget.errors import BadInput
from smelt_budget.verify import plots

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from smelt_budget.verify import panels, strokes

FAKE = runpy.run_path(str(Path(__file__).with_name("verify_result.py")))
made, metrics = FAKE["made"], FAKE["metrics"]
ALL = ["loss.png", "parts.png", "sink.png", "router.png"]


def size(path):
    """Width and height in a PNG's header."""
    raw = path.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", raw[16:24])


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"sinks": True}, ALL),
        ({"baseline": (2.05,), "twin": (2.12,), "bytes_known": False}, ["loss.png", "parts.png", "router.png"]),
        ({"baseline": (2.05, 2.06), "twin": (2.12, math.nan), "moe": False}, ["loss.png", "parts.png"]),
        ({"baseline": (math.nan,), "twin": (math.nan,)}, []),
    ],
)
def test_what_there_is_something_for_is_drawn(tmp_path, fields, names):
    """A whole file each, 7.2 x 5.2 inches at 160 dots, nothing left beside it; warnings are errors here."""
    result = made(**fields)
    written = plots.draw(result, metrics(result), tmp_path / "plots")
    assert [path.name for path in written] == names
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(names)
    assert {size(path) for path in written} <= {(1152, 832)}


def test_drawing_again_replaces_and_gives_the_same_bytes(tmp_path):
    """No date and no version in the file."""
    result = made(sinks=True)
    first = [path.read_bytes() for path in plots.draw(result, metrics(result), tmp_path)]
    assert first == [path.read_bytes() for path in plots.draw(result, metrics(result), tmp_path)]


def test_without_metrics_the_end_is_drawn(tmp_path):
    """No curve, but parts, sinks and final loads; the router then has no panel of steps."""
    result = made(sinks=True)
    assert [path.name for path in plots.draw(result, [], tmp_path)] == ALL[1:]


def test_a_domain_may_have_any_name(tmp_path):
    """Dollars are no formula, scripts the font lacks no warning, and a path is shown by its end."""
    result = made()
    for run in (run for runs in result["runs"].values() for run in runs):
        parts = run["held_out"]["domains"]
        run["held_out"]["domains"] = {"代码 $x_{$": parts["code"], "a/very/long/path/to/some/prose": parts["prose"]}
    figure = Figure()
    panels.parts(figure, result_runs(result))
    labels = [label.get_text() for label in figure.axes[3].get_xticklabels()]
    assert labels == ["代码 $x_{$", "...g/path/to/some/prose"]
    assert len(plots.draw(result, [], tmp_path)) == 2


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    """A file where the folder should be."""
    (tmp_path / "taken").write_text("mine", encoding="utf-8")
    result = made()
    with pytest.raises(BadInput, match="cannot write"):
        plots.draw(result, metrics(result), tmp_path / "taken")
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(("seeds", "size", "words"), [(3, "tiny", "3 seeds"), (1, "full", "1 seed")])
def test_every_title_says_how_small_it_is(seeds, size, words):
    """Pictures travel without their tables."""
    result = made((2.0,) * seeds, (2.1,) * seeds)
    result["proxy"]["size"] = size
    caption = plots.caption(result, seeds)
    what = "proxy of 1.89 M parameters" if size == "tiny" else "the pair itself"
    assert caption == f"{what}, 160 steps of 2,048 tokens, {words}"


def test_smoothing_keeps_a_constant_and_is_debiased():
    """By hand: weights 1 and 0.9 give (0.9 * 1 + 2) / 1.9 after two steps, and 1 after the first."""
    assert strokes.smoothed({1: 1.0, 2: 2.0}) == pytest.approx({1: 1.0, 2: 2.9 / 1.9})
    assert list(strokes.smoothed(dict.fromkeys(range(50), 3.0)).values()) == pytest.approx([3.0] * 50)


def test_the_lower_panel_is_the_paired_difference():
    """The same batch noise in both arms leaves none in the difference; its end is the held-out mean, ± its interval."""
    result = made()
    figure = Figure()
    panels.loss(
        figure,
        result_runs(result),
    )
    below = figure.axes[1]
    curve = next(line for line in below.lines if line.get_label() == "training").get_ydata()
    assert all(a < b for a, b in pairwise(curve))
    bar = below.containers[0]
    (low, high) = bar.lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((0.0833 - 0.0379, 0.0833 + 0.0379), abs=1e-4)


def result_runs(result):
    """As `draw` makes them."""
    return strokes.Runs.of(result, metrics(result))


def test_rates_that_were_tried_are_not_drawn():
    """Only seeds count; a seed whose loss is not a number is no run."""
    runs = result_runs(made((2.0, math.nan), (2.1, 2.2)))
    assert list(runs.metrics["baseline"]) == [0]
    assert list(runs.metrics["twin"]) == [0, 1]
    assert runs.seeds == 1


def test_a_second_visit_looks_different():
    """By marker and by line, not by colour alone; the baseline has one look."""
    looks = [strokes.style("twin", visit, 3) for visit in range(3)] + [strokes.style("baseline", 0, 1)]
    assert len({look.marker for look in looks}) == len({str(look.line) for look in looks}) == 4
    assert [look.words for look in looks] == ["twin, visit 1", "twin, visit 2", "twin, visit 3", "baseline"]


def test_the_sink_of_every_layer_and_visit_is_a_point():
    """Mean over seeds: 0.6 * 4/6 * 0.6 * 1.05 on the second visit of layer 2 (made so)."""
    figure = Figure()
    panels.sink(figure, result_runs(made(sinks=True)))
    points = {(round(x, 2), round(y, 4)) for bar in figure.axes[1].containers for x, y in bar.lines[0].get_xydata()}
    assert len(points) == 6
    assert (2.08, round(0.6 * 4 / 6 * 0.6 * 1.05, 4)) in points
