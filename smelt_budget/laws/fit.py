"""Which coefficients do losses give? Robust least squares in log space, from many starts.

    minimise  sum over points of Huber_delta(log sum of terms - log L)        delta 1e-3 (arXiv:2203.15556, section D.3)

The **sum**: divided by the number of points the objective falls below the optimiser's stopping rule, and a fit of the
public Chinchilla points stops at exponents .38 and .31 instead of .35 and .37. Gradients are exact,

    d log L / d theta = sum over terms of softmax(log terms) design

and theta is moved to where the features are centred, else constants and exponents trade off along a valley 1000 times
longer than wide, which is where a plain fit loses its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from smelt_budget.laws.forms import Array, Form

DELTA = 1e-3


@dataclass(frozen=True)
class Fit:
    """The best of all starts."""

    form: Form
    coefficients: dict[str, float]
    objective: float
    """Sum of Huber losses."""
    rmse: float
    """Nats, of the loss itself."""
    starts: int
    agreeing: int
    """Starts that ended within 1e-9 (relative) of the best objective."""
    residuals: Array
    """Loss minus fit, nats."""


class Problem:
    """Points as the optimiser sees them."""

    def __init__(self, form: Form, columns: Mapping[str, Array], loss: Array):
        design, _ = form.design(columns)
        self.form, self.log_loss = form, np.log(loss)
        centre = design.mean(1)  # [J, P]
        # constant' = constant + exponents x mean features: a unit triangular change of theta
        change = np.eye(len(form.names))
        place = 0
        for j, powers in enumerate([(), *(term.powers for term in form.terms)]):
            change[place, place + 1 : place + 1 + len(powers)] = centre[j, place + 1 : place + 1 + len(powers)]
            place += 1 + len(powers)
        self.change, self.back = change, np.linalg.inv(change)
        self.design = design @ self.back
        self.stacked = np.ascontiguousarray(self.design.reshape(-1, design.shape[2]))
        self.terms = design.shape[0]

    def log_terms(self, theta: Array) -> Array:
        """[J, n]."""
        return (self.stacked @ theta).reshape(self.terms, -1)

    def value(self, theta: Array, weight: Array | None = None) -> tuple[float, Array]:
        """Objective and gradient; `weight` counts points, as a bootstrap draws them."""
        log_terms = self.log_terms(theta)
        largest = log_terms.max(0)
        terms = np.exp(log_terms - largest)
        total = terms.sum(0)
        residual = largest + np.log(total) - self.log_loss
        size = np.abs(residual)
        small = size <= DELTA
        huber = np.where(small, 0.5 * residual * residual, DELTA * (size - 0.5 * DELTA))
        slope = np.where(small, residual, DELTA * np.sign(residual))
        if weight is not None:
            huber, slope = huber * weight, slope * weight
        share = terms / total * slope
        return float(huber.sum()) / DELTA, (share.ravel() @ self.stacked) / DELTA

    def descend(self, start: Array, weight: Array | None = None) -> tuple[Array, float]:
        """From one start, in centred theta."""
        done = minimize(
            self.value,
            start,
            args=(weight,),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-14, "gtol": 1e-9, "maxcor": 20},
        )
        return done.x, float(done.fun)

    def starts(self, number: int, seed: int) -> Array:
        """Seeded starts [number, P] in centred theta: E a share of the least loss, exponents of the usual sizes."""
        rng = np.random.default_rng(seed)
        least, middle = self.log_loss.min(), np.median(self.log_loss)
        found = np.empty((number, len(self.form.names)))
        for column, constant in enumerate(self.form.constants):
            if column == 0:
                found[:, column] = least + np.log(rng.uniform(0.3, 0.99, number))
            elif constant:
                found[:, column] = middle + np.log(rng.uniform(0.01, 0.5, number))
            else:
                found[:, column] = rng.uniform(0.05, 1.0, number)
        return found


def fit(form: Form, columns: Mapping[str, Array], loss: Array, starts: int = 200, seed: int = 0) -> Fit:
    """The best of `starts` descents."""
    problem = Problem(form, columns, loss)
    with threadpool_limits(1):  # 6 x 6 systems: BLAS's threads only wait for each other, 25 s instead of 0.8 when busy
        ends = [problem.descend(start) for start in problem.starts(starts, seed)]
    objectives = np.array([value for _, value in ends])
    best = int(objectives.argmin())
    theta = problem.back @ ends[best][0]
    fitted = form.loss(form.coefficients(theta), columns)
    return Fit(
        form=form,
        coefficients=form.coefficients(theta),
        objective=float(objectives[best] * DELTA),
        rmse=float(np.sqrt(np.mean((loss - fitted) ** 2))),
        starts=starts,
        agreeing=int((objectives <= objectives[best] * (1 + 1e-9) + 1e-12).sum()),
        residuals=loss - fitted,
    )
