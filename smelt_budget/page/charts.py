"""How does a plot look? One frame for all of them; colours that the colour-blind tell apart, and markers besides.

Text, grid and background have no colour here: the page's style gives it, so that dark mode and print need no script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from smelt_budget.verify.strokes import STYLES, Style, style

ARMS = ("baseline", "twin")
MOST_POINTS = 600
"""Of a curve; more are not seen and make the page heavy."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito."""
NEUTRAL = "#808080"
SYMBOLS = {"s": "square", "o": "circle", "^": "triangle-up", "v": "triangle-down", "D": "diamond"}
DASHES = ("solid", "dash", "dot", "dashdot")
Trace = dict[str, Any]


def label(text: Any) -> str:
    """Of somebody else: plotly reads tags in its texts."""
    return escape(str(text), quote=False)


def frame(x: str, y: str, **more: Any) -> dict[str, Any]:
    """A layout with named axes; `xaxis` and `yaxis` add to them."""
    axes = {
        axis: {"title": {"text": label(title)}, "automargin": True, "zeroline": False} | more.pop(axis, {})
        for axis, title in (("xaxis", x), ("yaxis", y))
    }
    return axes | more


def arm_style(arm: str, visit: int = 0, visits: int = 1) -> tuple[str, str, str]:
    """Colour, marker and dash of an arm's visit, as the pictures of `verify` have them."""
    look: Style = style(arm, visit, visits) if arm in STYLES else STYLES["baseline"]
    dash = "solid" if arm == "baseline" else DASHES[1 + visit % 3]
    return look.colour, SYMBOLS.get(look.marker, "circle"), dash


def curve(name: str, xs: Sequence[Any], ys: Sequence[Any], colour: str, dash: str = "solid", **more: Any) -> Trace:
    """A line, thinned to what can be seen."""
    step = max(1, -(-len(xs) // MOST_POINTS))
    keep = sorted({*range(0, len(xs), step), len(xs) - 1}) if len(xs) else []
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label(name),
        "x": [xs[i] for i in keep],
        "y": [ys[i] for i in keep],
        "line": {"color": colour, "dash": dash, "width": 2},
    } | more


def band(xs: Sequence[Any], low: Sequence[float], high: Sequence[float], colour: str, group: str) -> Trace:
    """From the lowest to the highest, without a name; it goes with the curve of its group."""
    step = max(1, -(-len(xs) // MOST_POINTS))
    keep = sorted({*range(0, len(xs), step), len(xs) - 1}) if len(xs) else []
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [xs[i] for i in keep] + [xs[i] for i in reversed(keep)],
        "y": [high[i] for i in keep] + [low[i] for i in reversed(keep)],
        "fill": "toself",
        "fillcolor": faint(colour),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": group,
    }


def faint(colour: str) -> str:
    """A fifth of it."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def ranged(
    name: str, xs: Sequence[Any], values: Sequence[Sequence[float]], look: tuple[str, str, str], **more: Any
) -> Trace:
    """A point for each place: the mean, with a bar over the range of its values."""
    means = [fmean(at) for at in values]
    bars: dict[str, Any] = {}
    if any(len(at) > 1 for at in values):
        bars["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [max(at) - mean for at, mean in zip(values, means, strict=True)],
            "arrayminus": [mean - min(at) for at, mean in zip(values, means, strict=True)],
            "thickness": 1.2,
            "width": 3,
            "color": look[0],
        }
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(name),
        "x": list(xs),
        "y": means,
        "marker": {"color": look[0], "symbol": look[1], "size": 8},
        "line": {"color": look[0], "dash": look[2], "width": 1.5},
        **bars,
    } | more


def level(y: float, words: str, dash: str = "dot") -> dict[str, Any]:
    """A line across, named at its right end: a shape of the layout."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "line": {"color": NEUTRAL, "width": 1, "dash": dash},
        "label": {"text": label(words), "textposition": "end", "font": {"size": 11}, "yanchor": "bottom"},
    }


def outside(low: float, high: float, window: Sequence[float]) -> list[dict[str, Any]]:
    """Grey where no run was, on a logarithmic x from `low` to `high`."""
    return [
        {
            "type": "rect",
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "x0": left,
            "x1": right,
            "fillcolor": "rgba(128,128,128,0.16)",
            "line": {"width": 0},
            "layer": "below",
            "label": {"text": "extrapolated", "textposition": "top center", "font": {"size": 11}},
        }
        for left, right in ((low, window[0]), (window[1], high))
        if left < right
    ]


def by_step(rows: Sequence[Mapping[str, Any]], key: str = "loss") -> dict[int, float]:
    """A run's curve."""
    return {row["step"]: row[key] for row in rows if row.get(key) is not None}
