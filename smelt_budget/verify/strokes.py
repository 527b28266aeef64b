"""With what is drawn? The runs that count, the look of each series, and the four strokes every picture is made of.

A curve is the mean over seeds; its band, and the bar of a point, span the lowest and the highest. Only `between` draws
a 95 % t-interval, and where it does the axis says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from smelt_budget.verify.interval import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARMS = ("baseline", "twin")
SMOOTH = 0.9
"""Weight of the past in the moving average over steps: about ten steps count."""
GREY = "#666666"
TITLE = 8.5
"""Points."""


class Style(NamedTuple):
    """How a series looks; colours of Okabe and Ito, which the colour-blind tell apart."""

    colour: str
    marker: str
    line: Any
    words: str


BASELINE = Style("#0072B2", "s", "-", "baseline")
TWIN = Style("#D55E00", "o", (0, (5, 1.6)), "looped twin")
LATER = (("#CC79A7", "^", (0, (2, 1.4))), ("#009E73", "v", (0, (1, 1))), ("#E69F00", "D", "-."))
"""The twin's second visit, its third, its fourth; then the second's again."""
STYLES = {"baseline": BASELINE, "twin": TWIN}


def style(arm: str, visit: int, visits: int) -> Style:
    """Of an arm's layers on one visit."""
    if arm == "baseline" or visits == 1:
        return STYLES[arm]
    colour, marker, line = TWIN[:3] if visit == 0 else LATER[(visit - 1) % len(LATER)]
    return Style(colour, marker, line, f"twin, visit {visit + 1}")


@dataclass(frozen=True)
class Runs:
    """The finished runs of both arms, and the metrics that belong to them."""

    result: dict[str, Any]
    by_arm: Mapping[str, list[dict[str, Any]]]
    metrics: Mapping[str, Mapping[int, list[dict[str, Any]]]]
    """Arm, then seed, to rows."""

    @classmethod
    def of(cls, result: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Runs:
        """Of the seeds; runs that only tried a rate are left out."""
        by_arm = {
            arm: [run for run in result["runs"].get(arm) or () if finite(run["held_out"]["nats_per_token"])]
            for arm in ARMS
        }
        metrics: dict[str, dict[int, list[dict[str, Any]]]] = {arm: {} for arm in ARMS}
        kept = {arm: {run["seed"] for run in by_arm[arm]} for arm in ARMS}
        for row in rows:
            if row["run"] == f"seed-{row['seed']}" and row["seed"] in kept.get(row["arm"], ()):
                metrics[row["arm"]].setdefault(row["seed"], []).append(row)
        return cls(result, by_arm, metrics)

    @property
    def pairs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Of the seeds that both arms finished."""
        twins = {run["seed"]: run for run in self.by_arm["twin"]}
        return [(run, twins[run["seed"]]) for run in self.by_arm["baseline"] if run["seed"] in twins]

    @property
    def seeds(self) -> int:
        """How many are compared."""
        return len(self.pairs)


def finite(value: float | None) -> bool:
    """Whether it is a number that can be drawn."""
    return value is not None and math.isfinite(value)


def smoothed(curve: Mapping[int, float]) -> dict[int, float]:
    """A moving average that is not drawn towards 0 at its beginning."""
    total, weight, smooth = 0.0, 0.0, {}
    for step in sorted(curve):
        total, weight = SMOOTH * total + curve[step], SMOOTH * weight + 1
        smooth[step] = total / weight
    return smooth


def banded(axes: Axes, curves: Sequence[Mapping[int, float]], look: Style) -> None:
    """The mean of curves over the steps they share, in a band from the lowest to the highest."""
    if not curves:
        return
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[step] for curve in curves] for step in steps]
    line = [fmean(at) for at in values]
    marker = look.marker if len(steps) == 1 else None
    axes.plot(steps, line, color=look.colour, linestyle=look.line, marker=marker, linewidth=1.4, label=look.words)
    if len(curves) > 1:
        low, high = [min(at) for at in values], [max(at) for at in values]
        axes.fill_between(steps, low, high, color=look.colour, alpha=0.18, linewidth=0)


def ranged(axes: Axes, x: float, values: Sequence[float], look: Style, words: str | None = None) -> None:
    """One point: the mean over seeds, with a bar over their range."""
    mean = fmean(values)
    bar = [[max(0.0, mean - min(values))], [max(0.0, max(values) - mean)]] if len(values) > 1 else None
    axes.errorbar(
        [x], [mean], bar, color=look.colour, marker=look.marker, markersize=4.5, linewidth=1, capsize=2, label=words
    )


def between(axes: Axes, x: float, differences: Sequence[float], words: str | None = None) -> None:
    """One paired difference with its 95 % interval; of one seed the point alone."""
    spread = Interval.over(differences)
    axes.errorbar(
        [x],
        [spread.mean],
        spread.half_width,
        color="black",
        marker="D",
        markersize=4,
        linewidth=1,
        capsize=2,
        label=words,
    )


def framed(axes: Axes, y: str, x: str = "") -> None:
    """Labels with units, two spines, a faint grid."""
    axes.set_ylabel(y, fontsize=8)
    axes.set_xlabel(x, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.5)
    axes.set_axisbelow(True)


def layers_on_x(axes: Axes, depth: int) -> None:
    """Whole layers from 1, at most a dozen of them named."""
    step = max(1, math.ceil(depth / 12))
    axes.set_xticks(range(1, depth + 1, step))
    axes.set_xlim(0.4, depth + 0.6)


def keyed(figure: Figure, *several: Axes) -> None:
    """A legend of one line between title and panels, where it hides nothing."""
    named: dict[str, Any] = {}
    for axes in several:
        handles, labels = axes.get_legend_handles_labels()
        named |= zip(labels, handles, strict=True)
    place = {"loc": "upper left", "bbox_to_anchor": (0, 0.97), "borderaxespad": 0}
    legend = figure.legend(list(named.values()), list(named), ncols=6, frameon=False, fontsize=8, **place)
    legend.set_in_layout(False)
    figure.suptitle(f"{figure.get_suptitle()}\n", x=0.01, ha="left", fontsize=TITLE)  # a line's room for it


def lined(axes: Axes, y: float, words: str = "", line: str = ":") -> None:
    """A level to compare with, named short of where the end points stand."""
    axes.axhline(y, color=GREY, linewidth=0.8, linestyle=line)
    above = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
    axes.annotate(words, (0.93, y), (0, 2), fontsize=7, color=GREY, **above)


def noted(figure: Figure, words: str) -> None:
    """What bars and bands are, at the foot of the picture."""
    figure.supxlabel(words, x=0.01, ha="left", fontsize=7, color=GREY)
