"""From a baseline to its twin: sparsify, place the loop, relax, search the lattice, certify; or say what binds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from smelt_budget.errors import BadInput, Infeasible, SmeltError
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.ledger.conventions import SMELT, Convention
from smelt_budget.solver.lattice import axes
from smelt_budget.solver.plan import Plan, place
from smelt_budget.solver.problem import Lattice, Policy, Problem, Tolerance
from smelt_budget.solver.relax import relax
from smelt_budget.solver.search import Progress, search
from smelt_budget.solver.solution import Alternative, Certificate, Gaps, Solution
from smelt_budget.solver.sparsify import sparsified
from smelt_budget.solver.targets import Found
from smelt_budget.spec import ModelSpec

WIDEST_SEARCH = 64
"""How far an infeasible search opens the tolerances to find the nearest point."""


@dataclass(frozen=True)
class Request:
    """Everything a user can ask of `solve`, beside the baseline."""

    plan: Plan = Plan()
    heads: Literal["auto", "uniform", "sectioned"] = "auto"
    policy: Policy = "nearest"
    lattice: Lattice = Lattice()
    tolerance: Tolerance = Tolerance()
    sparsity: float | None = None
    top_k: int | None = None
    keep: Mapping[str, int] = field(default_factory=dict)
    top: int = 1
    convention: Convention = SMELT
    context: int | None = None
    attention_length: Fraction | None = None
    bytes_per_element: Fraction = Fraction(2)


def solve(given: ModelSpec, request: Request | None = None, progress: Progress | None = None) -> Solution:
    """The looped twin of `given` whose FLOPs, non-embedding parameters and KV cache all match.

    Relaxes in closed form, then looks at every point of a hardware lattice around the relaxed one
    and ranks by the published score (`smelt_budget.solver.score`).

    Raises:
        BadInput: the baseline or the request cannot be read exactly (exit 2).
        Infeasible: nothing on the lattice meets the tolerances; says which budget binds, where the nearest
            point lies, and which change of flags was tried and works (exit 3).
    """
    request = request or Request()
    if not 1 <= request.top <= 1000:
        raise BadInput(f"--top {request.top} is not between 1 and 1000")
    setting = Setting.of(
        given, request.convention, request.context, request.attention_length, request.bytes_per_element
    )
    baseline = given
    if request.sparsity is not None:
        baseline = sparsified(given, request.sparsity, setting, request.top_k, request.lattice.experts_multiple)
    elif request.top_k is not None:
        raise BadInput("--top-k goes with --sparsity, for a dense baseline")
    if not baseline.is_moe:
        raise BadInput(
            "the baseline is dense: without experts nothing can hold the parameters that looping frees",
            "fix: --sparsity 0.95 turns it into the MoE of equal active width first",
        )
    placed = place(baseline, request.plan)
    problem = Problem(
        baseline=baseline,
        setting=setting,
        placed=placed,
        heads="sectioned" if request.heads == "sectioned" else "uniform",
        lattice=request.lattice,
        tolerance=request.tolerance,
        policy=request.policy,
        keep=request.keep,
    )
    solution, why = attempt(problem, request, progress)
    return replace(solution, given=given, notes=(*moved(given, solution), *placed.notes, *why))


def moved(given: ModelSpec, solution: Solution) -> tuple[str, ...]:
    """What a sparsity asked for made of the baseline."""
    if given == solution.baseline:
        return ()
    after, setting = solution.baseline, solution.setting
    sparsity = [Ledger(spec, setting).compute_equivalent_sparsity for spec in (given, after)]
    before = f"{given.num_experts} experts" if given.is_moe else f"a dense width of {given.intermediate_size}"
    return (
        f"baseline re-sparsified: {before} -> {after.num_experts} experts of {after.moe_intermediate_size}, "
        f"top-{after.num_experts_per_tok}, S {sparsity[0]:.2%} -> {sparsity[1]:.2%}",
    )


def attempt(problem: Problem, request: Request, progress: Progress | None) -> tuple[Solution, tuple[str, ...]]:
    """The heads asked for; `auto` is uniform where that meets the tolerance, else sectioned, and says why."""
    solution = looked(problem, request.top, progress)
    if solution is not None:
        return solution, ("heads: uniform, which meets every tolerance",) if request.heads == "auto" else ()
    if request.heads != "auto":
        raise refusal(problem, request, progress)
    reason = binding(problem, nearest(problem, progress))
    try:
        solution = looked(replace(problem, heads="sectioned"), request.top, progress)
    except BadInput as error:
        raise refusal(problem, request, progress, f"sectioned: {str(error).splitlines()[0]}") from None
    if solution is None:
        raise refusal(problem, request, progress, "sectioned: outside the tolerance too")
    return solution, (f"heads: sectioned, because no uniform twin is within tolerance ({reason})",)


def looked(problem: Problem, top: int, progress: Progress | None) -> Solution | None:
    """One search, and the solution it certifies; `None` where nothing on the lattice is within tolerance."""
    relaxed = relax(problem)
    lattice = axes(problem, relaxed)
    outcome = search(problem, lattice, top, progress)
    if not outcome.best:
        return None
    assert outcome.closest is not None
    first = outcome.best[0]
    step = problem.lattice
    certificate = Certificate(
        points=outcome.points,
        evaluated=outcome.evaluated,
        score=first.score,
        smallest_gap_sum=outcome.closest.gap_sum,
        hidden_sizes=(int(lattice.hidden[0]), int(lattice.hidden[-1]), step.hidden_multiple),
        expert_counts=(lattice.least_experts, lattice.most_experts, step.experts_multiple),
        geometries=len(lattice.query_width),
        relaxed=relaxed,
    )
    ranked = [alternative(problem, point) for point in outcome.best]
    return Solution(problem.baseline, problem, ranked[0].spec, certificate, tuple(ranked[1:]), ())


def alternative(problem: Problem, point: Found) -> Alternative:
    """A lattice point as a spec, its gaps counted exactly; the search's float sum has to agree."""
    spec = problem.twin(point.free, point.core_experts)
    gaps = Gaps.between(Ledger(problem.baseline, problem.setting), Ledger(spec, problem.setting))
    if abs(gaps.summed - point.gap_sum) > 1e-9:
        raise SmeltError(f"bug: the search saw a gap sum of {point.gap_sum!r}, the ledger counts {gaps.summed!r}")
    return Alternative(spec, gaps, point.score)


