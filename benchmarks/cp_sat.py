"""What does OR-Tools prove? The lattice as an integer program: tables of choices and two polynomials."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from case import ROUNDING, SEED, Answer, Case, E, F, Free, H, Sought
from ortools.sat.python import cp_model

from smelt_budget.ledger import totals
from smelt_budget.solver.problem import FOLLOWING, Problem
from smelt_budget.solver.score import EXPERTS_TILE, HEAD_WEIGHT, SHAPE_WEIGHT, TILE_WEIGHT, Shape, misaligned

THREADS = 2
WEIGHT = 10**4  # a CP-SAT weight is a whole number of at least 100 * WEIGHT, so rounding moves it by under 1e-6
Monomial = tuple[str, ...]
"""Names of the quantities multiplied; the empty one is the constant."""


class NotCovered(Exception):
    """A model this program cannot state; the table says so instead of a result."""


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
            raise NotCovered(f"{budget} whose coefficients are fractions are not in this program")
        out[budget] = Budget(target, int(problem.tolerance.by_budget[budget] * target), terms)
    return out


class Program:
    """The lattice as an integer program: tables, of which one row each is chosen, and two polynomials."""

    def __init__(self, case: Case, sought: Sought):
        if case.problem.baseline.q_lora_rank is not None:
            raise NotCovered("a query rank that follows the hidden size is not in this program")
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
    except NotCovered as error:
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
