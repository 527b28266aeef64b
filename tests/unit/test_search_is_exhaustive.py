"""Nothing on the lattice is better than what the search returns: brute force over every point, with exact integers.

The other side walks the whole product of the axes in Python, builds every model, counts it with the integer ledger
and scores it with the published score: no bounds, no convexity, no arrays.
"""

from dataclasses import replace
from fractions import Fraction
from math import exp
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from smelt_budget.errors import Infeasible, SmeltError
from smelt_budget.ledger import CONVENTIONS, Setting, totals
from smelt_budget.solver import Request, solve
from smelt_budget.solver.lattice import axes, query_rank
from smelt_budget.solver.plan import Plan, place
from smelt_budget.solver.problem import FOLLOWING, Lattice, Problem, Tolerance
from smelt_budget.solver.relax import relax
from smelt_budget.solver.score import Shape, misaligned, score, shape_distance
from smelt_budget.solver.search import search
from smelt_budget.solver.targets import core_offsets
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import Varied

SLACK = 1e-9


@st.composite
def baselines(draw):
    """Small models of every kind the solver takes."""
    layers = draw(st.sampled_from([4, 5, 6]))
    k = draw(st.sampled_from([1, 2]))
    fields = {
        "hidden_size": draw(st.sampled_from([48, 64, 80])),
        "num_hidden_layers": layers,
        "vocab_size": 100,
        "num_attention_heads": 4,
        "num_experts": k * draw(st.sampled_from([3, 4])),
        "num_experts_per_tok": k,
        "moe_intermediate_size": draw(st.sampled_from([24, 40])),
    }
    if draw(st.booleans()):
        fields |= {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        fields |= {"q_lora_rank": draw(st.sampled_from([None, 32]))}
    else:
        fields |= {"num_key_value_heads": draw(st.sampled_from([2, 4])), "head_dim": 16}
        fields |= {"qk_norm": draw(st.sampled_from(["none", "head", "full"])), "attention_bias": draw(st.booleans())}
        if draw(st.booleans()):
            kinds = ("sliding_attention", "full_attention") * layers
            fields |= {"sliding_window": 16, "layer_types": kinds[:layers], "attention_sinks": draw(st.booleans())}
    if draw(st.booleans()):
        fields |= {"shared_expert_intermediate_size": draw(st.sampled_from([24, 56])), "shared_expert_gate": True}
    if draw(st.booleans()):
        fields |= {"mlp_only_layers": (0,), "intermediate_size": draw(st.sampled_from([100, 128]))}
    fields |= {"expert_bias": draw(st.booleans()), "router_bias": draw(st.booleans())}
    if fields["num_experts"] % 2 == 0 and draw(st.booleans()):
        fields |= {"n_group": 2, "topk_group": draw(st.sampled_from([1, 2]))}
    return ModelSpec(**fields)


@st.composite
def problems(draw):
    """A baseline, a loop, a coarse lattice, tolerances wide enough to hold something."""
    baseline = draw(baselines())
    convention = CONVENTIONS[draw(st.sampled_from(sorted(CONVENTIONS)))]
    plan = Plan(span=Fraction(draw(st.sampled_from(["1/2", "1/3", "3/4"]))), visits=draw(st.sampled_from([2, 2, 3])))
    pins = [
        {},
        {},
        {},
        {"hidden_size": 56},
        {"num_experts": 8 if baseline.n_group else 9},
        {"moe_intermediate_size": 20},
    ]
    pins += [{n: 36} for n in FOLLOWING if getattr(baseline, n) is not None]
    keep = draw(st.sampled_from(pins))
    return Problem(
        baseline=baseline,
        setting=Setting.of(baseline, convention, context=32),
        placed=place(baseline, plan),
        heads=draw(st.sampled_from(["uniform", "sectioned"])),
        lattice=Lattice(8, 4, draw(st.sampled_from([4, 8])), draw(st.sampled_from([1, 2]))),
        tolerance=Tolerance(*(draw(st.sampled_from([0.03, 0.1, 0.25])) for _ in range(3))),
        policy=draw(st.sampled_from(["nearest", "at-most"])),
        keep=keep,
    )


def lattice_points(problem, lattice):
    """(free quantities, core experts, offset) of every point, from the definition in the lattice's docstring."""
    names = list(lattice.geometry)
    step = problem.experts_step
    first = -(-lattice.least_experts // step) * step
    for row, query_width in zip(zip(*lattice.geometry.values(), strict=True), lattice.query_width, strict=True):
        for hidden in lattice.hidden:
            ratio = query_width / hidden / lattice.attention_width
            if not exp(-lattice.window) - SLACK <= ratio <= exp(lattice.window) + SLACK:
                continue
            for width in lattice.expert_width:
                slender = width / hidden / lattice.slenderness
                if not exp(-lattice.window) - SLACK <= slender <= exp(lattice.window) + SLACK:
                    continue
                free = {"hidden_size": int(hidden), "moe_intermediate_size": int(width)}
                free |= {name: int(value) for name, value in zip(names, row, strict=True)}
                if problem.latent:
                    rank = query_rank(problem, lattice.hidden[lattice.hidden == hidden])
                    free["q_lora_rank"] = None if rank is None else int(rank[0])
                for experts in range(first, lattice.most_experts + 1, step):
                    for offset in core_offsets(problem):
                        core = experts + offset * step
                        if core >= lattice.least_experts:
                            yield free | {"num_experts": experts}, core, offset * step


def brute_force(problem, lattice):
    """(best score per hidden size and geometry, smallest gap sum, points) by looking at everything."""
    target, shape = totals(problem.baseline, problem.setting), Shape.of(problem.baseline)
    least = [-v for v in problem.tolerance.by_budget.values()]
    most = [0.0 if problem.policy == "at-most" else v for v in problem.tolerance.by_budget.values()]
    best, gap, points = {}, None, 0
    for free, core, offset in lattice_points(problem, lattice):
        points += 1
        fields = problem.fields(free, core, lambda w: int(problem.whole_width(w)))
        if "core" in fields:
            fields["core"] = SimpleNamespace(**fields["core"])
        twin = Varied(problem.frame, **fields)
        got = totals(twin, problem.setting)
        gaps = [
            float(Fraction(got.forward_flops) / target.forward_flops - 1),
            float(Fraction(got.non_embedding, target.non_embedding) - 1),
            float(Fraction(got.kv_elements, target.kv_elements) - 1),
        ]
        if any(not low - 1e-12 <= g <= high + 1e-12 for g, low, high in zip(gaps, least, most, strict=True)):
            continue
        summed, own = sum(map(abs, gaps)), Shape.of(twin)
        off_core = abs(offset) / problem.baseline.num_experts
        points_now = score(summed, shape_distance(own, shape), misaligned(own), free["num_experts"], off_core)
        shape_of = tuple(v for k, v in free.items() if k not in ("num_experts", "moe_intermediate_size"))
        best[shape_of] = min(best.get(shape_of, points_now), points_now)
        gap = summed if gap is None else min(gap, summed)
    return best, gap, points


def thinned(lattice):
    """A smaller lattice of the same kind, so that brute force takes a moment: every search takes any axes."""
    few = np.unique(np.linspace(0, len(lattice.query_width) - 1, 8).astype(int))
    return replace(
        lattice,
        hidden=lattice.hidden[:: max(1, len(lattice.hidden) // 3)],
        geometry={name: values[few] for name, values in lattice.geometry.items()},
        query_width=lattice.query_width[few],
        most_experts=max(lattice.least_experts, lattice.most_experts // 2),
    )


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(problems())
def test_nothing_on_the_lattice_scores_better(problem):
    """Score, smallest gap sum and the number of points agree with brute force."""
    try:
        relaxed = relax(problem)
        whole = axes(problem, relaxed)
    except SmeltError:
        return
    if whole is None:
        return
    lattice = thinned(whole)
    outcome = search(problem, lattice, 3)
    best, gap, points = brute_force(problem, lattice)
    expected = sorted(best.values())[:3]
    assert [found.score for found in outcome.best] == pytest.approx(expected, abs=1e-9)
    if not best:
        return
    assert outcome.closest.gap_sum == pytest.approx(gap, abs=1e-11)
    if problem.heads == "uniform":
        assert outcome.points == points


def test_an_empty_lattice_is_said():
    """A step wider than the model leaves no point, and that is an answer."""
    baseline = ModelSpec(
        hidden_size=64, num_hidden_layers=4, vocab_size=9, num_attention_heads=4, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    problem = Problem(baseline, Setting.of(baseline), place(baseline, Plan()), lattice=Lattice(hidden_multiple=4096))
    assert axes(problem, relax(problem)) is None
    with pytest.raises(Infeasible, match="the steps leave none, whatever the tolerance"):
        solve(baseline, Request(lattice=Lattice(hidden_multiple=4096)))