def nearest(problem: Problem, progress: Progress | None) -> Alternative | None:
    """The point with the smallest score once tolerances are opened, doubling until there is one."""
    factor = 2
    while factor <= WIDEST_SEARCH:
        solution = looked(replace(problem, tolerance=problem.tolerance.scaled(factor)), 1, progress)
        if solution is not None:
            return Alternative(solution.twin, solution.gaps, solution.certificate.score)
        factor *= 2
    return None


BUDGET_NAMES = {"flops": "FLOPs", "non_embedding_parameters": "parameters", "kv_cache": "KV cache"}
BUDGET_FLAGS = {
    "flops": "--tolerance-flops",
    "non_embedding_parameters": "--tolerance-parameters",
    "kv_cache": "--tolerance-kv",
}


def binding(problem: Problem, point: Alternative | None) -> str:
    """Which budget is missed by the nearest point, and by how much."""
    if point is None:
        return f"no point even within {WIDEST_SEARCH}x the tolerance"
    missed = [
        f"{BUDGET_NAMES[name]}, nearest is {percent(gap)}"
        for name, gap in point.gaps.as_dict().items()
        if abs(gap) > problem.tolerance.by_budget[name] or (problem.policy == "at-most" and gap > 0)
    ]
    return f"binding: {'; '.join(missed)}"


def percent(gap: float) -> str:
    """A gap in a message: two decimals, more where two would hide it."""
    return f"{100 * gap:+.2f} %" if abs(gap) >= 1e-4 else f"{100 * gap:+.2g} %"


def refusal(problem: Problem, request: Request, progress: Progress | None, also: str | None = None) -> Infeasible:
    """What binds, the nearest point, and fixes that were tried."""
    point = nearest(problem, progress)
    tolerances = problem.tolerance.by_budget
    if len(set(tolerances.values())) == 1:
        within = f"{100 * problem.tolerance.flops:g} %"
    else:
        within = ", ".join(f"{BUDGET_NAMES[name]} {100 * value:g} %" for name, value in tolerances.items())
    kind = "twin, uniform or sectioned," if request.heads == "auto" else f"{problem.heads} twin"
    policy = " and above none" if problem.policy == "at-most" else ""
    details = [binding(problem, point)]
    if point is not None:
        details.append(f"nearest: {described(point.spec)}")
    if also is not None:
        details.append(also)
    details += [f"fix: {flags}" for flags in fixes(problem, request, point, progress)]
    steps = problem.lattice
    return Infeasible(
        f"no {kind} within {within} on all three budgets{policy} "
        f"(hidden in steps of {steps.hidden_multiple}, heads of {steps.head_multiple})",
        *details,
    )


def fixes(problem: Problem, request: Request, point: Alternative | None, progress: Progress | None) -> list[str]:
    """Changes of flags, each tried: only those that find a twin are returned, at most three."""
    lattice = problem.lattice
    opened = {} if point is None else {n: rounded_up(abs(g)) for n, g in point.gaps.as_dict().items()}
    wider = {n: max(v, opened.get(n, 0.0)) for n, v in problem.tolerance.by_budget.items()}
    candidates: list[tuple[str, Callable[[], Problem]]] = [
        ("--heads sectioned", lambda: replace(problem, heads="sectioned")),
        *(
            (
                f"--head-multiple {m}",
                lambda m=m: replace(problem, lattice=replace(lattice, head_multiple=m)),
            )
            for m in (4, 2)
            if m < lattice.head_multiple
        ),
        *(
            (
                f"--hidden-multiple {m}",
                lambda m=m: replace(problem, lattice=replace(lattice, hidden_multiple=m)),
            )
            for m in (8,)
            if m < lattice.hidden_multiple
        ),
        (
            " ".join(f"{BUDGET_FLAGS[n]} {wider[n]:g}" for n, v in problem.tolerance.by_budget.items() if wider[n] > v),
            lambda: replace(problem, tolerance=Tolerance(**wider)),
        ),
    ]
    out = []
    for flags, changed in candidates:
        if not flags or (flags == "--heads sectioned" and request.heads != "uniform"):
            continue
        try:
            solution = looked(changed(), 1, progress)
        except SmeltError:
            continue
        if solution is not None:
            out.append(flags)
        if len(out) == 3:
            break
    return out


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
