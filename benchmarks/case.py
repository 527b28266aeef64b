"""What do we claim, and how is somebody else's point judged? One problem, our certificate, the exact ledger."""

from __future__ import annotations

import time
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from statistics import median
from typing import Literal

import numpy as np

from smelt_budget.ledger import Ledger
from smelt_budget.solver import Gaps, Request, Solution, solve
from smelt_budget.solver.lattice import Axes, axes
from smelt_budget.solver.problem import Problem
from smelt_budget.solver.relax import relax
from smelt_budget.solver.score import Shape, misaligned, score, shape_distance
from smelt_budget.spec import read

Free = dict[str, int]
Sought = Literal["score", "gap sum"]
H, F, E = "hidden_size", "moe_intermediate_size", "num_experts"
OURS_RUNS = 9
SEED = 0
ROUNDING = 1e-12  # of a gap: float64 sums of a few dozen products


@dataclass(frozen=True)
class Judged:
    """A point, counted by the exact ledger."""

    free: Free
    score: float
    gaps: Gaps
    feasible: bool
    """On the lattice and within every tolerance."""

    def value(self, sought: Sought) -> float:
        """What an opponent minimises, in points: the score, or the gap sum in percent."""
        return self.score if sought == "score" else 100 * self.gaps.summed


@dataclass(frozen=True)
class Answer:
    """What one opponent returned."""

    opponent: str
    sought: Sought
    best: Judged | None
    given: float
    """Wall seconds it could have used."""
    seconds: float
    about: str
    bound: float = 0.0
    """Nothing on the lattice is below this, says the opponent."""


@dataclass(frozen=True)
class Case:
    """One problem, what `solve` made of it, and how long that took."""

    name: str
    solution: Solution
    seconds: float

    @property
    def problem(self) -> Problem:
        """What was asked."""
        return self.solution.problem

    @cached_property
    def lattice(self) -> Axes:
        """The lattice `solve` looked at."""
        lattice = axes(self.problem, relax(self.problem))
        assert lattice is not None, "solve found a twin on it"
        return lattice

    @cached_property
    def shape(self) -> Shape:
        """The baseline's shape."""
        return Shape.of(self.problem.baseline)

    def ours(self, sought: Sought) -> float:
        """What the certificate says nothing is below, in points."""
        certificate = self.solution.certificate
        return certificate.score if sought == "score" else 100 * certificate.smallest_gap_sum

    def geometries(self, hidden: int, **fields: int) -> np.ndarray:
        """Places of the geometries that have these fields and go with the hidden size at place `hidden`."""
        start, stop = self.lattice.hidden_range()
        fit = (start <= hidden) & (hidden < stop)
        for name, value in fields.items():
            fit &= self.lattice.geometry[name] == value
        return np.flatnonzero(fit)

    def on_lattice(self, free: Free) -> bool:
        """Whether `solve` had this point to look at."""
        lattice = self.lattice
        hidden, width = np.flatnonzero(lattice.hidden == free[H]), np.flatnonzero(lattice.expert_width == free[F])
        if not len(hidden) or not len(width) or not lattice.least_experts <= free[E] <= lattice.most_experts:
            return False
        first, last = lattice.width_range(lattice.hidden[hidden])
        geometry = self.geometries(int(hidden[0]), **{name: free[name] for name in lattice.geometry})
        return len(geometry) == 1 and bool(first[0] <= width[0] < last[0])

    def judged(self, free: Free) -> Judged:
        """The published score and the gaps of a point, from its own validated spec."""
        twin = self.problem.twin(free)
        gaps = Gaps.between(self.solution.baseline_ledger, Ledger(twin, self.problem.setting))
        shape = Shape.of(twin)
        points = score(gaps.summed, shape_distance(shape, self.shape), misaligned(shape), twin.num_experts)
        tolerance = self.problem.tolerance.by_budget
        within = all(abs(gap) <= tolerance[name] + ROUNDING for name, gap in gaps.as_dict().items())
        return Judged(free, float(points), gaps, within and self.on_lattice(free))


def solved(name: str) -> Case:
    """Our own answer, and the median time of finding it once everything is imported."""
    reading = read(name)
    length = reading.setting.get("attention_length")
    request = Request(heads="uniform", attention_length=None if length is None else Fraction(length))
    solution, seconds = solve(reading.spec, request), []
    for _ in range(OURS_RUNS):
        start = time.perf_counter()
        solution = solve(reading.spec, request)
        seconds.append(time.perf_counter() - start)
    case = Case(name, solution, median(seconds))
    chosen = {field: getattr(solution.twin, field) for field in case.problem.free}
    ours = case.judged({field: value for field, value in chosen.items() if value is not None})
    assert ours.feasible, f"{name}: our own twin is not on the lattice as this file reads it"
    assert abs(ours.score - solution.certificate.score) < 1e-9, f"{name}: two scores for our own twin"
    return case
