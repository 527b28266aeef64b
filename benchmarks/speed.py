"""How fast is solve? Ratios taken in one run, because seconds differ between machines.

    cold     `python -m smelt_budget ...` over a cold import of what it stands on, taken in turns, medians
    lattice  the whole default lattice of deepseek-v3, in one process, imports not counted
    memory   peak resident size of the processes above, as the kernel reports it

A requirement that is missed is marked in the table, and the exit code is then 1.

    python benchmarks/speed.py --rounds 15
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from statistics import median

# Nothing heavy is imported here: a child's peak memory is at least its parent's at the fork.

FOUNDATION = "import numpy, scipy.optimize, sympy, pydantic, typer, rich"
LARGEST_COLD_RATIO = 1.6
LONGEST_LATTICE = 1.0  # seconds
LARGEST_MEMORY = 500.0  # MB
HEAVY = ("numpy", "scipy", "sympy", "torch")
LATTICE_RUNS = 7

COMMANDS = {
    "import": ["-c", FOUNDATION],
    "solve": ["-m", "smelt_budget", "solve"],
    "--help": ["-m", "smelt_budget", "--help"],
    "models": ["-m", "smelt_budget", "models"],
}
LOADS = {"--help": ["--help"], "models": ["models"], "ledger": ["ledger", "smelt-200m-s95"], "solve": ["solve"]}

LOADED = f"""
import json, sys
from smelt_budget.cli import app
app(sys.argv[1:], standalone_mode=False)
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]), file=sys.stderr)
"""

LATTICE = f"""
import json, time
{FOUNDATION}
from smelt_budget.solver import solve
from smelt_budget.spec import read
spec = read("deepseek-v3").spec
seconds = []
for _ in range({LATTICE_RUNS}):
    start = time.perf_counter()
    solution = solve(spec)
    seconds.append(time.perf_counter() - start)
print(json.dumps({{"seconds": seconds, "points": solution.certificate.points}}))
"""


@dataclass(frozen=True)
class Ended:
    """A finished child: wall seconds, peak memory in MB, what it printed."""

    seconds: float
    memory: float
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Line:
    """One line of the table. `limit` is the largest value the requirement allows."""

    what: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def met(self) -> bool:
        """Whether the requirement, if there is one, holds."""
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        asked = "" if self.limit is None else f"<= {self.limit:g}{self.unit}: {'met' if self.met else '**MISSED**'}"
        return f"| {self.what} | {self.value:.3g}{self.unit} | {asked} |"


def child(arguments: list[str]) -> Ended:
    """Run this interpreter on `arguments` to its end. Raises CalledProcessError where it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    process.stderr.close()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments, stdout, stderr)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere (getrusage(2))
    return Ended(seconds, usage.ru_maxrss * unit / 1e6, stdout, stderr)


def cold(rounds: int) -> dict[str, list[Ended]]:
    """Every command once per round, in turns, so that a busy machine slows all of them alike."""
    for arguments in COMMANDS.values():  # bytecode and file cache, not measured
        child(arguments)
    ended: dict[str, list[Ended]] = {name: [] for name in COMMANDS}
    for done in range(rounds):
        for name, arguments in COMMANDS.items():
            ended[name].append(child(arguments))
        print(f"round {done + 1} of {rounds}", file=sys.stderr)
    return ended


def cold_lines(ended: dict[str, list[Ended]]) -> list[Line]:
    """Medians, their ratios to the import, and what the example needs at most."""
    seconds = {name: median(one.seconds for one in runs) for name, runs in ended.items()}
    lines = [Line(f"cold `python -c '{FOUNDATION}'`", seconds["import"], " s")]
    for name in ("solve", "--help", "models"):
        limit = LARGEST_COLD_RATIO if name == "solve" else None
        lines.append(Line(f"cold `{name}`", seconds[name], " s"))
        lines.append(Line(f"cold `{name}` / import", seconds[name] / seconds["import"], "x", limit))
    memory = max(one.memory for one in ended["solve"])
    return [*lines, Line("peak memory, cold `solve`", memory, " MB", LARGEST_MEMORY)]


def lattice_lines(import_seconds: float) -> list[Line]:
    """deepseek-v3 over its whole default lattice."""
    ended = child(["-c", LATTICE])
    seen = json.loads(ended.stdout)
    seconds, what = median(seen["seconds"]), f"deepseek-v3, {seen['points']:,} points"
    return [
        Line(f"{what}, median of {LATTICE_RUNS}", seconds, " s", LONGEST_LATTICE),
        Line(f"{what} / import", seconds / import_seconds, "x"),
        Line("peak memory, deepseek-v3", ended.memory, " MB", LARGEST_MEMORY),
    ]


def loaded(arguments: list[str]) -> list[str]:
    """Which heavy packages a command loads."""
    return json.loads(child(["-c", LOADED, *arguments]).stderr.splitlines()[-1])


def at_least_15(text: str) -> int:
    if int(text) < 15:
        raise argparse.ArgumentTypeError("medians of fewer than 15 rounds move too much to compare")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast is solve?")
    parser.add_argument("--rounds", type=at_least_15, default=15, metavar="N", help="cold rounds, 15 or more")
    ended = cold(parser.parse_args().rounds)
    import_seconds = median(one.seconds for one in ended["import"])
    lines = [*cold_lines(ended), *lattice_lines(import_seconds)]
    print(
        f"{date.today()}, Python {platform.python_version()}, numpy {version('numpy')}, {os.cpu_count()} CPUs, "
        f"medians of {len(ended['import'])} rounds\n"
    )
    print("| what | measured | required |\n|---|---|---|")
    print(*lines, sep="\n")
    print(f"\n| command | {' | '.join(HEAVY)} |\n|---|{'---|' * len(HEAVY)}")
    for name, arguments in LOADS.items():
        packages = loaded(arguments)
        print(f"| `{name}` | {' | '.join('loads' if one in packages else '-' for one in HEAVY)} |")
    return 0 if all(line.met for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
