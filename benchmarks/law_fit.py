"""How fast is a law fitted, beside scipy called in a loop as one writes it by hand? Ratios taken in one run.

    fit       six coefficients on the 72 runs of one arm of arXiv 2609.01343, losses of its law and noise of its RMSE
    plain     scipy.optimize.minimize, L-BFGS-B, no gradient given: same objective, same starts, same tolerances
    centred   the same, in our coordinates: what the gradient alone is worth
    refits    both arms of drawn cells, each from the full fit; of the plain ones a few are run and the rest reckoned

Processor time of one process on one BLAS thread; `law fit --out` draws refits in as many processes as there are CPUs.

    python benchmarks/law_fit.py --plain-starts 200
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
from scipy.optimize import minimize
from scipy.special import huber, logsumexp
from threadpoolctl import threadpool_limits

from smelt_budget.laws.bootstrap import Refits
from smelt_budget.laws.fit import fit
from smelt_budget.laws.forms import SMELT, Array
from smelt_budget.laws.problem import DELTA, OPTIONS, PowersProblem
from smelt_budget.laws.runs import Runs

CELLS = json.loads((Path(__file__).parents[1] / "tests" / "golden" / "smelt_cells.json").read_text(encoding="utf-8"))
HORIZONS = np.array([10_000, 20_000, 50_000, 100_000, 150_000, 196_075]) * 256 * 4096 + 10e9  # section 7
ARMS = {"baseline": ("base", "smelt-baseline", 0.00554), "looped": ("smelt", "smelt-looped", 0.00952)}
STARTS, DRAWS = 200, 2000
LEAST_RATIO, LONGEST_FIT, LONGEST_REFITS = 10.0, 5.0, 120.0


@dataclass(frozen=True)
class Spent:
    """Seconds on the clock and of this process, and the least objective of every descent."""

    wall: float
    cpu: float
    objectives: Array

    @property
    def found(self) -> str:
        """The best objective, and how many descents got within 1e-6 of it."""
        best = self.objectives.min()
        return f"{best * DELTA:.8g}, by {(self.objectives <= best * (1 + 1e-6)).sum()} of {len(self.objectives)}"


def arm(name: str) -> Runs:
    """The 72 runs of an arm, with noise."""
    key, preset, rmse = ARMS[name]
    points = [(c["inferred"][key]["F_train"], c["published"][key]["S_pct"] / 100, d) for c in CELLS for d in HORIZONS]
    columns = dict(zip(SMELT.columns, np.array(points).T, strict=True))
    noise = np.random.default_rng(0).normal(0, rmse, len(points))
    cells = tuple(f"{c['scale']} {c['S_label']}" for c in CELLS for _ in HORIZONS)
    return Runs(columns, SMELT.loss(SMELT.presets[preset], columns) + noise, cells, tuple(range(len(points))))


def plain(runs: Runs, weight: Array | None = None) -> Callable[[Array], float]:
    """The objective written down from the formula, over theta."""
    columns, log_loss = runs.columns, np.log(runs.loss)
    log_F, log_density, log_D = (
        np.log(columns["flops_per_token"]),
        np.log1p(-columns["sparsity"]),
        np.log(columns["tokens"]),
    )

    def objective(theta: Array) -> float:
        e, log_A, a, b, log_K, c = theta
        terms = [np.full_like(log_F, e), log_A + b * log_density - a * log_F, log_K - c * log_D]
        losses = huber(DELTA, logsumexp(terms, axis=0) - log_loss)
        return float((losses if weight is None else losses * weight).sum()) / DELTA

    return objective


def spent(descents: list[Callable[[], float]]) -> Spent:
    """Run each, one after another."""
    wall, cpu = time.perf_counter(), time.process_time()
    objectives = np.array([descend() for descend in descents])
    return Spent(time.perf_counter() - wall, time.process_time() - cpu, objectives)


def scipy_descent(objective: Callable[[Array], float], start: Array) -> Callable[[], float]:
    """No gradient, so as many calls for one as there are coefficients: `maxfun` counts them."""
    options = OPTIONS | {"maxfun": OPTIONS["maxfun"] * (len(start) + 1)}
    return lambda: float(minimize(objective, start, method="L-BFGS-B", options=options).fun)


def fits(plain_starts: int) -> dict[str, Spent]:
    """The baseline's arm, three ways."""
    runs = arm("baseline")
    points = PowersProblem(SMELT, runs.columns, runs.loss)
    starts = points.starts(STARTS, 0)
    objective = plain(runs)
    place = starts[0]
    assert abs(objective(points.theta(place)) / points.value(place)[0] - 1) < 1e-9, "not the same objective"
    ours = spent([lambda start=start: points.descend(start)[1] for start in starts])
    some = starts[:plain_starts]
    return {
        "ours": ours,
        "plain": spent([scipy_descent(objective, points.theta(start)) for start in some]),
        "centred": spent([scipy_descent(lambda at: objective(points.theta(at)), start) for start in some]),
    }


