"""The command that shows results to others: report. Read, call, print, exit."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from smelt_budget.errors import BadInput


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(help="A smelt.yaml, or a folder of verify, law fit or ladder; any mix.", show_default=False),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="A .html, with a .md beside it; or a .md alone.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(metavar="TEXT", help="Of the page.")] = "Looped against unlooped at equal cost",
    force: Annotated[bool, typer.Option("--force", help="Overwrite --out if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the page's data and write nothing.")] = False,
) -> None:
    """Show results as one HTML page that needs no network, and as Markdown.

    The pair side by side, its budgets, its layers; losses, attention sink and router load; gains with intervals; the
    ladder. Each section names the command that gives it again, and what it cannot bear.

    Example: `smelt-budget report examples/smelt.yaml --out report.html`
    """
    from smelt_budget.page.book import book
    from smelt_budget.page.html import check_installed, html, numbers
    from smelt_budget.page.markdown import markdown
    from smelt_budget.page.sources import read_source
    from smelt_budget.report.console import print_json
    from smelt_budget.report.write import check_free, write_text

    if out.suffix.lower() not in (".html", ".md"):
        raise BadInput(f"{out} is neither .html nor .md", "fix: --out report.html")
    page = out.suffix.lower() == ".html"
    beside = out.with_suffix(".md")
    if not as_json:
        for place in (out, beside) if page else (out,):
            check_free(place, force)
        if page:
            check_installed()
    twice = {path for path in sources if sources.count(path) > 1}
    if twice:
        raise BadInput(f"{twice.pop()} is given twice")
    words = ["smelt-budget", "report", *map(str, sources), "--out", str(out)]
    made = book([read_source(path) for path in sources], title, shlex.join(words))
    if as_json:
        print_json(numbers(made.data()))
        return
    if page:
        text = html(made)
        write_text(out, text, force)
        typer.echo(f"wrote {out} ({len(text.encode()) / 1e6:.1f} MB)", err=True)
    write_text(beside, markdown(made), force)
    typer.echo(f"wrote {beside}", err=True)
