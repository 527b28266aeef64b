"""The same book for a pull request or an appendix: tables instead of plots, words instead of pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator

import smelt_budget
from smelt_budget.page.book import Book
from smelt_budget.page.parts import Part, Picture, Plot, Section, Table

SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")


def markdown(book: Book) -> str:
    """GitHub's Markdown."""
    lines = [f"# {escaped(book.title)}", "", f"By smelt-budget {smelt_budget.__version__}:", "", *fenced(book.command)]
    for section in book.sections:
        lines += written(section)
    return "\n".join(lines).rstrip("\n") + "\n"


def written(section: Section) -> Iterator[str]:
    """One section."""
    marks = "".join(f" ({escaped(mark)})" for mark in section.marks)
    yield from (f"## {escaped(section.title)}: {escaped(section.origin)}{marks}", "")
    yield from fenced(section.command)
    for part in section.parts:
        yield from part_lines(part)
    for sentence in section.says:
        yield f"- {escaped(sentence)}"
    for caveat in section.caveats:
        yield f"- **Mind**: {escaped(caveat)}"
    yield ""


def part_lines(part: Part) -> Iterator[str]:
    """A table, a plot's table, or a picture's words."""
    if isinstance(part, Picture):
        yield from (escaped(part.words), "")
    elif isinstance(part, Plot):
        yield from (f"### {escaped(part.title)}", "")
        if part.words:
            yield from (escaped(part.words), "")
        yield from table_lines(part.table())
    else:
        if part.title:
            yield from (f"### {escaped(part.title)}", "")
        yield from table_lines(part)


def table_lines(table: Table) -> Iterator[str]:
    """Numbers to the right; nothing where there are no rows."""
    if not table.rows:
        return
    yield f"| {' | '.join(escaped(column) for column in table.columns)} |"
    yield "|---|" + "---:|" * (len(table.columns) - 1)
    for row in table.rows:
        yield f"| {' | '.join(escaped(cell) for cell in row)} |"
    yield ""


def fenced(command: str) -> list[str]:
    """A command to be copied; it cannot end its own fence."""
    fence = "```"
    while fence in command:
        fence += "`"
    return [f"{fence}sh", *command.splitlines(), fence, ""]


def escaped(text: str) -> str:
    """One line, nothing in it markup."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))
