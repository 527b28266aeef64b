"""How is a judged model shown? Its loss on every part of the text, both arms side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from smelt_budget.report.experts import expert_words
from smelt_budget.report.frame import plain_table


def evaluation_view(result: dict[str, Any]) -> Group:
    """One row per part of the text, nats per token and bits per byte of each arm."""
    arms = result["arms"]
    headings = [f"{arm}, {unit}" for arm in arms for unit in ("nats/token", "bits/byte")]
    table = plain_table(f"{result['text']} ({result['which']})", "tokens", *headings, title=None)
    for words, key in parts(next(iter(arms.values()))):
        of_arms = [at(one, key) for one in arms.values()]
        shown = [number(one[unit]) for one in of_arms for unit in ("nats_per_token", "bits_per_byte")]
        table.add_row(words, f"{of_arms[0]['tokens']:,}", *shown)
    where = f"seed {result['seed']}, rows of {result['context']} tokens, text {result['fingerprint'][:12]}"
    return Group(table, *(Text(line, style="dim") for line in (where, *expert_words(result["experts"]))))


def parts(one: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """(what to call it, where it stands) of every part with tokens in it."""
    listed: list[tuple[str, tuple[str, ...]]] = [("all", ())]
    for group, words in (("domains", ""), ("document_length", "document of "), ("position", "position ")):
        unit = " tokens" if group == "document_length" else ""
        listed += [(f"{words}{name}{unit}", (group, name)) for name in one[group] if one[group][name]["tokens"]]
    return listed


def at(one: dict[str, Any], key: tuple[str, ...]) -> dict[str, Any]:
    """A part by its place."""
    for step in key:
        one = one[step]
    return one


def number(value: float | None) -> str:
    """Four digits behind the point."""
    return "" if value is None else f"{value:.4f}"
