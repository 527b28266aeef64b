"""What is a target? A trainer or format, what it can hold, and the files a pair becomes for it.

    pair -> Job -> Target.emit -> Emission -> folder.write

A target answers for every feature of the pair (features.py): as asked, otherwise, or dropped. What it cannot hold at
all it refuses by name. Nothing here knows a trainer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from smelt_budget.emit.features import Feature, features
from smelt_budget.emit.launch import Arm, Layout
from smelt_budget.emit.training import Training
from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec

ARMS: tuple[Arm, ...] = ("baseline", "twin")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class Job:
    """A pair and how it is to be trained, ready to be written down for a target."""

    name: str
    """Of the pair: a Python identifier, for it becomes a module, a directory and a job name."""
    baseline: ModelSpec
    twin: ModelSpec
    training: Training
    layout: Layout | None = None
    """Asked with --launch."""
    weights: str | None = None
    """`random`, or the folder of a verified run; only targets with `takes_weights`."""
    seed: int = 0
    """Of random weights."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise BadInput(
                f"{self.name!r:.80} cannot name a module",
                "fix: --name with letters, digits and _, a letter first",
            )

    def spec(self, arm: Arm) -> ModelSpec:
        """One of the two."""
        return self.baseline if arm == "baseline" else self.twin


@dataclass(frozen=True)
class Answer:
    """What becomes of a feature."""

    emitted: str
    how: Literal["as asked", "otherwise", "dropped"] = "as asked"


Content = str | bytes | Callable[[Path], None]
"""Text, bytes, or a function that writes the file at the path it is given (large weights)."""


@dataclass(frozen=True)
class Emission:
    """What a target makes of a job."""

    files: Mapping[str, Content]
    """By path relative to the folder, with forward slashes."""
    train: Mapping[Arm, tuple[str, ...]] = field(default_factory=dict)
    """The script (or -m module) and its arguments, as torchrun takes them, to be run in the folder."""
    notes: tuple[str, ...] = ()
    """What a person has to know before running it."""


@dataclass(frozen=True)
class Target:
    """A trainer or format."""

    name: str
    title: str
    tested: str
    """Versions its files were run with."""
    needs: str
    """What has to be installed to use them."""
    emit: Callable[[Job], Emission]
    answer: Callable[[Feature, Job], Answer | None]
    """`None`: cannot be held, refused by name."""
    takes_weights: bool = False
    parallel: frozenset[str] = frozenset({"data"})
    """Which of data, tensor, expert and pipeline parallelism its files set up."""


@dataclass(frozen=True)
class Line:
    """One row of the table asked / emitted / dropped."""

    feature: str
    asked: str
    emitted: str
    how: str


def lines(target: Target, job: Job) -> tuple[Line, ...]:
    """Every feature of the pair and what becomes of it.

    Raises:
        BadInput: the target cannot hold one of them; all such are named.
    """
    answered = [(feature, target.answer(feature, job)) for feature in features(job.baseline, job.twin, job.training)]
    refused = [f"{feature.name}: {feature.asked}" for feature, answer in answered if answer is None]
    if refused:
        raise BadInput(
            f"{target.name} cannot hold this pair", *refused, "fix: --to hf, which holds whatever solve finds"
        )
    return tuple(Line(f.name, f.asked, a.emitted, a.how) for f, a in answered if a is not None)
