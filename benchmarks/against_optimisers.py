"""Does anything a user would write instead find a better twin? Optuna and OR-Tools on the problem `solve` certifies.

Same baseline, loop, lattice and tolerances, uniform heads. With t the median wall time of `solve` in a warm process,
each opponent gets at least 10 t: TPE max(10 t, --seconds), CP-SAT max(10 t, --proof-seconds) or until it has a proof:

    TPE        Optuna over the lattice's axes, minimising the published score of the twin the exact ledger counts
    TPE, N     the same, with the expert count solved from the parameter budget instead of sampled
    CP-SAT     OR-Tools on the same lattice as an integer program, once for the smallest summed gap, once for the score

In the program FLOPs and parameters are polynomials read off the ledger, and ln(attention:FFN share) is a sum of one
term per (geometry, hidden) and one per expert width, read off `Shape`. Whatever point an opponent returns is counted
again by the exact ledger. An opponent that wins, or proves that our optimum is out of reach, has found a bug in the
solver (or here): it is printed with its fields and the exit code is 1.

TPE's luck moves with its seed; what the comparison rests on is CP-SAT's proofs.

    pip install 'smelt-budget[bench]' && python benchmarks/against_optimisers.py
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from fractions import Fraction
from functools import cached_property
from importlib.metadata import version
from itertools import combinations
from statistics import median
from typing import Any, Literal

import numpy as np
import optuna
from ortools.sat.python import cp_model

from smelt_budget.ledger import Ledger, totals
from smelt_budget.solver import Gaps, Request, Solution, solve
from smelt_budget.solver.lattice import Axes, axes
from smelt_budget.solver.problem import FOLLOWING, Problem
from smelt_budget.solver.relax import relax
from smelt_budget.solver.score import (
    EXPERTS_TILE,
    HEAD_WEIGHT,
    SHAPE_WEIGHT,
    TILE_WEIGHT,
    Shape,
    misaligned,
    score,
    shape_distance,
)
from smelt_budget.spec import read

MODELS = ("smelt-200m-s95", "deepseek-v2-lite", "qwen3-30b-a3b")
TIMES_OURS = 10
OURS_RUNS = 9
THREADS = 2
SEED = 0
PENALTY = 1000.0  # points; far above a twin within tolerance (three gaps of at most 2 % are 6 points)
ROUNDING = 1e-12  # of a gap: float64 sums of a few dozen products
WEIGHT = 10**4  # a CP-SAT weight is a whole number of at least 100 * WEIGHT, so rounding moves it by under 1e-6

Free = dict[str, int]
Monomial = tuple[str, ...]
"""Names of the quantities multiplied; the empty one is the constant."""
Sought = Literal["score", "gap sum"]
H, F, E = "hidden_size", "moe_intermediate_size", "num_experts"


@dataclass(frozen=True)
class Judged:
    """A point, counted by the exact ledger."""

    free: Free
    score: float
    gaps: Gaps
    feasible: bool
    """On the lattice and within every tolerance."""

    def value(self, sought: Sought) -> float:
        """What an opponent minimises, in points: the score, or the gap sum in percent."""
        return self.score if sought == "score" else 100 * self.gaps.summed


@dataclass(frozen=True)
class Answer:
    """What one opponent returned."""

    opponent: str
    sought: Sought
    best: Judged | None
    given: float
    """Wall seconds it could have used."""
    seconds: float
    about: str
    bound: float = 0.0
    """Nothing on the lattice is below this, says the opponent."""


@dataclass(frozen=True)
class Case:
    """One problem, what `solve` made of it, and how long that took."""

    name: str
    solution: Solution
    seconds: float

    @property
    def problem(self) -> Problem:
        """What was asked."""
        return self.solution.problem

    @cached_property
    def lattice(self) -> Axes:
        """The lattice `solve` looked at."""
        return axes(self.problem, relax(self.problem))

    @cached_property
    def shape(self) -> Shape:
        """The baseline's shape."""
        return Shape.of(self.problem.baseline)

    def ours(self, sought: Sought) -> float:
        """What the certificate says nothing is below, in points."""
        certificate = self.solution.certificate
        return certificate.score if sought == "score" else 100 * certificate.smallest_gap_sum

    def geometries(self, hidden: int, **fields: int) -> np.ndarray:
        """Places of the geometries that have these fields and go with the hidden size at place `hidden`."""
        start, stop = self.lattice.hidden_range()
        fit = (start <= hidden) & (hidden < stop)
        for name, value in fields.items():
            fit &= self.lattice.geometry[name] == value
        return np.flatnonzero(fit)

    def on_lattice(self, free: Free) -> bool:
        """Whether `solve` had this point to look at."""
        lattice = self.lattice
        hidden, width = np.flatnonzero(lattice.hidden == free[H]), np.flatnonzero(lattice.expert_width == free[F])
        if not len(hidden) or not len(width) or not lattice.least_experts <= free[E] <= lattice.most_experts:
            return False
        first, last = lattice.width_range(lattice.hidden[hidden])
        geometry = self.geometries(int(hidden[0]), **{name: free[name] for name in lattice.geometry})
        return len(geometry) == 1 and bool(first[0] <= width[0] < last[0])

    def judged(self, free: Free) -> Judged:
        """The published score and the gaps of a point, from its own validated spec."""
        twin = self.problem.twin(free)
        gaps = Gaps.between(self.solution.baseline_ledger, Ledger(twin, self.problem.setting))
        shape = Shape.of(twin)
        points = score(gaps.summed, shape_distance(shape, self.shape), misaligned(shape), twin.num_experts)
        tolerance = self.problem.tolerance.by_budget
        within = all(abs(gap) <= tolerance[name] + ROUNDING for name, gap in gaps.as_dict().items())
        return Judged(free, float(points), gaps, within and self.on_lattice(free))


