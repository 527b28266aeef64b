"""Which lattice point scores best? All of them are looked at, none is sampled; the best one is certified.

For each (hidden, geometry) pair the tolerances confine the expert width to an interval, so points outside are known
to miss a budget without being evaluated (`bounds`). For each expert width left, the best expert count is found in
closed form, and every other count is known to be worse (`experts`). Pairs are taken in blocks, the nearest caches and
the lowest bounds first, and a pair whose bound is above what has been found is not looked into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smelt_budget.solver.bounds import Pairs, contract, lower_bound, pairs_within, sliced
from smelt_budget.solver.experts import Looked, best_experts
from smelt_budget.solver.lattice import Array, Axes
from smelt_budget.solver.problem import Problem
from smelt_budget.solver.targets import Found, Targets, core_offsets

POINTS_AT_ONCE = 1 << 15
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Outcome:
    """What the search saw."""

    best: tuple[Found, ...]
    """Best first, one per (hidden, geometry); empty where nothing meets the tolerances."""
    closest: Found | None
    """The feasible point with the smallest summed gap, whatever its shape."""
    points: int
    evaluated: int


@dataclass
class Seen:
    """What has been found so far, and so what need not be looked into any more."""

    top: int
    best: list[Found] = field(default_factory=list)
    closest: Found | None = None
    evaluated: int = 0

    def may_matter(self, bound: Array, kv_gap: Array) -> Array:
        """Which pairs can still hold a better score or a smaller summed gap than what was found."""
        if len(self.best) < self.top or self.closest is None:
            return np.ones(len(bound), dtype=bool)
        return (bound <= self.best[-1].score) | (abs(kv_gap) < self.closest.gap_sum)

    def add(self, looked: Looked, starts: Array) -> None:
        """Take in a chunk of points."""
        self.best = sorted(self.best + looked.winners(starts, self.top), key=order)[: self.top]
        nearest = looked.closest()
        if nearest is not None and (self.closest is None or nearest.gap_sum < self.closest.gap_sum):
            self.closest = nearest
        self.evaluated += looked.scores.shape[1]


def search(problem: Problem, lattice: Axes, top: int, progress: Progress | None = None) -> Outcome:
    """Look at the whole lattice; see the module's docstring for why what is skipped cannot win."""
    targets, seen = Targets.of(problem), Seen(top)
    for pairs in pairs_within(problem, lattice, targets):
        look_into(problem, lattice, targets, pairs, seen)
        if progress is not None:
            progress(round(1000 * pairs.done), 1000)
    points = lattice.points(problem.experts_step, len(core_offsets(problem)))
    return Outcome(tuple(seen.best), seen.closest, points, seen.evaluated)


def look_into(problem: Problem, lattice: Axes, targets: Targets, pairs: Pairs, seen: Seen) -> None:
    """A block of pairs, those with the lowest bounds first, as long as they can matter."""
    bound = lower_bound(problem, lattice, targets, pairs)
    some = np.flatnonzero(seen.may_matter(bound, pairs.kv_gap))
    some = some[np.argsort(bound[some], kind="stable")]
    pairs, bound = pairs[some], bound[some]
    first, last = contract(problem, lattice, targets, pairs)
    some = np.flatnonzero(last > first)
    for chunk in sliced((last - first)[some], POINTS_AT_ONCE):
        at = some[chunk]
        at = at[seen.may_matter(bound[at], pairs.kv_gap[at])]
        if not len(at):
            continue
        counts = (last - first)[at]
        starts = np.cumsum(counts) - counts
        index = np.arange(counts.sum()) + np.repeat(first[at] - starts, counts)
        points = {name: np.repeat(values[at], counts) for name, values in pairs.free.items()}
        points["moe_intermediate_size"] = lattice.expert_width[index]
        seen.add(best_experts(problem, lattice, targets, points, np.repeat(pairs.kv_gap[at], counts)), starts)


def order(found: Found) -> tuple[Any, ...]:
    """Best score first; ties by the shape itself, so that two runs agree."""
    return (found.score, *found.free.values(), found.core_experts or 0)
