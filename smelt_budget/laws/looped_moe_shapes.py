"""Which looped MoE is best for a budget, by the law of looped_moe.py, and what do loops save?

    best shape   least loss over a family of shapes whose weights fit a memory, at D = C / (6 N_unroll)
    gain         1 - C / C': C' the least budget at which a shape with R = 1 reaches the loss of the best with R > 1

The family is ours, chosen so that its best shapes are the three printed optima, and they hang on it: with E = 4 in it
0.63e9 active, E 4, R 3 is best at 1 GB, by .0145 nats, four times the law's RMSE of .0037. `alike` counts the shapes
within that of the best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.laws.bootstrap import Interval
from smelt_budget.laws.forms import Array
from smelt_budget.laws.gains import Law
from smelt_budget.laws.looped_moe import BILLION, LOOPED_MOE, log_experts, log_law, log_size, unrolled

RMSE = 0.0037
"""Nats, of the published fit."""


@dataclass(frozen=True)
class Family:
    """Shapes to choose among; total parameters grow with experts as the expert share of the active ones does."""

    active: tuple[float, ...] = tuple(step * 10.0**power for power in range(7, 12) for step in (1, 1.6, 2.5, 4, 6.3))
    experts: tuple[int, ...] = (1, 2, 8, 16, 32, 64)
    loops: tuple[int, ...] = (1, 2, 3, 4)
    expert_share: float = 2 / 3
    """Of active parameters, in routed experts: of N_act 1, N_total is 1 + share (E - 1)."""
    looped_share: float = 0.5
    """N_loop / N_act; the paper's middle half."""
    largest: float = float("inf")
    """Most total parameters."""

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Every combination that fits, as the law's columns without tokens."""
        active, experts, loops = (x.ravel() for x in np.meshgrid(self.active, self.experts, self.loops, indexing="ij"))
        total = active * (1 + self.expert_share * (experts - 1))
        every = {
            "active": active,
            "total": total,
            "looped": np.where(loops > 1, active * self.looped_share, 0.0),
            "loops": loops,
            "experts": experts,
        }
        return {name: values[total <= self.largest] for name, values in every.items()}

    def within(self, memory: float | None, bytes_per_parameter: float) -> Family:
        """The shapes whose weights fit so many bytes.

        Raises:
            BadInput: none does.
        """
        found = self if memory is None else replace(self, largest=memory / bytes_per_parameter)
        if not len(found.columns["active"]):
            least = min(self.active) * bytes_per_parameter
            raise BadInput(f"no shape fits {memory:g} bytes", f"fix: at least {least / 1e9:g} GB")
        return found


def losses(theta: Array, columns: Mapping[str, Array], training_flops: float) -> Array:
    """Nats [n] of every shape with what tokens the budget buys it."""
    return np.exp(log_law(theta, {**columns, "tokens": training_flops / 6 / unrolled(columns)})[0])


def needed(theta: Array, columns: Mapping[str, Array], loss: float) -> Array:
    """Training FLOPs [n] at which each shape reaches a loss; infinite where no number of tokens does."""
    c, A, B = np.exp(theta[[0, 1, 5]])
    al, d, g, be, w, z = theta[[2, 3, 4, 6, 7, 8]]
    h, n = log_experts(theta, columns["experts"])[0], log_size(theta, columns)[0]
    left = loss - c - A * np.exp(d * h + (al + g * h) * n)
    with np.errstate(all="ignore"):
        tokens = BILLION * (left / (B * np.exp(w * h))) ** (1 / (be + z * h))
    return np.where(left > 0, 6 * unrolled(columns) * tokens, np.inf)


def thetas(law: Law) -> tuple[Array, list[Array]]:
    """Of the fit, and of every draw."""
    (arm,) = law.arms
    return LOOPED_MOE.theta(law.arms[arm]), [LOOPED_MOE.theta(draw[arm]) for draw in law.draws]


def allocations(law: Law, computes: list[float], family: Family) -> list[dict[str, Any]]:
    """A row for each budget: the best shape, its tokens and loss, and what stands at the family's end."""
    theta, drawn = thetas(law)
    rows = []
    for compute in computes:
        found = losses(theta, family.columns, compute)
        best = int(found.argmin())
        shape = {name: values[best].item() for name, values in family.columns.items()}
        one = {name: np.array([value]) for name, value in shape.items()}
        interval = Interval.of(np.array([losses(t, one, compute)[0] for t in drawn])) if drawn else None
        rows.append(
            {
                "compute": compute,
                **shape,
                "tokens": compute / 6 / float(unrolled(one)[0]),
                "loss": float(found[best]),
                "low": interval and interval.low,
                "high": interval and interval.high,
                "alike": int((found <= found[best] + RMSE).sum()),
                "at_end": ends(shape, family),
                "extrapolated": None if law.window is None else not law.inside(compute),
            }
        )
    return rows


def ends(shape: Mapping[str, float], family: Family) -> list[str]:
    """Where the family had nothing beyond."""
    most = {name: max(getattr(family, name)) for name in ("active", "experts", "loops")}
    found = [name for name, value in most.items() if shape[name] == value]
    return found + (["active"] if shape["active"] == min(family.active) else [])


def gains(law: Law, computes: list[float], family: Family) -> list[dict[str, Any]]:
    """A row for each budget: share of compute that the best loops save; negative where they cost more."""
    looped, unlooped = (
        replace(family, loops=tuple(r for r in family.loops if (r > 1) == more)) for more in (True, False)
    )

    def gain(theta: Array, compute: float) -> float:
        """1 - C / C'; 1 where no unlooped shape gets there."""
        reached = float(losses(theta, looped.columns, compute).min())
        return 1 - compute / float(needed(theta, unlooped.columns, reached).min())

    theta, drawn = thetas(law)
    rows = []
    for compute in computes:
        interval = Interval.of(np.array([gain(t, compute) for t in drawn])) if drawn else None
        (best,) = allocations(law, [compute], looped)
        rows.append(
            {
                "compute": compute,
                "gain": gain(theta, compute),
                "low": interval and interval.low,
                "high": interval and interval.high,
                **{name: best[name] for name in ("active", "experts", "loops", "loss", "at_end", "extrapolated")},
            }
        )
    return rows
