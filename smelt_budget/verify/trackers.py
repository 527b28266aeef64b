"""How do the metrics get into a tracker? From metrics.jsonl, after the fact: training does not know of any.

Each run of each arm becomes a run of the tracker, `baseline/seed-0`, with one point for each step. A router's load is
logged as its worst layer: the lowest entropy, the largest share, the most idle experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from smelt_budget.errors import BadInput

SCALARS = ("loss", "rate", "gradient_norm", "seconds", "tokens")
FIX = "fix: pip install 'smelt-budget[trackers]'"
Rows = list[dict[str, Any]]


def read(path: Path) -> Rows:
    """The rows of a metrics.jsonl.

    Raises:
        BadInput: it is not there, or not JSON on every line.
    """
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def tensorboard(folder: Path, rows: Rows) -> None:
    """TensorBoard events, a folder for each run; look at them with `tensorboard --logdir`.

    Raises:
        BadInput: the tensorboard package is missing, or the folder cannot be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise BadInput("--tensorboard needs the package tensorboard, which is not installed", FIX) from None
    try:
        for name, run in by_run(rows):
            with SummaryWriter(str(folder / name)) as writer:
                for row in run:
                    for key, value in scalars(row):
                        writer.add_scalar(key, value, row["step"])
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror or error}", "fix: another --out") from None


def wandb(folder: Path, rows: Rows, project: str = "smelt-budget") -> None:
    """W&B runs that touch no network; `wandb sync` sends them if that is wanted.

    Raises:
        BadInput: the wandb package is missing, or the folder cannot be written.
    """
    try:
        import wandb as client  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise BadInput("--wandb needs the package wandb, which is not installed", FIX) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, run in by_run(rows):
            arm, _, which = name.partition("/")
            started = client.init(
                project=project, name=name, group=which, job_type=arm, dir=str(folder), mode="offline", reinit=True
            )
            for row in run:
                started.log(dict(scalars(row)), step=row["step"])
            started.finish()
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror or error}", "fix: another --out") from None


def by_run(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """`arm/run` and its rows, in the order they stand in."""
    runs: dict[str, Rows] = {}
    for row in rows:
        runs.setdefault(f"{row['arm']}/{row['run']}", []).append(row)
    yield from runs.items()


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Name and value of everything a tracker draws."""
    yield from ((key, row[key]) for key in SCALARS if row.get(key) is not None)
    load = row.get("router", {})
    for key, worst in (("entropy", min), ("max_share", max), ("dead", max)):
        known = present(load.get(key, ()))
        if known:
            yield f"router/{key}", worst(known)


def present(values: Iterable[float | None]) -> list[float]:
    """Without the dense layers."""
    return [value for value in values if value is not None]
