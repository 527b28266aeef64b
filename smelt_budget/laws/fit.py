"""Which coefficients do losses give? The best of many descents; what is descended is in problem.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from smelt_budget.laws.forms import CHINCHILLA, SMELT, Array, Form, SumOfPowers
from smelt_budget.laws.looped_moe import LOOPED_MOE, LoopedMoe
from smelt_budget.laws.looped_moe_fit import LoopedMoeProblem
from smelt_budget.laws.problem import DELTA, PowersProblem, Problem

FORMS: dict[str, Form] = {form.name: form for form in (SMELT, CHINCHILLA, LOOPED_MOE)}


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
    undetermined: tuple[str, ...]
    """Coefficients that can move with no point noticing."""


def problem(form: Form, columns: Mapping[str, Array], loss: Array) -> Problem:
    """Points of a form, for the optimiser."""
    if isinstance(form, SumOfPowers):
        return PowersProblem(form, columns, loss)
    assert isinstance(form, LoopedMoe), "the third of FORMS"
    return LoopedMoeProblem(form, columns, loss)


def fit(
    form: Form,
    columns: Mapping[str, Array],
    loss: Array,
    starts: int = 200,
    seed: int = 0,
    advanced: Callable[[int, int], None] = lambda _done, _total: None,
) -> Fit:
    """The best of `starts` descents."""
    points = problem(form, columns, loss)
    with threadpool_limits(1):  # 6 x 6 systems: BLAS's threads only wait for each other, 25 s instead of 0.8 when busy
        ends = []
        for start in points.starts(starts, seed):
            ends.append(points.descend(start))
            advanced(len(ends), starts)
    objectives = np.array([value for _, value in ends])
    best = int(objectives.argmin())
    coefficients = form.coefficients(points.theta(ends[best][0]))
    fitted = form.loss(coefficients, columns)
    return Fit(
        form=form,
        coefficients=coefficients,
        objective=float(objectives[best] * DELTA),
        rmse=float(np.sqrt(np.mean((loss - fitted) ** 2))),
        starts=starts,
        agreeing=int((objectives <= objectives[best] * (1 + 1e-9) + 1e-12).sum()),
        residuals=loss - fitted,
        undetermined=tuple(np.array(form.names)[points.undetermined(ends[best][0])].tolist()),
    )
