"""Load and overlap, against counts made by hand and by enumeration."""

import json
import math

import numpy as np
import pytest
import torch

from smelt_budget.model import Output, Step, Transformer, initialise
from smelt_budget.model.router import Routed
from smelt_budget.spec.model import checked
from smelt_budget.verify.data import HeldOut
from smelt_budget.verify.data.documents import laid_out
from smelt_budget.verify.routing import Tally, load_summary, routing

torch.set_num_threads(1)  # at toy sizes threads wait for each other: 10 times slower on a busy machine

TOY = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 257,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "mlp_only_layers": (0,),
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "loop": {"start": 1, "stop": 2, "visits": 3, "residual_scale": 1 / 3},
    "core": {"num_experts": 5},
}


def judged():
    tokens = np.random.default_rng(0).integers(0, 256, 400).astype(np.uint8)
    return HeldOut(laid_out(tokens, [250, 150], [250, 150], [0, 1]), 64, 6, 256)


def decided(chosen, experts):
    """As a router would report it."""
    chosen = torch.tensor(chosen)
    count = torch.bincount(chosen.flatten(), minlength=experts).float()
    return Routed(count, torch.full((experts,), 1 / experts), torch.tensor(0.0), chosen)


def test_load_of_known_counts():
    """Counts 2, 1, 1, 0 of 4: entropy 1.5 bits of 2, largest share 1/2, max_violation 4/2 - 1, one dead."""
    routed = (None, decided([[0, 1], [0, 2]], 4))
    order = (Step(0, 0), Step(1, 0))
    tally = Tally(order)
    tally.add(Output(None, None, routed))
    assert tally.result() == {
        "load": [
            {
                "layer": 1,
                "visit": 0,
                "experts": 4,
                "top_k": 2,
                "tokens": 2,
                "entropy": pytest.approx(0.75),
                "max_share": 0.5,
                "max_violation": 1.0,
                "dead": 1,
            }
        ],
        "overlap": [],
    }
    assert load_summary(routed, order) == {
        "layer": [0, 1],
        "visit": [0, 0],
        "entropy": [None, pytest.approx(0.75)],
        "max_share": [None, 0.5],
        "dead": [None, 1],
    }


def test_a_dense_model_has_no_load():
    """Nothing to stack is not an error."""
    assert load_summary((None,), (Step(0, 0),))["entropy"] == [None]


def test_overlap_of_known_choices():
    """3 of 6 choices come again, whatever their order in the row; chance is K/E, or by load sum a b / 6^2 * 2."""
    order = (Step(0, 0), Step(0, 1))
    then, now = [[0, 1], [2, 3], [0, 2]], [[1, 0], [0, 3], [1, 3]]
    tally = Tally(order)
    for row in range(3):  # batch by batch
        tally.add(Output(None, None, (decided(then[row : row + 1], 4), decided(now[row : row + 1], 4))))
    loads = (2 * 2 + 1 * 2 + 2 * 0 + 1 * 2) / 36 * 2
    assert tally.result()["overlap"] == [
        {
            "layer": 0,
            "visits": [0, 1],
            "overlap": pytest.approx(3 / 6),
            "chance": 0.5,
            "chance_given_load": pytest.approx(loads),
        }
    ]


def test_independent_choices_overlap_by_chance():
    """Tokens that choose at random, from even or from uneven loads, overlap as chance_given_load says."""
    generator = torch.Generator().manual_seed(0)
    preference = torch.tensor([8.0, 4, 2, 1, 1, 1, 1, 1])
    then, now = (torch.multinomial(preference.expand(40_000, -1), 2, generator=generator) for _ in range(2))
    tally = Tally((Step(0, 0), Step(0, 1)))
    tally.add(Output(None, None, (decided(then.tolist(), 8), decided(now.tolist(), 8))))
    (found,) = tally.result()["overlap"]
    assert found["overlap"] == pytest.approx(found["chance_given_load"], abs=0.01)
    assert found["chance"] == 0.25 < found["overlap"] - 0.05


def test_a_router_with_known_weights():
    """Zero weights score all experts alike, and a correction that grows with e makes everyone choose the last two."""
    model = initialise(Transformer(checked(TOY)), 0)
    for layer in (1, 2):
        gate = model.layers[layer].mlp.gate
        experts = len(gate.weight)
        gate.weight.data.zero_()
        gate.e_score_correction_bias.copy_(torch.arange(experts).float())
    found = routing(model.train(), judged(), 4)
    assert model.training
    assert [(row["layer"], row["visit"], row["experts"]) for row in found["load"]] == [
        (1, 0, 5),
        (1, 1, 5),
        (1, 2, 5),
        (2, 0, 6),
    ]
    for row in found["load"]:
        assert row["tokens"] == 6 * 64
        assert row["entropy"] == pytest.approx(math.log(2) / math.log(row["experts"]))
        assert row["dead"] == row["experts"] - 2
    assert [(row["visits"], row["overlap"], row["chance"]) for row in found["overlap"]] == [
        ([0, 1], 1.0, 0.4),
        ([1, 2], 1.0, 0.4),
    ]
    json.dumps(found)


def test_sums_over_batches_are_sums_over_tokens():
    """Enumeration: every token's set of experts on one visit and the next, from single rows."""
    model, held_out = initialise(Transformer(checked(TOY)), 0), judged()
    found = routing(model, held_out, 4)
    same = total = 0
    with torch.no_grad():
        for ids, document in zip(held_out.whole.ids, held_out.whole.document, strict=True):
            document_BT = torch.from_numpy(document[None, :-1])
            routed = model(torch.from_numpy(ids[None, :-1]), document_BT=document_BT).routed
            for a, b in zip(routed[1].chosen_NK.tolist(), routed[2].chosen_NK.tolist(), strict=True):
                same, total = same + len(set(a) & set(b)), total + len(a)
    assert found["overlap"][0]["overlap"] == pytest.approx(same / total)
