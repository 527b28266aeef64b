"""How does a book become one file? Template, style, script and plotly in it; nothing is fetched when it is read.

A content policy in the page forbids every request. Text of the user's goes through jinja2's escaping; JSON cannot end
its own element.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from typing import Any

import smelt_budget
from smelt_budget.errors import BadInput
from smelt_budget.page.book import Book
from smelt_budget.page.parts import Picture, Plot, Table

TEMPLATES = files("smelt_budget.page") / "templates"
FIX = "fix: pip install 'smelt-budget[report]', or --out report.md for Markdown alone"


def check_installed() -> None:
    """Fail before the work.

    Raises:
        BadInput: a package of the extra is missing.
    """
    from importlib.util import find_spec

    for package in ("plotly", "jinja2"):
        if find_spec(package) is None:
            raise BadInput(f"an HTML report needs {package}, which is not installed", FIX)


def html(book: Book) -> str:
    """The page.

    Raises:
        BadInput: a package of the extra is missing.
    """
    check_installed()
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    plots = {plot.name: {"data": plot.traces, "layout": plot.layout} for plot in book.plots}
    return environment.from_string(asset("page.html.j2")).render(
        book=book,
        version=smelt_budget.__version__,
        style=asset("page.css"),
        script=asset("page.js"),
        plotly=get_plotlyjs() if plots else "",
        data=inert(book.data()),
        plots=inert(plots),
        kind=kind,
    )


def asset(name: str) -> str:
    """A file beside this one."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def kind(part: Any) -> str:
    """Which of the three a part is."""
    return {Table: "table", Plot: "plot", Picture: "picture"}[type(part)]


def numbers(data: Any) -> Any:
    """What JSON has no number for is null: the loss of a run that diverged."""
    if isinstance(data, dict):
        return {key: numbers(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [numbers(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def inert(data: Any) -> str:
    """JSON that no text in it can turn into markup."""
    text = json.dumps(numbers(data), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
