"""What does a law look like? Loss against compute with both frontiers, gain curves, residuals. PNG or SVG by suffix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.laws.frontier import gain
from smelt_budget.laws.gains import Law

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (7.2, 4.6)  # inches: the width of a printed page
MARKS, LINES = ("o", "s"), ("-", "--")
POINTS = 60


def draw(law: Law, kind: str, sparsities: list[float], path: Path, residuals: dict[str, list[dict[str, Any]]]) -> None:
    """Write one picture: `loss`, `gain` or `residuals`.

    Raises:
        BadInput: the suffix is neither .png nor .svg, or there is nothing to draw.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise BadInput(f"{path} is neither .png nor .svg", "fix: --out law.png")
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=160, layout="constrained")
    axes = figure.add_subplot()
    {"loss": losses, "gain": gain_curves, "residuals": misfits}[kind](axes, law, sparsities, residuals)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(
            beside, format=path.suffix[1:].lower(), metadata={"Date": None} if path.suffix == ".svg" else None
        )
        beside.replace(path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        beside.unlink(missing_ok=True)


def budgets(law: Law) -> np.ndarray:
    """From a decade below the window to a decade above."""
    low, high = law.window or (1e18, 1e24)
    return np.geomspace(low / 10, high * 10, POINTS)


def shade(axes: Axes, law: Law) -> None:
    """What no run covers is grey."""
    if law.window is None:
        return
    low, high = axes.get_xlim()
    for left, right in ((low, law.window[0]), (law.window[1], high)):
        axes.axvspan(left, right, color="0.92", zorder=0)
    axes.set_xlim(low, high)
    axes.text(0.99, 0.01, "grey: extrapolated", transform=axes.transAxes, ha="right", va="bottom", fontsize=7)


def losses(axes: Axes, law: Law, sparsities: list[float], residuals: dict[str, list[dict[str, Any]]]) -> None:
    """Runs as marks, each arm's frontier as a line."""
    computes = budgets(law)
    for arm, mark, line in zip(law.arms, MARKS, LINES, strict=False):
        for place, sparsity in enumerate(sparsities):
            frontier = law.frontier(arm, sparsity)
            label = f"{arm}, S {sparsity:.0%}" if law.form.name == "smelt" else arm
            axes.plot(computes, [frontier.loss(c) for c in computes], line, color=f"C{place}", label=label)
        runs = [run for run in residuals.get(arm, []) if "compute" in run]
        axes.plot([r["compute"] for r in runs], [r["loss"] for r in runs], mark, color="0.5", markersize=3, alpha=0.6)
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="loss, nats per token", title=f"Frontiers: {law.origin}")
    axes.legend(fontsize=7)
    shade(axes, law)


def gain_curves(axes: Axes, law: Law, sparsities: list[float], _residuals: dict[str, list[dict[str, Any]]]) -> None:
    """Percent of compute saved, with the band of the refits."""
    baseline, looped = law.pair()
    computes = budgets(law)
    for place, sparsity in enumerate(sparsities):
        curve = [100 * gain(law.frontier(baseline, sparsity), law.frontier(looped, sparsity), c) for c in computes]
        axes.plot(computes, curve, LINES[place % 2], color=f"C{place}", label=f"S {sparsity:.0%}")
        if law.draws:
            drawn = [
                [
                    100 * gain(law.frontier(baseline, sparsity, i), law.frontier(looped, sparsity, i), c)
                    for c in computes
                ]
                for i in range(len(law.draws))
            ]
            low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
            axes.fill_between(computes, low, high, color=f"C{place}", alpha=0.15)
    axes.axhline(0, color="0.3", linewidth=0.6)
    axes.set(xscale="log", xlabel=f"training FLOPs of the {looped} arm", ylabel=f"compute saved against {baseline}, %")
    axes.set_title(f"Compute saved at equal loss: {law.origin}")
    axes.legend(fontsize=7)
    shade(axes, law)


def misfits(axes: Axes, law: Law, _sparsities: list[float], residuals: dict[str, list[dict[str, Any]]]) -> None:
    """Loss minus fit for every run."""
    if not residuals:
        raise BadInput(f"{law.origin} has no runs, so no residuals")
    for arm, mark in zip(law.arms, MARKS, strict=False):
        runs = residuals[arm]
        axes.plot([r["loss"] for r in runs], [1e3 * r["residual"] for r in runs], mark, markersize=4, label=arm)
    axes.axhline(0, color="0.3", linewidth=0.6)
    axes.set(xlabel="loss, nats per token", ylabel="loss minus fit, 0.001 nats", title=f"Residuals: {law.origin}")
    axes.legend(fontsize=7)
