"""Which points need no look? Pairs that miss the cache, expert widths that miss a budget, pairs that cannot win.

A pair is a hidden width and an attention geometry. All bounds come from the ledger's own polynomials, evaluated at
a few corners over arrays of pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from smelt_budget.ledger import Totals, totals
from smelt_budget.solver.lattice import Array, Axes, query_rank
from smelt_budget.solver.problem import FOLLOWING, Problem
from smelt_budget.solver.score import HEAD_WEIGHT, SHAPE_WEIGHT, Shape
from smelt_budget.solver.targets import Targets, core_offsets

PAIRS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Pairs:
    """(hidden, geometry) pairs as flat arrays of free quantities, with each pair's KV gap."""

    free: dict[str, Array]
    kv_gap: Array
    done: float
    """Share of all pairs that lie in this block and the blocks before it."""

    def __getitem__(self, which: Array) -> Pairs:
        """The chosen pairs."""
        free = {name: values[which] for name, values in self.free.items()}
        return Pairs(free, self.kv_gap[which], self.done)


def pairs_within(problem: Problem, lattice: Axes, targets: Targets) -> Iterator[Pairs]:
    """Every pair on the lattice whose KV cache is within tolerance, in blocks, the nearest caches first."""
    one = lattice.geometry
    probe = one | {"hidden_size": np.ones(1), "moe_intermediate_size": np.ones(1), "num_experts": 1.0}
    cache = totals(problem.draft(probe, 1.0), targets.setting).kv_elements
    gap = np.broadcast_to(cache / targets.totals.kv_elements - 1, lattice.query_width.shape)
    start, stop = lattice.hidden_range()
    within = np.flatnonzero((gap >= targets.kv[0]) & (gap <= targets.kv[1]) & (stop > start))
    within = within[np.argsort(abs(gap[within]), kind="stable")]
    for block in sliced((stop - start)[within], PAIRS_AT_ONCE):
        at = within[block]
        counts = (stop - start)[at]
        which = np.repeat(at, counts)
        index = np.arange(counts.sum()) + np.repeat(start[at] - np.cumsum(counts) + counts, counts)
        free = {"hidden_size": lattice.hidden[index]} | {name: values[which] for name, values in one.items()}
        rank = query_rank(problem, free["hidden_size"]) if problem.latent else None
        if rank is not None:
            free["q_lora_rank"] = rank
        yield Pairs(free, gap[which], block.stop / len(within))


def sliced(counts: Array, size: int) -> Iterator[slice]:
    """Slices of `counts` that each add up to about `size`."""
    if not len(counts):
        return
    cuts = np.flatnonzero(np.diff(np.cumsum(counts) // size)) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(counts)], strict=True):
        yield slice(int(start), int(stop))


def contract(problem: Problem, lattice: Axes, targets: Targets, pairs: Pairs) -> tuple[Array, Array]:
    """Index range into the expert widths outside which FLOPs or parameters miss their tolerance.

    FLOPs f00 + f10 F + f01 E and parameters n00 + n10 F + n01 E + n11 F E grow with both F and E. A bound on one
    therefore bounds the other; three rounds bring the interval close to its limit. `slack` covers what rounding the
    following widths and a core with up to `offset` more experts can add.
    """
    offset = max(core_offsets(problem)) * problem.experts_step
    hidden = pairs.free["hidden_size"]

    def corner(width: float, experts: float) -> Totals:
        free = pairs.free | {"moe_intermediate_size": np.full_like(hidden, width), "num_experts": experts}
        return totals(problem.draft(free, experts, rounded=False), targets.setting)

    a, b, c, d = corner(0.0, 0.0), corner(1.0, 0.0), corner(0.0, 1.0), corner(1.0, 1.0)
    f00, f10, f01 = a.forward_flops, b.forward_flops - a.forward_flops, c.forward_flops - a.forward_flops
    n00, n10, n01 = a.non_embedding, b.non_embedding - a.non_embedding, c.non_embedding - a.non_embedding
    n11 = d.non_embedding - b.non_embedding - c.non_embedding + a.non_embedding
    flops = [targets.totals.forward_flops * (1 + g) for g in targets.flops]
    params = [targets.totals.non_embedding * (1 + g) for g in targets.params]
    slack_f, slack_n = rounding_slack(problem, targets, pairs)
    slack_f = slack_f + 2 * offset * f01
    first, last = lattice.width_range(hidden)
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


def rounding_slack(problem: Problem, targets: Targets, pairs: Pairs) -> tuple[Array, Array]:
    """FLOPs and parameters that moving every following width by one step costs; rounding moves them by half."""
    widths = [name for name in FOLLOWING if getattr(problem.baseline, name) is not None]
    zero = np.zeros_like(pairs.kv_gap)
    if not widths:
        return zero, zero
    draft = problem.draft(pairs.free | {"moe_intermediate_size": zero, "num_experts": 0.0}, 0.0)
    before = totals(draft, targets.setting)
    for name in widths:
        setattr(draft, name, getattr(draft, name) + problem.lattice.expert_multiple)
    after = totals(draft, targets.setting)
    return after.forward_flops - before.forward_flops, after.non_embedding - before.non_embedding


def lower_bound(problem: Problem, lattice: Axes, targets: Targets, pairs: Pairs) -> Array:
    """No expert width or count brings a pair's score below this.

    The KV gap and the head size are the pair's own. Of the other two terms, with share = a / (c F) and slenderness
    F / H, the triangle inequality leaves |ln(share * slenderness)| whatever F is, up to the rounding of following
    widths.
    """
    one = np.ones_like(pairs.kv_gap)
    shape = Shape.of(problem.draft(pairs.free | {"moe_intermediate_size": one, "num_experts": 0.0}, 0.0, rounded=False))
    fixed = abs(np.log(shape.share * shape.slenderness / (targets.shape.share * targets.shape.slenderness)))
    if any(name in problem.keep for name in FOLLOWING):  # then the FFN is no multiple of F
        fixed = np.zeros_like(fixed)
    # Rounding moves the FFN by at most half of `extra`, two FLOPs a multiply-add; ln(1 + x) < 2x covers it twice.
    extra, _ = rounding_slack(problem, targets, pairs)
    fixed = fixed - extra / (2 * shape.ffn * lattice.expert_width[0])
    head = HEAD_WEIGHT * abs(np.log(shape.head_size / targets.shape.head_size))
    return 100 * abs(pairs.kv_gap) + SHAPE_WEIGHT * (np.maximum(fixed, 0) + head)
