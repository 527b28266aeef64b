"""What does one search prove? The best lattice point as a recounted pair, with what was looked at to find it."""

from __future__ import annotations

from smelt_budget.errors import SmeltError
from smelt_budget.ledger import Ledger
from smelt_budget.solver.lattice import axes
from smelt_budget.solver.problem import Problem
from smelt_budget.solver.relax import relax
from smelt_budget.solver.search import Progress, search
from smelt_budget.solver.solution import Alternative, Certificate, Gaps, Solution
from smelt_budget.solver.targets import Found

FLOAT_NOISE = 1e-9
"""What a search's float sum of three gaps may differ from the exact one."""


def looked(problem: Problem, top: int, progress: Progress | None) -> Solution | None:
    """One search, and the solution it certifies; `None` where nothing on the lattice is within tolerance."""
    relaxed = relax(problem)
    lattice = axes(problem, relaxed)
    if lattice is None:
        return None
    outcome = search(problem, lattice, top, progress)
    if not outcome.best:
        return None
    assert outcome.closest is not None
    first = outcome.best[0]
    step = problem.lattice
    certificate = Certificate(
        points=outcome.points,
        evaluated=outcome.evaluated,
        score=first.score,
        smallest_gap_sum=outcome.closest.gap_sum,
        hidden_sizes=(int(lattice.hidden[0]), int(lattice.hidden[-1]), step.hidden_multiple),
        expert_counts=(lattice.least_experts, lattice.most_experts, problem.experts_step),
        geometries=len(lattice.query_width),
        relaxed=relaxed,
    )
    ranked = [alternative(problem, point) for point in outcome.best]
    return Solution(problem.baseline, problem, ranked[0].spec, certificate, tuple(ranked[1:]), ())


def alternative(problem: Problem, point: Found) -> Alternative:
    """A lattice point as a spec, its gaps counted exactly; the search's float sum has to agree."""
    spec = problem.twin(point.free, point.core_experts)
    gaps = Gaps.between(Ledger(problem.baseline, problem.setting), Ledger(spec, problem.setting))
    if abs(gaps.summed - point.gap_sum) > FLOAT_NOISE:
        raise SmeltError(f"bug: the search saw a gap sum of {point.gap_sum!r}, the ledger counts {gaps.summed!r}")
    return Alternative(spec, gaps, point.score)
