"""Held-out loss on documents whose right values can be worked out by hand."""

import json
import math

import numpy as np
import pytest
import torch

from smelt_budget.model import Transformer, initialise
from smelt_budget.spec.model import checked
from smelt_budget.verify.data import HeldOut
from smelt_budget.verify.data.documents import joined, laid_out
from smelt_budget.verify.evaluate import evaluate
from smelt_budget.verify.look import starts

torch.set_num_threads(1)  # at toy sizes threads wait for each other: 10 times slower on a busy machine

BOS, V = 256, 257
TOY = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "vocab_size": V,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "mlp_only_layers": (0,),
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
LOOP = {"loop": {"start": 1, "stop": 3, "visits": 2, "residual_scale": 0.5}}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
SPECS = {
    "baseline": TOY,
    "looped": TOY | LOOP,
    "sectioned": TOY | LOOP | {"core": {"num_key_value_heads": 1, "num_experts": 9}},
    "latent": TOY | LOOP | LATENT,
    "dense": {**{k: v for k, v in TOY.items() if "expert" not in k and k != "moe_intermediate_size"}} | LOOP,
}
SPECS["dense"].pop("mlp_only_layers")


def texts(lengths, seed, bytes_known=True):
    """Documents of random bytes."""
    tokens = np.random.default_rng(seed).integers(0, 256, sum(lengths)).astype(np.uint8)
    return laid_out(tokens, lengths, lengths if bytes_known else [-1] * len(lengths), range(len(lengths)))


def judged(lengths=((70, 30, 300, 20, 90), (1500, 40)), length=256, rows=4, token_bytes=True):
    """Two domains, or as many as there are lists of lengths."""
    documents = joined([texts(own, i, token_bytes) for i, own in enumerate(lengths)], range(len(lengths)))
    table = np.append(np.ones(256, np.int64), 0) if token_bytes else None
    return HeldOut(documents, length, rows, BOS, table)


def built(spec, seed=0):
    return initialise(Transformer(checked(spec)), seed)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equal_logits_cost_log_v_everywhere(spec):
    """A head of zeros makes all ids equally likely: ln V nats a token, exactly, in every part."""
    model = built(spec)
    model.lm_head.weight.data.zero_()
    found = evaluate(model, judged(), ("code", "docs"), 3)
    parts = [found, found["end_of_document"]]
    for name in ("domains", "document_length", "position"):
        parts += found[name].values()
        assert sum(part["tokens"] for part in found[name].values()) == found["tokens"] == 6 * 256
        assert sum(part["bytes"] for part in found[name].values()) == found["bytes"]
    for part in parts:
        assert part["nats_per_token"] == pytest.approx(math.log(V), rel=1e-6) or part["tokens"] == 0
        if part["bytes"]:
            expected = part["tokens"] * math.log2(V) / part["bytes"]
            assert part["bits_per_byte"] == pytest.approx(expected, rel=1e-6)
    assert found["rows"]["nats_per_token"] == pytest.approx([math.log(V)] * 6, rel=1e-6)
    assert found["rows"]["standard_error"] == pytest.approx(0, abs=1e-6)
    json.dumps(found)


def test_parts_hold_the_tokens_they_name():
    """Documents of 70 and 3 tokens in a row of 74 inputs: both whole, one of them ends, all counted by hand."""
    found = evaluate(built(TOY), judged([[70, 3]], length=74, rows=1), ("text",), 1)
    ids_of_long_first = {"1-64": 3, "65-256": 71}  # BOS a.. | BOS b b b: the end of the short one is not in the row
    ids_of_short_first = {"1-64": 4, "65-256": 70}
    lengths = {name: part["tokens"] for name, part in found["document_length"].items() if part["tokens"]}
    assert lengths in (ids_of_long_first, ids_of_short_first)
    assert found["end_of_document"]["tokens"] == 1
    assert found["end_of_document"]["bytes"] == 0
    assert found["bytes"] == 73
    short = lengths["1-64"]
    assert {name: part["tokens"] for name, part in found["position"].items()} == {
        "0-15": short + 16,
        "16-63": 48,
        "64-255": 74 - short - 64,
        "256+": 0,
    }


