"""What does the optimiser see of the looped-MoE law? Points, starts, and a descent in coordinates that are made round.

Columns of the derivatives at the published coefficients differ 1500-fold in length and lean on each other, and L-BFGS-B
takes thousands of steps along such a valley. So each round descends in z,

    theta = theta0 + V diag(1/s) z          U diag(s) V^T = derivatives of the log law at theta0

where the objective's bottom is about a sphere, and the next round starts where it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.optimize import minimize

from smelt_budget.laws.forms import Array
from smelt_budget.laws.looped_moe import NAMES, LoopedMoe, log_law
from smelt_budget.laws.problem import OPTIONS, Problem

ROUNDS = 8
STEPS = 300  # of one round: most converge in fewer, and another centre helps more than more steps
FLOOR = 1e-7  # of the largest s: what no point depends on would be stretched without end
NO_PLACE = 1e12
"""The objective where the law overflows."""


class LoopedMoeProblem(Problem):
    """A place is theta itself."""

    def __init__(self, form: LoopedMoe, columns: Mapping[str, Array], loss: Array):
        self.form, self.columns, self.log_loss = form, columns, np.log(loss)

    def log_law(self, place: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Derivatives are kept until slopes come."""
        values, slopes = log_law(place, self.columns)
        return values, lambda slope: slopes @ slope

    def value(self, place: Array, weight: Array | None = None) -> tuple[float, Array]:
        """As of any law; large and flat where it overflows, so that a line search turns round."""
        with np.errstate(all="ignore"):
            value, gradient = super().value(place, weight)
        if np.isfinite(value) and np.isfinite(gradient).all():
            return value, gradient
        return NO_PLACE, np.zeros(len(NAMES))

    def descend(self, start: Array, weight: Array | None = None) -> tuple[Array, float]:
        """Rounds until one gains nothing."""
        place, best = start, self.value(start, weight)[0]
        for _ in range(ROUNDS):
            slopes = log_law(place, self.columns)[1].T
            if weight is not None:
                slopes = slopes[weight > 0]
            if not np.isfinite(slopes).all():
                break
            _, lengths, axes = np.linalg.svd(slopes, full_matrices=False)
            out = axes.T / np.hypot(lengths, FLOOR * lengths[0])

            def rounded(z: Array, centre: Array = place, out: Array = out) -> tuple[float, Array]:
                value, gradient = self.value(centre + out @ z, weight)
                return value, gradient @ out

            options = OPTIONS | {"maxiter": STEPS, "maxfun": 2 * STEPS}
            done = minimize(rounded, np.zeros(len(lengths)), jac=True, method="L-BFGS-B", options=options)
            gained = best - float(done.fun)
            place, best = place + out @ done.x, float(done.fun)
            if gained <= 1e-12 * max(1.0, best):
                break
        return place, best

    def theta(self, place: Array) -> Array:
        """The same."""
        return place

    def place(self, theta: Array) -> Array:
        """The same."""
        return theta

    def starts(self, number: int, seed: int) -> Array:
        """Constants as shares of the losses; exponents, experts and loops of the usual sizes."""
        rng = np.random.default_rng(seed)
        least, middle = np.exp(self.log_loss.min()), np.exp(np.median(self.log_loss))
        ranges = {
            "c": (0.3 * least, 0.99 * least), "A": (0.05 * middle, 0.5 * middle), "B": (0.05 * middle, 0.9 * middle),
            "al": (-0.5, -0.05), "be": (-1, -0.2), "d": (-0.4, 0), "w": (-0.4, 0), "g": (-0.1, 0.1), "z": (-0.1, 0.1),
            "Es": (0.5, 3), "Em": (10, 100), "k1": (0.1, 1), "k2": (0.5, 3), "th": (0, 0.6),
        }  # fmt: skip
        drawn = {name: rng.uniform(ranges[name][0], ranges[name][1], number) for name in NAMES}
        return np.array([self.form.theta({name: values[i] for name, values in drawn.items()}) for i in range(number)])
