"""A ladder: pairs and their gaps, what they take, which runs there are."""

from __future__ import annotations

from typing import Any

from smelt_budget.page.charts import ARMS, COLOURS, arm_style, frame, label
from smelt_budget.page.parts import Chapter, Plot, Section, Table
from smelt_budget.page.sources import Source
from smelt_budget.report.ladder import cell_table, cost_table, horizon_words

BUDGETS = {"flops": "training FLOPs", "non_embedding_parameters": "non-embedding parameters", "kv_cache": "KV cache"}
SYMBOLS = ("circle", "square", "diamond")
Data = dict[str, Any]


def chapter(source: Source, number: int) -> Chapter:
    """Pairs, and what they take."""
    result, path = source.data, str(source.path)
    grid, names = result["grid"], [label(cell["name"]) for cell in result["cells"]]
    heading = f"{grid['name']}: {len(names)} cells" + (f", {grid['source']}" if grid["source"] else "")
    low, high = result["window"]["baseline"]
    return Chapter(
        "ladder",
        path,
        (
            Section(
                f"ladder{number}",
                "The ladder",
                path,
                result["command"],
                (Table.of(cell_table(result["cells"])), gaps(result, names, f"ladder-gaps{number}")),
                (heading, *horizon_words(result), f"runs span {low:.2g} to {high:.2g} training FLOPs"),
                ("planned, not trained",),
            ),
            Section(
                f"cost{number}",
                "What it takes",
                path,
                result["command"],
                (Table.of(cost_table(result)), hours(result, names, f"hours{number}")),
                tuple(result["notes"]),
                ("planned, not measured", f"MFU {100 * result['mfu']:g} % assumed"),
            ),
        ),
        result,
    )


def gaps(result: Data, names: list[str], plot: str) -> Plot:
    """Three markers a cell."""
    traces = tuple(
        {
            "type": "scatter",
            "mode": "markers",
            "name": words,
            "x": names,
            "y": [100 * cell["gaps"][budget] for cell in result["cells"]],
            "marker": {"symbol": symbol, "size": 9, "color": colour},
        }
        for (budget, words), symbol, colour in zip(BUDGETS.items(), SYMBOLS, COLOURS, strict=False)
    )
    layout = frame("", "gap of the twin, %", xaxis={"type": "category"})
    layout["yaxis"] |= {"zeroline": True}
    return Plot(plot, "Gaps by cell", traces, layout, "Signed and relative.", "cell")


def hours(result: Data, names: list[str], plot: str) -> Plot:
    """Two bars a cell, horizons off a shared trunk."""
    traces = tuple(
        {
            "type": "bar",
            "name": arm,
            "x": names,
            "y": [cell["arms"][arm]["shared"]["gpu_hours"] for cell in result["cells"]],
            "marker": {"color": arm_style(arm)[0], "pattern": {"shape": "" if arm == "baseline" else "/"}},
        }
        for arm in ARMS
    )
    layout = frame("", "GPU-hours", xaxis={"type": "category"}, barmode="group")
    return Plot(plot, "GPU-hours by cell", traces, layout, "All horizons of a cell, branching off one trunk.", "cell")
