"""Which chapters does a page have, and what do programs find on it? One chapter a source, in the order given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import smelt_budget
from smelt_budget.errors import BadInput, SmeltError
from smelt_budget.page.parts import Chapter, Plot, Section
from smelt_budget.page.sources import Source


@dataclass(frozen=True)
class Book:
    """A whole page."""

    title: str
    command: str
    """What wrote it."""
    chapters: tuple[Chapter, ...]

    @property
    def sections(self) -> Iterator[Section]:
        """In order."""
        for chapter in self.chapters:
            yield from chapter.sections

    @property
    def plots(self) -> Iterator[Plot]:
        """In order."""
        for section in self.sections:
            yield from (part for part in section.parts if isinstance(part, Plot))

    def data(self) -> dict[str, Any]:
        """What is on the page, for programs: every number shown is in here or made from it."""
        return {
            "smelt_budget": smelt_budget.__version__,
            "title": self.title,
            "command": self.command,
            "chapters": [
                {
                    "kind": chapter.kind,
                    "origin": chapter.origin,
                    "sections": [
                        {"name": section.name, "title": section.title, "command": section.command}
                        for section in chapter.sections
                    ],
                    "data": chapter.data,
                }
                for chapter in self.chapters
            ],
        }


def book(sources: Sequence[Source], title: str, command: str) -> Book:
    """Every source as a chapter.

    Raises:
        BadInput: a source lacks what its command would have written.
    """
    from smelt_budget.page import fitted, pair, planned, verified

    makers = {"pair": pair.chapter, "verify": verified.chapter, "law": fitted.chapter, "ladder": planned.chapter}
    chapters = []
    for number, source in enumerate(sources, 1):
        try:
            chapters.append(makers[source.kind](source, number))
        except SmeltError:
            raise
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise BadInput(
                f"{source.path} is not what {source.kind} of this version writes: {error!r:.120}",
                "fix: make it again with this version",
            ) from None
    return Book(title, command, tuple(chapters))
