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
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version

import numpy as np
import optuna
from case import ROUNDING, Answer, Case, solved
from cp_sat import THREADS, by_cp_sat, close
from tpe import by_optuna

MODELS = ("smelt-200m-s95", "deepseek-v2-lite", "qwen3-30b-a3b")
TIMES_OURS = 10


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
