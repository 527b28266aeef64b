"""Which lattice point scores best? All of them are looked at, none is sampled; the best one is certified.

For each (hidden, geometry) pair the tolerances confine the expert width to an interval (`contract`, by interval
arithmetic on the ledger's polynomials), so points outside are known to miss a budget without being evaluated. For
each expert width left, FLOPs and parameters are affine in the expert count, so the summed gap is convex in it: its
minimum lies at one vertex, clipped to what the tolerances allow, and the best integer is next to it (or at the
nearest multiple of the tile). Every other expert count is worse, and is covered without being evaluated. Pairs are
taken in the order of a lower bound on their score (`lower_bound`), and a pair whose bound is above what has been
found is not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt_budget.ledger import Setting, Totals, rows, totalled, totals
from smelt_budget.solver.lattice import Array, Axes, query_rank
from smelt_budget.solver.problem import Problem
from smelt_budget.solver.score import (
    EXPERTS_TILE,
    HEAD_WEIGHT,
    SHAPE_WEIGHT,
    Shape,
    misaligned,
    score,
    shape_distance,
)
from smelt_budget.spec.runs import Varied

CHUNK = 1 << 15
CORE_OFFSETS = 4
"""A sectioned core's expert count lies within this many steps of the prelude's."""
ROUNDING = 1e-12  # relative error of float64 sums of a few dozen exact products
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Found:
    """One lattice point: its free quantities, its score and the gap sum the score was made with."""

    score: float
    gap_sum: float
    free: dict[str, int]
    core_experts: int | None


@dataclass(frozen=True)
class Outcome:
    """What the search saw."""

    best: tuple[Found, ...]
    """Best first, one per (hidden, geometry); empty where nothing meets the tolerances."""
    closest: Found | None
    """The feasible point with the smallest summed gap, whatever its shape."""
    points: int
    evaluated: int


@dataclass(frozen=True)
class Targets:
    """The baseline's budgets and shape, as floats, and the smallest and largest gap accepted for each budget."""

    totals: Totals
    shape: Shape
    flops: tuple[float, float]
    params: tuple[float, float]
    kv: tuple[float, float]

    @classmethod
    def of(cls, problem: Problem, setting: Setting) -> Targets:
        """The targets of a problem; `at-most` accepts no positive gap."""
        tolerance = problem.tolerance
        above = 0.0 if problem.policy == "at-most" else 1.0
        bounds = [
            (-v - ROUNDING, v * above + ROUNDING)
            for v in (tolerance.flops, tolerance.non_embedding_parameters, tolerance.kv_cache)
        ]
        exact = totals(problem.baseline, setting)
        return cls(exact, Shape.of(problem.baseline), *bounds)


def search(problem: Problem, lattice: Axes, top: int, progress: Progress | None = None) -> Outcome:
    """Look at the whole lattice; see the module's docstring for why what is skipped cannot win."""
    setting = Setting(
        problem.setting.context,
        problem.setting.attention_length,
        problem.setting.convention,
        problem.setting.bytes_per_element,
        number=float,
    )
    targets = Targets.of(problem, setting)
    offsets = core_offsets(problem)
    points = lattice.points(problem.lattice.experts_multiple, len(offsets))
    pairs, kv_gap = pairs_within(problem, lattice, setting, targets)
    first, last = contract(problem, lattice, setting, targets, pairs, max(offsets) * problem.lattice.experts_multiple)
    some = np.flatnonzero(last > first)
    bound = lower_bound(problem, setting, targets, {k: v[some] for k, v in pairs.items()}, kv_gap[some])
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
            looked = best_experts(problem, lattice, setting, targets, flat, np.repeat(kv_gap[at], counts), offsets)
            best = sorted(best + looked.winners(flat, starts, top), key=order)[:top]
            nearest = looked.closest(flat)
            if nearest is not None and (closest is None or nearest.gap_sum < closest.gap_sum):
                closest = nearest
            evaluated += len(index)
        if progress is not None:
            progress(chunk.stop, len(some))
    return Outcome(tuple(best), closest, points, evaluated)


