"""How sure is a fit? Refits of cells drawn with replacement, one stream of draws for both arms.

A cell is one shape at all its horizons: its runs share an initialisation and a data order, so they are drawn together
(arXiv 2609.01343, section 6: 2,000 draws over 12 cells). Draw i is seeded by (seed, i): stopped and resumed, in one
process or two, it is the same draw. A draw in which a column takes too few values cannot be fitted and is drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from smelt_budget.laws.fit import Fit, problem
from smelt_budget.laws.forms import Array, Form
from smelt_budget.laws.runs import Runs

IDENTIFIED = 0.5
"""A coefficient is unidentified where its 95 % interval is wider than this times its value, up and down."""


class Refits:
    """Draws and refits of the arms of one table."""

    def __init__(self, form: Form, arms: Mapping[str, Runs], fits: Mapping[str, Fit], seed: int = 0):
        self.form, self.arms, self.seed = form, arms, seed
        self.problems = {arm: problem(form, runs.columns, runs.loss) for arm, runs in arms.items()}
        self.best = {arm: self.problems[arm].place(form.theta(fits[arm].coefficients)) for arm in arms}
        self.cells = tuple(dict.fromkeys(cell for runs in arms.values() for cell in runs.cells))

    def draw(self, number: int) -> dict[str, Array]:
        """How often each run of each arm counts in a draw."""
        rng = np.random.default_rng((self.seed, number))
        while True:
            picked = np.bincount(rng.integers(0, len(self.cells), len(self.cells)), minlength=len(self.cells))
            times = dict(zip(self.cells, picked, strict=True))
            weights = {arm: np.array([float(times[cell]) for cell in runs.cell]) for arm, runs in self.arms.items()}
            if all(self.varied(arm, weight) for arm, weight in weights.items()):
                return weights

    def varied(self, arm: str, weight: Array) -> bool:
        """Whether every column has values enough left."""
        return all(
            len(np.unique(values[weight > 0])) >= self.form.least_different(name)
            for name, values in self.arms[arm].columns.items()
        )

    def refit(self, number: int) -> dict[str, dict[str, float]]:
        """Coefficients of every arm in one draw, found from the full fit."""
        weights = self.draw(number)
        found = {}
        with threadpool_limits(1):
            for arm, points in self.problems.items():
                place, _ = points.descend(self.best[arm], weights[arm])
                found[arm] = self.form.coefficients(points.theta(place))
        return found

    def batch(self, numbers: tuple[int, int]) -> list[dict[str, dict[str, float]]]:
        """Refits from the first number up to the second."""
        return [self.refit(number) for number in range(*numbers)]


@dataclass(frozen=True)
class Interval:
    """The middle 95 % of refits."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Array) -> Interval:
        """Percentiles 2.5 and 97.5."""
        low, high = np.percentile(values, [2.5, 97.5])
        return cls(float(low), float(high))


def identified(value: float, interval: Interval) -> bool:
    """Whether an interval pins a coefficient down at all."""
    return max(value - interval.low, interval.high - value) < IDENTIFIED * abs(value)
