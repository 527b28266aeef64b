"""Are the kernels right and fast on this GPU? One run of under eight minutes answers, and leaves text and JSON.

    python kernels/bench/gpu.py [--out FOLDER] [--minutes 8] [--rehearse]

Nothing is downloaded: torch, nvcc and g++ are used if they are there, Liger and compute-sanitizer too; what is missing
is said. Every step has its share of the time and a process of its own, so that none can eat the rest or break the next;
what a step did not use goes to those after it. `--rehearse` goes through every step on the CPU, by the emulated kernels
on tiny shapes, and measures nothing.

Exit code: 0; 1 if there is no GPU, or if something was wrong, not merely missing or out of time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from records import Records
from shapes import REHEARSED, SHAPES
from table import findings, text

HERE = Path(__file__).resolve().parent
LAST_WORDS = 15
"""Seconds at the end in which nothing is begun: the table, and processes that go slowly."""
GRACE = 6
"""Seconds between the time at which a step begins no new unit, and that at which it is stopped."""


@dataclass(frozen=True)
class Step:
    """A part of the run."""

    name: str
    share: float
    """Seconds, if there are eight minutes and every step uses its time up."""


@dataclass(frozen=True)
class Outcome:
    """How a step went."""

    step: str
    allowed: float
    """Seconds."""
    used: float
    words: str


def plan(shapes: int) -> list[Step]:
    """All steps; those before the shapes are what makes their figures worth anything."""
    first = [
        Step("build", 80),
        Step("conformance", 20),
        Step("checks", 60),
        Step("sanitizer", 50),
        Step("ceilings", 12),
    ]
    return first + [Step(f"shape {number}", 240 / shapes) for number in range(shapes)]


def allowed(steps: Sequence[Step], left: float) -> float:
    """Seconds for the first of these steps, so that the others keep their shares of what is left."""
    return max(0.0, left) * steps[0].share / sum(step.share for step in steps)


def run(step: str, seconds: float, records: Records, device: str, log: Path) -> Outcome:
    """Start a step, again as long as it dies with units not begun; stop it when its time is over."""
    start = time.monotonic()
    stopping = max(seconds - GRACE, seconds / 2)
    words = "nothing was begun"
    while (used := time.monotonic() - start) < stopping:
        before = len(records.begun(step))
        code = child(step, seconds - used, stopping - used, records.path, device, log)
        begun = len(records.begun(step)) - before
        if code == 0 or begun == 0:
            words = "done" if code == 0 else f"ended with {code}, see {log.name}"
            break
        words = "stopped: its time was over" if code is None else f"ended with {code}, see {log.name}"
        if code is None:
            break
    return Outcome(step, round(seconds, 1), round(time.monotonic() - start, 1), words)


def child(step: str, seconds: float, stopping: float, records: Path, device: str, log: Path) -> int | None:
    """The exit code of one process; None if it had to be stopped, which ends its children too."""
    command = [sys.executable, str(HERE / "step.py"), step, str(records), str(stopping), device]
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def machine(device: str) -> dict[str, Any]:
    """What the figures belong to."""
    import torch

    found = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        found |= {"gpu": about.name, "capability": f"{about.major}.{about.minor}", "cuda": torch.version.cuda}
        found |= {"multiprocessors": about.multi_processor_count, "memory": about.total_memory}
    return found


def main() -> int:
    """Read, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for the results")
    parser.add_argument("--minutes", type=float, default=8, help="for everything")
    parser.add_argument("--rehearse", action="store_true", help="every step on the CPU, tiny; measures nothing")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes - LAST_WORDS
    if reason := unfit(options.rehearse):
        print(f"error: {reason}", file=sys.stderr)
        return 1
    device = "cpu" if options.rehearse else "cuda"
    options.out.mkdir(parents=True, exist_ok=True)
    records, log = Records(options.out / "gpu.jsonl"), options.out / "gpu.log"
    for old in (records.path, log):
        old.unlink(missing_ok=True)
    try:
        result = everything(records, log, device, end)
    except KeyboardInterrupt:
        print(f"interrupted; what was found is in {options.out}", file=sys.stderr)
        return 130
    print(f"\n{text(result)}\nin {options.out}: gpu.md, gpu.json, gpu.jsonl (every finding), gpu.log (all output)")
    return 1 if result["wrong"] else 0


def everything(records: Records, log: Path, device: str, end: float) -> dict[str, Any]:
    """All steps until `end`; what was found so far is written after each."""
    steps = plan(len(SHAPES if device == "cuda" else REHEARSED))
    about, outcomes, result = machine(device), [], {}
    for number, step in enumerate(steps):
        outcome = run(step.name, allowed(steps[number:], end - time.monotonic()), records, device, log)
        outcomes.append(asdict(outcome))
        print(f"{step.name}: {outcome.words}, {outcome.used:.0f} of {outcome.allowed:.0f} s", flush=True)
        result = findings(about, outcomes, records.latest(), rehearsal=device == "cpu")
        write(log.with_name("gpu.json"), json.dumps(result, indent=1) + "\n")
        write(log.with_name("gpu.md"), text(result))
    return result


def unfit(rehearse: bool) -> str:
    """Why nothing can be run here, with what would help; empty if something can."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} has no torch ({error})\n  fix:     make gpu PYTHON=..., one whose torch sees the GPU"
    if rehearse or torch.cuda.is_available():
        return ""
    fix = "run it on a machine with one, or go through every step on the CPU: --rehearse"
    return f"torch {torch.__version__} sees no GPU here\n  fix:     {fix}"


def write(path: Path, content: str) -> None:
    """All of it or nothing."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(content, encoding="utf-8")
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
