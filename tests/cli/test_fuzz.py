"""5,000 mutated specs: every one is counted, or refused in a sentence. No traceback, no other exit code."""

import copy
import json
import random

import pytest
from typer.testing import CliRunner

from smelt_budget.cli import app
from smelt_budget.spec import builtin

MUTANTS = 5000
SHARDS = 10
ODD = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.0, 1e9, 1e308, 10**6, 10**18, 10**30, "", "8", "x", "full_attention",
    [], [0], [1, 2], ["full_attention"], ["sliding_attention"] * 3, [None], {}, {"a": 1}, "\u2603", "null", "4e9", [[]],
]  # fmt: skip
BITS = [
    "\t",
    "\x00",
    ": ",
    "{",
    "}",
    "[",
    "]",
    "&a ",
    "*a",
    "!!python/name:os.system ",
    "#",
    "---\n",
    "\ufeff",
    "'",
    '"',
    "-",
]


def mutated(r, model):
    """A spec with one to four fields changed, dropped, doubled, nested or added."""
    spec = copy.deepcopy(model)
    for _ in range(r.randrange(1, 5)):
        keys = list(spec)
        if not keys:
            break
        key, kind = r.choice(keys), r.randrange(7)
        if kind == 0:
            spec[key] = r.choice(ODD)
        elif kind == 1:
            del spec[key]
        elif kind == 2:
            spec[r.choice(["num_mamba_layers", "loop", "core", "text_config", "kv_lora_rank", "foo", "norm"])] = (
                r.choice(ODD)
            )
        elif kind == 3 and type(spec[key]) is int:
            spec[key] = spec[key] * r.choice([2, 3, -1, 1000]) + r.randrange(-2, 3)
        elif kind == 4 and isinstance(spec[key], list) and spec[key]:
            spec[key][r.randrange(len(spec[key]))] = r.choice(ODD)
        elif kind == 5:
            spec[r.choice(keys)] = spec[key]
        else:
            spec = (
                {"text_config": spec, "model_type": r.choice(["wrapped", "llama", None])} if r.random() < 0.1 else spec
            )
    return spec


def scarred(r, text):
    """Text with characters put in, cut out or repeated."""
    for _ in range(r.randrange(1, 4)):
        at = r.randrange(len(text) + 1)
        kind = r.randrange(3)
        if kind == 0:
            text = text[:at] + r.choice(BITS) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + r.randrange(1, 20) :]
        else:
            text = text[:at] + text[at : at + 30] * r.randrange(2, 4) + text[at + 30 :]
    return text


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_traceback(shard):
    """Ledger on every mutant; solve on a quarter of those that can be counted."""
    r, runner = random.Random(shard), CliRunner()
    models = [builtin.load(name)["config"] for name in builtin.names()]
    models.append({**builtin.load("smelt-200m-s95")["config"], "loop": {"start": 3, "stop": 9, "visits": 2}})
    codes = {0: 0, 2: 0, 3: 0}
    for _ in range(MUTANTS // SHARDS):
        spec = mutated(r, r.choice(models))
        as_yaml = "\n".join(f"{key}: {json.dumps(value)}" for key, value in spec.items())
        text = r.choice([json.dumps(spec), as_yaml])
        if r.random() < 0.4:
            text = scarred(r, text)
        solved = [("solve", "--baseline", "-", "--json")] if r.random() < 0.25 else []
        for command in [("ledger", "-", "--json"), *solved]:
            result = runner.invoke(app, list(command), input=text)
            unexpected = result.exception is not None and not isinstance(result.exception, SystemExit)
            assert not unexpected, (text, result.exception)
            assert result.exit_code in codes, text
            assert "Traceback" not in result.stderr
            codes[result.exit_code] += 1
            if result.exit_code:
                assert result.stderr.startswith(("error: ", "note: "))
                assert result.stdout == ""
                break
    assert min(codes[0], codes[2]) > 50  # both halves of the promise were exercised
