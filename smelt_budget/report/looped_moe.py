"""How are the best shapes of the looped-MoE law shown? With how many others are as good, and where the family ends."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from smelt_budget.report.frame import plain_table


def shape_view(origin: str, window: Any, rows: list[dict[str, Any]]) -> Group:
    """A row a budget."""
    heads = ("training FLOPs", "active", "total", "looped", "loops R", "experts/top-k E", "tokens", "loss", "as good")
    table = plain_table(*heads)
    for row in rows:
        loss = f"{row['loss']:.4f}"
        table.add_row(
            budget(row),
            marked(row, "active"),
            f"{row['total']:.3g}",
            f"{row['looped']:.3g}" if row["loops"] > 1 else "-",
            marked(row, "loops"),
            marked(row, "experts"),
            f"{row['tokens']:.3g}",
            loss if row["low"] is None else f"{loss} [{row['low']:.4f}, {row['high']:.4f}]",
            str(row["alike"] - 1),
        )
    words = [
        Text("as good: other shapes within .0037 nats, the published fit's RMSE; N without embeddings"),
        *said(window, rows),
    ]
    return Group(Text(f"Best looped MoE for a budget, {origin}"), table, *words)


def shape_gain_view(origin: str, window: Any, rows: list[dict[str, Any]]) -> Group:
    """A row a budget."""
    table = plain_table("training FLOPs", "saved", "active", "loops R", "experts/top-k E", "loss")
    for row in rows:
        table.add_row(
            budget(row),
            saved(row),
            marked(row, "active"),
            marked(row, "loops"),
            marked(row, "experts"),
            f"{row['loss']:.4f}",
        )
    heading = Text(f"Compute saved by the best R > 1 against the best R = 1 at equal loss, {origin}")
    return Group(heading, table, *said(window, rows))


def saved(row: dict[str, Any]) -> str:
    """Percent; in words where no budget is enough without loops."""
    if row["gain"] == 1:
        return "no R = 1 gets there"
    text = f"{100 * row['gain']:.1f} %"
    return text if row["low"] is None else f"{text} [{100 * row['low']:.0f}, {100 * row['high']:.0f}]"


def budget(row: dict[str, Any]) -> str:
    """Marked where no run of about its size was fitted."""
    return f"{row['compute']:.3g}" + (" *" if row["extrapolated"] else "")


def marked(row: dict[str, Any], name: str) -> str:
    """A number, and whether the family had nothing beyond it."""
    return f"{row[name]:.3g}" + (" +" if name in row["at_end"] else "")


def said(window: Any, rows: list[dict[str, Any]]) -> list[Text]:
    """What the numbers cannot bear."""
    found = []
    if any(row["at_end"] for row in rows):
        found.append(Text("+ the last there was to choose from; beyond it may be better"))
    if window is None:
        found.append(Text("which budgets the runs of this law spanned is not known here"))
    elif any(row["extrapolated"] for row in rows):
        found.append(Text(f"* extrapolated: the runs span {window[0]:.2g} to {window[1]:.2g} training FLOPs"))
    if rows[0]["low"] is None:
        found.append(Text("no interval: these are coefficients without refits"))
    return found
