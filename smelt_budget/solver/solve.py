"""From a baseline to its twin: sparsify, place the loop, relax, search the lattice, certify; or say what binds."""

from __future__ import annotations

from dataclasses import replace

from smelt_budget.errors import BadInput, SmeltError
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.solver.certify import looked
from smelt_budget.solver.plan import place
from smelt_budget.solver.problem import Problem
from smelt_budget.solver.refusal import binding, nearest, refusal
from smelt_budget.solver.request import Request
from smelt_budget.solver.search import Progress
from smelt_budget.solver.solution import Solution
from smelt_budget.solver.sparsify import sparsified
from smelt_budget.spec import ModelSpec


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
    if not 0 <= request.top <= 1000:
        raise BadInput(f"--top {request.top} is not between 0 and 1000")
    if given.loop is not None and given.loop.visits > 1:
        raise BadInput("the baseline is looped already; a twin is found for an unlooped one")
    if given.core is not None:
        raise BadInput("the baseline is sectioned: its core has widths of its own", "fix: leave out core and loop")
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
    notes = (*moved(given, solution), *placed.notes, *in_groups(problem), *why)
    return replace(solution, given=given, request=request, notes=notes)


def in_groups(problem: Problem) -> tuple[str, ...]:
    """Why the expert counts step as they do, where they are chosen by group."""
    groups = problem.baseline.n_group or 1
    return (f"experts: in steps of {problem.experts_step}, which fill the {groups} groups",) if groups > 1 else ()


def moved(given: ModelSpec, solution: Solution) -> tuple[str, ...]:
    """What a sparsity asked for made of the baseline."""
    if given == solution.baseline:
        return ()
    after, setting = solution.baseline, solution.setting
    sparsity = [Ledger(spec, setting).compute_equivalent_sparsity for spec in (given, after)]
    before = (
        f"{given.num_experts} experts"
        if given.is_moe
        else f"a dense width of {given.intermediate_size or given.moe_intermediate_size}"
    )
    return (
        f"baseline re-sparsified: {before} -> {after.num_experts} experts of {after.moe_intermediate_size}, "
        f"top-{after.num_experts_per_tok}, S {sparsity[0]:.2%} -> {sparsity[1]:.2%}",
    )


def attempt(problem: Problem, request: Request, progress: Progress | None) -> tuple[Solution, tuple[str, ...]]:
    """The heads asked for; `auto` is uniform where that meets the tolerance, else sectioned, and says why."""
    solution = looked(problem, request.top + 1, progress)
    if solution is not None:
        return solution, ("heads: uniform, which meets every tolerance",) if request.heads == "auto" else ()
    point = nearest(problem, progress)
    if request.heads != "auto":
        raise refusal(problem, request.heads, point, progress)
    try:
        solution = looked(replace(problem, heads="sectioned"), request.top + 1, progress)
    except SmeltError as error:
        raise refusal(problem, request.heads, point, progress, f"sectioned: {str(error).splitlines()[0]}") from None
    if solution is None:
        raise refusal(problem, request.heads, point, progress, "sectioned: outside the tolerance too")
    return solution, (f"heads: sectioned, because no uniform twin is within tolerance ({binding(problem, point)})",)