def order(found: Found) -> tuple[Any, ...]:
    """Best score first; ties by the shape itself, so that two runs agree."""
    return (found.score, *found.free.values(), found.core_experts or 0)


def core_offsets(problem: Problem) -> list[int]:
    """How many steps the core's expert count may lie from the prelude's; none in a uniform twin."""
    if problem.heads == "uniform" or "num_experts" in problem.keep:
        return [0]
    return list(range(-CORE_OFFSETS, CORE_OFFSETS + 1))


def pairs_within(problem: Problem, lattice: Axes, setting: Setting, targets: Targets) -> tuple[dict[str, Array], Array]:
    """Every (hidden, geometry) pair on the lattice whose KV cache is within tolerance, and its KV gap."""
    one = {name: values.copy() for name, values in lattice.geometry.items()}
    probe = one | {"hidden_size": np.ones(1), "moe_intermediate_size": np.ones(1)}
    cache = totals(drafted(problem, probe, 1.0, 1.0), setting).kv_elements
    gap = np.broadcast_to(cache / targets.totals.kv_elements - 1, lattice.query_width.shape)
    start, stop = lattice.hidden_range()
    counts = np.where((gap >= targets.kv[0]) & (gap <= targets.kv[1]), np.maximum(stop - start, 0), 0)
    which = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(start, counts)
    pairs = {"hidden_size": lattice.hidden[index]} | {name: values[which] for name, values in one.items()}
    rank = query_rank(problem, pairs["hidden_size"]) if problem.latent else None
    if rank is not None:
        pairs["q_lora_rank"] = rank
    return pairs, gap[which]


def drafted(problem: Problem, free: dict[str, Any], experts: Any, core: Any, *, rounded: bool = True) -> Varied:
    """A draft with `experts` in the prelude and coda and `core` in a sectioned core."""
    full = free | {"num_experts": experts}
    if problem.latent:  # absent where queries are not compressed
        full["q_lora_rank"] = free.get("q_lora_rank")
    return problem.draft(full, core, rounded=rounded)


def contract(
    problem: Problem, lattice: Axes, setting: Setting, targets: Targets, pairs: dict[str, Array], offset: int
) -> tuple[Array, Array]:
    """Index range into the expert widths outside which FLOPs or parameters miss their tolerance.

    FLOPs f00 + f10 F + f01 E and parameters n00 + n10 F + n01 E + n11 F E grow with both F and E. A bound on one
    therefore bounds the other; three rounds bring the interval close to its limit. `slack` covers what rounding the
    following widths and a core with up to `offset` more experts can add.
    """

    def corner(width: float, experts: float) -> Totals:
        free = pairs | {"moe_intermediate_size": np.full_like(pairs["hidden_size"], width)}
        return totals(drafted(problem, free, experts, experts, rounded=False), setting)

    a, b, c, d = corner(0.0, 0.0), corner(1.0, 0.0), corner(0.0, 1.0), corner(1.0, 1.0)
    f00, f10, f01 = a.forward_flops, b.forward_flops - a.forward_flops, c.forward_flops - a.forward_flops
    n00, n10, n01 = a.non_embedding, b.non_embedding - a.non_embedding, c.non_embedding - a.non_embedding
    n11 = d.non_embedding - b.non_embedding - c.non_embedding + a.non_embedding
    flops = [targets.totals.forward_flops * (1 + g) for g in targets.flops]
    params = [targets.totals.non_embedding * (1 + g) for g in targets.params]
    slack_f, slack_n = rounding_slack(problem, setting, pairs)
    slack_f = slack_f + 2 * offset * f01
    first, last = lattice.width_range(pairs["hidden_size"])
    low = lattice.expert_width[np.minimum(first, len(lattice.expert_width) - 1)]
    high = lattice.expert_width[np.maximum(last - 1, 0)]
    for _ in range(3):
        most = (params[1] + slack_n - n00 - n10 * low) / (n01 + n11 * low) + 2 * offset
        low = np.maximum(low, (flops[0] - slack_f - f00 - f01 * np.minimum(most, lattice.most_experts)) / f10)
        least = (params[0] - slack_n - n00 - n10 * high) / (n01 + n11 * high) - 2 * offset
        high = np.minimum(high, (flops[1] + slack_f - f00 - f01 * np.maximum(least, lattice.least_experts)) / f10)
    inside = np.searchsorted(lattice.expert_width, low - 1e-6)
    outside = np.searchsorted(lattice.expert_width, high + 1e-6, side="right")
    return np.maximum(first, inside), np.minimum(last, outside)


