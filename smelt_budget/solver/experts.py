"""How many experts are best for a shape? In closed form, for arrays of shapes at once.

With everything else fixed, FLOPs and parameters are affine in the expert count, so the summed gap is convex in it:
its minimum lies where the steeper of the two gaps is zero, clipped to the counts that the tolerances allow, and the
best integer is next to it. Only the tile term is not convex; its nearest multiples are looked at too. In a sectioned
twin the core may hold a few experts more or fewer (`core_offsets`); each offset is solved on its own.

Arrays are (points,) for shapes and (candidates, points) for the counts tried at each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smelt_budget.ledger import rows, totalled, totals
from smelt_budget.ledger.ledger import Totals
from smelt_budget.solver.lattice import Array, Axes
from smelt_budget.solver.problem import Problem
from smelt_budget.solver.score import EXPERTS_TILE, Shape, misaligned, score, shape_distance
from smelt_budget.solver.targets import Found, Targets, core_offsets

EDGE = 1e-9
"""How far past a bound, in experts, a count may lie: the bounds are quotients of rounded sums."""


@dataclass(frozen=True)
class Affine:
    """A relative gap as start + per_expert * E + per_core_expert * (core E - E)."""

    start: Array
    per_expert: Array
    per_core_expert: Array

    @classmethod
    def through(cls, none: Array, everywhere: Array, core_only: Array, target: float, points: int) -> Affine:
        """From totals with no expert, one in every layer, one in the core only."""
        a, b, c = (np.broadcast_to(v / target, (points,)) for v in (none, everywhere, core_only))
        return cls(a - 1, b - a, c - a)

    def at(self, experts: Array, moved: Array) -> Array:
        """The gap at expert counts, the core holding `moved` more."""
        return self.start + self.per_expert * experts + self.per_core_expert * moved


@dataclass(frozen=True)
class Looked:
    """Scores and summed gaps of every candidate count at every point; infinite where it is not allowed."""

    flat: dict[str, Array]
    scores: Array
    gaps: Array
    experts: Array
    core: Array

    def winners(self, starts: Array, top: int) -> list[Found]:
        """The best point of each of the `top` best pairs; `starts` are the pairs' first points."""
        best = self.scores.min(axis=0)
        per_pair = np.minimum.reduceat(best, starts)
        few = np.argsort(per_pair, kind="stable")[:top]
        ends = np.append(starts[1:], len(best))
        return [
            self.found(int(starts[pair]) + int(np.argmin(best[starts[pair] : ends[pair]])), self.scores)
            for pair in few[np.isfinite(per_pair[few])]
        ]

    def closest(self) -> Found | None:
        """The point with the smallest summed gap, whatever its shape."""
        best = self.gaps.min(axis=0)
        point = int(np.argmin(best))
        return self.found(point, self.gaps) if np.isfinite(best[point]) else None

    def found(self, point: int, by: Array) -> Found:
        """The candidate that is smallest by `by`, as plain integers."""
        at = int(np.argmin(by[:, point])), point
        free = {name: int(values[point]) for name, values in self.flat.items()}
        free["num_experts"] = int(self.experts[at])
        return Found(float(self.scores[at]), float(self.gaps[at]), free, int(self.core[at]))


def best_experts(problem: Problem, lattice: Axes, targets: Targets, flat: dict[str, Array], kv_gap: Array) -> Looked:
    """Try the counts that can be best at every point."""
    draft = problem.draft(flat | {"num_experts": 0.0}, 0.0)
    table = rows(draft)
    shape = Shape.of(draft, table)
    none = totalled(table, targets.setting)
    params, flops = affine(problem, targets, flat, none, len(kv_gap))
    experts, moved, allowed = candidates(problem, lattice, targets, params, flops)
    gaps = abs(params.at(experts, moved)) + abs(flops.at(experts, moved)) + abs(kv_gap)
    gaps = np.where(allowed, gaps, np.inf)
    off_core = abs(moved) / (problem.baseline.num_experts or 1)
    scores = score(gaps, shape_distance(shape, targets.shape), misaligned(shape), experts, off_core)
    return Looked(flat, scores, gaps, experts, experts + moved)


def affine(
    problem: Problem, targets: Targets, flat: dict[str, Array], none: Totals, points: int
) -> tuple[Affine, Affine]:
    """Parameter and FLOP gaps as functions of the expert counts; the ledger is evaluated at 0 and 1."""
    one = totals(problem.draft(flat | {"num_experts": 1.0}, 1.0), targets.setting)
    core = none
    if problem.heads == "sectioned":
        core = totals(problem.draft(flat | {"num_experts": 0.0}, 1.0), targets.setting)
    goal = targets.totals
    return (
        Affine.through(none.non_embedding, one.non_embedding, core.non_embedding, goal.non_embedding, points),
        Affine.through(none.forward_flops, one.forward_flops, core.forward_flops, goal.forward_flops, points),
    )


def candidates(
    problem: Problem, lattice: Axes, targets: Targets, params: Affine, flops: Affine
) -> tuple[Array, Array, Array]:
    """(expert counts, how many more in the core, whether allowed): the vertex's neighbours, for every offset."""
    step = problem.experts_step
    tile = int(np.lcm(step, EXPERTS_TILE))
    steeper = params.per_expert >= flops.per_expert
    tried: list[tuple[Array, Array, Array]] = []
    for moved in (offset * step for offset in core_offsets(problem)):
        params0, flops0 = params.at(np.zeros(1), np.array(moved)), flops.at(np.zeros(1), np.array(moved))
        low, high = allowed_experts(lattice, targets, (params0, params.per_expert), (flops0, flops.per_expert))
        low = np.maximum(low, lattice.least_experts - min(0, moved))
        vertex = np.where(steeper, -params0 / params.per_expert, -flops0 / np.where(steeper, 1.0, flops.per_expert))
        vertex = np.clip(high if problem.policy == "at-most" else vertex, low, high)
        vertex = np.where(low <= high, vertex, 0.0)  # nothing is allowed there, and low may be infinite
        for size in (step, tile):
            below = np.floor(vertex / size + EDGE) * size
            for experts in (below, below + size):
                inside = (experts >= low - EDGE) & (experts <= high + EDGE)
                tried.append((experts, np.full(1, float(moved)), inside))
    experts, moves, allowed = zip(*tried, strict=True)
    return np.stack(experts), np.stack(moves), np.stack(allowed)


def allowed_experts(
    lattice: Axes, targets: Targets, params: tuple[Array, Array], flops: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Smallest and largest count within both tolerances and on the lattice; low > high where there is none.

    `params` and `flops` are (gap without experts, gap per expert).
    """
    (params0, per_params), (flops0, per_flops) = params, flops
    routed = per_flops > 0  # a convention may leave the router out; then FLOPs do not depend on the count
    per_flops = np.where(routed, per_flops, 1.0)
    fits = (flops0 >= targets.flops[0]) & (flops0 <= targets.flops[1])
    flops_low = np.where(routed, (targets.flops[0] - flops0) / per_flops, np.where(fits, -np.inf, np.inf))
    flops_high = np.where(routed, (targets.flops[1] - flops0) / per_flops, np.where(fits, np.inf, -np.inf))
    low = np.maximum((targets.params[0] - params0) / per_params, flops_low)
    high = np.minimum((targets.params[1] - params0) / per_params, flops_high)
    return np.maximum(low, lattice.least_experts), np.minimum(high, lattice.most_experts)