def refits(plain_draws: int) -> tuple[Spent, Spent]:
    """All of ours, some of the plain ones."""
    arms = {name: arm(name) for name in ARMS}
    found = {name: fit(SMELT, runs.columns, runs.loss, 20) for name, runs in arms.items()}
    ours = Refits(SMELT, arms, found)
    drawn = spent([lambda number=number: float(len(ours.refit(number))) for number in range(DRAWS)])
    descents = []
    for number in range(plain_draws):
        for name, weight in ours.draw(number).items():
            descents.append(scipy_descent(plain(arms[name], weight), SMELT.theta(found[name].coefficients)))
    return drawn, spent(descents)


def met(value: float, limit: float, least: bool = False) -> str:
    """Whether a requirement holds."""
    good = value >= limit if least else value <= limit
    return f"{'>=' if least else '<='} {limit:g}: {'met' if good else '**MISSED**'}"


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast is a law fitted?")
    parser.add_argument("--plain-starts", type=int, default=40, metavar="N", help=f"of the {STARTS} starts")
    parser.add_argument("--plain-draws", type=int, default=20, metavar="N", help=f"of the {DRAWS} draws")
    asked = parser.parse_args()
    with threadpool_limits(1):
        fitted = fits(asked.plain_starts)
        ours, few = refits(asked.plain_draws)
    print(f"{date.today()}, Python {platform.python_version()}, numpy {version('numpy')}, scipy {version('scipy')}\n")
    print(
        "| what | descents | wall, s | processor, s | per descent / ours | best objective |\n|---|---|---|---|---|---|"
    )
    each = fitted["ours"].cpu / STARTS
    ratios = {name: one.cpu / len(one.objectives) / each for name, one in fitted.items()}
    for name, one in fitted.items():
        print(f"| {name} | {len(one.objectives)} | {one.wall:.2f} | {one.cpu:.2f} | {ratios[name]:.1f} | {one.found} |")
    reckoned = few.cpu / asked.plain_draws * DRAWS
    print(f"\n{DRAWS} refits of both arms: ours {ours.wall:.1f} s, {ours.cpu:.1f} s of processor")
    print(f"plain: {asked.plain_draws} refits run in {few.cpu:.1f} s of processor; {DRAWS} would take {reckoned:.0f} s")
    checks = [
        f"fit, seconds {met(fitted['ours'].wall, LONGEST_FIT)}",
        f"refits, seconds {met(ours.wall, LONGEST_REFITS)}",
        f"plain / ours, a fit: {ratios['plain']:.1f} {met(ratios['plain'], LEAST_RATIO, least=True)}",
        f"plain / ours, refits: {reckoned / ours.cpu:.1f} {met(reckoned / ours.cpu, LEAST_RATIO, least=True)}",
    ]
    print("", *checks, sep="\n")
    return int(any("MISSED" in line for line in checks))


if __name__ == "__main__":
    sys.exit(main())
