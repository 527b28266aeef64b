"""Same config, same weights, same logits as transformers' own classes, and the same number of parameters.

The right values are transformers' forward passes in fp32 (eager attention). Its weights go into our model, renamed.
"""

import re

import pytest
import torch

from smelt_budget.model import Cache, Transformer, load, save
from smelt_budget.spec.read import read_mapping

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {
    **SHAPE,
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 1.2,
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
CASES = {
    "qwen3_moe": ("Qwen3Moe", {**SHAPE, **QWEN, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe, scores as they are": ("Qwen3Moe", {**SHAPE, **QWEN, "head_dim": 16, "norm_topk_prob": False}),
    "qwen3_moe, biases and dense layers": (
        "Qwen3Moe",
        {**SHAPE, **QWEN, "head_dim": 12, "attention_bias": True, "mlp_only_layers": [1]},
    ),
    "qwen3_moe, window": (
        "Qwen3Moe",
        {**SHAPE, **QWEN, "head_dim": 16, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "qwen3_moe, tied": ("Qwen3Moe", {**SHAPE, **QWEN, "head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, window": (
        "Mixtral",
        {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, "rms_norm_eps": 1e-2},
    ),
    "olmoe": ("Olmoe", {**SHAPE, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "deepseek_v2-lite": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False},
    ),
    "deepseek_v2, groups": (
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5, "rope_parameters": YARN},
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    "deepseek_v3, yarn": ("DeepseekV3", {**LATENT, "rope_parameters": YARN}),
    "gpt_oss": (
        "GptOss",
        {**SHAPE, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 6},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**SHAPE, **QWEN, "shared_expert_intermediate_size": 24, "norm_topk_prob": False},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **SHAPE,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            **SHAPE,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {**SHAPE, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    ),
    "llama": ("Llama", {**SHAPE, "attention_bias": True}),
    "llama 3.1": (
        "Llama",
        {
            **SHAPE,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama, linear": ("Llama", {**SHAPE, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("Mistral", {**SHAPE, "head_dim": 8, "sliding_window": 4}),
    "qwen2": ("Qwen2", SHAPE),
    "qwen3": ("Qwen3", {**SHAPE, "head_dim": 16}),
}


def theirs(name):
    """transformers' model with every weight drawn wide, so that no term is too small to be seen."""
    family, fields = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    return model


NAMES = {
    r"^model\.": "",
    r"block_sparse_moe\.": "mlp.",
    r"mlp\.router\.(layer\.)?": "mlp.gate.",
    r"shared_experts\.": "shared_expert.",
    r"mlp\.(experts\.)?e_score": "mlp.gate.e_score",
    r"input_linear\.weight": "experts.gate_up_proj",
    r"output_linear\.weight": "experts.down_proj",
}
"""Their spelling, ours; in this order."""


def our_name(name):
    for theirs, ours in NAMES.items():
        name = re.sub(theirs, ours, name)
    return name


def our_layout(name, x, family):
    """gpt-oss stores its experts transposed, gate and up in turns."""
    if not family.startswith("GptOss") or "experts." not in name:
        return x
    if "gate_up_proj" in name:
        x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    return x if name.endswith("_bias") else x.transpose(1, 2)


def renamed(model):
    """Their tensors under our names."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    family = type(model).__name__
    ours = {
        our_name(name): our_layout(name, x, family).detach().clone()
        for name, x in tensors.items()
        if "inv_freq" not in name
    }
    if model.config.tie_word_embeddings:
        ours["lm_head.weight"] = ours["embed_tokens.weight"]
    return ours


@pytest.mark.parametrize("name", CASES)
def test_logits_are_transformers_logits(name):
    """fp32 on 2 rows of 24 tokens; also the parameter count, exactly."""
    reference = theirs(name)
    spec = read_mapping(reference.config.to_dict(), name).spec
    model = Transformer(spec).eval()
    state, given = model.state_dict(), renamed(reference)
    for key in state:
        if key.endswith("e_score_correction_bias") and key not in given:
            given[key] = torch.zeros_like(state[key])
    model.load_state_dict(given, strict=True)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = reference(ids).logits, model(ids).logits
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe, tied"])
def test_transformers_loads_our_checkpoint(tmp_path, name):
    """Weights saved here are a qwen3_moe checkpoint that transformers loads whole, and the other way round."""
    reference = theirs(name)
    model = Transformer(read_mapping(reference.config.to_dict(), name).spec).eval()
    reference.save_pretrained(tmp_path / "theirs")
    load(model, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save(model, tmp_path / "ours")
    reference.config.save_pretrained(tmp_path / "ours")
    again, told = type(reference).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    ids = torch.arange(20)[None]
    with torch.no_grad():
        for (key, there), back in zip(reference.state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(there, back), key
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3, yarn", "gpt_oss", "mistral"])
def test_cached_steps_are_transformers_steps(name):
    """Prefill and eight single tokens, each cache against transformers' own."""
    reference = theirs(name)
    model = Transformer(read_mapping(reference.config.to_dict(), name).spec).eval()
    given = renamed(reference)
    for key, x in model.state_dict().items():
        given.setdefault(key, torch.zeros_like(x))
    model.load_state_dict(given)
    ids = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(2))
    cache, past = Cache(20), None
    with torch.no_grad():
        for part in (ids[:, :12], *ids[:, 12:].split(1, 1)):
            out = reference(part, cache=past, use_cache=True)
            past = out.cache
            want, got = out.logits, model(part, cache=cache).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
