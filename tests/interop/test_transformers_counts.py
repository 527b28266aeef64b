"""Every family is read as transformers builds it: same parameters, for shapes drawn at random; same defaults.

The other side is the family's own class in transformers, instantiated on the meta device: it shares nothing with
our formulas. What differs on purpose is listed in `ours_alone`.
"""

import random

import pytest

from smelt_budget.ledger import CONVENTIONS, Ledger, Setting
from smelt_budget.spec import read_mapping

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

SHAPES_PER_FAMILY = 12


def common(r):
    heads = r.choice([2, 4, 6, 12])
    return {
        "vocab_size": r.randrange(100, 500),
        "hidden_size": heads * r.choice([8, 16, 24]),
        "num_hidden_layers": r.randrange(1, 9),
        "num_attention_heads": heads,
        "max_position_embeddings": r.choice([64, 2048]),
        "tie_word_embeddings": r.random() < 0.3,
    }


def kv(r, c):
    divisors = [d for d in range(1, c["num_attention_heads"] + 1) if c["num_attention_heads"] % d == 0]
    return {"num_key_value_heads": r.choice(divisors)}


def moe(r, count="num_experts"):
    experts = r.randrange(2, 12)
    return {count: experts, "num_experts_per_tok": r.randrange(1, min(experts, 5) + 1)}


def width(r):
    return r.randrange(3, 40)


def flag(r):
    return r.random() < 0.5


def qwen2_moe(r):
    c = common(r)
    c |= kv(r, c) | moe(r) | {"moe_intermediate_size": width(r), "intermediate_size": width(r)}
    c |= {"shared_expert_intermediate_size": width(r), "decoder_sparse_step": r.choice([1, 1, 2, 3])}
    c |= {"mlp_only_layers": r.sample(range(c["num_hidden_layers"]), r.randrange(0, 2)), "qkv_bias": flag(r)}
    return c


def qwen3_moe(r):
    c = common(r)
    c |= kv(r, c) | moe(r, r.choice(["num_experts", "num_local_experts"]))
    c |= {"moe_intermediate_size": width(r), "intermediate_size": width(r), "attention_bias": flag(r)}
    c |= {"decoder_sparse_step": r.choice([1, 1, 2, 3]), "mlp_only_layers": r.choice([None, [], [0]])}
    if flag(r):
        c["head_dim"] = r.choice([8, 10, 32])
    if flag(r):
        c |= {"use_sliding_window": True, "sliding_window": 16}
    return c


def mixtral(r):
    c = common(r)
    c |= kv(r, c) | moe(r, "num_local_experts") | {"intermediate_size": width(r), "sliding_window": r.choice([None, 9])}
    if flag(r):
        c["head_dim"] = r.choice([None, 6, 20])
    return c


def olmoe(r):
    c = common(r) | moe(r) | {"intermediate_size": width(r), "attention_bias": flag(r)}
    return c | (kv(r, c) if flag(r) else {})


def deepseek_v2(r):
    c = common(r) | moe(r, "n_routed_experts")
    layers = c["num_hidden_layers"]
    c |= {
        "num_key_value_heads": c["num_attention_heads"],
        "kv_lora_rank": width(r),
        "q_lora_rank": r.choice([None, width(r)]),
        "qk_nope_head_dim": r.choice([8, 12]),
        "qk_rope_head_dim": r.choice([4, 8]),
        "v_head_dim": r.choice([8, 10]),
        "intermediate_size": width(r),
        "moe_intermediate_size": width(r),
        "n_shared_experts": r.randrange(1, 4),
        "first_k_dense_replace": r.randrange(0, layers),
        "attention_bias": flag(r),
    }
    return c | ({"mlp_bias": True} if r.random() < 0.3 else {})


def deepseek_v3(r):
    return {k: v for k, v in deepseek_v2(r).items() if k != "mlp_bias"} | {"n_group": 1, "topk_group": 1}


def glm4_moe_lite(r):
    c = {k: v for k, v in deepseek_v3(r).items() if k != "first_k_dense_replace"}
    layers = c["num_hidden_layers"] = r.randrange(2, 9)
    dense = r.randrange(0, layers)
    return c | (
        {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense)} if flag(r) else {"hidden_act": "silu"}
    )


