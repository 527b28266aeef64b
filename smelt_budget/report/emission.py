"""How is an emission shown? What was asked, what was emitted, what was dropped; then how to train it."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from smelt_budget.report.frame import plain_table


def target_table(targets: list[dict[str, str]]) -> Table:
    """Every target, the versions its files were run with, and what they need."""
    table = plain_table("target", "what comes out", "tested with", "needs")
    for column in table.columns:
        column.justify = "left"
    for target in targets:
        table.add_row(target["name"], target["title"], target["tested"], target["needs"])
    return table


def emission_view(told: dict[str, Any]) -> Group:
    """What `emit` did."""
    table = plain_table("feature", "asked", "emitted", "")
    for column in table.columns:
        column.justify = "left"
    for line in told["features"]:
        how = "" if line["how"] == "as asked" else line["how"]
        table.add_row(line["feature"], line["asked"], "-" if how == "dropped" else line["emitted"], how)
    training = told["training"]
    step = f"{training['batch_sequences']} x {training['context']}"
    budget = f"{training['tokens']:,} tokens: {training['steps']:,} steps of {step}"
    rates = "peak rates {:.2g} (baseline), {:.2g} (twin)".format(*training["rates"])
    parts: list[Any] = [Text(f"wrote {len(told['files'])} files for {told['target']} to {told['out']}"), table]
    if told["train"]:
        parts.append(Text(f"{budget}; {rates}"))
    parts += [Text(f"train the {arm}:  {command}") for arm, command in told["train"].items()]
    parts += [Text(f"note: {note}") for note in told["notes"]]
    return Group(*parts)
