"""How is every cell solved? One after the other while that is quick, else side by side, a process a core.

A process costs over a second to start, the paper's twelve cells together take about one: processes are for finer
lattices and larger grids. A cell for which no twin is found does not stop the others. Ctrl-C ends the processes at
once; what was handed over before is the caller's already.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any

from smelt_budget.errors import Infeasible, SmeltError
from smelt_budget.ladder.grid import Cell
from smelt_budget.solver import solve
from smelt_budget.spec.text import as_yaml

WORTH = 5.0
"""Seconds of work left from which on processes pay for their start."""
Outcome = tuple[Cell, dict[str, Any] | None, dict[str, str], str]
"""A cell, its pair as plain data, the files of it, and why there is none."""


def solved(wanted: Sequence[Cell], heading: str) -> Iterator[Outcome]:
    """Each cell as it is found, in whatever order.

    Raises:
        SmeltError: anything but that no twin exists.
    """
    jobs = [(cell, heading) for cell in wanted]
    began, done = time.monotonic(), 0
    while done < len(jobs):
        yield one(jobs[done])
        done += 1
        if (time.monotonic() - began) / done * (len(jobs) - done) > WORTH and usable_cores() > 1:
            break
    if done == len(jobs):
        return
    # A Ctrl-C goes to every process of a terminal, and one that comes while they start leaves them half made: it is
    # held back until they stand, and they, who inherit that, never hear it. Starting multiprocessing's tracker lets
    # it through again, so that comes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with multiprocessing.get_context("spawn").Pool(min(len(jobs) - done, usable_cores())) as pool:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield from pool.imap_unordered(one, jobs[done:])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one(job: tuple[Cell, str]) -> Outcome:
    """A worker's share."""
    cell, heading = job
    try:
        solution = solve(cell.given, cell.request)
    except Infeasible as error:
        return cell, None, {}, str(error)
    except SmeltError as error:
        raise type(error)(f"{cell.name}: {error}") from None
    found = solution.as_dict()
    if cell.functions:
        found["built_otherwise"] = list(cell.functions)
    written = {
        "smelt.yaml": as_yaml(found, f"{heading}, {cell.name}."),
        "baseline.yaml": as_yaml(found["baseline"]["spec"], f"The baseline of {cell.name}."),
        "twin.yaml": as_yaml(found["twin"]["spec"], f"The twin of {cell.name}."),
    }
    return cell, found, written, ""
