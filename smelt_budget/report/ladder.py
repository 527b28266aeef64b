"""How is a ladder shown? What was matched, what is trained, what it takes; then what the numbers rest on.

Reads what `ladder --json` prints, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from smelt_budget.report.frame import plain_table
from smelt_budget.report.numbers import exact, short, signed_percent

ARMS = ("baseline", "twin")
Data = dict[str, Any]


def ladder_view(result: Data) -> Group:
    """Everything there is."""
    grid = result["grid"]
    heading = f"{grid['name']}: {len(result['cells'])} cells" + (f", {grid['source']}" if grid["source"] else "")
    parts: list[RenderableType] = [Text(heading), cell_table(result["cells"])]
    parts += [Text(line, style="dim") for line in horizon_words(result)]
    parts.append(cost_table(result))
    if result["window"]["baseline"]:
        low, high = result["window"]["baseline"]
        parts.append(Text(f"runs of the baseline span {low:.2g} to {high:.2g} training FLOPs", style="dim"))
    return Group(*parts, *(Text(note, style="dim") for note in result["notes"]))


def cell_table(cells: Sequence[Data]) -> Table:
    """A row a pair: what the solver chose, gaps, S."""
    columns = ("hidden", "experts", "width", "FLOPs / token", "FLOPs", "params", "KV", "S")
    table = plain_table("cell, baseline -> twin", *columns)
    for cell in cells:
        specs = [cell[arm]["spec"] for arm in ARMS]
        table.add_row(
            cell["name"],
            *(
                arrow(spec[field] for spec in specs)
                for field in ("hidden_size", "num_experts", "moe_intermediate_size")
            ),
            " -> ".join(short(cell["arms"][arm]["training_flops_per_token"]) for arm in ARMS),
            *(signed_percent(gap) for gap in cell["gaps"].values()),
            " -> ".join(f"{100 * cell['sparsity'][arm]:.2f}" for arm in ARMS) + " %",
        )
    return table


def arrow(values: Any) -> str:
    """1,280 -> 1,056."""
    return " -> ".join(exact(value) for value in values)


def horizon_words(result: Data) -> list[str]:
    """How long, and what is shared."""
    lengths = result["horizons"]
    each = ", ".join(short(run["tokens"]) for run in lengths["runs"])
    return [
        f"horizons: {each} tokens",
        f"branch points: {', '.join(exact(steps) for steps in lengths['stable_steps'])} steps of "
        f"{lengths['batch_sequences']:,} x {lengths['context']:,} tokens, each with a decay of "
        f"{short(lengths['decay_tokens'])} tokens",
        f"an arm of a cell: {short(lengths['shared_tokens'])} tokens where horizons branch off one trunk, "
        f"{short(lengths['separate_tokens'])} where each is trained by itself",
    ]


def cost_table(result: Data) -> Table:
    """A row an arm, branches off one trunk; then the totals, both ways."""
    layout, priced = result["layout"], result["price"] is not None
    gpus = layout["nodes"] * layout["gpus"]
    days = f"days on {gpus:,} GPU{'' if gpus == 1 else 's'}"
    columns = ["arm", "tokens", "training FLOPs", "with lm-head", "GPU-hours", days, "GB / GPU"]
    table = plain_table("shared trunk", *columns, *(["cost"] if priced else []))
    for cell in result["cells"]:
        for arm in ARMS:
            one = cell["arms"][arm]
            held = one["memory"]
            gigabytes = f"{held['total'] / 1e9:.1f}{'' if held['fits'] else ' !'}"
            table.add_row(cell["name"] if arm == ARMS[0] else "", arm, *spent(one["shared"], gigabytes, priced))
    table.add_section()
    for arm in (*ARMS, "both"):
        table.add_row("all" if arm == ARMS[0] else "", arm, *spent(result["totals"][arm]["shared"], "", priced))
    table.add_row("each horizon by itself", "both", *spent(result["totals"]["both"]["separate"], "", priced))
    return table


def spent(one: Data, gigabytes: str, priced: bool) -> list[str]:
    """Tokens to money."""
    found = [
        short(one["tokens"]),
        f"{one['training_flops']:.3g}",
        f"{one['work']:.3g}",
        amount(one["gpu_hours"]),
        amount(one["days"]),
        gigabytes,
    ]
    return [*found, amount(one["cost"])] if priced else found


def amount(value: float) -> str:
    """Hours, days or money: three digits, and every one before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
