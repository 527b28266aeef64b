"""A fitted law: coefficients with intervals, both frontiers over the runs, compute saved at equal loss, residuals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from smelt_budget.laws.frontier import gain
from smelt_budget.laws.gains import Law, gains, load
from smelt_budget.page import commands
from smelt_budget.page.charts import COLOURS, DASHES, band, curve, frame, label, level, outside
from smelt_budget.page.parts import Chapter, Plot, Section, Table
from smelt_budget.page.sources import Source
from smelt_budget.report.law import coefficient_table, fit_words, gain_table, said

SPARSITIES, COMPUTES = [0.85, 0.95, 0.97], [1e20, 1e21, 1e22]
"""Those that `law gain` shows by itself."""
POINTS = 25
SYMBOLS = ("square-open", "circle-open")
Data = dict[str, Any]


def chapter(source: Source, number: int) -> Chapter:
    """Fit, gains, residuals."""
    result, path = source.data, str(source.path)
    law = load(Path(path))
    command = commands.fitted(path, result)
    saves = law.form.name == "smelt" and len(law.arms) == 2
    marks = ("single runs",) if all(one["runs"] == one["cells"] for one in result["arms"].values()) else ()
    loose = any(
        found["identified"] is False for arm in result["arms"].values() for found in arm["coefficients"].values()
    )
    sections = [
        Section(
            f"law{number}",
            "The law",
            path,
            command,
            (
                Table.of(coefficient_table(result)),
                *((frontiers(law, result, f"frontiers{number}"),) if law.has_frontier else ()),
                residuals(result, f"residuals{number}"),
            ),
            (f"{result['equation']}, {result['origin']}", *fit_words(result)),
            (*marks, *(("not all identified",) if loose else ())),
            ("outside the fitted window a law is an extrapolation, however good the fit",),
        )
    ]
    rows: list[Data] = []
    if saves:
        rows = gains(law, COMPUTES, SPARSITIES)
        marks = ("partly extrapolated",) if any(row["extrapolated"] for row in rows) else ()
        sections.append(
            Section(
                f"gain{number}",
                "Compute saved at equal loss",
                path,
                commands.gained(path),
                (Table.of(gain_table(rows)), savings(law, f"gains{number}")),
                tuple(line.plain for line in said(law.window, rows)),
                marks,
                ("compute is counted FLOPs: time, memory traffic and inference are not in it",),
            )
        )
    kept = {key: value for key, value in result.items() if key != "draws"}
    return Chapter("law", path, tuple(sections), kept | {"gains": rows})


def budgets(law: Law) -> np.ndarray:
    """From a decade below the window to a decade above."""
    low, high = law.window or (1e18, 1e24)
    return np.geomspace(low / 10, high * 10, POINTS)


def frontiers(law: Law, result: Data, name: str) -> Plot:
    """Runs as markers, each arm's frontier as a line for each sparsity."""
    computes, traces = budgets(law), []
    for arm, symbol, dash in zip(law.arms, SYMBOLS * 9, DASHES * 9, strict=False):
        runs = [run for run in result["arms"][arm]["residuals"] if "compute" in run]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label(f"runs, {arm}"),
                "x": [run["compute"] for run in runs],
                "y": [run["loss"] for run in runs],
                "marker": {"symbol": symbol, "size": 6, "color": "#808080"},
            }
        )
        for place, sparsity in enumerate(SPARSITIES if law.form.name == "smelt" else [None]):
            best = law.frontier(arm, sparsity)
            words = arm if sparsity is None else f"{arm}, S {sparsity:.0%}"
            line = [best.loss(float(c)) for c in computes]
            traces.append(curve(words, computes.tolist(), line, COLOURS[place], dash))
    layout = frame("training FLOPs", "loss, nats / token", xaxis=logarithmic(computes))
    layout["shapes"] = outside(float(computes[0]), float(computes[-1]), law.window) if law.window else []
    words = "Lines: the least loss a budget can reach. Grey: no runs were there."
    return Plot(name, "Runs and frontiers", tuple(traces), layout, words, "training FLOPs")


def savings(law: Law, name: str) -> Plot:
    """Percent of compute saved, in the band of the refits."""
    baseline, looped = law.pair()
    computes, traces = budgets(law).tolist(), []
    for place, sparsity in enumerate(SPARSITIES):
        colour, words = COLOURS[place], f"S {sparsity:.0%}"
        if law.draws:
            low, high = interval(law, baseline, looped, sparsity, computes)
            traces.append(band(computes, low, high, colour, words))
        ends = law.frontier(baseline, sparsity), law.frontier(looped, sparsity)
        saved = [100 * gain(*ends, c) for c in computes]
        traces.append(curve(words, computes, saved, colour, DASHES[place], legendgroup=words))
    layout = frame(f"training FLOPs of {looped}", f"compute saved against {baseline}, %", xaxis=logarithmic(computes))
    shaded = outside(computes[0], computes[-1], law.window) if law.window else []
    layout["shapes"] = [level(0, "", "solid"), *shaded]
    middle = [100 * gain(law.frontier(baseline, s), law.frontier(looped, s), c) for s in SPARSITIES for c in computes]
    layout["yaxis"] |= {"range": [min(-20.0, 1.2 * min(middle)), max(60.0, 1.2 * max(middle))]}
    words = "Bands: the middle 95 % of refits." if law.draws else "No refits, so no bands."
    return Plot(name, "Gain", tuple(traces), layout, words, "training FLOPs")


def interval(
    law: Law, baseline: str, looped: str, sparsity: float, computes: list[float]
) -> tuple[list[float], list[float]]:
    """The middle 95 % of refits at each budget."""
    drawn = []
    for draw in range(len(law.draws)):
        ends = law.frontier(baseline, sparsity, draw), law.frontier(looped, sparsity, draw)
        drawn.append([100 * gain(*ends, c) for c in computes])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return low.tolist(), high.tolist()


def logarithmic(computes: Any) -> dict[str, Any]:
    """Powers of ten, over what is drawn."""
    return {
        "type": "log",
        "exponentformat": "power",
        "dtick": 1,
        "range": [float(np.log10(computes[0])), float(np.log10(computes[-1]))],
    }


def residuals(result: Data, name: str) -> Plot:
    """Loss minus fit of every run."""
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label(arm),
            "x": [run["loss"] for run in one["residuals"]],
            "y": [1e3 * run["residual"] for run in one["residuals"]],
            "text": [label(f"row {run['row']}, {run['cell']}") for run in one["residuals"]],
            "hovertemplate": "%{text}: %{y:.2f}<extra></extra>",
            "marker": {"symbol": symbol, "size": 7, "color": COLOURS[place]},
        }
        for place, ((arm, one), symbol) in enumerate(zip(result["arms"].items(), SYMBOLS * 9, strict=False))
    ]
    layout = frame("loss, nats / token", "loss - fit, 0.001 nats", shapes=[level(0, "", "solid")])
    return Plot(name, "Residuals", tuple(traces), layout, "A pattern here means that the form does not fit.", "loss")
