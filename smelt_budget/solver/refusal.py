"""Why is there no twin, and what would work? The budget that binds, the nearest point, and flags that were tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from smelt_budget.errors import Infeasible, SmeltError
from smelt_budget.solver.certify import looked
from smelt_budget.solver.problem import Problem, Tolerance
from smelt_budget.solver.search import Progress
from smelt_budget.solver.solution import Alternative
from smelt_budget.spec import ModelSpec

OPEN = 0.99
WIDEST = 64
"""How far, in tolerances, all budgets together are opened to find the nearest point."""
MOST_FIXES = 3
NAMES = {"flops": "FLOPs", "non_embedding_parameters": "parameters", "kv_cache": "KV cache"}
FLAGS = {
    "flops": "--tolerance-flops",
    "non_embedding_parameters": "--tolerance-parameters",
    "kv_cache": "--tolerance-kv",
}


def nearest(problem: Problem, progress: Progress | None) -> Alternative | None:
    """The best point once one budget is let go, the cache first; else once all are opened, doubling."""
    opened = [replace(problem.tolerance, **{name: OPEN}) for name in ("kv_cache", "flops", "non_embedding_parameters")]
    factor = 2
    while factor <= WIDEST:
        opened.append(problem.tolerance.scaled(factor))
        factor *= 2
    for tolerance in opened:
        solution = looked(replace(problem, tolerance=tolerance), 1, progress)
        if solution is not None:
            return Alternative(solution.twin, solution.gaps, solution.certificate.score)
    return nearest(replace(problem, policy="nearest"), progress) if problem.policy == "at-most" else None


def binding(problem: Problem, point: Alternative | None) -> str:
    """Which budget is missed by the nearest point, and by how much."""
    if point is None:
        pins = "".join(f" --keep {name}={value}" for name, value in problem.keep.items())
        return f"no shape at all is near: the steps{' and' + pins if pins else ''} leave none, whatever the tolerance"
    missed = [
        f"{NAMES[name]}, nearest is {percent(gap)}"
        for name, gap in point.gaps.as_dict().items()
        if abs(gap) > problem.tolerance.by_budget[name] or (problem.policy == "at-most" and gap > 0)
    ]
    return f"binding: {'; '.join(missed)}"


def percent(gap: float) -> str:
    """A gap in a message: two decimals, more where two would hide it."""
    return f"{100 * gap:+.2f} %" if abs(gap) >= 1e-4 else f"{100 * gap:+.2g} %"


def refusal(
    problem: Problem, heads: str, point: Alternative | None, progress: Progress | None, also: str | None = None
) -> Infeasible:
    """The whole answer. `heads` is what was asked for, `point` the nearest one, `also` what else was tried."""
    tolerances = problem.tolerance.by_budget
    if len(set(tolerances.values())) == 1:
        within = f"{100 * problem.tolerance.flops:g} %"
    else:
        within = ", ".join(f"{NAMES[name]} {100 * value:g} %" for name, value in tolerances.items())
    kind = "twin, uniform or sectioned," if heads == "auto" else f"{problem.heads} twin"
    policy = " and above none" if problem.policy == "at-most" else ""
    details = [binding(problem, point)]
    if point is not None:
        details.append(f"nearest: {described(point.spec)}")
    if also is not None:
        details.append(also)
    details += [f"fix: {flags}" for flags in fixes(problem, heads, point, progress)]
    steps = problem.lattice
    return Infeasible(
        f"no {kind} within {within} on all three budgets{policy} "
        f"(hidden in steps of {steps.hidden_multiple}, heads of {steps.head_multiple})",
        *details,
    )


def fixes(problem: Problem, heads: str, point: Alternative | None, progress: Progress | None) -> list[str]:
    """Changes of flags, each tried: only those that find a twin are returned, the smallest changes first."""
    out: list[str] = []
    for flags, changed in changes(problem, heads, point):
        if len(out) == MOST_FIXES:
            break
        flag = flags.rpartition(" ")[0]
        if any(found.rpartition(" ")[0] == flag for found in out):
            continue  # a smaller change of the same flag works already
        try:
            solution = looked(changed, 1, progress)
        except SmeltError:
            continue
        if solution is not None:
            out.append(flags)
    return out


def changes(problem: Problem, heads: str, point: Alternative | None) -> Iterator[tuple[str, Problem]]:
    """What could be changed: other heads, a pin dropped, finer steps, the policy, a wider tolerance."""
    lattice = problem.lattice
    if heads in ("uniform", "sectioned"):
        other = "sectioned" if heads == "uniform" else "uniform"
        yield f"--heads {other}", replace(problem, heads=other)
    for name in problem.keep:
        rest = {other: value for other, value in problem.keep.items() if other != name}
        yield f"without --keep {name}", replace(problem, keep=rest)
    for flag, field, finer in (
        ("--experts-multiple", "experts_multiple", (64, 8, 4, 2, 1)),
        ("--head-multiple", "head_multiple", (4, 2)),
        ("--hidden-multiple", "hidden_multiple", (128, 16, 8)),
        ("--expert-multiple", "expert_multiple", (8, 4, 2, 1)),
    ):
        for step in finer:
            if step < getattr(lattice, field):
                yield f"{flag} {step}", replace(problem, lattice=replace(lattice, **{field: step}))
    if problem.policy == "at-most":
        yield "--policy nearest", replace(problem, policy="nearest")
    if point is not None:
        before = problem.tolerance.by_budget
        wider = {name: max(before[name], rounded_up(abs(gap))) for name, gap in point.gaps.as_dict().items()}
        flags = " ".join(f"{FLAGS[name]} {value:g}" for name, value in wider.items() if value > before[name])
        yield flags, replace(problem, tolerance=Tolerance(**wider))


def rounded_up(gap: float) -> float:
    """A tolerance a person would type that covers a gap: three decimals, rounded up."""
    return min(0.999, (int(gap * 1000) + 1) / 1000)


def described(spec: ModelSpec) -> str:
    """A twin in half a line."""
    heads = (
        f"{spec.num_attention_heads} heads, KV rank {spec.kv_lora_rank}"
        if spec.kv_lora_rank is not None
        else f"{spec.num_attention_heads}/{spec.num_key_value_heads} heads of {spec.head_dim}"
    )
    return f"hidden {spec.hidden_size}, {heads}, {spec.num_experts} experts {spec.moe_intermediate_size} wide"
