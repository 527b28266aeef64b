"""Which looped shape costs the same? Relaxes in closed form, searches a lattice exhaustively, certifies."""

from smelt_budget.solver.plan import Plan
from smelt_budget.solver.problem import Lattice, Tolerance
from smelt_budget.solver.request import Request
from smelt_budget.solver.solution import Gaps, Solution
from smelt_budget.solver.solve import solve

__all__ = ["Gaps", "Lattice", "Plan", "Request", "Solution", "Tolerance", "solve"]
