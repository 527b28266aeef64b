"""Which lattice point scores best? All of them are looked at, none is sampled; the best one is certified.

For each (hidden, geometry) pair the tolerances confine the expert width to an interval, so points outside are known
to miss a budget without being evaluated (`bounds`). For each expert width left, the best expert count is found in
closed form, and every other count is known to be worse (`experts`). Pairs are taken in the order of a lower bound on
their score, and a pair whose bound is above what has been found is not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt_budget.solver.bounds import contract, lower_bound, pairs_within
from smelt_budget.solver.experts import best_experts
from smelt_budget.solver.lattice import Array, Axes
from smelt_budget.solver.problem import Problem
from smelt_budget.solver.targets import Found, Targets, core_offsets

CHUNK = 1 << 15
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


def search(problem: Problem, lattice: Axes, top: int, progress: Progress | None = None) -> Outcome:
    """Look at the whole lattice; see the module's docstring for why what is skipped cannot win."""
    targets = Targets.of(problem)
    offsets = core_offsets(problem)
    points = lattice.points(problem.lattice.experts_multiple, len(offsets))
    pairs, kv_gap = pairs_within(problem, lattice, targets)
    first, last = contract(problem, lattice, targets, pairs, max(offsets) * problem.lattice.experts_multiple)
    some = np.flatnonzero(last > first)
    bound = lower_bound(problem, lattice, targets, {k: v[some] for k, v in pairs.items()}, kv_gap[some])
    by_bound = np.argsort(bound, kind="stable")
    some, bound = some[by_bound], bound[by_bound]
    best: list[Found] = []
    closest: Found | None = None
    evaluated = 0
    for chunk in chunks((last - first)[some]):
        alive = np.ones(chunk.stop - chunk.start, dtype=bool)
        if len(best) == top and closest is not None:
            alive = (bound[chunk] <= best[-1].score) | (abs(kv_gap[some[chunk]]) < closest.gap_sum)
        at = some[chunk][alive]
        if len(at):
            counts = (last - first)[at]
            flat = {name: np.repeat(values[at], counts) for name, values in pairs.items()}
            starts = np.cumsum(counts) - counts
            index = np.arange(counts.sum()) + np.repeat(first[at] - starts, counts)
            flat["moe_intermediate_size"] = lattice.expert_width[index]
            looked = best_experts(problem, lattice, targets, flat, np.repeat(kv_gap[at], counts))
            best = sorted(best + looked.winners(starts, top), key=order)[:top]
            nearest = looked.closest()
            if nearest is not None and (closest is None or nearest.gap_sum < closest.gap_sum):
                closest = nearest
            evaluated += len(index)
        if progress is not None:
            progress(chunk.stop, len(some))
    return Outcome(tuple(best), closest, points, evaluated)


def order(found: Found) -> tuple[Any, ...]:
    """Best score first; ties by the shape itself, so that two runs agree."""
    return (found.score, *found.free.values(), found.core_experts or 0)


def chunks(counts: Array) -> Iterator[slice]:
    """Slices of pairs holding about `CHUNK` points each."""
    if not len(counts):
        return
    at = np.cumsum(counts) // CHUNK
    cuts = np.flatnonzero(np.diff(at)) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(counts)], strict=True):
        yield slice(int(start), int(stop))
