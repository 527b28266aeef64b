"""Every model that can be named is built without memory, and holds exactly the parameters the ledger counts."""

import json
import subprocess
import sys
from functools import cache

import pytest
import torch

from smelt_budget.errors import BadInput
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.model import Transformer
from smelt_budget.solver import Request, solve
from smelt_budget.spec import builtin, read
from smelt_budget.spec.model import checked

SOLVED = ("smelt-200m-s95", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "llama-4-scout")


def counted(spec):
    return Ledger(spec, Setting.of(spec)).total


def held(spec):
    with torch.device("meta"):
        model = Transformer(spec)
    assert all(x.is_meta for x in [*model.parameters(), *model.buffers()])
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", builtin.names())
def test_built_in_models_hold_what_is_counted(name):
    """Formula against built weights, exactly."""
    spec = read(name).spec
    assert held(spec) == counted(spec)


@cache
def twin(name, heads):
    return solve(read(name).spec, Request(heads=heads)).twin


@pytest.mark.parametrize("name", SOLVED)
@pytest.mark.parametrize("heads", ["uniform", "sectioned"])
def test_twins_hold_what_is_counted(name, heads):
    """The same for what the solver returns; a sectioned twin has a core of its own."""
    spec = twin(name, heads)
    assert (spec.core is not None) == (heads == "sectioned")
    assert held(spec) == counted(spec)


def test_every_small_kind_holds_what_is_counted(fields):
    """Vectors, biases, gates and sections that no built-in model has together."""
    spec = checked(fields)
    assert held(spec) == counted(spec)


COST = """
import json, resource, sys, time
import torch
from smelt_budget.model import Transformer
from smelt_budget.spec import read
spec, before = read("deepseek-v3").spec, time.process_time()
with torch.device("meta"):
    model = Transformer(spec)
print(json.dumps([sum(p.numel() for p in model.parameters()), time.process_time() - before,
    1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


def test_671_billion_parameters_cost_nothing():
    """DeepSeek-V3: within 10 s of processor time and 2 GB, torch included."""
    told = subprocess.run([sys.executable, "-c", COST], check=True, capture_output=True, text=True).stdout
    parameters, seconds, memory = json.loads(told)
    assert parameters == 671_026_404_352  # the safetensors index without the MTP layer
    assert seconds < 10
    assert memory < 2e9


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"head_dim": 7}, "7 elements of each head rotate"),
        ({"partial_rotary_factor": 0.4}, "3 elements of each head rotate"),
        ({"partial_rotary_factor": 0.1}, "0 elements of each head rotate"),
        ({"lm_head_bias": True, "logits_scaling": 2.0}, "logits_scaling together with lm_head_bias"),
        ("latent", "3 elements of each head rotate"),
    ],
    ids=str,
)
def test_what_can_only_be_counted_is_refused_by_name(small, fields_of, fields, said):
    """The ledger counts it, the model does not guess what an odd head would do."""
    fields = fields_of("latent", "once") | {"qk_rope_head_dim": 3} if fields == "latent" else small | fields
    assert counted(checked(fields)) > 0
    with pytest.raises(BadInput, match=said):
        Transformer(checked(fields))
