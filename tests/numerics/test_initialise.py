"""Weights before training: as documented, the same everywhere, and a stream that keeps its size."""

import pytest
import torch

from smelt_budget.model import Transformer, initialise
from smelt_budget.spec.model import checked

WIDE = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "vocab_size": 211,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "attention_bias": True,
    "qk_norm": "head",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "expert_bias": True,
    "intermediate_size": 160,
    "mlp_only_layers": (0,),
    "attention_sinks": True,
    "loop": {"start": 1, "stop": 5, "visits": 3, "residual_scale": 1 / 3},
}
LATENT = {
    "attention_sinks": False,
    "qk_norm": "none",
    "head_dim": None,
    "num_key_value_heads": None,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}


def state(model):
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("more", [{}, LATENT, {"tie_word_embeddings": True}], ids=["grouped", "latent", "tied"])
def test_deviations_are_the_documented_ones(more):
    """1/sqrt(fan-in), back into the stream over sqrt(2 D) too, D = 14; each within 5 standard errors, mean 0 too."""
    spec = checked(WIDE | more)
    model = initialise(Transformer(spec), 3)
    for name, weight in model.named_parameters():
        if weight.ndim == 1 or name.endswith("_bias"):
            gain = "norm" in name and name.endswith("weight")
            assert torch.equal(weight, torch.full_like(weight, 1.0 if gain else 0.0)), name
            continue
        std = weight.shape[-1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            std /= (2 * 14) ** 0.5
        if name == "embed_tokens.weight":
            std = 96**-0.5 if spec.tie_word_embeddings else 1.0
        n = weight.numel()
        assert float(weight.detach().std()) == pytest.approx(std, rel=5 / (2 * n) ** 0.5), name
        assert abs(float(weight.detach().mean())) <= 5 * std / n**0.5, name
    assert not any(bool(buffer.any()) for buffer in model.buffers())
    assert (model.lm_head.weight is model.embed_tokens.weight) == spec.tie_word_embeddings


def test_a_seed_is_all_that_counts():
    """Not what was in the weights, the global generator, the device the model came from, dtype or other layers."""
    spec = checked(WIDE)
    want = state(initialise(Transformer(spec), 3))
    torch.manual_seed(9)
    again = Transformer(spec)
    for tensor in [*again.parameters(), *again.buffers()]:
        tensor.detach().fill_(7.0)
    with torch.device("meta"):
        empty = Transformer(spec)
    half = initialise(Transformer(spec).to(torch.bfloat16), 3)
    for other in (initialise(again, 3), initialise(empty.to_empty(device="cpu"), 3)):
        assert all(torch.equal(x, want[name]) for name, x in state(other).items())
    assert all(torch.equal(x, want[name].to(x.dtype)) for name, x in state(half).items())
    longer = state(initialise(Transformer(checked(WIDE | {"num_hidden_layers": 7, "loop": None})), 3))
    for name, x in want.items():
        if "o_proj" not in name and "down_proj" not in name:
            assert torch.equal(longer[name], x), name


def test_seeds_and_weights_have_streams_of_their_own():
    """No two matrices of one shape are alike, within a model or between seeds."""
    one, other = (initialise(Transformer(checked(WIDE)), seed) for seed in (0, 1))
    drawn = [p for m in (one, other) for name, p in m.named_parameters() if p.ndim > 1 and not name.endswith("_bias")]
    firsts = [float(p[(0,) * p.ndim].detach() / p.detach().std()) for p in drawn]
    assert len(set(firsts)) == len(firsts) > 70
    pairs = [(a, b) for i, a in enumerate(drawn) for b in drawn[:i] if a.shape == b.shape and a.ndim == 2]
    for a, b in pairs:
        cosine = float(torch.cosine_similarity(a.detach().flatten(), b.detach().flatten(), 0))
        assert abs(cosine) < 6 / a.numel() ** 0.5


@pytest.mark.parametrize("visits", [1, 2, 4])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("layers", [4, 16])
def test_the_stream_stays_of_order_one(visits, scaled, layers):
    """Mean square before the last norm; the embedding gives 1, each of 2 D additions at most 1/2D."""
    fields = {name: value for name, value in WIDE.items() if name not in ("mlp_only_layers", "attention_sinks")}
    loop = {"start": layers // 4, "stop": layers - layers // 4, "visits": visits}
    loop["residual_scale"] = 1 / visits if scaled else 1.0
    model = initialise(Transformer(checked(fields | {"num_hidden_layers": layers, "loop": loop})), 0)
    seen = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        logits = model(torch.randint(211, (4, 32), generator=torch.Generator().manual_seed(0))).logits
    assert 1.0 < float(seen[0].square().mean()) < 3.0
    assert float(logits.std()) == pytest.approx(1, abs=0.1)
