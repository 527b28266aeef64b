"""How is a ledger shown? Every row with what it makes, then every total. Nothing is computed here."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from smelt_budget.ledger import Ledger, Row
from smelt_budget.report.frame import plain_table
from smelt_budget.report.numbers import exact, short

Equations = dict[tuple[str, str], tuple[Any, Any, Any]]
"""What `smelt_budget.ledger.symbols.equations` returns, which is not imported here: sympy takes half a second."""


def ledger_view(ledger: Ledger, name: str, equations: Equations | None = None) -> Group:
    """Every row, then every total under its own name."""
    parts: list[RenderableType] = [row_table(ledger, name, equations), total_table(ledger)]
    return Group(*parts)


def row_table(ledger: Ledger, name: str, equations: Equations | None) -> Table:
    """One line per weight: what one costs, how often it is stored, read and run, and what that makes."""
    setting = ledger.setting
    headers = ["weight", "each", "stored", "read", "run", "parameters", "FLOPs / token", "KV bytes / token", "rule"]
    if equations is not None:
        headers.append("equation of one")
    table = plain_table(*headers, title=name)
    for row in ledger.rows:
        flops = round(setting.flops(row))
        counted = setting.convention.counts(row) or row.kind == "cache"
        cells = [
            label(row, ledger),
            exact(row.params) if row.params else "-",
            exact(row.stored) if row.params else "-",
            exact(row.read) if row.params else "-",
            exact(row.run),
            exact(row.params * row.stored) if row.params else "-",
            exact(flops) if flops else "-",
            exact(ledger.bytes_of(row.cache * row.run)) if row.cache else "-",
            row.source,
        ]
        if equations is not None:
            cells.append(equation(row, equations[row.name, "".join(row.sections[:1])]))
        table.add_row(*cells, style=None if counted or row.params else "dim")
    return table


def label(row: Row, ledger: Ledger) -> str:
    """A row's name; its section where another section has other numbers."""
    name = row.name
    if sum(other.name == name for other in ledger.rows) > 1:
        parts = list(dict.fromkeys(row.sections)) if ledger.spec.loop else []
        parts += [f"window {row.window.size}"] if row.window else []
        name += f" ({', '.join(parts)})" if parts else ""
    return name


def equation(row: Row, formulas: tuple[Any, Any, Any]) -> str:
    """A row's formula: cached elements, parameters, or the multiply-adds of a weightless operation."""
    params, macs, cache = formulas
    if row.kind == "cache":
        return f"{cache} elements"
    if row.kind == "attention":
        return f"{macs} multiply-adds x positions"
    return str(params if row.params else macs)


def total_table(ledger: Ledger) -> Table:
    """The totals, each under the name its convention goes by."""
    data, setting = ledger.as_dict(), ledger.setting
    table = plain_table("total", "value", "")
    for key, value in data["parameters"].items():
        table.add_row(f"parameters: {key.replace('_', ' ')}", exact(value), short(value))
    flops = data["flops"]
    about = f"{flops['convention']}, {flops['attention_length']:g} positions"
    table.add_row("FLOPs per token: forward", exact(flops["forward_per_token"]), about)
    table.add_row("FLOPs per token: training", exact(flops["training_per_token"]), "3 x forward")
    cache = data["kv_cache"]
    table.add_row("KV cache: bytes per token", exact(cache["bytes_per_token"]), f"{setting_bytes(ledger)} per element")
    table.add_row(f"KV cache: bytes at {setting.context:,} tokens", exact(cache["bytes_at_context"]), "windows capped")
    layers = data["layers"]
    table.add_row("layers: stored / executed", f"{layers['physical']} / {layers['effective']}", "")
    sparsity = data["sparsity"]
    table.add_row("sparsity: compute-equivalent S", f"{sparsity['compute_equivalent']:.4f}", "")
    table.add_row("sparsity: experts idle", f"{sparsity['expert']:.4f}", "")
    return table


def setting_bytes(ledger: Ledger) -> str:
    """Bytes per element in words."""
    size = float(ledger.setting.bytes_per_element)
    return f"{size:g} byte{'' if size == 1 else 's'}"