def solved(name: str) -> Case:
    """Our own answer, and the median time of finding it once everything is imported."""
    reading = read(name)
    length = None if reading.attention_length is None else Fraction(reading.attention_length)
    request = Request(heads="uniform", attention_length=length)
    solution, seconds = solve(reading.spec, request), []
    for _ in range(OURS_RUNS):
        start = time.perf_counter()
        solution = solve(reading.spec, request)
        seconds.append(time.perf_counter() - start)
    case = Case(name, solution, median(seconds))
    chosen = {field: getattr(solution.twin, field) for field in case.problem.free}
    ours = case.judged({field: value for field, value in chosen.items() if value is not None})
    assert ours.feasible, f"{name}: our own twin is not on the lattice as this file reads it"
    assert abs(ours.score - solution.certificate.score) < 1e-9, f"{name}: two scores for our own twin"
    return case


# Optuna


def suggested(trial: optuna.Trial, case: Case, *, sample_experts: bool) -> Free | None:
    """A lattice point: expert width and query heads are moved into their windows; `None` where heads cannot be."""

    def pick(name: str, values: np.ndarray) -> int:
        return int(values[trial.suggest_int(name, 0, len(values) - 1)])

    lattice, geometry = case.lattice, case.lattice.geometry
    hidden = trial.suggest_int(H, 0, len(lattice.hidden) - 1)
    first, last = lattice.width_range(lattice.hidden[hidden])
    width = min(max(trial.suggest_int(F, 0, len(lattice.expert_width) - 1), first), last - 1)
    free = {H: int(lattice.hidden[hidden]), F: int(lattice.expert_width[width])}
    others = [name for name in geometry if name not in ("num_attention_heads", "v_head_dim")]  # v follows nope
    at = case.geometries(hidden, **{name: pick(name, np.unique(geometry[name])) for name in others})
    wanted = pick("num_attention_heads", np.unique(geometry["num_attention_heads"]))
    if not len(at):
        return None
    nearest = at[np.argmin(abs(geometry["num_attention_heads"][at] - wanted))]
    free |= {name: int(values[nearest]) for name, values in geometry.items()}
    if sample_experts:
        return free | {E: trial.suggest_int(E, lattice.least_experts, lattice.most_experts)}
    return free | {E: experts_by_parameters(case, free)}


