"""A process that trains: `-m smelt_budget.verify.worker FOLDER THREADS PARENT ARM...`, a JSON event a line on stdout.

It stops after the step at hand on SIGINT and SIGTERM, and when the process that started it is gone; what it did is
on disk then. Exit codes are those of the program.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from smelt_budget.errors import SmeltError
from smelt_budget.verify.asked import read_asked
from smelt_budget.verify.place import Place
from smelt_budget.verify.study import Study
from smelt_budget.verify.train import Interrupted

INTERRUPTED = 130


class Signals:
    """Whether somebody wants the work to stop; a second SIGINT ends the process at once."""

    def __init__(self, parent: int | None = None) -> None:
        """`parent` started this process; it may be gone before the process has come so far."""
        self.asked = False
        self.parent = os.getppid() if parent is None else parent

    def listen(self) -> Signals:
        """From now on."""
        signal.signal(signal.SIGINT, self.stop)
        signal.signal(signal.SIGTERM, self.stop)
        return self

    def stop(self, number: int, _: Any) -> None:
        """After the step at hand."""
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __call__(self) -> bool:
        """Asked by somebody, or because nobody is left to ask."""
        return self.asked or os.getppid() != self.parent


def told(event: dict[str, Any]) -> None:
    """One line; whoever listened may be gone."""
    try:
        print(json.dumps(event), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def work(folder: Path, arms: list[str], stopping: Callable[[], bool], threads: int) -> int:
    """All of the arms, one after another; returns the exit code."""
    torch.set_num_threads(threads)
    try:
        asked = read_asked(folder)
        place = Place(asked.device, asked.precision, asked.compiled, asked.checkpointing, experts=asked.experts)
        split = asked.split(folder)
        for arm in arms:
            Study(arm, asked, split, place, folder).run(told, stopping)
    except Interrupted:
        return INTERRUPTED
    except SmeltError as error:
        told({"event": "error", "message": str(error), "exit_code": error.exit_code})
        return error.exit_code
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        message = f"{' and '.join(arms)}: cannot read or write{where}: {error.strerror or error}"
        told({"event": "error", "message": f"{message}\n  fix: make it possible, then --resume", "exit_code": 1})
        return 1
    return 0


if __name__ == "__main__":
    given, threads, started_by, *named = sys.argv[1:]
    raise SystemExit(work(Path(given), named, Signals(int(started_by)).listen(), int(threads)))