def glm4_moe(r):
    c = common(r) | moe(r, "n_routed_experts")
    c |= kv(r, c) | {"intermediate_size": width(r), "moe_intermediate_size": width(r), "n_group": 1, "topk_group": 1}
    c |= {"n_shared_experts": r.randrange(1, 4), "first_k_dense_replace": r.randrange(0, c["num_hidden_layers"])}
    c |= {"attention_bias": flag(r), "use_qk_norm": flag(r)}
    return c | ({"head_dim": 24} if flag(r) else {})


def gpt_oss(r):
    c = common(r) | moe(r, "num_local_experts")
    c |= kv(r, c) | {"intermediate_size": width(r), "head_dim": r.choice([8, 14]), "sliding_window": 7}
    kinds = ["sliding_attention", "full_attention"]
    if flag(r):
        c["layer_types"] = [r.choice(kinds) for _ in range(c["num_hidden_layers"])]
    return c | ({"attention_bias": flag(r)} if flag(r) else {})


def granitemoe(r):
    c = common(r) | moe(r, "num_local_experts") | {"intermediate_size": width(r), "attention_bias": flag(r)}
    return c | (kv(r, c) if flag(r) else {})


def granitemoeshared(r):
    return granitemoe(r) | {"shared_intermediate_size": r.choice([0, width(r)])}


def phimoe(r):
    c = common(r) | moe(r, "num_local_experts") | {"intermediate_size": width(r), "attention_bias": flag(r)}
    c |= kv(r, c) | {"lm_head_bias": flag(r)}
    return c | ({"tie_word_embeddings": False} if c["lm_head_bias"] else {})


def dbrx(r):
    c = common(r)
    return {
        "vocab_size": c["vocab_size"],
        "d_model": c["hidden_size"],
        "n_layers": c["num_hidden_layers"],
        "n_heads": c["num_attention_heads"],
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": kv(r, c)["num_key_value_heads"], "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": width(r), "moe_num_experts": r.randrange(4, 9), "moe_top_k": 2},
    }


def minimax(r):
    c = common(r) | moe(r, "num_local_experts") | {"intermediate_size": width(r)}
    return c | kv(r, c) | {"layer_types": ["full_attention"] * c["num_hidden_layers"]}


def minimax_m2(r):
    c = common(r) | moe(r, "num_local_experts") | {"intermediate_size": width(r)}
    return c | kv(r, c) | {"head_dim": r.choice([8, 24])}


def llama4_text(r):
    c = common(r) | moe(r, "num_local_experts") | {"intermediate_size": width(r), "intermediate_size_mlp": width(r)}
    c |= kv(r, c) | {"head_dim": r.choice([8, 16]), "attention_chunk_size": r.choice([None, 16])}
    c |= {"use_qk_norm": flag(r), "attention_bias": flag(r), "no_rope_layers": []}
    step = r.randrange(1, min(3, c["num_hidden_layers"]) + 1)
    if flag(r):
        return c | {"moe_layers": sorted(r.sample(range(c["num_hidden_layers"]), 1)), "interleave_moe_layer_step": 1}
    return c | {"interleave_moe_layer_step": step}


def llama(r):
    c = common(r) | {"intermediate_size": width(r), "attention_bias": flag(r), "mlp_bias": flag(r)}
    return c | (kv(r, c) if flag(r) else {}) | ({"head_dim": 24} if flag(r) else {})


def mistral(r):
    c = common(r) | {"intermediate_size": width(r), "sliding_window": r.choice([None, 8])}
    return c | kv(r, c) | ({"head_dim": r.choice([None, 24])} if flag(r) else {})


def qwen2(r):
    c = common(r) | {"intermediate_size": width(r)}
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return c | kv(r, c) | (window if flag(r) else {})


def qwen3(r):
    return qwen2(r) | {"head_dim": r.choice([8, 24]), "attention_bias": flag(r)}


