"""Two ranks with FSDP2 over gloo give the losses of one process, and a run moves from two ranks to one.

The other side is the same command without torchrun. The pair is a toy, verified at full size.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

TOY = """
hidden_size: 64
num_hidden_layers: 4
vocab_size: 257
max_position_embeddings: 64
num_attention_heads: 4
num_key_value_heads: 2
head_dim: 16
num_experts: 8
num_experts_per_tok: 2
moe_intermediate_size: 32
tie_word_embeddings: true
"""
SOLVE = "solve --heads sectioned --hidden-multiple 8 --head-multiple 4 --expert-multiple 4 --tolerance 0.05"
VERIFY = "verify --size full --steps 8 --seeds 1 --rate-factors 0.25 --dtype fp32 --batch-size 4 --context 64"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def run(folder, arguments, ranks=1):
    """The command in a process of its own, or in two that torchrun starts."""
    launcher = TORCHRUN if ranks == 2 else []
    if ranks == 2:
        launcher = [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, *launcher, "-m", "smelt_budget", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def losses(folder, arm):
    """Loss and gradient norm of every step."""
    lines = (folder / arm / "seed-0" / "metrics.jsonl").read_text().splitlines()
    return [(row["loss"], row["gradient_norm"]) for row in map(json.loads, lines)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The pair, and its run in one process."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "base.yaml").write_text(TOY)
    solved = run(folder, [*SOLVE.split(), "--baseline", "base.yaml", "--out", "smelt.yaml"])
    assert solved.returncode == 0, solved.stderr
    done = run(folder, [*VERIFY.split(), "--out", "one"])
    assert done.returncode == 0, done.stderr
    return folder


def test_two_ranks_give_the_losses_of_one(alone):
    """To 1e-6 relative, both arms, over 8 steps; balancing counts the load of both ranks' tokens."""
    done = run(alone, [*VERIFY.split(), "--out", "two"], ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    for arm in ("baseline", "twin"):
        one, two = (torch.tensor(losses(alone / name, arm), dtype=torch.float64) for name in ("one", "two"))
        assert one.shape == (8, 2)
        torch.testing.assert_close(one[:, 0], two[:, 0], rtol=1e-6, atol=0)
        torch.testing.assert_close(one[:, 1], two[:, 1], rtol=1e-5, atol=0)
    judged = [json.loads((alone / name / "verify.json").read_text()) for name in ("one", "two")]
    for arm in ("baseline", "twin"):
        one, two = (result["runs"][arm][0]["held_out"]["nats_per_token"] for result in judged)
        assert one == pytest.approx(two, rel=1e-5)


def test_a_run_of_two_ranks_goes_on_in_one(alone):
    """Half a run's state is cut out of a two-rank run, resumed by one process, and ends as the whole run did."""
    script = """
import os, torch, torch.distributed as dist
from pathlib import Path
from smelt_budget.verify.asked import read_asked
from smelt_budget.verify.place import Place, group
from smelt_budget.verify.train import Interrupted, Job, Trainer
asked = read_asked(Path("one"))
split = asked.split(Path("half"))
torch.set_num_threads(1)
with group("cpu") as (rank, world):
    place = Place(rank=rank, world=world)
    job = Job("twin", "seed-0", asked.twin, 0, asked.recipe.first_rate(asked.twin) * 0.25, Path("half"))
    trainer = Trainer(job, asked.recipe, split, place)
    trainer.resume()
    try:
        trainer.train(lambda event: None, lambda: world == 2 and trainer.done == 5)
        print("DONE", trainer.rows[-1]["loss"] if rank == 0 else "")
    except Interrupted:
        print("STOPPED", trainer.done)
"""
    (alone / "half.py").write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [*TORCHRUN, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    for start in (launcher, []):
        done = subprocess.run(
            [sys.executable, *start, "half.py"],
            cwd=alone,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert ("STOPPED 5" if start else "DONE") in done.stdout
    want = [loss for loss, _ in losses(alone / "one", "twin")]
    rows = [json.loads(line)["loss"] for line in (alone / "half" / "metrics.jsonl").read_text().splitlines()]
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(want), rtol=1e-6, atol=0)
    assert len(rows) == 8


def test_what_torchrun_starts_again_goes_on_by_itself(alone):
    """A rank kills itself behind the first checkpoint; the restarted pair ends with the losses of a run left alone."""
    script = """
import os, signal, sys
from smelt_budget.cli import app
from smelt_budget.verify.train import Trainer
step = Trainer.step
def dying(self):
    if self.done == 6 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)
Trainer.step = dying
app(sys.argv[1:])
"""
    (alone / "dying.py").write_text(script)
    launcher = [*TORCHRUN, "--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, *launcher, "dying.py", *VERIFY.split(), "--out", "again"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=alone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for arm in ("baseline", "twin"):
        one, again = (torch.tensor(losses(alone / name, arm), dtype=torch.float64)[:, 0] for name in ("one", "again"))
        torch.testing.assert_close(again, one, rtol=1e-6, atol=0)
