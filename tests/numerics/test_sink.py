"""Mass on the start of the document, against whole attention maps in float64 and against attention's own output."""

import json
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smelt_budget.model import Step, Transformer, initialise
from smelt_budget.model.attention import attend
from smelt_budget.spec.model import checked
from smelt_budget.verify import sink as module
from smelt_budget.verify.data import HeldOut
from smelt_budget.verify.data.documents import laid_out
from smelt_budget.verify.sink import CHUNK, Tally, openings, sink, sink_words, start_mass

torch.set_num_threads(1)  # at toy sizes threads wait for each other: 10 times slower on a busy machine

BOS, T = 256, 160
TOY = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 257,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "loop": {"start": 1, "stop": 2, "visits": 2, "residual_scale": 0.5},
}
LATENT = {k: v for k, v in TOY.items() if k not in ("head_dim", "num_key_value_heads")} | {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
SPECS = {
    "grouped": TOY,
    "sectioned": TOY | {"core": {"num_key_value_heads": 1}},
    "latent": LATENT,
    "window": TOY | {"sliding_window": 24},
    "chunks": TOY
    | {
        "attention_chunk_size": 40,
        "layer_types": ("chunked_attention", "full_attention", "chunked_attention"),
    },
    "learned sinks": TOY | {"attention_sinks": True},
}


def judged(lengths=(70, 20, 90, 3, 330), length=T, rows=2):
    tokens = np.random.default_rng(0).integers(0, 256, sum(lengths)).astype(np.uint8)
    return HeldOut(laid_out(tokens, lengths, lengths, range(len(lengths))), length, rows, BOS)


def built(spec):
    """Small weights make small sinks: queries are scaled up until attention is far from uniform."""
    model = initialise(Transformer(checked(spec)), 0)
    for layer in model.layers:
        layer.self_attn.q_proj.weight.data.mul_(4)
        if getattr(layer.self_attn, "sinks", None) is not None:
            layer.self_attn.sinks.data.copy_(torch.arange(4.0) - 1)
    return model


def queries_that_count(held_out):
    """(row, query, its document's BOS), by walking each row."""
    for row, ids in enumerate(held_out.whole.ids[:, :-1].tolist()):
        start = None
        for t, token in enumerate(ids):
            if token == BOS:
                start = t
            elif start is not None:
                yield row, t, start


def looked_at(model, held_out):
    """What each executed layer's attention was given, over all rows at once."""
    seen = {}
    ids, document = (torch.from_numpy(x[:, :-1]) for x in (held_out.whole.ids, held_out.whole.document))
    with torch.no_grad():
        model(ids, document_BT=document, watch=lambda step, *given: seen.update({step: given}))
    return seen


def whole_map(q, k, scale, mask, sinks):
    """[B, n, T, T] softmax in float64; a learned sink is a further column, dropped."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    score = (q.double() @ k.double().mT * scale).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        score = torch.cat((score, sinks.double()[None, :, None, None].expand(*score.shape[:3], 1)), -1)
    return score.softmax(-1)[..., :T].detach()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_masses_are_those_of_whole_maps(spec):
    """Every mean and count, by loops over a float64 softmax; rows of 160 take two chunks of queries."""
    model, held_out = built(spec), judged()
    found = sink(model.train(), held_out, BOS, 2)
    assert model.training
    counted = list(queries_that_count(held_out))
    assert found["queries"] == len(counted) > 150
    given = looked_at(model, held_out)
    assert [(row["layer"], row["visit"]) for row in found["layers"]] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    for layer, step in zip(found["layers"], model.order, strict=True):
        maps, mask = whole_map(*given[step]), given[step][3].expand(2, -1, -1, -1)
        mass = torch.stack([maps[row, :, t, s] for row, t, s in counted])
        visible = [bool(mask[row, 0, t, s]) for row, t, s in counted]
        floor = [v / int(mask[row, 0, t].sum()) for v, (row, t, _) in zip(visible, counted, strict=True)]
        assert layer["mass_per_head"] == pytest.approx(mass.mean(0).tolist(), rel=1e-5)
        assert layer["mass_mean"] == pytest.approx(float(mass.mean()), rel=1e-5)
        assert layer["sink_rate"] == sum(m > 0.3 for m in mass.mean(0).tolist()) / 4
        assert layer["visible"] == pytest.approx(np.mean(visible))
        assert layer["floor"] == pytest.approx(np.mean(floor))
        for name, first, last in (("0-15", 1, 15), ("16-63", 16, 63), ("64-255", 64, 255)):
            own = [i for i, (_, t, s) in enumerate(counted) if first <= t - s <= last]
            part = layer["position"][name]
            assert part["queries"] == len(own)
            assert part["mass_mean"] == pytest.approx(float(mass[own].mean()), rel=1e-5)
            assert part["floor"] == pytest.approx(np.mean([floor[i] for i in own]))
        assert layer["position"]["256+"] == {"queries": 0, "mass_mean": None, "floor": None}
    json.dumps(found)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_attention_itself_gives_the_same_masses(spec):
    """Values that are 1 at starts and 0 elsewhere come out of the model's own attention as the mass."""
    model, held_out = built(spec), judged()
    found = sink(model, held_out, BOS, 1)
    counted = list(queries_that_count(held_out))
    rows, queries, _ = (list(column) for column in zip(*counted, strict=True))
    is_start = torch.from_numpy(held_out.whole.ids[:, None, :-1, None] == BOS).float()
    for layer, given in zip(found["layers"], looked_at(model, held_out).values(), strict=True):
        q, k, scale, mask, sinks = given
        out = attend(q, k, is_start.expand(-1, k.shape[1], -1, k.shape[3]).contiguous(), mask, scale, sinks)
        assert layer["mass_per_head"] == pytest.approx(out[rows, :, queries, 0].mean(0).tolist(), rel=1e-4)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_uniform_attention_is_the_floor(spec):
    """Queries of zero look everywhere alike: each head's mass is the floor, once a learned sink takes nothing."""
    model = built(spec)
    for layer in model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
        if getattr(layer.self_attn, "sinks", None) is not None:
            layer.self_attn.sinks.data.fill_(-1e9)
    for layer in sink(model, judged(), BOS, 2)["layers"]:
        assert layer["mass_per_head"] == pytest.approx([layer["floor"]] * 4, rel=1e-6)


def test_floor_of_one_document():
    """Mean of 1/(t+1) over t = 1 .. T-1 is (H_T - 1)/(T - 1): 0.029 for 160 tokens."""
    found = sink(built(TOY), judged([400, 400], T, 1), BOS, 1)
    harmonic = sum(1 / t for t in range(1, T + 1))
    assert found["queries"] == T - 1
    assert found["layers"][0]["floor"] == pytest.approx((harmonic - 1) / (T - 1))
    assert found["layers"][0]["visible"] == 1


def test_a_known_mass():
    """Two keys, scores ln 3 and 0: 3/4 on the start; with a sink of logit 0: 3/5; two heads share one key head."""
    q, k = torch.tensor([[[2.0]], [[4.0]]]), torch.tensor([[[math.log(3)], [0.0]]])
    seen, start = torch.tensor([[True, True]]), torch.tensor([0])
    assert start_mass(q, k, 0.5, seen, start, None)[:, 0].tolist() == pytest.approx([3 / 4, 9 / 10])
    assert start_mass(q, k, 0.5, seen, start, torch.tensor([0.0, 2.0]))[:, 0].tolist() == pytest.approx(
        [3 / 5, 9 / (10 + math.exp(2))]
    )
    assert start_mass(q, k, 0.5, torch.tensor([[False, True]]), start, None)[:, 0].tolist() == [0, 0]


def test_without_a_mask_attention_is_causal():
    """Attention that was given no mask sees all before it."""
    held_out = judged([400, 3], T, 1)
    q, k = (torch.randn(1, n, T, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 2))
    tallies = Tally(), Tally()
    for tally, mask in zip(tallies, (None, torch.ones(T, T, dtype=torch.bool).tril()[None, None]), strict=True):
        tally.show(next(held_out.batches(1)), BOS)
        tally.watch(Step(0, 0), q, k, 0.3, mask, None)
    assert tallies[0].layer(Step(0, 0)) == tallies[1].layer(Step(0, 0))


def test_continuing_pieces_do_not_count():
    """Rows inside one long document hold no BOS: nothing is measured, and that is said."""
    held_out = judged([3000, 1], 32, 8)
    held_out.whole.ids[held_out.whole.ids == BOS] = 7
    found = sink(built(TOY), held_out, BOS, 4)
    assert found["queries"] == found["rows"] == 0
    assert found["layers"][0]["mass_mean"] is None
    assert sink_words(found, found) == ["attention sinks were not measured: no document begins inside a held-out row"]
    json.dumps(found)


def test_openings_put_a_start_into_every_row():
    """Documents cut to 63 tokens and their BOS fill rows of 64; shorter ones stay whole, with their bytes."""
    lengths = (500, 400, 63, 300)
    tokens = np.random.default_rng(0).integers(0, 256, sum(lengths)).astype(np.uint8)
    documents = openings(laid_out(tokens, lengths, lengths, range(4)), 64)
    assert documents.bytes.tolist() == [-1, -1, 63, -1]
    assert (documents[1] == tokens[500:563]).all()
    found = sink(built(TOY), HeldOut(documents, 64, 99, BOS), BOS, 2)
    assert (found["rows"], found["queries"]) == (3, 3 * 63)  # the fourth row has no target for its last token


def test_lower_precision_is_measured_in_fp32():
    """Under bfloat16 autocast the masses keep bfloat16's two digits, and the softmax is not done in it."""
    model, held_out = built(TOY), judged()
    exact, rough = (
        sink(model, held_out, BOS, 2, *how)["layers"] for how in ((), (lambda: torch.autocast("cpu", torch.bfloat16),))
    )
    for a, b in zip(exact, rough, strict=True):
        assert a["mass_mean"] == pytest.approx(b["mass_mean"], rel=0.1)
        assert a["mass_mean"] != b["mass_mean"]


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor any operation made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.bytes = max(self.bytes, out.nbytes)
        return out


def test_long_rows_make_no_maps():
    """4,096 tokens, 8 heads: at most 8 x 128 x 4,096 scores of 4 bytes, 1/32 of a map."""
    length = 4096
    held_out = judged([6000, 3000], length, 1)
    q, k = torch.zeros(1, 8, length, 4), torch.zeros(1, 2, length, 4)
    tally = Tally()
    tally.show(next(held_out.batches(1)), BOS)
    with Largest() as largest:
        tally.watch(Step(0, 0), q, k, 0.5, None, None)
    assert largest.bytes == 8 * CHUNK * length * 4
    assert tally.layer(Step(0, 0))["visible"] == 1


def result(*masses, floor=0.024):
    """As `sink` gives it: (layer, visit, mass of each head)."""
    layers = [
        {"layer": i, "visit": v, "mass_mean": sum(m) / len(m), "mass_per_head": list(m), "floor": floor}
        for i, v, *m in masses
    ]
    return {"eps": module.EPS, "queries": 99, "layers": layers}


def test_words_where_no_sink_has_formed():
    """Small differences between visits are not reported as findings."""
    (words,) = sink_words(result((0, 0, 0.011, 0.02)), result((0, 0, 0.018, 0.018), (0, 1, 0.016, 0.016)))
    assert words == (
        "no sink has formed (max head mass 0.020; uniform floor 0.024): "
        "visit 1 against visit 2 says nothing at this scale"
    )
    (words,) = sink_words(result((0, 0, 0.1)), result((0, 0, 0.5), (0, 1, 0.1)))
    assert words.startswith("a sink has formed in the twin only (max head mass 0.500, in the baseline 0.100")


def test_words_where_the_baseline_has_a_sink():
    """Depth of the baseline, and each visit against the one before over the core's layers."""
    baseline = result((0, 0, 0.1, 0.1), (1, 0, 0.4, 0.2), (2, 0, 0.2, 0.2))
    twin = result((0, 0, 0.1), (1, 0, 0.4), (2, 0, 0.2), (1, 1, 0.2), (2, 1, 0.3), (3, 0, 0.5))
    assert sink_words(baseline, twin) == [
        "baseline: mean mass on the document's start 0.100 in the first layer, 0.200 in the last, "
        "most in layer 2 of 3: 0.300 (uniform floor 0.024)",
        "twin: core mean 0.300 on visit 1, 0.250 on visit 2; visit 2 is below visit 1 in 1 of 2 core layers",
    ]
    assert sink_words(baseline, result((0, 0, 0.2), (0, 1, 0.1)))[1] == "twin: no sink has formed (max head mass 0.200)"
