"""The pair as specs of our own, one file an arm: what `solve --baseline` and `ledger` read back."""

from __future__ import annotations

import json

from smelt_budget.emit.features import Feature
from smelt_budget.emit.target import ARMS, Answer, Emission, Job, Target
from smelt_budget.spec.text import as_yaml


def held(feature: Feature, _job: Job) -> Answer:
    """A spec holds every architecture, and no training."""
    if feature.key.startswith("balance.") or feature.key in ("z", "init", "schedule"):
        return Answer("not part of a spec", "dropped")
    return Answer(feature.asked)


def yaml_files(job: Job) -> Emission:
    """`baseline.yaml` and `twin.yaml`."""
    return Emission({f"{arm}.yaml": as_yaml(job.spec(arm).compact(), f"The {arm} of {job.name}.") for arm in ARMS})


def json_files(job: Job) -> Emission:
    """`baseline.json` and `twin.json`."""
    return Emission({f"{arm}.json": json.dumps(job.spec(arm).compact(), indent=2) + "\n" for arm in ARMS})


YAML = Target("yaml", "Our own spec, YAML", "smelt-budget itself", "smelt-budget", yaml_files, held)
JSON = Target("json", "Our own spec, JSON", "smelt-budget itself", "smelt-budget", json_files, held)