FAMILIES = [
    qwen2_moe, qwen3_moe, mixtral, olmoe, deepseek_v2, deepseek_v3, glm4_moe, glm4_moe_lite, gpt_oss, granitemoe,
    granitemoeshared, phimoe, dbrx, minimax, minimax_m2, llama4_text, llama, mistral, qwen2, qwen3,
]  # fmt: skip


def built(family, config):
    """Unique parameters of transformers' own model, and its config as a config.json would hold it."""
    made = transformers.AutoConfig.for_model(family, **config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    return sum(p.numel() for p in model.parameters()), made.to_dict()


@pytest.mark.parametrize("draw", FAMILIES, ids=lambda f: f.__name__)
def test_parameters_equal_transformers(draw):
    """Exact, for random shapes and switches of the family; source: transformers 5.24 on the meta device."""
    family = draw.__name__
    for seed in range(SHAPES_PER_FAMILY):
        config = draw(random.Random(f"{family} {seed}"))
        expected, _ = built(family, config)
        spec = read_mapping({"model_type": family, **config}, "drawn").spec
        assert Ledger(spec, Setting.of(spec)).total == expected, (seed, config)


@pytest.mark.parametrize("draw", FAMILIES, ids=lambda f: f.__name__)
def test_saved_config_reads_the_same(draw):
    """A config.json as transformers itself writes it, every default spelt out, is read to the same model."""
    family = draw.__name__
    for seed in range(4):
        expected, saved = built(family, draw(random.Random(f"{family} {seed}")))
        spec = read_mapping(saved, "saved").spec
        assert Ledger(spec, Setting.of(spec)).total == expected, (seed, saved)


@pytest.mark.parametrize(
    "draw", [mixtral, qwen3_moe, olmoe, qwen2_moe, deepseek_v3, llama, qwen3], ids=lambda f: f.__name__
)
def test_full_square_flops_equal_torchs_counter(draw):
    """Exact: torch's FLOP counter over transformers' forward pass, eager attention and batched experts."""
    from torch.utils.flop_counter import FlopCounterMode

    family, tokens = draw.__name__, 32
    for seed in range(4):
        config = draw(random.Random(f"{family} flops {seed}"))
        made = transformers.AutoConfig.for_model(family, **config)
        how = {"experts_implementation": "batched_mm"} if "num_experts_per_tok" in config else {}
        model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager", **how)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        spec = read_mapping({"model_type": family, **config}, "drawn").spec
        setting = Setting.of(spec, CONVENTIONS["full-square"], context=tokens)
        assert Ledger(spec, setting).forward_flops * tokens == counter.get_total_flops(), (seed, config)


SAME = (
    "rms_norm_eps", "norm_topk_prob", "routed_scaling_factor", "rope_interleave", "swiglu_limit",
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
)  # fmt: skip


@pytest.mark.parametrize("draw", FAMILIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("saved", [False, True], ids=["silent", "saved"])
def test_functions_default_to_the_classs(draw, saved):
    """Exact (rule C20), whether the file leaves the keys out or transformers itself wrote every one of them."""
    family = draw.__name__
    config = draw(random.Random(family))
    made = transformers.AutoConfig.for_model(family, **config)
    spec = read_mapping(made.to_dict() if saved else {"model_type": family, **config}, "drawn").spec
    for name in SAME:
        if hasattr(made, name) and spec.is_moe:
            assert getattr(spec, name) == getattr(made, name), name
    rope = made.rope_parameters
    if family != "dbrx":  # its rotary base stands where the class misses it
        assert spec.rope_theta == rope["rope_theta"]
    assert spec.partial_rotary_factor == rope.get("partial_rotary_factor", 1.0)
    assert (spec.rope_scaling is None) == (rope["rope_type"] == "default")
    if spec.rope_scaling is not None:
        assert all(getattr(spec.rope_scaling, name, value) == value for name, value in rope.items())
    if (getattr(made, "n_group", None) or 1) > 1 and getattr(made, "topk_method", None) != "greedy":
        assert (spec.n_group, spec.topk_group) == (made.n_group, made.topk_group)