def rounding_slack(problem: Problem, setting: Setting, pairs: dict[str, Array]) -> tuple[Array, Array]:
    """FLOPs and parameters that moving every following width by one step costs; rounding moves them by half."""
    widths = [n for n in ("shared_expert_intermediate_size", "intermediate_size") if getattr(problem.baseline, n)]
    zero = np.zeros_like(pairs["hidden_size"])
    if not widths:
        return zero, zero
    draft = drafted(problem, pairs | {"moe_intermediate_size": zero}, 0.0, 0.0)
    before = totals(draft, setting)
    for name in widths:
        setattr(draft, name, getattr(draft, name) + problem.lattice.expert_multiple)
    after = totals(draft, setting)
    return after.forward_flops - before.forward_flops, after.non_embedding - before.non_embedding


def lower_bound(problem: Problem, setting: Setting, targets: Targets, pairs: dict[str, Array], kv_gap: Array) -> Array:
    """No expert width or count brings a pair's score below this.

    The KV gap and the head size are the pair's own. Of the other two terms, with share = a / (c F) and slenderness
    F / H, the triangle inequality leaves |ln(share * slenderness)| whatever F is, up to the rounding of following
    widths.
    """
    if not len(kv_gap):
        return kv_gap
    one = np.ones_like(kv_gap)
    shape = Shape.of(drafted(problem, pairs | {"moe_intermediate_size": one}, 0.0, 0.0, rounded=False))
    fixed = abs(np.log(shape.share * shape.slenderness / (targets.shape.share * targets.shape.slenderness)))
    extra, _ = rounding_slack(problem, setting, pairs)
    fixed = np.maximum(fixed - 4 * extra / targets.totals.forward_flops, 0)
    head = HEAD_WEIGHT * abs(np.log(shape.head_size / targets.shape.head_size))
    return 100 * abs(kv_gap) + SHAPE_WEIGHT * (fixed + head)


def chunks(counts: Array) -> Iterator[slice]:
    """Slices of pairs holding about `CHUNK` points each."""
    if not len(counts):
        return
    at = np.cumsum(counts) // CHUNK
    cuts = np.flatnonzero(np.diff(at)) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(counts)], strict=True):
        yield slice(int(start), int(stop))


@dataclass(frozen=True)
class Looked:
    """Per point of a chunk: the best score over expert counts, the smallest gap sum, and where each was met."""

    score: Array
    gap_at_score: Array
    experts: Array
    core: Array
    gap: Array
    experts_at_gap: Array
    core_at_gap: Array
    score_at_gap: Array

    def winners(self, flat: dict[str, Array], starts: Array, top: int) -> list[Found]:
        """The best point of each of the `top` best pairs."""
        per_pair = np.minimum.reduceat(self.score, starts)
        few = np.argsort(per_pair, kind="stable")[:top]
        ends = np.append(starts[1:], len(self.score))
        out = []
        for pair in few[np.isfinite(per_pair[few])]:
            at = int(starts[pair]) + int(np.argmin(self.score[starts[pair] : ends[pair]]))
            out.append(found(flat, at, self.score[at], self.gap_at_score[at], self.experts[at], self.core[at]))
        return out

    def closest(self, flat: dict[str, Array]) -> Found | None:
        """The point with the smallest gap sum."""
        at = int(np.argmin(self.gap))
        if not np.isfinite(self.gap[at]):
            return None
        return found(flat, at, self.score_at_gap[at], self.gap[at], self.experts_at_gap[at], self.core_at_gap[at])


def found(flat: dict[str, Array], at: int, points: float, gap: float, experts: float, core: float) -> Found:
    """A point as plain integers."""
    free = {name: int(values[at]) for name, values in flat.items()}
    return Found(float(points), float(gap), free | {"num_experts": int(experts)}, int(core))


