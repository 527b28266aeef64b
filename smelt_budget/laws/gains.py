"""How much compute does looping save, and how is a budget best spent, with what certainty?

A law is two arms of coefficients, fitted or published, with refits where there are any and the window of the runs. What
lies outside the window is extrapolated, and every row says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.laws.bootstrap import Interval
from smelt_budget.laws.fit import FORMS
from smelt_budget.laws.forms import CHINCHILLA, SMELT, Form
from smelt_budget.laws.frontier import Frontier, chinchilla_frontier, frontier, gain
from smelt_budget.laws.looped_moe import LOOPED_MOE
from smelt_budget.laws.runs import ONE_ARM
from smelt_budget.laws.study import RESULT

SMELT_WINDOW = (1.3e19, 2.2e21)  # training FLOPs of the paper's grid, arXiv 2609.01343 section 6
PRESETS = ("smelt", *CHINCHILLA.presets, *LOOPED_MOE.presets)


@dataclass(frozen=True)
class Law:
    """Arms of one form."""

    form: Form
    origin: str
    arms: dict[str, dict[str, float]]
    """Coefficients."""
    draws: list[dict[str, dict[str, float]]]
    window: tuple[float, float] | None
    """Training FLOPs that the runs span; `None` where nobody said."""

    def pair(self) -> tuple[str, str]:
        """Names of the baseline and of the looped arm: those so called, else the first and the second.

        Raises:
            BadInput: there are not two.
        """
        names = list(self.arms)
        if len(names) != 2:
            raise BadInput(f"a gain is between two arms; {self.origin} has {', '.join(names)}")
        return ("baseline", names[1 - names.index("baseline")]) if "baseline" in names else (names[0], names[1])

    @property
    def has_frontier(self) -> bool:
        """Whether the best loss is a power of compute; the looped-MoE law has a best shape instead."""
        return self.form is not LOOPED_MOE

    def frontier(self, arm: str, sparsity: float | None, draw: int | None = None) -> Frontier:
        """An arm's frontier, by the fit or by one of its draws."""
        coefficients = self.arms[arm] if draw is None else self.draws[draw][arm]
        return (
            frontier(coefficients, sparsity or 0.0) if self.form.name == "smelt" else chinchilla_frontier(coefficients)
        )

    def inside(self, compute: float) -> bool | None:
        """Whether runs of about this budget were fitted."""
        return None if self.window is None else self.window[0] <= compute <= self.window[1]


def preset(name: str) -> Law:
    """A published law."""
    if name == "smelt":
        arms = {"baseline": dict(SMELT.presets["smelt-baseline"]), "looped": dict(SMELT.presets["smelt-looped"])}
        return Law(SMELT, f"preset smelt ({SMELT.source})", arms, [], SMELT_WINDOW)
    if name not in PRESETS:
        raise BadInput(f"there is no preset {name!r:.60}", f"fix: one of {', '.join(PRESETS)}")
    if name in LOOPED_MOE.presets:
        return Law(
            LOOPED_MOE, f"preset {name} ({LOOPED_MOE.source})", {ONE_ARM: dict(LOOPED_MOE.presets[name])}, [], None
        )
    return Law(CHINCHILLA, f"preset {name} ({CHINCHILLA.source})", {"dense": dict(CHINCHILLA.presets[name])}, [], None)


def load(folder: Path) -> Law:
    """A law that `law fit` wrote.

    Raises:
        BadInput: there is none.
    """
    path = folder / RESULT if folder.is_dir() else folder
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        form = FORMS[data["form"]]
        arms = {
            arm: {n: float(k["value"]) for n, k in one["coefficients"].items()} for arm, one in data["arms"].items()
        }
        windows = [one["window"]["compute"] for one in data["arms"].values()]
        window = (min(low for low, _ in windows), max(high for _, high in windows))
        return Law(form, data["origin"], arms, data["draws"], window)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{path} is not what law fit wrote", "fix: smelt-budget law fit RUNS --out FOLDER") from None


def gains(law: Law, computes: list[float], sparsities: list[float]) -> list[dict[str, Any]]:
    """A row for each budget and sparsity: percent saved, interval, and whether runs were there."""
    if law.form.name != "smelt":
        raise BadInput(f"{law.origin} knows no sparsity, and no looped arm; a gain needs the form smelt or looped-moe")
    baseline, looped = law.pair()
    rows = []
    for compute in computes:
        for sparsity in sparsities:
            drawn = [
                gain(law.frontier(baseline, sparsity, i), law.frontier(looped, sparsity, i), compute)
                for i in range(len(law.draws))
            ]
            interval = Interval.of(np.array(drawn)) if drawn else None
            value = gain(law.frontier(baseline, sparsity), law.frontier(looped, sparsity), compute)
            rows.append(
                {
                    "compute": compute,
                    "sparsity": sparsity,
                    "gain": value,
                    "low": interval and interval.low,
                    "high": interval and interval.high,
                    "extrapolated": not law.inside(compute),
                }
            )
    return rows


def allocations(law: Law, computes: list[float], sparsities: list[float]) -> list[dict[str, Any]]:
    """A row for each budget, sparsity and arm: F*, D*, tokens per parameter, loss."""
    rows = []
    for compute in computes:
        for sparsity in sparsities if law.form.name == "smelt" else [None]:
            for arm in law.arms:
                best = law.frontier(arm, sparsity)
                ratios = [law.frontier(arm, sparsity, i).tokens_per_parameter(compute) for i in range(len(law.draws))]
                interval = Interval.of(np.array(ratios)) if ratios else None
                rows.append(
                    {
                        "compute": compute,
                        "sparsity": sparsity,
                        "arm": arm,
                        "flops_per_token": best.flops(compute),
                        "active_parameters": best.flops(compute) / 6,
                        "tokens": best.tokens(compute),
                        "tokens_per_parameter": best.tokens_per_parameter(compute),
                        "low": interval and interval.low,
                        "high": interval and interval.high,
                        "loss": best.loss(compute),
                        "extrapolated": None if law.window is None else not law.inside(compute),
                    }
                )
    return rows


def residuals(folder: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Every run of a fitted law by arm; none of a preset."""
    if folder is None:
        return {}
    path = folder / RESULT if folder.is_dir() else folder
    return {arm: one["residuals"] for arm, one in json.loads(path.read_text(encoding="utf-8"))["arms"].items()}
