"""How does a pair become a folder? Check, ask the target, add launch files and the manifest, write, report."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import smelt_budget
from smelt_budget.emit import folder, launch
from smelt_budget.emit.target import ARMS, Job, Target, lines
from smelt_budget.errors import BadInput


def emitted(target: Target, job: Job, out: Path, strict: bool, force: bool, origin: str) -> dict[str, Any]:
    """Write the folder; what was made, as plain data.

    Raises:
        BadInput: the target cannot hold the pair, or under `strict` not exactly; the layout does not divide; the place
            is taken. Nothing was written.
    """
    folder.check_place(out, force)
    table = lines(target, job)
    changed = [line for line in table if line.how != "as asked"]
    if strict and changed:
        raise BadInput(
            f"{target.name} does not hold everything that was asked, and --strict is set",
            *(f"{line.feature}: asked {line.asked}; {line.how}: {line.emitted}" for line in changed),
            "fix: without --strict, or another target (--list)",
        )
    if job.weights is not None and not target.takes_weights:
        raise BadInput(f"{target.name} takes no weights", "fix: --to hf --weights ..., or without --weights")
    if job.layout is not None:
        specs = {arm: job.spec(arm) for arm in ARMS}
        launch.check(job.layout, specs, job.training.batch_sequences, target.parallel)
    made = target.emit(job)
    files = dict(made.files)
    if job.layout is not None:
        if not made.train:
            raise BadInput(f"{target.name} has nothing to launch", "fix: without --launch")
        files |= launch.scripts(job.layout, job.name, made.train)
    told = {
        "smelt_budget": smelt_budget.__version__,
        "target": target.name,
        "pair": origin,
        "files": sorted(files),
        "features": [asdict(line) for line in table],
        "training": job.training.model_dump(mode="json") | {"steps": job.training.steps},
        "train": {arm: "torchrun " + shlex.join(command) for arm, command in made.train.items()},
        "notes": list(made.notes),
    }
    folder.write(out, files | {folder.MANIFEST: json.dumps(told, indent=2) + "\n"}, force)
    return told | {"out": str(out)}
