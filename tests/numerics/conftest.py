"""Small models of every kind. One thread: at toy sizes threads wait for each other, and sums keep one order."""

import pytest
import torch

from smelt_budget.model import Transformer
from smelt_budget.model.norms import RMSNorm
from smelt_budget.spec.model import checked

torch.set_num_threads(1)

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "vocab_size": 61,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": None,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 1.2}
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = {
    "grouped": {},
    "biases": {
        **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias", "router_bias", "expert_bias"), True),
        "lm_head_bias": True,
        "mlp_only_layers": (0,),
        "shared_expert_intermediate_size": 5,
        "shared_expert_gate": True,
    },
    "qk-norm of heads": {"qk_norm": "head", "tie_word_embeddings": True},
    "qk-norm of all": {"qk_norm": "full", "norm_topk_prob": False},
    "sinks": {
        "attention_sinks": True,
        "sliding_window": 3,
        "layer_types": (SLIDING, FULL, SLIDING, FULL),
        "swiglu_limit": 1.0,
        "rope_scaling": {**YARN, "truncate": False},
    },
    "windows": {"sliding_window": 5},
    "windows of 1": {"sliding_window": 1, "layer_types": (FULL, SLIDING, SLIDING, FULL)},
    "chunks": {"attention_chunk_size": 4, "layer_types": (CHUNKED, FULL, CHUNKED, CHUNKED)},
    "chunks and windows": {
        "attention_chunk_size": 3,
        "sliding_window": 4,
        "layer_types": (SLIDING, CHUNKED, SLIDING, FULL),
    },
    "part of a head": {"partial_rotary_factor": 0.5},
    "neighbours": {"rope_interleave": True, "partial_rotary_factor": 0.75},
    "latent": {**LATENT, "q_lora_rank": 7, "rope_scaling": YARN, "attention_bias": True},
    "latent windows": {**LATENT, "sliding_window": 3, "rope_interleave": True, "mlp_only_layers": (0, 2)},
    "latent, part": {**LATENT, "partial_rotary_factor": 0.5},
    "groups": {
        "scoring_func": "sigmoid",
        "router_correction_bias": True,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "shared_expert_intermediate_size": 8,
    },
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 6},
    "top-1": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "dense": dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size")),
    "LayerNorm": {"norm": "layer_norm"},
    "multipliers": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "odd widths": {"hidden_size": 13, "head_dim": 6, "moe_intermediate_size": 5, "num_attention_heads": 3}
    | {"num_key_value_heads": 1},
    "four norms": {"norms_per_layer": 4, "early_exit_gate": True},
}
ARMS = ("once", "one visit", "two visits", "three visits", "sectioned")
CASES = [(kind, arm) for kind in KINDS for arm in ("once", "sectioned")]
CASES += [(kind, arm) for kind in ("grouped", "windows", "latent") for arm in ARMS[1:4]]


def looped(kind: str, arm: str) -> dict:
    """The fields of a kind in an arm; a model with an exit gate loops its whole stack, as Ouro does."""
    fields = {**SMALL, **KINDS[kind]}
    start, stop = (0, 4) if fields.get("early_exit_gate") else (1, 3)
    if arm == "once":
        return fields
    visits = {"one visit": 1, "two visits": 2}.get(arm, 3)
    fields["loop"] = {"start": start, "stop": stop, "visits": visits, "residual_scale": 1 / visits}
    if arm == "sectioned":
        experts = {} if fields["num_experts"] is None else {"num_experts": 6 if fields["num_experts"] == 1 else 9}
        fields["core"] = experts | (
            {"num_key_value_heads": 1} if fields.get("kv_lora_rank") is None else {"kv_lora_rank": 3}
        )
    return fields


def wide(fields: dict, seed: int = 0) -> Transformer:
    """A model whose every weight matters: gains around 1, biases, sinks and corrections around 0."""
    model = Transformer(checked(fields))
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            owner = model.get_submodule(name.rpartition(".")[0])
            gain = isinstance(owner, RMSNorm | torch.nn.LayerNorm) and name.endswith(".weight")
            matrix = weight.ndim > 1 and not name.endswith("_bias")
            weight.normal_(float(gain), weight.shape[-1] ** -0.5 if matrix else 0.2, generator=draws)
        model.embed_tokens.weight.mul_(4 if fields.get("tie_word_embeddings") else 1)
    return model


@pytest.fixture(scope="session")
def build():
    """`build(fields)` is a model with wide weights."""
    return wide


@pytest.fixture(scope="session")
def small():
    """Fields of a small model."""
    return SMALL


@pytest.fixture(params=CASES, ids=", ".join)
def fields(request) -> dict:
    """Every kind of layer, unlooped and in a sectioned core visited three times; some in every arm."""
    return looped(*request.param)


@pytest.fixture
def model(fields) -> Transformer:
    """The model of `fields`."""
    return wide(fields).eval()


@pytest.fixture(scope="session")
def fields_of():
    """`fields_of(kind, arm)`."""
    return looped


@pytest.fixture(scope="session")
def close():
    """`close(got, want)`: fp32, to 1e-5 of the largest value."""

    def check(got, want, tolerance=1e-5):
        assert got.shape == want.shape
        assert want.numel() == 0 or float((got - want).abs().max()) <= tolerance * float(want.abs().max())

    return check
