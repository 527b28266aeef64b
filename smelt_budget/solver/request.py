"""What can be asked of `solve`, beside the baseline? Plan, heads, lattice, tolerances, and what to count under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from smelt_budget.ledger.conventions import SMELT, Convention
from smelt_budget.ledger.ledger import written
from smelt_budget.solver.plan import Plan
from smelt_budget.solver.problem import Lattice, Policy, Tolerance

HeadsAsked = Literal["auto", "uniform", "sectioned"]


@dataclass(frozen=True)
class Request:
    """Everything a user can ask of `solve`, beside the baseline."""

    plan: Plan = Plan()
    heads: HeadsAsked = "auto"
    policy: Policy = "nearest"
    lattice: Lattice = Lattice()
    tolerance: Tolerance = Tolerance()
    sparsity: float | None = None
    top_k: int | None = None
    keep: Mapping[str, int] = field(default_factory=dict)
    top: int = 3
    """How many runners-up beside the twin."""
    convention: Convention = SMELT
    context: int | None = None
    attention_length: Fraction | None = None
    bytes_per_element: Fraction = Fraction(2)

    def as_dict(self) -> dict[str, Any]:
        """What a solution does not tell by itself: its setting, lattice, tolerances and pins stand there already."""
        plan = self.plan
        return {
            "plan": {"span": written(plan.span), "visits": plan.visits, "start": plan.start, "layers": plan.layers},
            "heads": self.heads,
            "sparsity": self.sparsity,
            "top_k": self.top_k,
        }