def best_experts(
    problem: Problem,
    lattice: Axes,
    setting: Setting,
    targets: Targets,
    flat: dict[str, Array],
    kv_gap: Array,
    offsets: list[int],
) -> Looked:
    """The best expert count of every point, in closed form (see the module's docstring)."""
    n = len(kv_gap)
    draft = drafted(problem, flat, 0.0, 0.0)
    table = rows(draft)
    shape = Shape.of(draft, table)
    at = [totalled(table, setting), totals(drafted(problem, flat, 1.0, 1.0), setting)]
    at.append(totals(drafted(problem, flat, 0.0, 1.0), setting) if problem.heads == "sectioned" else at[0])
    nb, ns, nc = relative([t.non_embedding for t in at], targets.totals.non_embedding, n)
    fb, fs, fc = relative([t.forward_flops for t in at], targets.totals.forward_flops, n)
    distance, off_tiles = shape_distance(shape, targets.shape), misaligned(shape)
    step = problem.lattice.experts_multiple
    tile = int(np.lcm(step, EXPERTS_TILE))
    inf = np.full(n, np.inf)
    best, gap = inf, inf
    zero = np.zeros(n)
    best_gap, best_e, best_core, gap_e, gap_core, gap_score = zero, zero, zero, zero, zero, inf
    for offset in offsets:
        moved = offset * step
        params0, flops0 = nb + nc * moved, fb + fc * moved
        low, high = allowed_experts(lattice, targets, params0, ns, flops0, fs, max(0, -moved))
        vertex = np.where(ns >= fs, -params0 / ns, -flops0 / np.where(fs > 0, fs, 1))
        vertex = np.clip(high if problem.policy == "at-most" else vertex, low, high)
        for size in (step, tile):
            below = np.floor(vertex / size + 1e-9) * size
            for experts in (below, below + size):
                inside = (experts >= low - 1e-9) & (experts <= high + 1e-9)
                gaps = abs(params0 + ns * experts) + abs(flops0 + fs * experts) + abs(kv_gap)
                gaps = np.where(inside, gaps, np.inf)
                off_core = abs(moved) / (problem.baseline.num_experts or 1)
                points = score(gaps, distance, off_tiles, experts, off_core)
                better, nearer = points < best, gaps < gap
                best = np.where(better, points, best)
                best_gap, best_e, best_core = (
                    np.where(better, new, old)
                    for new, old in ((gaps, best_gap), (experts, best_e), (experts + moved, best_core))
                )
                gap = np.where(nearer, gaps, gap)
                gap_e, gap_core, gap_score = (
                    np.where(nearer, new, old)
                    for new, old in ((experts, gap_e), (experts + moved, gap_core), (points, gap_score))
                )
    return Looked(best, best_gap, best_e, best_core, gap, gap_e, gap_core, gap_score)


def relative(values: list[Any], target: float, n: int) -> tuple[Array, Array, Array]:
    """Gap without experts, gap per expert in every layer, gap per expert in the core only."""
    none, everywhere, core = (np.broadcast_to(v / target, (n,)) for v in values)
    return none - 1, everywhere - none, core - none


def allowed_experts(
    lattice: Axes, targets: Targets, params0: Array, ns: Array, flops0: Array, fs: Array, reserve: int
) -> tuple[Array, Array]:
    """Smallest and largest expert count within every tolerance and on the lattice; low > high where there is none."""
    low, high = (targets.params[0] - params0) / ns, (targets.params[1] - params0) / ns
    routed = fs > 0  # a convention may leave the router out; then FLOPs do not depend on the count
    per_expert = np.where(routed, fs, 1.0)
    fits = (flops0 >= targets.flops[0]) & (flops0 <= targets.flops[1])
    flops_low = np.where(routed, (targets.flops[0] - flops0) / per_expert, np.where(fits, -np.inf, np.inf))
    flops_high = np.where(routed, (targets.flops[1] - flops0) / per_expert, np.where(fits, np.inf, -np.inf))
    low = np.maximum(np.maximum(low, flops_low), lattice.least_experts + reserve)
    high = np.minimum(np.minimum(high, flops_high), lattice.most_experts)
    return low, high
