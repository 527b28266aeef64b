"""What do trainers share that take a model directory? Both arms' directories, and what of the training they change.

The architecture, the initial weights and the balancing losses are in the directory (hf.py); the loop over data, the
schedule and whatever moves between steps are the trainer's.
"""

from __future__ import annotations

import re
from typing import Any

from smelt_budget.emit.features import Feature
from smelt_budget.emit.hf import HF
from smelt_budget.emit.launch import Arm
from smelt_budget.emit.target import ARMS, Answer, Content, Emission, Job
from smelt_budget.emit.training import Training
from smelt_budget.spec import text

MOST_SEQUENCES = 8
"""Of a device at a time."""


def directories(job: Job) -> Emission:
    """`baseline/` and `twin/` without hf's own trainer, and its notes about them."""
    made = HF.emit(job)
    files: dict[str, Content] = {name: made.files[name] for name in made.files if name.partition("/")[0] in ARMS}
    return Emission(files, notes=tuple(note for note in made.notes if "train.py" not in note))


def answer(feature: Feature, job: Job) -> Answer | None:
    """As the model directory, but for what a trainer does between steps."""
    training = job.training
    if feature.key == "balance.bias":
        return Answer("corrections that nothing moves: they stay 0", "dropped")
    if feature.key == "z" and training.balance == "none":
        return Answer("without balancing the model directory has no losses", "dropped")
    if feature.key == "schedule":
        late = "; warmup from 0, a step late" if training.warmup_steps else ""
        return Answer(f"{feature.asked}{late}", "otherwise" if late else "as asked")
    return HF.answer(feature, job)


def stable(training: Training) -> dict[str, Any]:
    """transformers' `warmup_stable_decay`: linear to the peak, stable, linear to 0."""
    return {
        "num_stable_steps": max(0, training.steps - training.warmup_steps - training.decay_steps),
        "num_decay_steps": training.decay_steps,
        "decay_type": "linear",
        "min_lr_ratio": 0.0,
    }


def batches(job: Job) -> tuple[int, int]:
    """Sequences of a device at a time, and how many such passes make a step; one device where none are known."""
    share = job.training.batch_sequences // (job.layout.data if job.layout else 1)
    each = max(n for n in range(1, MOST_SEQUENCES + 1) if share % n == 0)
    return each, share // each


def as_yaml(data: dict[str, Any], heading: str) -> str:
    """YAML that 1.1 reads as well: PyYAML takes 1e-08 for text, and 1.0e-08 for a number."""
    return re.sub(r"(?m)(?<=: )(\d+)(e[-+]\d+)$", r"\1.0\2", text.as_yaml(data, heading))


def rate(job: Job, arm: Arm) -> float:
    """Peak learning rate."""
    return job.training.rates[ARMS.index(arm)]
