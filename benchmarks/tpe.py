"""What does Optuna find? TPE over the lattice's axes, minimising the published score by the exact ledger."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import optuna
from case import SEED, Answer, Case, E, F, Free, H, Judged

from smelt_budget.ledger import Ledger

PENALTY = 1000.0  # points; far above a twin within tolerance (three gaps of at most 2 % are 6 points)


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
