"""How are laws shown? Coefficients, savings, allocations; what is extrapolated or not identified is said."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from smelt_budget.report.frame import plain_table


def fit_view(result: dict[str, Any]) -> Group:
    """One table of coefficients, an arm a column, and how good the fits are."""
    heading = Text(f"{result['equation']}, {result['origin']}")
    return Group(heading, coefficient_table(result), *(Text(line) for line in fit_words(result)))


def coefficient_table(result: dict[str, Any]) -> Table:
    """Coefficients, misfit, what was fitted."""
    arms = result["arms"]
    table = plain_table("", *arms)
    names = next(iter(arms.values()))["coefficients"]
    for name in names:
        table.add_row(name, *(coefficient(arm["coefficients"][name]) for arm in arms.values()))
    table.add_row("RMSE, nats", *(f"{arm['rmse']:.5f}" for arm in arms.values()))
    table.add_row("objective", *(f"{arm['objective']:.4g}" for arm in arms.values()))
    table.add_row("runs in cells", *(f"{arm['runs']} in {arm['cells']}" for arm in arms.values()))
    table.add_row("starts that agree", *(f"{arm['starts_agreeing']} of {arm['starts']}" for arm in arms.values()))
    return table


def fit_words(result: dict[str, Any]) -> list[str]:
    """The window, how intervals came about, and what the runs cannot identify."""
    arms, draws = result["arms"], result["asked"]["draws"]
    low, high = zip(*(arm["window"]["compute"] for arm in arms.values()), strict=True)
    said = [
        f"fitted window: {min(low):.2g} to {max(high):.2g} training FLOPs",
        f"95 % intervals of {draws} refits, whole cells drawn" if draws else "no refits: no intervals",
    ]
    loose = [
        f"{name} of {arm}"
        for arm, one in arms.items()
        for name, found in one["coefficients"].items()
        if found["identified"] is False
    ]
    if loose:
        said.append(f"not identified by these runs: {', '.join(loose)}; frontiers and gains may be all the same")
    if any(arm["cells"] == arm["runs"] for arm in arms.values()):
        said.append("every run is a cell of its own: intervals know nothing of what runs of one cell share")
    return said


def coefficient(found: dict[str, Any]) -> str:
    """As many digits as are known; a range where the value is not identified."""
    value, low, high = found["value"], found["low"], found["high"]
    if low is None:
        return "not identified" if found["identified"] is False else f"{value:.4g}"
    if not found["identified"]:
        return f"{low:.2g} .. {high:.2g}"
    digits = next((d for d in range(2, 6) if abs(float(f"{value:.{d}g}") - value) <= (high - low) / 20), 6)
    return f"{value:.{digits}g} [{low:.{digits}g}, {high:.{digits}g}]"


def gain_view(origin: str, window: Any, rows: list[dict[str, Any]]) -> Group:
    """The savings, and what they cannot bear."""
    return Group(Text(f"Compute saved at equal loss, {origin}"), gain_table(rows), *said(window, rows))


def gain_table(rows: list[dict[str, Any]]) -> Table:
    """A row a budget, a column a sparsity."""
    sparsities = list(dict.fromkeys(row["sparsity"] for row in rows))
    table = plain_table("training FLOPs", *(f"S {s:.4g}" for s in sparsities))
    for compute in dict.fromkeys(row["compute"] for row in rows):
        own = [row for row in rows if row["compute"] == compute]
        table.add_row(f"{compute:.3g}" + (" *" if own[0]["extrapolated"] else ""), *(percent(row) for row in own))
    return table


def percent(row: dict[str, Any]) -> str:
    """With its interval where there is one."""
    text = f"{100 * row['gain']:.1f} %"
    return text if row["low"] is None else f"{text} [{100 * row['low']:.0f}, {100 * row['high']:.0f}]"


def allocation_view(origin: str, window: Any, rows: list[dict[str, Any]]) -> Group:
    """A row a budget, sparsity and arm."""
    heads = ("training FLOPs", "S", "arm", "FLOPs/token", "tokens", "tokens/parameter", "loss")
    table = plain_table(*heads)
    for row in rows:
        ratio = f"{row['tokens_per_parameter']:.0f}"
        if row["low"] is not None:
            ratio += f" [{row['low']:.0f}, {row['high']:.0f}]"
        table.add_row(
            f"{row['compute']:.3g}" + (" *" if row["extrapolated"] else ""),
            "-" if row["sparsity"] is None else f"{row['sparsity']:.4g}",
            row["arm"],
            f"{row['flops_per_token']:.3g}",
            f"{row['tokens']:.3g}",
            ratio,
            f"{row['loss']:.4f}",
        )
    return Group(Text(f"Best split of a budget, {origin}"), table, *said(window, rows))


def said(window: Any, rows: list[dict[str, Any]]) -> list[Text]:
    """What the numbers cannot bear."""
    found = []
    if any(row["extrapolated"] for row in rows):
        found.append(Text(f"* extrapolated: the runs span {window[0]:.2g} to {window[1]:.2g} training FLOPs"))
    if rows and rows[0]["low"] is None:
        found.append(Text("no interval: these are coefficients without refits"))
    return found
