"""Emitted directories of small pairs, with the weights of models in which every weight matters."""

import json
import runpy
from pathlib import Path

import torch

from smelt_budget.emit import TARGETS, folder
from smelt_budget.emit.target import Job
from smelt_budget.emit.training import training
from smelt_budget.model import save
from smelt_budget.spec.model import checked

NUMERICS = runpy.run_path(str(Path(__file__).parents[1] / "numerics" / "conftest.py"))
CASES, looped, wide = (NUMERICS[name] for name in ("CASES", "looped", "wide"))


def unlooped(fields):
    """The baseline to a twin's fields."""
    return {key: value for key, value in fields.items() if key not in ("loop", "core")}


def run_of(place, fields, seed=0):
    """What verify leaves of both arms, as far as emit reads it; the twin's model."""
    for arm, of_arm in (("baseline", unlooped(fields)), ("twin", fields)):
        model, own = wide(of_arm).eval(), place / arm / f"seed-{seed}"
        own.mkdir(parents=True)
        (own / "spec.json").write_text(json.dumps(model.spec.compact()))
        save(model, own)
    return model


def job_of(fields, **more):
    """A pair of these fields, context 64."""
    baseline, twin = checked(unlooped(fields)), checked(fields)
    asked = training(baseline, twin, 64, batch_sequences=4, balance=more.pop("balance", "aux"))
    return Job("toy", baseline, twin, asked, **more)


def emitted(place, target, job):
    """The folder that a target makes of a job."""
    folder.write(place, TARGETS[target].emit(job).files, force=False)
    return place


def pair_of(tmp_path, target, fields):
    """The twin as our model and as an emitted folder, same weights."""
    model = run_of(tmp_path / "run", fields)
    return model, emitted(tmp_path / "emitted", target, job_of(fields, weights=str(tmp_path / "run")))


def ids_of(vocab_size, length=19, rows=2):
    """Random tokens."""
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def apart(got, want):
    """Largest difference over largest value."""
    return float((got - want).detach().abs().max() / want.detach().abs().max())
