"""What do our tables look like? One frame for all of them."""

from __future__ import annotations

from rich import box
from rich.table import Table


def plain_table(*headers: str, title: str | None = None) -> Table:
    """A table with its first column left, the others right."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i == 0 else "right", no_wrap=True)
    return table
