"""What has to be met? The baseline's budgets and shape as floats, and what counts as a point that meets them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from smelt_budget.ledger import Setting, Totals, totals
from smelt_budget.solver.problem import Problem
from smelt_budget.solver.score import Shape

CORE_OFFSETS = 4
"""A sectioned core's expert count lies within this many steps of the prelude's."""
ROUNDING = 1e-12  # relative error of float64 sums of a few dozen exact products


@dataclass(frozen=True)
class Targets:
    """The baseline's budgets and shape, as floats, and the smallest and largest gap accepted for each budget."""

    setting: Setting
    totals: Totals
    shape: Shape
    flops: tuple[float, float]
    params: tuple[float, float]
    kv: tuple[float, float]

    @classmethod
    def of(cls, problem: Problem) -> Targets:
        """The targets of a problem; `at-most` accepts no positive gap."""
        tolerance = problem.tolerance
        above = 0.0 if problem.policy == "at-most" else 1.0
        bounds = [
            (-v - ROUNDING, v * above + ROUNDING)
            for v in (tolerance.flops, tolerance.non_embedding_parameters, tolerance.kv_cache)
        ]
        setting = replace(problem.setting, number=float)
        return cls(setting, totals(problem.baseline, setting), Shape.of(problem.baseline), *bounds)


@dataclass(frozen=True)
class Found:
    """One lattice point: its free quantities, its score and the gap sum the score was made with."""

    score: float
    gap_sum: float
    free: dict[str, int]
    core_experts: int | None


def core_offsets(problem: Problem) -> list[int]:
    """How many steps the core's expert count may lie from the prelude's; none in a uniform twin."""
    if problem.heads == "uniform" or "num_experts" in problem.keep:
        return [0]
    return list(range(-CORE_OFFSETS, CORE_OFFSETS + 1))
