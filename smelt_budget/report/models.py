"""How are the built-in models shown?"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from smelt_budget.report.frame import plain_table
from smelt_budget.report.numbers import exact, short


def model_table(models: list[dict[str, Any]]) -> Table:
    """The built-in models."""
    table = plain_table("name", "family", "total", "active", "layers", "experts", "top-k")
    table.add_column("published", max_width=60)
    for m in models:
        table.add_row(
            m["name"],
            m["family"],
            short(m["total"]),
            short(m["active_with_embeddings"]),
            exact(m["layers"]),
            exact(m["experts"]) if m["experts"] else "-",
            exact(m["top_k"]) if m["top_k"] else "-",
            m["published"],
        )
    return table
