"""Where would the twin lie if shapes were real numbers? A closed form, made from the ledger's own formulas.

Attention keeps its share: with q/H fixed and the cache divided by rho,

    attention_flops(H') = attention_flops(H)          a quadratic in H'; to first order H' = H / sqrt(rho)

then the two remaining budgets fix the experts. With F' and E' unknown, flops are a + b F' + c E' and parameters
n0 + n1 F' + n2 E' + n3 F' E'; eliminating E' leaves a quadratic in F' (to first order H'F' = HF/rho, E' = rho E).
The search looks at the lattice around this point; the point itself is printed beside what was chosen. Where the
quadratic has no root (very sparse models, many visits: the router alone outweighs what is left), the first-order
values are the centre, and the lattice reaches further.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import sympy

from smelt_budget.errors import Infeasible
from smelt_budget.ledger import rows, totals
from smelt_budget.ledger.symbols import E, F, H
from smelt_budget.solver.problem import Problem


@dataclass(frozen=True)
class Relaxed:
    """The real-valued twin."""

    hidden_size: float
    num_experts: float
    moe_intermediate_size: float
    kv_width: float
    """Cached elements per executed layer and token."""
    first_order_hidden: float
    """H / sqrt(rho), before corrections."""
    exact: bool
    """Whether the closed form has a solution; if not, the first-order values stand in and the output says so."""


def relax(problem: Problem) -> Relaxed:
    """Solve the relaxed problem in closed form, or say that it has no solution with attention's share kept.

    Raises:
        Infeasible: the rotary keys of latent attention alone exceed the KV cache.
    """
    uniform = replace(problem, heads="uniform", keep={})
    baseline, rho = (
        problem.baseline,
        sympy.Rational(problem.depth_ratio.numerator, problem.depth_ratio.denominator),
    )
    draft = uniform.draft(free_symbols(uniform, rho), rounded=False)
    kv_width = cached(baseline) / rho
    setting = replace(problem.setting, number=lambda x: sympy.Rational(x.numerator, x.denominator))
    target = totals(baseline, setting)
    simple = float(baseline.hidden_size / sympy.sqrt(rho))
    first_order = Relaxed(
        hidden_size=simple,
        num_experts=float(baseline.num_experts * rho),  # pyright: ignore[reportOptionalOperand]
        moe_intermediate_size=float(baseline.moe_intermediate_size / sympy.sqrt(rho)),  # pyright: ignore
        kv_width=float(kv_width),
        first_order_hidden=simple,
        exact=False,
    )
    hidden = root(attention_flops(draft, setting) - attention_flops(baseline, setting), H)
    if hidden is None:
        return first_order
    drafted = totals(draft, setting)
    flops = sympy.expand(sympy.sympify(drafted.forward_flops).subs(H, hidden) - target.forward_flops)
    params = sympy.expand(sympy.sympify(drafted.non_embedding).subs(H, hidden) - target.non_embedding)
    per_expert = params.coeff(E, 1)
    experts = -params.coeff(E, 0) / per_expert
    width = root(sympy.expand(flops.coeff(E, 0) * per_expert - flops.coeff(E, 1) * params.coeff(E, 0)), F)
    if width is None:
        return first_order
    return replace(
        first_order,
        hidden_size=float(hidden),
        num_experts=float(experts.subs(F, width)),
        moe_intermediate_size=float(width),
        exact=True,
    )


def cached(spec: Any) -> int:
    """Cached elements of one layer and token."""
    return next(row.cache for row in rows(spec) if row.kind == "cache")


def free_symbols(problem: Problem, rho: Any) -> dict[str, Any]:
    """Free quantities as expressions in H, E and F: widths that follow H, and a cache divided by rho."""
    b = problem.baseline
    per_hidden = H / b.hidden_size
    free: dict[str, Any] = {
        "hidden_size": H,
        "num_attention_heads": b.num_attention_heads * per_hidden,
        "num_experts": E,
        "moe_intermediate_size": F,
    }
    if not problem.latent:
        return free | {"num_key_value_heads": b.num_key_value_heads / rho, "head_dim": b.head_dim}
    rank = cached(b) / rho - b.qk_rope_head_dim
    if rank <= 0:
        raise Infeasible(
            f"no twin: the rotary keys alone ({b.qk_rope_head_dim} a layer) fill the KV cache of {cached(b)} a layer "
            f"when {float(rho):.2f}x the layers run",
            "fix: fewer --visits or a smaller --span",
        )
    q_rank = None if b.q_lora_rank is None else b.q_lora_rank * per_hidden
    return free | {
        "kv_lora_rank": rank,
        "q_lora_rank": q_rank,
        "qk_nope_head_dim": b.qk_nope_head_dim,
        "v_head_dim": b.v_head_dim,
    }


def attention_flops(spec: Any, setting: Any) -> Any:
    """Forward FLOPs per token of attention alone."""
    return sum(setting.flops(row) for row in rows(spec) if row.name.startswith("attention."))


def root(expression: Any, symbol: sympy.Symbol) -> sympy.Expr | None:
    """The largest positive root of a polynomial of degree one or two; `None` if there is none."""
    coefficients = sympy.Poly(expression, symbol).all_coeffs()
    if len(coefficients) == 2:
        found = [-coefficients[1] / coefficients[0]]
    elif len(coefficients) == 3:
        a, b, c = coefficients
        if b * b - 4 * a * c < 0:
            return None
        spread = sympy.sqrt(b * b - 4 * a * c)
        found = [(-b + spread) / (2 * a), (-b - spread) / (2 * a)]
    else:
        return None
    positive = [x.evalf() for x in found if x.is_real and x > 0]
    return max(positive) if positive else None
