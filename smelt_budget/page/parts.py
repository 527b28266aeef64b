"""What is a section made of? Tables, plots and a picture, with the command that gives it and what it cannot bear.

HTML and Markdown are two ways of writing the same parts; neither computes a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any

FEW_POINTS = 12
"""Rows of the table that stands for a plot where there is none."""


@dataclass(frozen=True)
class Table:
    """Text in rows; the first column is left, numbers are right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    @classmethod
    def of(cls, table: Any, title: str = "") -> Table:
        """A table of rich: the page shows the cells that the terminal shows."""
        columns = [[plain(cell) for cell in column.cells] for column in table.columns]
        heads = tuple(plain(column.header) for column in table.columns)
        return cls(heads, tuple(zip(*columns, strict=True)), title)


def plain(cell: Any) -> str:
    """A cell's text without its style."""
    return cell if isinstance(cell, str) else cell.plain


@dataclass(frozen=True)
class Plot:
    """Traces and a layout as plotly takes them, and in words what is drawn."""

    name: str
    """Unique on the page."""
    title: str
    traces: tuple[dict[str, Any], ...]
    layout: dict[str, Any]
    words: str = ""
    x: str = "x"
    """What the first column of its table is called."""

    def table(self) -> Table:
        """Named series at a few places, for those who see no plot."""
        shown = [trace for trace in self.traces if trace.get("name") and trace.get("visible", True) is True]
        series = [
            (trace["y"], trace["x"]) if trace.get("orientation") == "h" else (trace["x"], trace["y"]) for trace in shown
        ]
        drawn = [xs for (xs, _), trace in zip(series, shown, strict=True) if trace.get("mode") != "markers"]
        places = list(dict.fromkeys(x for xs in drawn or [xs for xs, _ in series] for x in xs))
        if all(isinstance(place, (int, float)) for place in places):
            places.sort()
        kept = spread(places)
        values = [dict(zip(xs, ys, strict=True)) for xs, ys in series]
        columns = [[word(at.get(place)) for place in kept] for at in values]
        told = [i for i, column in enumerate(columns) if set(column) != {"-"}]
        rows = zip(map(word, kept), *(columns[i] for i in told), strict=True)
        return Table((self.x, *(unescape(shown[i]["name"]) for i in told)), tuple(rows))


def spread(places: Sequence[Any]) -> list[Any]:
    """First, last, and as many between as fit."""
    if len(places) <= FEW_POINTS:
        return list(places)
    return [places[round(i * (len(places) - 1) / (FEW_POINTS - 1))] for i in range(FEW_POINTS)]


def word(value: Any) -> str:
    """A number in five digits; nothing as a dash."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, str):
        return unescape(value)
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**9 else f"{value:.5g}"


@dataclass(frozen=True)
class Picture:
    """An SVG that is ours, every text in it escaped, and the same in words."""

    svg: str
    words: str


Part = Table | Plot | Picture


@dataclass(frozen=True)
class Section:
    """One question, answered."""

    name: str
    """Unique on the page; its anchor."""
    title: str
    origin: str
    """The file or folder it was read from."""
    command: str
    """What gives it again."""
    parts: tuple[Part, ...]
    says: tuple[str, ...] = ()
    """Sentences about the numbers."""
    marks: tuple[str, ...] = ()
    """Words beside the title: toy scale, 1 seed, extrapolated."""
    caveats: tuple[str, ...] = ()
    """What must not be concluded."""


@dataclass(frozen=True)
class Chapter:
    """All of one source: its sections, and its data for programs."""

    kind: str
    origin: str
    sections: tuple[Section, ...]
    data: Any