def test_positions_restart_with_each_document():
    """And in a row that begins inside a document they count from its first column."""
    document = np.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])
    assert starts(document).tolist() == [[0, 0, 2, 2, 2, 5], [0, 1, 1, 3, 3, 3]]


def test_a_loss_is_the_mean_over_single_predictions():
    """The whole is recomputed row by row, document by document, without a mask: each piece alone, from logits."""
    model, held_out = built(TOY | LOOP), judged()
    found = evaluate(model, held_out, ("code", "docs"), 2)
    rows, ends = [], []
    with torch.no_grad():
        for ids, document in zip(held_out.whole.ids, held_out.whole.document, strict=True):
            nats = []
            for one in range(document[:-1].max() + 1):
                columns = np.flatnonzero(document[:-1] == one)
                logits = model(torch.from_numpy(ids[None, columns])).logits[0].double().log_softmax(-1)
                nats += (-logits[range(len(columns)), torch.from_numpy(ids[columns + 1])]).tolist()
            rows.append(np.mean(nats))
            ends += [n for n, here, there in zip(nats, document[:-1], document[1:], strict=True) if here != there]
    assert found["nats_per_token"] == pytest.approx(np.mean(rows), rel=1e-5)
    assert found["rows"]["nats_per_token"] == pytest.approx(rows, rel=1e-5)
    assert found["end_of_document"]["nats_per_token"] == pytest.approx(np.mean(ends), rel=1e-5)
    assert len(ends) == found["end_of_document"]["tokens"] > 0


def test_standard_error_is_within_domains():
    """Stratified sampling: sqrt(sum n_d s_d^2) / n over the rows, here 2 and 2; one row alone has no spread."""
    found = evaluate(built(TOY), judged(rows=2), ("code", "docs"), 4)["rows"]
    assert found["domain"] == ["code", "code", "docs", "docs"]
    a, b, c, d = found["nats_per_token"]
    assert found["standard_error"] == pytest.approx(math.sqrt((a - b) ** 2 + (c - d) ** 2) / 4)
    assert evaluate(built(TOY), judged(rows=1), ("code", "docs"), 4)["rows"]["standard_error"] is None


def test_unknown_bytes_give_no_bits_per_byte():
    """Pre-tokenised data without a tokenizer: nats only."""
    found = evaluate(built(TOY), judged(token_bytes=False), ("code", "docs"), 4)
    assert found["bits_per_byte"] is None
    assert found["bytes"] is None
    assert found["domains"]["docs"]["bits_per_byte"] is None
    assert found["nats_per_token"] > 0


def test_batches_and_modes_do_not_matter():
    """The same numbers in batches of 1 and of 6; training mode comes back, and no gradient was made."""
    model, seen = built(TOY | LOOP), []
    model.train()
    one = evaluate(model, judged(), ("code", "docs"), 1, also=lambda output: seen.append(output.losses.requires_grad))
    assert model.training
    assert seen == [False] * 6
    assert evaluate(model.eval(), judged(), ("code", "docs"), 5)["nats_per_token"] == pytest.approx(
        one["nats_per_token"], rel=1e-6
    )
    assert not model.training


def test_lower_precision_is_the_contexts_business():
    """bfloat16 autocast moves the loss by less than its 3 digits."""
    model = built(TOY | LOOP)
    exact = evaluate(model, judged(), ("code", "docs"), 4)["nats_per_token"]
    rough = evaluate(model, judged(), ("code", "docs"), 4, lambda: torch.autocast("cpu", torch.bfloat16))
    assert rough["nats_per_token"] != exact
    assert rough["nats_per_token"] == pytest.approx(exact, rel=2e-2)
