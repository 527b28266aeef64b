"""One step of the GPU run, in a process of its own: what it breaks, it breaks for itself.

    python step.py STEP RECORDS SECONDS DEVICE

gpu.py starts it, again if it dies, until every unit of the step has been begun. The package is imported as it lies in
the checkout and without what only commands and specs need (pydantic, ...): a GPU machine has torch, often little else.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from records import Missing, Records, Unit

STARTED = time.monotonic()  # before torch is imported, which takes seconds
ROOT = Path(__file__).resolve().parents[2]
STEPS = {
    "build": ("libraries", "built"),
    "conformance": ("libraries", "compared"),
    "checks": ("checks", "units"),
    "sanitizer": ("sanitizer", "units"),
    "ceilings": ("ceilings", "units"),
    "shape": ("measure", "units"),
}
"""Where the units of a step are made: a function of the device and of what stands behind the step's name."""
BROKEN = 3
"""Exit code: the GPU answers no more, and what is left wants a new process."""


def reachable() -> None:
    """The model's modules, the oracle of the tests and the conformance dump can be imported."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernels"), str(ROOT / "kernels" / "conformance")]
    package = types.ModuleType("smelt_budget.model")
    package.__path__ = [str(ROOT / "smelt_budget" / "model")]
    sys.modules["smelt_budget.model"] = package


def units(step: str, device: str) -> Iterable[Unit]:
    """What a step consists of."""
    name, _, number = step.partition(" ")
    module, function = STEPS[name]
    return getattr(importlib.import_module(module), function)(device, number)


def broken(device: str) -> bool:
    """Whether the GPU refuses everything after a fault, as it does for the rest of a process."""
    if device == "cuda":
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


def main(step: str, path: str, seconds: str, device: str) -> int:
    """0, or BROKEN."""
    reachable()
    records = Records(Path(path))
    begun = records.begun(step)
    try:
        for unit, work in units(step, device):
            if unit in begun:
                continue
            if time.monotonic() - STARTED > float(seconds):
                records.add(step, unit, "left out", reason="no time left")
                continue
            print(f"{step}: {unit}", flush=True)
            records.add(step, unit, "begun")
            state, found = outcome(work)
            records.add(step, unit, state, **found)
            if state == "failed" and broken(device):
                return BROKEN
    except Exception as error:
        records.add(step, "units", "failed", reason=words(error))
    return 0


def outcome(work: Callable[[], dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The state of a unit, and what it found or why it found nothing."""
    start = time.monotonic()
    try:
        found = work()
    except Missing as reason:
        return "missing", {"reason": str(reason)}
    except Exception as error:
        return "failed", {"reason": words(error)}
    return "done", {"seconds": round(time.monotonic() - start, 2), **found}


def words(error: Exception) -> str:
    """In one line; the rest is printed."""
    traceback.print_exception(error)
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
