"""Write the golden folders anew: `python tests/golden/emit.py [TARGET...]`, then read the diff before committing it."""

import sys
from dataclasses import replace
from pathlib import Path

from smelt_budget.emit import TARGETS
from smelt_budget.emit.launch import Layout
from smelt_budget.emit.target import Job
from smelt_budget.emit.training import training
from smelt_budget.emit.whole import emitted
from smelt_budget.verify.pair import read_pair

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "emitted"
ORIGIN = "examples/smelt.yaml"


def job():
    """The example pair, as the command has it without options."""
    pair = read_pair(ROOT / ORIGIN)
    return Job(
        name="smelt_pair",
        baseline=pair.baseline,
        twin=pair.twin,
        training=training(pair.baseline, pair.twin, pair.setting.context),
    )


def write(target, folder):
    """A target's folder, with launch files for two nodes where it has something to launch."""
    alone = job()
    launched = replace(alone, layout=Layout("slurm", nodes=2, gpus=8))
    has_train = bool(TARGETS[target].emit(alone).train)
    emitted(TARGETS[target], launched if has_train else alone, folder, strict=False, force=True, origin=ORIGIN)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in sys.argv[1:] or TARGETS:
        write(name, GOLDEN / name)
