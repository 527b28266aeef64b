"""A looped model is an unlooped one whose core layers are copies, each branch that goes back divided by the visits.

The reference is a model of effective depth without residual scale: the factor is folded into the last matrices (and
biases) of the copies, or into the gains of the norms behind them where there are four.
"""

import pytest
import torch

from smelt_budget.model import Step, Transformer
from smelt_budget.model.rotary import angles
from smelt_budget.spec.model import checked

LOOPED = [
    *[("grouped", arm) for arm in ("one visit", "two visits", "three visits", "sectioned")],
    *[
        (kind, "sectioned")
        for kind in ("biases", "sinks", "latent", "groups", "one expert", "four norms", "multipliers")
    ],
    ("four norms", "two visits"),
]
cases = pytest.mark.parametrize(("kind", "arm"), LOOPED)
IDS = torch.randint(61, (2, 11), generator=torch.Generator().manual_seed(0))


def physical(spec):
    """The physical layer of each execution, written out by hand."""
    layers, loop = list(range(spec.num_hidden_layers)), spec.loop
    return layers[: loop.start] + layers[loop.start : loop.stop] * loop.visits + layers[loop.stop :]


def unrolled(model):
    """Its layers laid out once per execution; a sectioned core is one long core visited once."""
    spec = model.spec
    of = physical(spec)
    start, stop = spec.loop.start, spec.loop.start + (spec.loop.stop - spec.loop.start) * spec.loop.visits
    longer = spec.replace(
        num_hidden_layers=len(of),
        layer_types=spec.layer_types and tuple(spec.layer_types[i] for i in of),
        mlp_only_layers=tuple(i for i, layer in enumerate(of) if layer in spec.mlp_only_layers),
        loop={"start": start, "stop": stop, "visits": 1} if spec.core else None,
    )
    copy = Transformer(longer)
    weights = {name: x.clone() for name, x in model.state_dict().items() if not name.startswith("layers.")}
    for i, layer in enumerate(of):
        for name, x in model.layers[layer].state_dict().items():
            branch_end = ("_layernorm_2.weight",) if spec.norms_per_layer == 4 else ENDS
            folded = start <= i < stop and name.endswith(branch_end)
            weights[f"layers.{i}.{name}"] = x * spec.loop.residual_scale if folded else x.clone()
    copy.load_state_dict(weights)
    return copy


ENDS = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj.bias", "experts.down_proj", "down_proj_bias")


@cases
def test_looped_equals_unrolled(build, fields_of, close, kind, arm):
    """Logits and losses; fp32."""
    model = build(fields_of(kind, arm))
    copy = unrolled(model)
    with torch.no_grad():
        if kind != "four norms":  # Ouro norms after every visit of the stack, its copy once at the end
            close(model(IDS).logits, copy(IDS).logits)
            close(model(IDS, IDS).losses, copy(IDS, IDS).losses)
        else:
            x, turn = model.embed_tokens(IDS), angles(model.spec, torch.arange(IDS.shape[1])[None])
            for step, layer in zip(model.order, copy.layers, strict=True):
                x = layer(x, turn, None)[0]
                x = model.norm(x) if step.layer == 3 else x
            close(model(IDS).logits, model.lm_head(x))


@pytest.mark.parametrize(("kind", "arm"), [case for case in LOOPED if case[0] != "four norms"])
def test_shared_gradients_are_the_sum_of_the_copies(build, fields_of, kind, arm):
    """The chain rule: d/dW over all visits; where the scale was folded in, each copy's share carries it."""
    model = build(fields_of(kind, arm))
    copy = unrolled(model)
    model(IDS, IDS).losses.mean().backward()
    copy(IDS, IDS).losses.mean().backward()
    of, loop = physical(model.spec), model.spec.loop
    for layer, block in enumerate(model.layers):
        for name, weight in block.named_parameters():
            scale = loop.residual_scale if loop.start <= layer < loop.stop and name.endswith(ENDS) else 1.0
            copies = [copy.layers[i].get_parameter(name).grad for i, place in enumerate(of) if place == layer]
            want = scale * sum(copies)
            assert float((weight.grad - want).norm()) <= 1e-5 * float(want.norm()) + 1e-7, name
    for name in ("embed_tokens", "norm", "lm_head"):
        got, want = getattr(model, name).weight.grad, getattr(copy, name).weight.grad
        assert float((got - want).norm()) <= 1e-5 * float(want.norm()), name


@pytest.mark.parametrize("kind", ["grouped", "latent", "biases"])
def test_one_visit_is_the_unlooped_model(build, fields_of, kind):
    """With scale 1 the baseline and a loop of one visit are the same numbers, bit for bit."""
    plain, once = build(fields_of(kind, "once")), build(fields_of(kind, "one visit"))
    once.load_state_dict(plain.state_dict())
    assert torch.equal(plain(IDS).logits, once(IDS).logits)


def test_the_scale_is_on_every_core_layer_and_only_there(build, fields_of):
    """Prelude and coda add their branches whole (SMELT, section 1)."""
    model = build(fields_of("grouped", "three visits"))
    assert [layer.scale for layer in model.layers] == [1, 1 / 3, 1 / 3, 1]
    assert [layer.scale for layer in build(fields_of("multipliers", "two visits")).layers] == [0.4, 0.2, 0.2, 0.4]


def test_the_core_runs_as_a_block():
    """The paper's L = 12: layers 4-9 of 1-based count, then 4-9 again; effective depth 18."""
    spec = checked(
        {
            "hidden_size": 8,
            "num_hidden_layers": 12,
            "vocab_size": 8,
            "num_attention_heads": 1,
            "intermediate_size": 8,
            "loop": {"start": 3, "stop": 9, "visits": 2, "residual_scale": 0.5},
        }
    )
    core = [4, 5, 6, 7, 8, 9]
    assert [step.layer + 1 for step in Transformer(spec).order] == [1, 2, 3, *core, *core, 10, 11, 12]
    assert [step for step in Transformer(spec).order if step.layer == 4] == [Step(4, 0), Step(4, 1)]


def test_an_exit_gate_norms_after_every_visit(build, fields_of):
    """Ouro's stack: norm after each visit, so twice over a norm of unit gain is still of unit size."""
    model = build(fields_of("four norms", "two visits"))
    seen = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    gated = []
    model.early_exit_gate.register_forward_hook(lambda module, inputs, output: gated.append(inputs[0]))
    logits = model(IDS).logits
    assert len(seen) == len(gated) == 2
    assert torch.equal(model.lm_head(seen[-1]), logits)
    assert torch.equal(gated[1], seen[1])
