"""Routing against enumeration in plain Python, balancing against derivatives made by hand."""

import math

import pytest
import torch

from smelt_budget.model import Transformer
from smelt_budget.model.router import Router, auxiliary_loss, correct
from smelt_budget.spec.model import checked
from smelt_budget.spec.runs import moe_of

H, E, N = 8, 12, 50
BASE = {
    "hidden_size": H,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "num_attention_heads": 1,
    "num_experts": E,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 4,
}
CASES = {
    "softmax": {},
    "softmax, as they are": {"norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "sigmoid": {"scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
    "sigmoid, as they are": {"scoring_func": "sigmoid", "norm_topk_prob": False},
    "bias": {"router_bias": True},
    "correction": {"scoring_func": "sigmoid", "router_correction_bias": True},
    "groups": {"n_group": 4, "topk_group": 2},
    "corrected groups": {"scoring_func": "sigmoid", "router_correction_bias": True, "n_group": 4, "topk_group": 2},
    "groups of one": {"n_group": 12, "topk_group": 5, "router_correction_bias": True, "scoring_func": "sigmoid"},
    "top-1": {"num_experts_per_tok": 1},
    "all": {"num_experts_per_tok": E},
}


def router(**fields):
    spec = checked(BASE | fields)
    gate = Router(spec, moe_of(spec, "prelude"))
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        gate.weight.normal_(generator=draws)
        if gate.bias is not None:
            gate.bias.normal_(generator=draws)
        if spec.router_correction_bias:
            gate.e_score_correction_bias.normal_(0, 0.5, generator=draws)
    return spec, gate


def enumerated(spec, gate, x):
    """{expert: weight} of one token, from the definitions; x, weight and bias are lists of floats."""
    w, b = gate.weight.double().tolist(), [0.0] * E if gate.bias is None else gate.bias.double().tolist()
    logits = [sum(a * c for a, c in zip(row, x, strict=True)) + b[e] for e, row in enumerate(w)]
    if spec.scoring_func == "softmax":
        total = sum(map(math.exp, logits))
        score = [math.exp(z) / total for z in logits]
    else:
        score = [1 / (1 + math.exp(-z)) for z in logits]
    by = [s + c for s, c in zip(score, gate.e_score_correction_bias.double().tolist(), strict=True)]
    groups = spec.n_group or 1
    members = [list(range(g * E // groups, (g + 1) * E // groups)) for g in range(groups)]
    best = 2 if spec.router_correction_bias else 1
    value = [sum(sorted((by[e] for e in group), reverse=True)[:best]) for group in members]
    kept = sorted(range(groups), key=lambda g: -value[g])[: spec.topk_group or 1]
    open_ = [e for g in kept for e in members[g]]
    chosen = sorted(open_, key=lambda e: -by[e])[: spec.num_experts_per_tok]
    norm = sum(score[e] for e in chosen) if spec.norm_topk_prob else 1.0
    return {e: score[e] / norm * spec.routed_scaling_factor for e in chosen}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_choice_and_weights_are_the_enumerated_ones(fields):
    """Every token's experts as a set, and each one's weight; counts, P and z from the same scores."""
    spec, gate = router(**fields)
    x = torch.randn(N, H, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight, routed = gate(x)
    load = [0] * E
    for i, row in enumerate(x.double().tolist()):
        want = enumerated(spec, gate, row)
        got = dict(zip(routed.chosen_NK[i].tolist(), weight[i].tolist(), strict=True))
        assert got == pytest.approx(want, rel=1e-5)
        for e in want:
            load[e] += 1
    assert routed.count_E.tolist() == load
    logits = x.double() @ gate.weight.detach().double().t()
    logits = logits if gate.bias is None else logits + gate.bias.detach().double()
    score = logits.softmax(-1) if spec.scoring_func == "softmax" else logits.sigmoid()
    mean = (score / score.sum(-1, keepdim=True)).mean(0)
    assert routed.mean_score_E.tolist() == pytest.approx(mean.tolist(), rel=1e-5)
    assert float(routed.z) == pytest.approx(float(logits.exp().sum(-1).log().square().mean()), rel=1e-5)


def test_a_correction_moves_choices_and_no_weight():
    """Alike experts: the favoured ones are chosen, all with equal weights."""
    _, gate = router(router_correction_bias=True, scoring_func="sigmoid")
    with torch.no_grad():
        gate.weight.zero_()
        gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.1, 0.3, 0.2] + [0.0] * 8))
        weight, routed = gate(torch.randn(N, H))
    assert set(routed.chosen_NK.flatten().tolist()) == {1, 2, 3}
    torch.testing.assert_close(weight, torch.full((N, 3), 1 / 3))


def test_auxiliary_loss_of_even_load_is_one():
    """E sum f_e P_e with f = P = 1/E (Switch, eq. 4, without alpha); all on one expert it is E."""
    assert float(auxiliary_loss(torch.full((E,), 7.0), torch.full((E,), 1 / E))) == pytest.approx(1)
    one = torch.eye(E)[3]
    assert float(auxiliary_loss(40 * one, one)) == E


def test_auxiliary_and_z_gradient_by_hand():
    """d aux/d logit = E/N p_e (f_e - sum f p); d z/d logit = 2/N logsumexp p_e; then times x."""
    _, gate = router()
    x = torch.randn(N, H, generator=torch.Generator().manual_seed(1))
    _, routed = gate(x)
    p = (x @ gate.weight.detach().t()).softmax(-1)
    f = routed.count_E / (3 * N)
    slope = E / N * p * (f - (p @ f)[:, None])
    (got,) = torch.autograd.grad(auxiliary_loss(routed.count_E, routed.mean_score_E), gate.weight, retain_graph=True)
    torch.testing.assert_close(got, slope.t() @ x, rtol=1e-4, atol=1e-6)
    size = (x @ gate.weight.detach().t()).logsumexp(-1, keepdim=True)
    (got,) = torch.autograd.grad(routed.z, gate.weight)
    torch.testing.assert_close(got, (2 / N * size * p).t() @ x, rtol=1e-4, atol=1e-6)


def test_corrections_move_against_the_load():
    """One step up below the mean load, down above it, none at it (arXiv:2408.15664, algorithm 1)."""
    _, gate = router()
    correct(gate, torch.tensor([4.0, 0, 8, 4] * 3), 0.25)
    assert gate.e_score_correction_bias.tolist() == [0.0, 0.25, -0.25, 0.0] * 3


def test_corrections_even_out_a_skewed_load():
    """Tokens that all prefer the same experts: the busiest expert's share falls to near 1/E."""
    _, gate = router(scoring_func="sigmoid")
    x = torch.randn(400, H, generator=torch.Generator().manual_seed(1)) + 1.0
    with torch.no_grad():
        before = gate(x)[1].count_E.max()
        for _ in range(600):
            correct(gate, gate(x)[1].count_E, 0.005)
        after = gate(x)[1].count_E
    assert float(before) > 2.5 * 100
    assert float(after.max()) < 1.3 * 100
    assert float(after.min()) > 0.7 * 100


def test_corrections_move_in_a_half_precision_model():
    """1 + 0.001 is 1 in bf16, so the correction keeps fp32 through casts; so does its value."""
    model = Transformer(checked(BASE))
    gate = model.layers[0].mlp.gate
    gate.e_score_correction_bias.fill_(1.001)
    model.to(torch.bfloat16).half().to("cpu")
    assert gate.weight.dtype == torch.float16
    correct(gate, torch.tensor([0.0] * 6 + [2.0] * 6), 0.001)
    assert gate.e_score_correction_bias.tolist() == pytest.approx([1.002] * 6 + [1.0] * 6, abs=1e-6)


def test_loads_are_counted_on_every_visit(build, fields_of):
    """One entry per execution, each of N K assignments; the visits of a layer decide for themselves."""
    model = build(fields_of("grouped", "three visits"))
    ids = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        routed = model(ids).routed
    assert [int(r.count_E.sum()) for r in routed] == [2 * 20 * 2] * 8
    assert len({tuple(r.count_E.tolist()) for r in routed[1:7:2]}) > 1
    for r in routed:
        assert r.count_E.tolist() == torch.bincount(r.chosen_NK.flatten(), minlength=len(r.count_E)).tolist()


def test_scores_are_fp32_under_autocast_and_in_half_models():
    """The same choice and weights from the same (rounded) inputs, whatever stands around the router."""
    _, gate = router(router_bias=True)
    gate.to(torch.bfloat16)
    x = torch.randn(N, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        half = gate(x)
        gate.float()
        full = gate(x.float())
        with torch.autocast("cpu", torch.bfloat16):
            cast = gate(x)
    for weight, routed in (half, cast):
        assert weight.dtype == torch.float32
        assert torch.equal(weight, full[0])
        assert torch.equal(routed.chosen_NK, full[1].chosen_NK)


def test_a_training_step_is_deterministic(build, fields_of):
    """Two runs from the same weights: losses, loads and every gradient bitwise equal."""
    ids = torch.randint(61, (4, 30), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(2):
        model = build(fields_of("groups", "sectioned"))
        out = model(ids[:, :-1], ids[:, 1:])
        (out.losses.mean() + sum(auxiliary_loss(r.count_E, r.mean_score_E) + r.z for r in out.routed)).backward()
        found.append([out.losses, *(r.count_E for r in out.routed), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
