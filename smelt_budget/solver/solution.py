"""What came out? A pair of specs under one setting, their gaps, and the certificate of the search.

A returned `Solution` is always feasible: its gaps were counted again, exactly, from the twin's own ledger.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import smelt_budget
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.solver.problem import Problem
from smelt_budget.solver.relax import Relaxed
from smelt_budget.solver.request import Request
from smelt_budget.spec import ModelSpec


@dataclass(frozen=True)
class Gaps:
    """Twin over baseline minus one, signed, for the three budgets."""

    flops: float
    non_embedding_parameters: float
    kv_cache: float

    @classmethod
    def between(cls, baseline: Ledger, twin: Ledger) -> Gaps:
        """From exact counts, before any rounding. The cache is one sequence's at the context (rule C10)."""
        return cls(
            flops=float(twin.exact_forward_flops / baseline.exact_forward_flops - 1),
            non_embedding_parameters=float(Fraction(twin.non_embedding, baseline.non_embedding) - 1),
            kv_cache=float(Fraction(twin.kv_elements_at_context, baseline.kv_elements_at_context) - 1),
        )

    @property
    def summed(self) -> float:
        """The three gaps' sizes added up."""
        return abs(self.flops) + abs(self.non_embedding_parameters) + abs(self.kv_cache)

    def as_dict(self) -> dict[str, float]:
        """By budget."""
        return asdict(self)


@dataclass(frozen=True)
class Alternative:
    """A runner-up: its spec, gaps and score."""

    spec: ModelSpec
    gaps: Gaps
    score: float


@dataclass(frozen=True)
class Certificate:
    """What was looked at, and what it proves: no point on this lattice has a lower score."""

    points: int
    """Points on the lattice."""
    evaluated: int
    """Shapes whose best expert count was computed; the rest are excluded by interval bounds or convexity."""
    score: float
    smallest_gap_sum: float
    """The smallest summed gap on the lattice, of whatever shape."""
    hidden_sizes: tuple[int, int, int]
    """First, last, step."""
    expert_counts: tuple[int, int, int]
    geometries: int
    relaxed: Relaxed


@dataclass(frozen=True)
class Solution:
    """Baseline and twin, matched."""

    given: ModelSpec
    """The baseline as handed over; differs from `baseline` where a sparsity was asked for."""
    problem: Problem
    twin: ModelSpec
    certificate: Certificate
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]
    request: Request = Request()
    """What was asked; with the baseline it gives this twin again."""

    @property
    def baseline(self) -> ModelSpec:
        """What the twin is matched to."""
        return self.problem.baseline

    @property
    def setting(self) -> Setting:
        """The convention both are counted under."""
        return self.problem.setting

    @cached_property
    def baseline_ledger(self) -> Ledger:
        """The baseline's costs."""
        return Ledger(self.baseline, self.setting)

    @cached_property
    def twin_ledger(self) -> Ledger:
        """The twin's costs, counted from its own spec."""
        return Ledger(self.twin, self.setting)

    @cached_property
    def gaps(self) -> Gaps:
        """The three gaps, recounted."""
        return Gaps.between(self.baseline_ledger, self.twin_ledger)

    def as_dict(self) -> dict[str, Any]:
        """The `--json` contract, and the content of `smelt.yaml`."""
        out: dict[str, Any] = {
            "smelt_budget": smelt_budget.__version__,
            "setting": self.setting.as_dict(),
            "baseline": {"spec": self.baseline.compact(), "ledger": self.baseline_ledger.as_dict()},
            "twin": {"spec": self.twin.compact(), "ledger": self.twin_ledger.as_dict()},
            "gaps": self.gaps.as_dict(),
            "request": self.request.as_dict(),
            "heads": self.problem.heads,
            "policy": self.problem.policy,
            "tolerance": self.problem.tolerance.by_budget,
            "lattice": asdict(self.problem.lattice),
            "keep": dict(self.problem.keep),
            "certificate": certificate_dict(self.certificate),
            "alternatives": [
                {"spec": a.spec.compact(), "gaps": a.gaps.as_dict(), "score": a.score} for a in self.alternatives
            ],
            "notes": list(self.notes),
        }
        if self.given != self.baseline:
            out["given"] = {"spec": self.given.compact()}
        return out


def certificate_dict(certificate: Certificate) -> dict[str, Any]:
    """A certificate as plain data, ranges spelt out."""
    out = asdict(certificate)
    for name in ("hidden_sizes", "expert_counts"):
        out[name] = dict(zip(("first", "last", "step"), out[name], strict=True))
    return out | {"complete": True, "claim": f"no point on this lattice scores below {certificate.score!r}"}
