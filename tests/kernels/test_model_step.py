"""Does the whole looped model train when the kernels compute its experts? A step through the emulated library.

The other side is the torch path in the same precision: bf16 autocast, float32 parameters. Both round the same tensors,
and add up in another order.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from smelt_budget.cli import app
from smelt_budget.model import Transformer, initialise
from smelt_budget.model.experts_choice import decided
from smelt_budget.model.ffn import ask, choices
from smelt_budget.spec.model import checked

ROOT = Path(__file__).parents[2]
FIELDS = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 97,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "loop": {"start": 1, "stop": 3, "visits": 2, "residual_scale": 0.5},
    "core": {"num_experts": 9},
}
TOLERANCE = 2e-2
"""Relative norm of a parameter's gradient. A residual stream in bf16 carries one rounding, 4e-3, through six layers."""


@pytest.fixture(autouse=True)
def capability(library):
    """Of the emulated GPU as each test says: what was decided for another is forgotten."""
    decided.cache_clear()
    yield
    decided.cache_clear()


def step(asked: str, checkpointing: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a forward and backward pass over 2 x 24 tokens."""
    model = initialise(Transformer(checked(FIELDS)), 0)
    model.checkpointing = checkpointing
    ask(model, asked)
    ids = torch.randint(97, (2, 25), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids[:, :-1], ids[:, 1:]).losses.mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("capability", [80, 90], ids=["mma.sync", "wgmma"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_of_the_looped_model_is_that_of_the_torch_path(checkpointing, capability, monkeypatch):
    """Loss to 1e-3, every gradient to 2e-2, all of them there and in float32; also where layers are recomputed."""
    monkeypatch.setenv("SMELT_EMULATED_CAPABILITY", str(capability))
    loss, gradients = step("emulated", checkpointing)
    right_loss, right = step("torch")
    torch.testing.assert_close(loss, right_loss, rtol=1e-3, atol=0)
    assert gradients.keys() == right.keys()
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    far = {name: float((gradients[name] - right[name]).norm() / right[name].norm()) for name in right}
    assert not {name: d for name, d in far.items() if not d < TOLERANCE}


def test_a_model_says_what_computes_its_experts(monkeypatch):
    """Each choice once; the environment is asked where the model was told nothing."""
    with torch.device("meta"):
        model = Transformer(checked(FIELDS))
    why = "torch (the native kernels take float32, these are bfloat16)"
    assert [choice.words for choice in choices(model, "cpu", torch.bfloat16)] == [why]
    monkeypatch.setenv("SMELT_EXPERTS", "emulated")
    assert [choice.name for choice in choices(model, "cpu", torch.bfloat16)] == ["emulated"]
    ask(model, "torch")
    assert [choice.words for choice in choices(model, "cpu", torch.bfloat16)] == ["torch (as asked)"]


SHARDED = """
import sys, torch, torch.distributed as dist
from smelt_budget.model import Transformer, initialise
from smelt_budget.spec.model import checked
from smelt_budget.verify.place import Place, group, whole
from pathlib import Path
import json
torch.set_num_threads(1)
fields = json.loads(Path(sys.argv[1]).read_text())
with group("cpu") as (rank, world):
    place = Place(precision="bf16", rank=rank, world=world, experts="emulated")
    with torch.device("meta"):
        model = Transformer(checked(fields))
    model = initialise(place.prepared(model), 0)
    ids = torch.randint(97, (2, 25), generator=torch.Generator().manual_seed(0))[rank::world]
    with place.autocast():
        loss = model(ids[:, :-1], ids[:, 1:]).losses.mean()
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(gradients, sys.argv[2])
"""


def test_two_ranks_that_shard_the_experts_give_the_gradients_of_one(tmp_path):
    """FSDP2 over gloo: each rank has one of the two rows; the mean over ranks is the gradient of both, to 2e-2."""
    (tmp_path / "fields.json").write_text(json.dumps(FIELDS))
    (tmp_path / "sharded.py").write_text(SHARDED)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    arguments = [str(tmp_path / name) for name in ("sharded.py", "fields.json", "gradients.pt")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    gradients, (_, right) = torch.load(tmp_path / "gradients.pt"), step("emulated")
    assert gradients.keys() == right.keys()
    far = {name: float((gradients[name] - right[name]).norm() / right[name].norm()) for name in right}
    assert not {name: d for name, d in far.items() if not d < TOLERANCE}


TOY = {name: value for name, value in FIELDS.items() if name not in ("loop", "core")} | {"vocab_size": 257}
SOLVE = "solve --heads sectioned --hidden-multiple 8 --head-multiple 4 --expert-multiple 8 --tolerance 0.3"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A solved pair whose widths are multiples of 8, and a text."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "base.yaml").write_text("".join(f"{name}: {value}\n" for name, value in TOY.items()))
    words = f"{SOLVE} --baseline {folder}/base.yaml --out {folder}/smelt.yaml".split()
    solved = CliRunner().invoke(app, words)
    assert solved.exit_code == 0, solved.stderr
    (folder / "text").mkdir()
    for i in range(40):
        (folder / "text" / f"{i}.txt").write_text(f"document {i} says what document {i * i} says. " * 20)
    return folder


def test_a_run_is_begun_and_trains_on_the_kernels(pair):
    """What is taken is told, kept with the request, and what the trainer then steps with; bf16 follows from it."""
    from smelt_budget.verify.asked import Text, read_asked
    from smelt_budget.verify.pair import read_pair
    from smelt_budget.verify.place import Place
    from smelt_budget.verify.recipe import Recipe
    from smelt_budget.verify.train import Job, Trainer
    from smelt_budget.verify.verify import Options, begin

    recipe = Recipe(steps=1, seeds=1, batch_size=1, context=16, factors=(1.0,))
    text, told = Text(sources=(str(pair / "text"),)), []
    options = Options(pair / "begun", recipe, text, "full", experts="emulated")
    begin(read_pair(pair / "smelt.yaml"), options, told.append)
    asked = read_asked(pair / "begun")
    assert {"event": "note", "words": "precision: bf16 (the expert kernels take it)"} in told
    (found,) = (event["experts"] for event in told if event["event"] == "experts")
    assert [choice["words"] for of_arm in found.values() for choice in of_arm] == ["emulated (wgmma)"] * 2
    assert (asked.experts, asked.taken) == ("emulated", dict.fromkeys(("baseline", "twin"), ("emulated 90",)))
    losses = []
    for experts in ("emulated", "torch"):
        place = Place(asked.device, asked.precision, experts=experts)
        job = Job("twin", "seed-0", asked.twin, 0, 1e-3, pair / experts)
        losses.append(Trainer(job, recipe, asked.split(pair / "begun"), place).step()["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # of 16 tokens
    assert losses[0] != losses[1]
