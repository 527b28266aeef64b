"""In-context recall: rows that can be read, chance where nothing is known, certainty where a model looks up keys."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from smelt_budget.errors import BadInput
from smelt_budget.model import Transformer, initialise
from smelt_budget.spec.model import checked
from smelt_budget.verify.recall import BYTES, copying, frequent, prompts, recall

torch.set_num_threads(1)  # at toy sizes threads wait for each other: 10 times slower on a busy machine

BOS = 256
TOY = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 257,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "loop": {"start": 1, "stop": 2, "visits": 2, "residual_scale": 0.5},
}


def test_rows_read_as_text():
    """BOS, k lines of two letters, = and a digit, then one of the keys again; the answer is its digit."""
    for k in (1, 2, 4, 8):
        ids, answers = prompts(BYTES, BOS, 50, k, 0)
        asked_for = set()
        for row, answer in zip(ids.tolist(), answers.tolist(), strict=True):
            assert row[0] == BOS
            *lines, question = bytes(row[1:]).decode().split("\n")
            pairs = dict(line.split("=") for line in lines)
            assert len(pairs) == k, "keys are distinct"
            assert question.endswith("=")
            assert pairs[question[:-1]] == chr(answer)
            asked_for.add(list(pairs).index(question[:-1]))
        assert asked_for == set(range(k))
    ids, _ = prompts(BYTES, BOS, 50, 0, 0)
    assert ids.shape == (50, 4)


def test_rows_depend_on_the_seed_alone():
    """Both arms and every run are asked the same."""
    assert (prompts(BYTES, BOS, 9, 4, 3)[0] == prompts(BYTES, BOS, 9, 4, 3)[0]).all()
    assert (prompts(BYTES, BOS, 9, 4, 3)[0] != prompts(BYTES, BOS, 9, 4, 4)[0]).any()


def test_equal_logits_are_chance():
    """ln V nats; among equal values the first is taken, right in 1 of 10."""
    model = initialise(Transformer(checked(TOY)), 0).train()
    model.lm_head.weight.data.zero_()
    found = recall(model, BYTES, BOS, 100)
    assert model.training
    assert found["chance"] == {"accuracy": 0.1, "nats_per_answer": pytest.approx(math.log(10))}
    assert [row["examples"] for row in found["examples"]] == [0, 1, 2, 4, 8]
    for row in found["examples"]:
        assert row["tokens"] == 4 + 5 * row["examples"]
        assert row["nats_per_answer"] == pytest.approx(math.log(257), rel=1e-6)
        assert row["accuracy"] == pytest.approx(0.1, abs=0.06)  # 3 standard errors of 256 rows
    json.dumps(found)


def test_copying_is_one_value_in_view_or_luck():
    """One example: always right. Two: half the time, and a tenth of the other half."""
    assert copying(0, 10) == 0.1
    assert copying(1, 10) == 1
    assert copying(2, 10) == pytest.approx(0.55)


class LooksUp(torch.nn.Module):
    """A model that answers with the value behind the first line whose key is asked for."""

    order = ()

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids, logits_to_keep, watch):
        logits = torch.zeros(len(ids), 1, 257)
        for row, line in enumerate(ids.tolist()):
            for at in range(1, len(line) - 3, 5):
                if line[at : at + 2] == line[-3:-1]:
                    logits[row, 0, line[at + 3]] = 50.0
        return SimpleNamespace(logits=logits)


def test_looking_up_is_certainty():
    """With examples every answer is right at 0 nats; without, chance."""
    nothing, *some = recall(LooksUp(), BYTES, BOS, 64)["examples"]
    assert nothing["accuracy"] == pytest.approx(0.1, abs=0.06)
    assert all(row["accuracy"] == 1 and row["nats_per_answer"] < 1e-6 for row in some)


def test_uniform_attention_gives_the_floor_to_bos():
    """The answering query sees T tokens, BOS among them; in a window of 5 that is so without examples only."""
    model = initialise(
        Transformer(
            checked(
                TOY | {"sliding_window": 5, "layer_types": ("full_attention", "full_attention", "sliding_attention")}
            )
        ),
        0,
    )
    for layer in model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    for row in recall(model, BYTES, BOS, 7, rows=10, examples=(0, 2))["examples"]:
        assert row["floor"] == 1 / row["tokens"]
        *full, windowed = row["sink"]
        assert [(s["layer"], s["visit"], s["mass_mean"]) for s in full] == [
            (layer, visit, pytest.approx(row["floor"])) for layer, visit in ((0, 0), (1, 0), (1, 1))
        ]
        assert windowed["mass_mean"] == pytest.approx(0.25 if row["examples"] == 0 else 0)


def test_other_vocabularies_use_their_commonest_ids():
    """Counted by hand; ids that training hardly saw would ask about the embedding, not about recall."""
    ids = np.repeat([50_000, 3, 9, 4, 5, 6, 7, 8, 1], [9, 8, 99, 6, 5, 4, 3, 2, 1])
    alphabet = frequent(ids, bos_id=9)
    assert alphabet == ((5, 6, 7, 8, 1)[1:], (4, 5), 50_000, 3)
    with pytest.raises(BadInput, match="8 different ids"):
        frequent(np.arange(7), bos_id=9)
