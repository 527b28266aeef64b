"""A training step means the same compiled, recomputed, sliced and in half precision."""

import pytest
import torch

from smelt_budget.model import Cache, loss
from smelt_budget.model.attention import attend
from smelt_budget.model.layer import DecoderLayer
from smelt_budget.model.rotary import angles
from smelt_budget.spec.model import checked
from smelt_budget.spec.runs import layer_kinds, layer_of

IDS = torch.randint(61, (3, 14), generator=torch.Generator().manual_seed(0))
HALF = 0.06
"""Relative norm; bf16 has 8 bits, and a dozen roundings on the way of one token add up to a few eps of 2^-8."""


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(got, want, tolerance):
    assert got.keys() == want.keys()
    far = {n: float((got[n].float() - x).norm()) for n, x in want.items()}
    assert {n: d for n, d in far.items() if d > tolerance * float(want[n].norm()) + 1e-7} == {}


def test_a_compiled_layer_is_the_layer(small, build):
    """One graph, forward and backward, of a core's Mixture-of-Experts layer; not inductor, whose C++ takes a minute."""
    spec = checked(small | {"loop": {"start": 1, "stop": 3, "visits": 2, "residual_scale": 0.5}, "qk_norm": "head"})
    layer = DecoderLayer(spec, layer_of(spec, layer_kinds(spec)[1]), 0.5)
    layer.load_state_dict(build(spec.compact()).layers[1].state_dict())
    x, turn = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0)), angles(spec, torch.arange(9)[None])
    found = []
    for form in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        inputs = x.clone().requires_grad_()
        y = form(inputs, turn, None)[0]
        y = form(y, turn, None)[0]
        found.append(gradients(layer, y.square().mean()) | {"x": inputs.grad, "y": y.detach()})
    assert_near(found[1], found[0], 1e-5)


@pytest.mark.parametrize("kind", ["grouped", "latent", "biases", "four norms"])
def test_recomputed_layers_have_the_same_gradients(build, fields_of, kind):
    """Activation checkpointing: bitwise, for nothing in a layer is random."""
    model = build(fields_of(kind, "sectioned")).train()
    found = []
    for model.checkpointing in (False, True):
        losses = model(IDS[:, :-1], IDS[:, 1:]).losses
        found.append(gradients(model, losses.mean()) | {"losses": losses.detach()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


@pytest.mark.parametrize("most", [1, 61, 5 * 61, 13 * 61, 3 * 13 * 61 - 1])
def test_sliced_losses_are_the_losses(build, fields_of, monkeypatch, close, most):
    """Heads with and without bias; losses and gradients, tokens not a multiple of the slice."""
    for kind in ("grouped", "biases"):
        model = build(fields_of(kind, "two visits"))
        whole = model(IDS[:, :-1], IDS[:, 1:]).losses
        want = gradients(model, whole.mean())
        with monkeypatch.context() as small:
            small.setattr(loss, "MOST_LOGITS", most)
            sliced = model(IDS[:, :-1], IDS[:, 1:]).losses
            got = gradients(model, sliced.mean())
        close(sliced.detach(), whole.detach(), 1e-6)
        assert_near(got, want, 1e-5)


def test_losses_are_minus_log_probabilities(model, close):
    """From the logits by definition, for every kind."""
    with torch.no_grad():
        logits, losses = model(IDS[:, :-1]).logits, model(IDS[:, :-1], IDS[:, 1:]).losses
    want = -logits.log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    close(losses, want)
    assert losses.dtype == torch.float32


@pytest.fixture
def steady(fields):
    """Fields whose routers choose all experts: no rounding can change the choice."""
    if fields["num_experts"] is None:
        return fields
    every = fields | {"num_experts_per_tok": fields["num_experts"], "n_group": None, "topk_group": None}
    return every | ({"core": fields["core"] | {"num_experts": fields["num_experts"]}} if "core" in fields else {})


def test_half_precision_is_near_fp32(steady, build):
    """bf16 under autocast and bf16 models: losses to bf16's tolerance, through the cache and in inference mode too."""
    model = build(steady)
    want = model(IDS).logits.detach()
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(IDS).logits.detach()
        stepped = stepwise(model)
    model.to(torch.bfloat16)
    half = model(IDS).logits.detach()
    with torch.inference_mode():
        inferred = model(IDS.t().contiguous().t()).logits
    for got in (cast, half, stepped, stepwise(model)):
        assert got.dtype == torch.bfloat16
        assert float((got.float() - want).norm()) < HALF * float(want.norm())
    assert torch.equal(inferred, half)


def stepwise(model):
    cache = Cache(14)
    with torch.no_grad():
        return torch.cat([model(ids, cache=cache).logits for ids in IDS.split([10, 1, 2, 1], 1)], 1)


@pytest.mark.parametrize("kind", ["grouped", "latent", "biases", "sinks"])
def test_half_precision_gradients_are_near_fp32(build, fields_of, kind):
    """Autocast, with routers that choose all experts: to bf16's tolerance over all weights together."""
    model = build(fields_of(kind, "once") | {"num_experts": 2, "num_experts_per_tok": 2})
    want = gradients(model, model(IDS[:, :-1], IDS[:, 1:]).losses.mean())
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(IDS[:, :-1], IDS[:, 1:]).losses
    got = gradients(model, losses.mean())
    assert losses.dtype == torch.float32
    assert got.keys() == want.keys()
    away, size = (
        sum(float((got[n] - a * x).square().sum()) for n, x in want.items()) for a, got in ((1, got), (0, want))
    )
    assert away**0.5 < HALF * size**0.5


def test_sinks_take_mass_and_give_nothing():
    """softmax over the scores and one more logit, whose column is dropped (gpt-oss), by definition in float64."""
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 6, 4, generator=draws) for n in (4, 2, 2))
    sinks = torch.randn(4, generator=draws)
    score = (q.double() @ k.double().repeat_interleave(2, 1).mT) * 0.3
    score = score.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    column = sinks.double()[None, :, None, None].expand(2, 4, 6, 1)
    want = torch.cat((score, column), -1).softmax(-1)[..., :-1] @ v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(attend(q, k, v, None, 0.3, sinks).double(), want, rtol=1e-5, atol=1e-6)
    none = torch.full((4,), -1e9)
    torch.testing.assert_close(attend(q, k, v, None, 0.3, none), attend(q, k, v, None, 0.3))
