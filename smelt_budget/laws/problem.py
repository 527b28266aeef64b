"""What does the optimiser see? The robust objective of any law, its exact gradient, one descent.

    minimise  sum over points of Huber_delta(log law - log L)        delta 1e-3 (arXiv:2203.15556, section D.3)

The **sum**: divided by the number of points the objective falls below the optimiser's stopping rule, and a fit of the
public Chinchilla points stops at exponents .38 and .31 instead of .35 and .37. For a sum of powers

    d log L / d theta = sum over terms of softmax(log terms) design

and theta is moved to where the features are centred, else constants and exponents trade off along a valley 1000 times
longer than wide, which is where a plain fit loses its time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
from scipy.optimize import minimize

from smelt_budget.laws.forms import Array, SumOfPowers

DELTA = 1e-3
OPTIONS = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-14, "gtol": 1e-9, "maxcor": 20}
"""Of scipy's L-BFGS-B."""
NOTHING = 1e-9
"""Share of the longest derivative under which a step moves no point; float64 leaves 1e-15 of a true 0."""


class Problem(ABC):
    """Points as the optimiser sees them; it moves a `place` [P], which need not be theta."""

    log_loss: Array

    @abstractmethod
    def log_law(self, place: Array) -> tuple[Array, Callable[[Array], Array]]:
        """Log of the law at each point [n], and what turns slopes [n] into the gradient [P]."""

    @abstractmethod
    def theta(self, place: Array) -> Array:
        """The form's theta at a place."""

    @abstractmethod
    def place(self, theta: Array) -> Array:
        """Where a theta lies."""

    @abstractmethod
    def starts(self, number: int, seed: int) -> Array:
        """Seeded places [number, P]."""

    def value(self, place: Array, weight: Array | None = None) -> tuple[float, Array]:
        """Objective over delta, and gradient; `weight` counts points, as a bootstrap draws them."""
        log_law, gradient = self.log_law(place)
        residual = log_law - self.log_loss
        size = np.abs(residual)
        small = size <= DELTA
        huber = np.where(small, 0.5 * residual * residual, DELTA * (size - 0.5 * DELTA))
        slope = np.where(small, residual, DELTA * np.sign(residual))
        if weight is not None:
            huber, slope = huber * weight, slope * weight
        return float(huber.sum()) / DELTA, gradient(slope) / DELTA

    def descend(self, start: Array, weight: Array | None = None) -> tuple[Array, float]:
        """Place and objective at the end of one descent."""
        done = minimize(self.value, start, args=(weight,), jac=True, method="L-BFGS-B", options=OPTIONS)
        return done.x, float(done.fun)

    def undetermined(self, place: Array) -> Array:
        """Which numbers of theta [P] some step moves that moves the law at no point."""
        gradient = self.log_law(place)[1]
        slopes = np.array([gradient(point) for point in np.eye(len(self.log_loss))])
        _, lengths, steps = np.linalg.svd(slopes, full_matrices=False)
        moved = [np.abs(self.theta(step)) for step in steps[lengths < NOTHING * lengths[0]]]
        return np.any([step > 1e-6 * step.max() for step in moved] or [np.zeros(len(place), bool)], axis=0)


class PowersProblem(Problem):
    """A sum of powers, centred."""

    def __init__(self, form: SumOfPowers, columns: Mapping[str, Array], loss: Array):
        design = form.design(columns)
        self.form, self.log_loss = form, np.log(loss)
        centre = design.mean(1)  # [J, P]
        # constant' = constant + exponents x mean features: a unit triangular change of theta
        change = np.eye(len(form.names))
        first = 0
        for j, powers in enumerate([(), *(term.powers for term in form.terms)]):
            change[first, first + 1 : first + 1 + len(powers)] = centre[j, first + 1 : first + 1 + len(powers)]
            first += 1 + len(powers)
        self.change, self.back = change, np.linalg.inv(change)
        self.stacked = np.ascontiguousarray((design @ self.back).reshape(-1, design.shape[2]))
        self.terms = design.shape[0]

    def log_law(self, place: Array) -> tuple[Array, Callable[[Array], Array]]:
        """One product forth, one back."""
        log_terms = (self.stacked @ place).reshape(self.terms, -1)
        largest = log_terms.max(0)
        terms = np.exp(log_terms - largest)
        total = terms.sum(0)
        return largest + np.log(total), lambda slope: (terms / total * slope).ravel() @ self.stacked

    def theta(self, place: Array) -> Array:
        """Uncentred."""
        return self.back @ place

    def place(self, theta: Array) -> Array:
        """Centred."""
        return self.change @ theta

    def starts(self, number: int, seed: int) -> Array:
        """E a share of the least loss, exponents of the usual sizes."""
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