def experts_by_parameters(case: Case, free: Free) -> int:
    """The count that comes nearest to the baseline's parameters; they are affine in it."""
    ends = (case.lattice.least_experts, case.lattice.most_experts)
    low, high = (Ledger(case.problem.twin(free | {E: end}), case.problem.setting).non_embedding for end in ends)
    experts = ends[0] + Fraction(case.solution.baseline_ledger.non_embedding - low, high - low) * (ends[1] - ends[0])
    return min(max(round(experts), ends[0]), ends[1])


def by_optuna(case: Case, budget: float, *, sample_experts: bool) -> Answer:
    """TPE, started at the relaxed widths; a point out of tolerance keeps its score, plus a penalty."""
    feasible: list[Judged] = []

    def objective(trial: optuna.Trial) -> float:
        free = suggested(trial, case, sample_experts=sample_experts)
        if free is None:
            return 2 * PENALTY
        point = case.judged(free)
        if point.feasible:
            feasible.append(point)
        return point.score + (0.0 if point.feasible else PENALTY)

    relaxed, lattice = case.solution.certificate.relaxed, case.lattice
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED))
    start_at = {
        H: int(np.argmin(abs(lattice.hidden - relaxed.hidden_size))),
        F: int(np.argmin(abs(lattice.expert_width - relaxed.moe_intermediate_size))),
    }
    study.enqueue_trial(start_at | ({E: round(relaxed.num_experts)} if sample_experts else {}))
    start = time.perf_counter()
    study.optimize(objective, timeout=budget)
    seconds = time.perf_counter() - start
    best = min(feasible, key=lambda point: point.score, default=None)
    about = f"{len(feasible)} of {len(study.trials)} trials feasible"
    return Answer("TPE" if sample_experts else "TPE, N", "score", best, budget, seconds, about)


# OR-Tools


@dataclass(frozen=True)
class Budget:
    """FLOPs or parameters as a polynomial: one coefficient per geometry for each product of free quantities."""

    target: int
    largest_gap: int
    coefficients: dict[Monomial, np.ndarray]


def following(problem: Problem) -> Monomial:
    """Widths that keep their share of the expert width."""
    return tuple(name for name in FOLLOWING if getattr(problem.baseline, name) is not None)


def subsets(names: Monomial) -> Iterator[Monomial]:
    for size in range(len(names) + 1):
        yield from combinations(names, size)


def drafted(problem: Problem, free: dict[str, Any], *, rounded: bool = True) -> Any:
    """A draft over arrays; a latent model without a query rank says so."""
    return problem.draft(free | {"q_lora_rank": None} if problem.latent else free, rounded=rounded)


def budgets(case: Case) -> dict[str, Budget]:
    """FLOPs and parameters, read off the ledger at the corners 0 and 1 of every quantity: they are affine in each."""
    problem, exact = case.problem, case.solution.baseline_ledger
    setting = replace(problem.setting, number=float)
    names = (H, F, E, *following(problem))
    corners: dict[Monomial, dict[str, np.ndarray]] = {}
    for ones in subsets(names):
        at = {name: float(name in ones) for name in names}  # floats: an integer single expert would lose its router
        draft = drafted(problem, case.lattice.geometry | {name: at[name] for name in (H, F, E)}, rounded=False)
        for name in following(problem):
            setattr(draft, name, at[name])
        counted = totals(draft, setting)
        pair = {"flops": counted.forward_flops, "non_embedding_parameters": counted.non_embedding}
        corners[ones] = {name: np.broadcast_to(v, case.lattice.query_width.shape) for name, v in pair.items()}
    out = {}
    for budget, target in (("flops", exact.forward_flops), ("non_embedding_parameters", exact.non_embedding)):
        terms = {
            ones: sum((-1) ** (len(ones) - len(fewer)) * corners[fewer][budget] for fewer in subsets(ones))
            for ones in corners
        }
        if not all((term == np.rint(term)).all() for term in terms.values()):
            raise NotImplementedError(f"{budget} whose coefficients are fractions are not in this program")
        out[budget] = Budget(target, int(problem.tolerance.by_budget[budget] * target), terms)
    return out


