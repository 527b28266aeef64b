"""Which small pair is best? Neighbouring baselines, each solved as the full pair was; the best of them is taken.

A few hidden sizes and attention shapes (KV heads or rank) are tried, on lattices of three finenesses. Each quantity is
compared with the full pair's; lower is better:

    miss(baseline) = |ln active / wanted| + |ln attention:FFN| + |ln query width / H| + |ln K F / H|
                   + |ln GQA| + |ln head size / usual| / 10
    total          = miss + 30 (sum of the three |gaps|) + 20 (|S - full S| + |twin's S - full twin's S|)
                   + |ln twin's E / E| + 0.1 for each finer lattice

A pair counts only where S lies within one point of the full pair's (the twin's: of the range between the two full
arms, which differ where norms and routers weigh much), gaps within `TOLERANCE`, and no width below 8.
A miss bounds its totals from below, so baselines are taken in its order until none can win.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, log, sqrt

from smelt_budget.errors import BadInput, Infeasible
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.solver import Gaps, Lattice, Plan, Tolerance
from smelt_budget.solver.certify import looked
from smelt_budget.solver.plan import leading_dense, place
from smelt_budget.solver.problem import Heads, Problem
from smelt_budget.solver.score import Shape
from smelt_budget.spec import ModelSpec
from smelt_budget.verify.pair import Pair
from smelt_budget.verify.shrink import Scale, as_sparse, attentions, floor_of, shrunk

TINY = 340_000  # active parameters of the pair whose training was measured: hidden 96, 4 layers, 4 of 32 experts
TOLERANCE = Tolerance(flops=0.01, non_embedding_parameters=0.01, kv_cache=0.02)
POINT = 0.01
"""How far S may lie from the full pair's."""
SHARE_OFF = Fraction(1, 20)
"""How far the core's share of the depth may be off before a deeper proxy is made."""
ENOUGH, MOST_TRIED = 16, 48
"""Baselines solved once a pair is found, and where none is."""
GAP_WEIGHT, SPARSITY_WEIGHT, FINER = 30, 20, 0.1
NEIGHBOURS = (-2, -1, 0, 1, 2)
USUAL_HEAD = 24  # of the measured pair's baseline
STEPS = ((8, 4, 8), (8, 2, 4), (8, 2, 2))
"""Hidden, head and expert steps, coarsest first: bf16 kernels want rows of 16 bytes."""
WIDTHS = (
    "head_dim",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


@dataclass(frozen=True)
class Wanted:
    """What a proxy is measured against: the full pair's traits and the size asked for."""

    pair: Pair
    active: int
    setting: Setting
    vocab_size: int
    layers: int
    sparsity: tuple[float, float]
    shape: Shape

    @property
    def growth(self) -> float:
        """Width over the tiny preset's."""
        return sqrt(self.active / TINY)

    def at(self, active: int, layers: int) -> Wanted:
        """The same at another size."""
        return replace(self, active=active, layers=layers)

    def scale(self, hidden: int, steps: tuple[int, int, int]) -> Scale:
        """The scale at a hidden width, in given steps."""
        head = max(steps[1], rotary_step(self.pair.baseline))
        return Scale(
            layers=self.layers,
            hidden_size=hidden,
            context=self.setting.context,
            full_context=self.pair.setting.context,
            vocab_size=self.vocab_size,
            head_multiple=head,
            expert_multiple=max(4, steps[2]),
            growth=self.growth,
        )


@dataclass(frozen=True)
class Found:
    """A matched small pair and its total, lower is better."""

    total: float
    baseline: ModelSpec
    twin: ModelSpec
    lattice: Lattice
    heads: Heads


def wanted(pair: Pair, active: int, depths: range, vocab_size: int, context: int) -> Wanted:
    """The traits to keep, measured on the full pair under its own setting."""
    request = pair.request
    sparsity = [Ledger(spec, pair.setting).compute_equivalent_sparsity for spec in (pair.baseline, pair.twin)]
    layers = depth(pair, depths)
    short = pair.baseline.replace(max_position_embeddings=context)
    setting = Setting.of(short, request.convention, context, None, request.bytes_per_element)
    return Wanted(pair, active, setting, vocab_size, layers, (sparsity[0], sparsity[1]), Shape.of(pair.baseline))


def depth(pair: Pair, depths: range) -> int:
    """The first depth at which the core's share of the layers is near the full pair's; never above the baseline's."""
    loop = pair.twin.loop
    assert loop is not None
    share = Fraction(loop.stop - loop.start, pair.twin.num_hidden_layers)

    def off(layers: int) -> Fraction:
        return abs(Fraction(max(1, ceil(layers * pair.request.plan.span - Fraction(1, 2))), layers) - share)

    within = [d for d in depths if d <= pair.baseline.num_hidden_layers] or [pair.baseline.num_hidden_layers]
    return next((d for d in within if off(d) <= SHARE_OFF), min(within, key=off))


def small_plan(pair: Pair, baseline: ModelSpec) -> Plan:
    """The pair's plan at the small depth: same span and visits, the core at the same share of the depth."""
    plan, full = pair.request.plan, pair.baseline.num_hidden_layers
    ratio = Fraction(baseline.num_hidden_layers, full)
    layers = None if plan.layers is None else max(1, round(plan.layers * ratio))
    depth = layers or baseline.num_hidden_layers
    first = leading_dense(baseline.mlp_only_layers) if plan.start is None else 0
    span = max(plan.span, Fraction(1, depth))
    if ceil(depth * span - Fraction(1, 2)) + first > depth:
        span = Fraction(max(1, depth - first), depth)
    core = ceil(depth * span - Fraction(1, 2))
    start = None if plan.start is None else min(round(plan.start * ratio), depth - core)
    return Plan(span, plan.visits, start, layers)


def rotary_step(full: ModelSpec) -> int:
    """The step of head sizes that leaves whole rotary pairs where only a share of each head rotates."""
    if full.partial_rotary_factor == 1 or full.kv_lora_rank is not None:
        return 2
    return next((step for step in (2, 4) if (step * full.partial_rotary_factor) % 2 == 0), 8)


def best(target: Wanted) -> Found | None:
    """The best pair, of the full twin's kind of heads; of the other kind where `auto` was asked and that has none."""
    own: Heads = "uniform" if target.pair.twin.core is None else "sectioned"
    other: Heads = "sectioned" if own == "uniform" else "uniform"
    for heads in (own, other) if target.pair.request.heads == "auto" else (own,):
        found = best_of(target, heads)
        if found is not None:
            return found
    return None


def best_of(target: Wanted, heads: Heads) -> Found | None:
    """The best pair among the neighbouring baselines. Their misses bound the totals, so few are solved."""
    found: Found | None = None
    offered = [
        (finer * FINER + miss, steps, small)
        for finer, steps in enumerate(STEPS)
        for miss, small in baselines(target, heads, steps)
    ]
    for tried, (bound, steps, small) in enumerate(sorted(offered, key=lambda entry: entry[0])):
        if (found is not None and (bound >= found.total or tried >= ENOUGH)) or tried >= MOST_TRIED:
            break
        baseline = as_sparse(small, target.sparsity[0], target.setting)
        if baseline is None:
            continue
        off = abs(Ledger(baseline, target.setting).compute_equivalent_sparsity - target.sparsity[0])
        if off > POINT:
            continue
        lattice = Lattice(*steps, baseline.n_group or 1)
        for total, twin in twins(target, baseline, heads, lattice, bound + SPARSITY_WEIGHT * off):
            if found is None or total < found.total:
                found = Found(total, baseline, twin, lattice, heads)
    return found


def baselines(target: Wanted, heads: Heads, steps: tuple[int, int, int]) -> list[tuple[float, ModelSpec]]:
    """Small baselines near the size wanted, least miss first."""
    full, visits = target.pair.baseline, target.pair.request.plan.visits
    widest = max(full.hidden_size // 8 * 8, 8)

    def offered(hidden: int) -> Iterator[ModelSpec]:
        scale = target.scale(hidden, steps)
        for attention in attentions(full, scale, visits, heads == "sectioned"):
            try:
                yield shrunk(full, scale, attention)
            except BadInput:  # e.g. expert groups that leave too few to choose from
                continue

    hidden = min(widest, 96)
    for _ in range(4):  # active parameters grow about as the square of the width
        first = next(offered(hidden), None)
        if first is None:
            break
        active = Ledger(first, target.setting).active_non_embedding
        hidden = min(widest, max(16, round(hidden * sqrt(target.active / active) / 8) * 8))
    tried = sorted({min(widest, max(16, hidden + 8 * step)) for step in NEIGHBOURS})
    found = [(miss(target, spec), spec) for width in tried for spec in offered(width)]
    return sorted(found, key=lambda pair: pair[0])


def miss(target: Wanted, small: ModelSpec) -> float:
    """How far a small baseline's traits are from the full one's, its sparsity left out."""
    full, shape = target.pair.baseline, Shape.of(small)
    active = min(target.active, Ledger(full, target.pair.setting).active_non_embedding)
    usual = min(target.shape.head_size, USUAL_HEAD * sqrt(target.growth))
    return (
        abs(log(Ledger(small, target.setting).active_non_embedding / active))
        + abs(log(shape.share / target.shape.share))
        + abs(log(query_share(small) / query_share(full)))
        + abs(log(active_width(small) / active_width(full)))
        + abs(log(gqa(small) / gqa(full)))
        + abs(log(shape.head_size / usual)) / 10
    )


def query_share(spec: ModelSpec) -> float:
    """Query width over hidden width; in latent attention the value heads'."""
    return spec.num_attention_heads * (spec.v_head_dim or spec.head_dim or 0) / spec.hidden_size


def active_width(spec: ModelSpec) -> float:
    """Width of the routed experts a token runs, over the hidden width."""
    return (spec.num_experts_per_tok or 0) * (spec.moe_intermediate_size or 0) / spec.hidden_size


def gqa(spec: ModelSpec) -> float:
    """Query heads per KV head; in latent attention all of them share one latent."""
    return 1.0 if spec.kv_lora_rank is not None else spec.num_attention_heads / (spec.num_key_value_heads or 1)


def more_experts(baseline: ModelSpec, twin: ModelSpec) -> float:
    """How many times the baseline's experts the twin has outside its core."""
    return (twin.num_experts or 1) / (baseline.num_experts or 1)


def twins(
    target: Wanted, baseline: ModelSpec, heads: Heads, lattice: Lattice, before: float
) -> Iterator[tuple[float, ModelSpec]]:
    """The twin and its runners-up that are wide and sparse enough, each with its total."""
    pair = target.pair
    try:
        placed = place(baseline, small_plan(pair, baseline))
        policy = pair.request.policy
        problem = Problem(baseline, target.setting, placed, heads, lattice, TOLERANCE, policy)
        solution = looked(problem, 4, None)
    except (BadInput, Infeasible):  # KV heads that do not divide by the visits, rotary keys that fill the cache
        return
    if solution is None:
        return
    low, high = sorted(target.sparsity)
    for twin in (solution.twin, *(a.spec for a in solution.alternatives)):
        ledger = Ledger(twin, target.setting)
        sparsity = ledger.compute_equivalent_sparsity
        if not low - POINT <= sparsity <= high + POINT or too_narrow(twin, pair.baseline):
            continue
        gaps = Gaps.between(solution.baseline_ledger, ledger)
        more = abs(log(more_experts(baseline, twin) / more_experts(pair.baseline, pair.twin)))
        yield before + GAP_WEIGHT * gaps.summed + SPARSITY_WEIGHT * abs(sparsity - target.sparsity[1]) + more, twin


def too_narrow(twin: ModelSpec, full: ModelSpec) -> bool:
    """Whether any width is below 8 that was not in the full model."""
    widths = [(getattr(twin, name), getattr(full, name)) for name in WIDTHS]
    if twin.core is not None:
        widths.append((twin.core.kv_lora_rank, full.kv_lora_rank))
    return any(width is not None and width < floor_of(old) for width, old in widths)