class Program:
    """The lattice as an integer program: tables, of which one row each is chosen, and two polynomials."""

    def __init__(self, case: Case, sought: Sought):
        if case.problem.baseline.q_lora_rank is not None:
            raise NotImplementedError("a query rank that follows the hidden size is not in this program")
        self.case, self.model, self.budgets = case, cp_model.CpModel(), budgets(case)
        self.scale = WEIGHT * max(budget.target for budget in self.budgets.values())  # units of the objective a point
        lattice = case.lattice
        most = lattice.most_experts
        self.var: dict[str, cp_model.IntVar] = {E: self.model.new_int_var(lattice.least_experts, most, E)}
        self.tables()
        self.expert_weights = self.product(F, E, most * int(lattice.expert_width[-1]))
        cost = [self.gap_size(name, budget) for name, budget in self.budgets.items()]
        shape = self.shape_cost() if sought == "score" else []
        self.model.minimize(sum([*cost, *shape]) + self.var["kv_cost"])

    def table(self, columns: dict[str, np.ndarray]) -> None:
        """Variables, new ones made, that together take one of the rows."""
        for name, values in columns.items():
            if name not in self.var:
                domain = cp_model.Domain.from_values([int(value) for value in values])
                self.var[name] = self.model.new_int_var_from_domain(domain, name)
        rows = [[int(value) for value in row] for row in zip(*columns.values(), strict=True)]
        self.model.add_allowed_assignments([self.var[name] for name in columns], rows)

    def points(self, value: np.ndarray) -> np.ndarray:
        """Points of the score in whole units of the objective."""
        return np.rint(value * self.scale)

    def tables(self) -> None:
        """What a geometry, a hidden size and an expert width bring along, and which go together."""
        lattice = self.case.lattice
        start, stop = lattice.hidden_range()
        kv_gap = self.kv_gap()
        near = np.flatnonzero((abs(kv_gap) <= self.case.problem.tolerance.kv_cache + ROUNDING) & (start < stop))
        columns = {"geometry": near, "least_hidden": start[near], "most_hidden": stop[near] - 1}
        for name, budget in self.budgets.items():
            columns |= {"*".join((name, *ones)): budget.coefficients[ones][near] for ones in ((), (H,))}
        self.table(columns | {"kv_cost": self.points(100 * abs(kv_gap[near]))})
        first, last = lattice.width_range(lattice.hidden)
        hidden = {"hidden": np.arange(len(lattice.hidden)), H: lattice.hidden}
        self.table(hidden | {"least_width": first, "most_width": last - 1})
        draft = self.drafted_widths()
        widths = {name: getattr(draft, name) for name in (F, *following(self.case.problem))}
        self.table({"width": np.arange(len(lattice.expert_width))} | widths)
        for name in ("hidden", "width"):
            self.model.add(self.var[f"least_{name}"] <= self.var[name])
            self.model.add(self.var[name] <= self.var[f"most_{name}"])

    def drafted_widths(self) -> Any:
        """Every expert width, and the widths that follow it, on the first geometry and hidden size."""
        lattice = self.case.lattice
        first = {name: values[0] for name, values in lattice.geometry.items()}
        return drafted(self.case.problem, first | {H: lattice.hidden[0], F: lattice.expert_width, E: 0.0})

    def kv_gap(self) -> np.ndarray:
        """The cache's gap of every geometry; nothing else moves it."""
        problem, target = self.case.problem, self.case.solution.baseline_ledger.kv_elements_at_context
        draft = drafted(problem, self.case.lattice.geometry | {H: 1.0, F: 1.0, E: 1.0})
        return totals(draft, replace(problem.setting, number=float)).kv_elements / target - 1

    def product(self, a: str, b: str, most: int) -> cp_model.IntVar:
        """A variable equal to the product of two, at most `most`."""
        out = self.model.new_int_var(0, most, f"{a} times {b}")
        self.model.add_multiplication_equality(out, [self.var[a], self.var[b]])
        return out

    def size(self, name: str, value: cp_model.LinearExprT, most: int) -> cp_model.IntVar:
        """|value|, and |value| <= most."""
        out = self.model.new_int_var(0, most, f"size of {name}")
        self.model.add_abs_equality(out, value)
        return out

    def gap_size(self, name: str, budget: Budget) -> cp_model.LinearExprT:
        """The weighed size of one budget's gap, which the tolerance confines."""
        parts: dict[bool, cp_model.LinearExprT] = {False: self.var[name], True: self.var[f"{name}*{H}"]}
        for ones, coefficients in budget.coefficients.items():
            others = tuple(one for one in ones if one != H)
            if not others or not coefficients.any():
                continue
            assert np.ptp(coefficients) == 0, f"the coefficient of {ones} depends on the geometry"
            assert len(others) == 1 or others == (F, E), f"no variable for {ones}"
            together = self.expert_weights if others == (F, E) else self.var[others[0]]
            parts[H in ones] += int(coefficients[0]) * together
        most = budget.target + budget.largest_gap
        inner = self.var[f"{name} per hidden"] = self.model.new_int_var(0, most, f"{name} per hidden")
        self.model.add(inner == parts[True])
        gap = parts[False] + self.product(H, f"{name} per hidden", most) - budget.target
        return round(100 * self.scale / budget.target) * self.size(name, gap, budget.largest_gap)

    def shape_tables(self) -> None:
        """ln(share) and ln(slenderness), each a term of the (geometry, hidden) pair plus a term of the width."""
        case, lattice = self.case, self.case.lattice
        wide = Shape.of(self.drafted_widths())
        start, stop = (edge[:, None] for edge in lattice.hidden_range())
        near = abs(self.kv_gap())[:, None] <= case.problem.tolerance.kv_cache + ROUNDING
        place = np.arange(len(lattice.hidden))
        which, hidden = np.nonzero(near & (start <= place) & (place < stop))
        pairs = {name: values[which] for name, values in lattice.geometry.items()} | {H: lattice.hidden[hidden]}
        shapes = Shape.of(drafted(case.problem, pairs | {F: lattice.expert_width[0], E: 0.0}))
        alone = HEAD_WEIGHT * SHAPE_WEIGHT * abs(np.log(shapes.head_size / case.shape.head_size))
        alone += TILE_WEIGHT * misaligned(replace(shapes, expert_width=0))
        columns = {"geometry": which, "hidden": hidden, "pair_cost": self.points(alone)}
        width_cost = TILE_WEIGHT * misaligned(replace(wide, head_size=0, hidden_size=0))
        widths = {"width": np.arange(len(lattice.expert_width)), "width_cost": self.points(width_cost)}
        for name in ("share", "slenderness"):
            of_pair, of_width = getattr(shapes, name), getattr(wide, name)
            columns[f"{name}_of_pair"] = self.points(SHAPE_WEIGHT * np.log(of_pair / getattr(case.shape, name)))
            widths[f"{name}_of_width"] = self.points(SHAPE_WEIGHT * np.log(of_width / of_width[0]))
        self.table(columns)
        self.table(widths)

    def shape_cost(self) -> list[cp_model.LinearExprT]:
        """What the score adds to the gaps."""
        self.shape_tables()
        out: list[cp_model.LinearExprT] = [self.var["pair_cost"], self.var["width_cost"]]
        for name in ("share", "slenderness"):
            away = self.var[f"{name}_of_pair"] + self.var[f"{name}_of_width"]
            out.append(self.size(name, away, 100 * self.scale))
        tiles = self.model.new_int_var(0, self.case.lattice.most_experts // EXPERTS_TILE, "tiles")
        off = self.model.new_bool_var("experts off tile")
        self.model.add(self.var[E] == EXPERTS_TILE * tiles).only_enforce_if(~off)
        return [*out, round(TILE_WEIGHT * self.scale) * off]

    def free(self, solver: cp_model.CpSolver) -> Free:
        """The point a solver holds."""
        at = solver.value(self.var["geometry"])
        geometry = {name: int(values[at]) for name, values in self.case.lattice.geometry.items()}
        return geometry | {name: solver.value(self.var[name]) for name in (H, F, E)}


def by_cp_sat(case: Case, budget: float, sought: Sought) -> Answer:
    """The integer program solved, its point counted again by the ledger."""
    start = time.perf_counter()
    try:
        program = Program(case, sought)
    except NotImplementedError as error:
        return Answer("CP-SAT", sought, None, budget, time.perf_counter() - start, f"not tried: {error}")
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = budget
    solver.parameters.num_workers = THREADS
    solver.parameters.random_seed = SEED
    status = solver.solve(program.model)
    seconds = time.perf_counter() - start
    bound = solver.best_objective_bound / program.scale
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer("CP-SAT", sought, None, budget, seconds, solver.status_name(status), bound)
    best = case.judged(program.free(solver))
    seen = solver.objective_value / program.scale
    assert best.feasible, f"{case.name}: the program's point is infeasible for the ledger: {best}"
    assert close(seen, best.value(sought)), f"{case.name}: the program sees {seen!r}, the ledger {best}"
    about = "proved optimal" if status == cp_model.OPTIMAL else f"not proved, at least {bound:.6f}"
    return Answer("CP-SAT", sought, best, budget, seconds, about, bound)


def close(a: float, b: float) -> bool:
    """Equal up to the rounding of the program's weights."""
    return abs(a - b) <= 2e-6 * abs(b)


# The verdict


def refuted(case: Case, answer: Answer) -> list[str]:
    """Every way in which an answer contradicts our certificate."""
    out, asked = [], case.ours(answer.sought)
    for sought in ("score", "gap sum"):
        ours = case.ours(sought)
        if answer.best is not None and answer.best.value(sought) < ours - 100 * ROUNDING:
            out.append(f"{sought} {answer.best.value(sought)!r} is below our {ours!r}: {answer.best}")
    if answer.bound > asked and not close(answer.bound, asked):
        out.append(f"no {answer.sought} is below {answer.bound!r}, yet we claim {asked!r}")
    return [f"{case.name}, {answer.opponent}: {text}" for text in out]


def line(case: Case, answer: Answer) -> str:
    """One line of the table."""
    found = "none" if answer.best is None else f"{answer.best.value(answer.sought):.9f}"
    ours = f"{case.ours(answer.sought):.9f}"
    given = f"{1000 * case.seconds:.1f} ms | {TIMES_OURS * case.seconds:.2f} s | {answer.given:.0f} s"
    asked = f"{case.name} | {answer.opponent} | {answer.sought} | {given} | {answer.seconds:.1f} s"
    return f"| {asked} | {ours} | {found} | {answer.about} |"


def answers(case: Case, seconds: float, proof_seconds: float) -> Iterator[Answer]:
    """Every opponent in turn."""
    least = TIMES_OURS * case.seconds
    for sample_experts in (True, False):
        yield by_optuna(case, max(least, seconds), sample_experts=sample_experts)
    for sought in ("gap sum", "score"):
        yield by_cp_sat(case, max(least, proof_seconds), sought)


def main() -> int:
    parser = argparse.ArgumentParser(description="Does anything a user would write instead find a better twin?")
    parser.add_argument("models", nargs="*", default=MODELS, help=f"built-in names; left out: {', '.join(MODELS)}")
    parser.add_argument("--seconds", type=float, default=20.0, help="least wall time of TPE (20)")
    parser.add_argument("--proof-seconds", type=float, default=120.0, help="most wall time of a CP-SAT proof (120)")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print(
        f"{date.today()}, Python {platform.python_version()}, numpy {np.__version__}, optuna {optuna.__version__}, "
        f"ortools {version('ortools')}, {os.cpu_count()} CPUs, "
        f"CP-SAT on {THREADS} threads; score in points, gap sum in %\n"
    )
    print("| model | opponent | minimises | our t | 10 t | given | used | ours | theirs | |")
    print(f"|{'---|' * 10}")
    contradictions: list[str] = []
    for name in options.models:
        case = solved(name)
        for answer in answers(case, options.seconds, options.proof_seconds):
            contradictions += refuted(case, answer)
            print(line(case, answer), flush=True)
    for text in contradictions:
        print(f"\n!!! OUR CERTIFICATE IS WRONG !!! {text}")
    return 1 if contradictions else 0


if __name__ == "__main__":
    sys.exit(main())
