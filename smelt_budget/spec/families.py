"""How does each Hugging Face family spell its shape? One function a family: config.json to a spec's fields.

Every reading was compared with the family's class in transformers 5.24, weight by weight
(`tests/interop/test_transformers_counts.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from smelt_budget.spec.config import (
    EXPERTS,
    TOP_K,
    Config,
    Fields,
    base,
    every_layer_window,
    experts,
    grouped_query,
    listed_windows,
    qwen_windows,
    sparse_steps,
    with_dense,
)
from smelt_budget.spec.functions import (
    clipped,
    greedy,
    multipliers,
    rotary,
    shared,
    sigmoid,
    softmax,
    softmax_of_chosen,
)


def qwen_moe(c: Config) -> Fields:
    """What qwen2_moe and qwen3_moe share."""
    fields = base(c) | grouped_query(c, kv_default=True) | shared(c)
    if c.one_of(EXPERTS) == 0:
        c.aside(*TOP_K, "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
        return fields | {"intermediate_size": c.whole("intermediate_size")}
    fields |= experts(c, "moe_intermediate_size") | softmax(c, norm=False)
    return fields | with_dense(c, fields, sparse_steps(c, fields))


def qwen2_moe(c: Config) -> Fields:
    """Qwen1.5/2-MoE: q/k/v biases and a gated shared expert."""
    fields = qwen_moe(c)
    fields |= qwen_windows(c, fields, lambda i, first: i % 2 == 0 and i < first)
    fields["attention_bias"] = c.flag("qkv_bias", True)
    c.aside("attention_bias")
    if "num_experts" in fields:
        shared = c.whole("shared_expert_intermediate_size")
        fields |= {"shared_expert_intermediate_size": shared or None, "shared_expert_gate": shared > 0}
    else:
        c.aside("shared_expert_intermediate_size")
    return fields


def qwen3_moe(c: Config) -> Fields:
    """Qwen3-MoE: per-head qk-norm; with `use_sliding_window` every layer is windowed."""
    fields = qwen_moe(c)
    bias = c.flag("attention_bias", False)
    fields |= {"qk_norm": "head", "attention_bias": bias, "attention_output_bias": bias}
    window = c.whole("sliding_window", None)
    return fields | ({"sliding_window": window} if c.flag("use_sliding_window", False) else {})


def mixtral(c: Config) -> Fields:
    """Mixtral: `intermediate_size` is the expert width."""
    fields = base(c) | grouped_query(c, kv_default=True) | experts(c, "intermediate_size") | every_layer_window(c)
    return fields | shared(c, theta=1e6, eps=1e-5) | softmax_of_chosen()


def olmoe(c: Config) -> Fields:
    """OLMoE: qk-norm over all heads."""
    fields = base(c) | grouped_query(c) | experts(c, "intermediate_size") | shared(c, eps=1e-5) | softmax(c, norm=False)
    clipped(c)
    heads, head = fields["num_attention_heads"], fields["head_dim"]
    if head is not None and head * heads != fields["hidden_size"]:
        c.fail(f"head_dim {head} times {heads} heads is not hidden_size, which OLMoE's q_norm needs")
    bias = c.flag("attention_bias", False)
    return fields | {"qk_norm": "full", "attention_bias": bias, "attention_output_bias": bias}


def deepseek_v2(c: Config) -> Fields:
    """DeepSeek V2: neighbours always rotate together."""
    return latent(c) | shared_and_dense_first(c) | shared(c, interleave=True) | greedy(c)


def deepseek_v3(c: Config) -> Fields:
    """DeepSeek V3, Kimi K2, Moonlight."""
    fields = latent(c) | shared_and_dense_first(c) | sigmoid(c, scale=2.5, groups=(8, 4))
    return fields | shared(c, interleave=c.flag("rope_interleave", True))


def latent(c: Config) -> Fields:
    """Latent attention and fused shared experts, without the layers that are dense."""
    fields = base(c)
    bias = c.flag("attention_bias", False)
    fields |= {
        "num_attention_heads": c.whole("num_attention_heads"),
        "q_lora_rank": c.whole("q_lora_rank", None) or None,
        "kv_lora_rank": c.whole("kv_lora_rank"),
        "qk_nope_head_dim": c.whole("qk_nope_head_dim"),
        "qk_rope_head_dim": c.whole("qk_rope_head_dim"),
        "v_head_dim": c.whole("v_head_dim"),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": c.flag("mlp_bias", False),
    }
    if "q_lora_rank" not in c.data:
        c.fail("q_lora_rank is missing; null means no query compression")
    c.aside("num_key_value_heads", "head_dim")  # one latent serves every head
    return fields | experts(c, "moe_intermediate_size")


def shared_and_dense_first(c: Config, first: int | None = None) -> Fields:
    """DeepSeek's and GLM's way: n_shared_experts fused, first_k_dense_replace, moe_layer_freq."""
    shared = c.whole("n_shared_experts", 0) * c.whole("moe_intermediate_size")
    if first is None:
        first = int(c.whole("first_k_dense_replace"))
    every = c.whole("moe_layer_freq", 1)
    if every < 1:
        c.fail("moe_layer_freq is 0")
    fields = {"num_hidden_layers": c.whole("num_hidden_layers")}
    layers = tuple(i for i in range(fields["num_hidden_layers"]) if i < first or i % every)
    if len(layers) == fields["num_hidden_layers"]:
        c.fail(f"first_k_dense_replace {first} leaves no MoE layer of {len(layers)}")
    return {"shared_expert_intermediate_size": shared or None} | with_dense(c, fields, layers)


def glm4_moe_lite(c: Config) -> Fields:
    """GLM-4.7-Flash: DeepSeek's layers; `mlp_layer_types` lists the dense ones, left out it is the first."""
    kinds = c.items("mlp_layer_types")
    first = c.whole("first_k_dense_replace", None)
    if kinds is not None:
        dense = [kind == "dense" for kind in kinds]
        right = all(kind in ("dense", "sparse") for kind in kinds) and True not in dense[sum(dense) :]
        if not right or len(kinds) != c.whole("num_hidden_layers"):
            c.fail(f"mlp_layer_types is {kinds!r:.40}, not one of dense, then sparse, for each layer")
        if first not in (None, sum(dense)):
            c.fail(f"first_k_dense_replace is {first}, mlp_layer_types has {sum(dense)} dense layers")
        first = sum(dense)
    fields = latent(c) | shared_and_dense_first(c, 1 if first is None else first)
    fields |= sigmoid(c, scale=1.8, groups=(1, 1))
    return fields | shared(c, eps=1e-5, partial=1.0, interleave=c.flag("rope_interleave", True))


def glm4_moe(c: Config) -> Fields:
    """GLM-4.5: biases on q, k, v only, per-head qk-norm by switch."""
    fields = base(c) | grouped_query(c, kv_default=True)
    fields |= {
        "attention_bias": c.flag("attention_bias", False),
        "qk_norm": "head" if c.flag("use_qk_norm", False) else "none",
    }
    fields |= experts(c, "moe_intermediate_size") | shared_and_dense_first(c) | sigmoid(c, scale=1.0, groups=(1, 1))
    return fields | shared(c, eps=1e-5, partial=0.5)


def gpt_oss(c: Config) -> Fields:
    """gpt-oss: biases everywhere, sinks, a window in every other layer."""
    fields = base(c) | grouped_query(c, kv_default=True, head_default=True) | experts(c, "intermediate_size")
    kinds = listed_windows(c, fields) or tuple(
        ("sliding_attention", "full_attention")[i % 2] for i in range(fields["num_hidden_layers"])
    )
    bias = c.flag("attention_bias", True)
    if c.number("swiglu_alpha", 1.702) != 1.702:
        c.unlike(f"swiglu_alpha is {c.data['swiglu_alpha']}; here it is 1.702")
    stretched = {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096, "truncate": False}
    fields |= shared(c, theta=150_000.0, eps=1e-5, stretched=stretched) | softmax_of_chosen()
    return fields | {
        "swiglu_limit": c.number("swiglu_limit", 7.0),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "attention_sinks": True,
        "router_bias": True,
        "expert_bias": True,
        "layer_types": kinds,
        "sliding_window": c.whole("sliding_window") if "sliding_attention" in kinds else None,
    }


def granitemoe(c: Config) -> Fields:
    """Granite 3 MoE; `granitemoeshared` adds an ungated shared expert."""
    bias = c.flag("attention_bias", False)
    return (
        base(c)
        | grouped_query(c)
        | experts(c, "intermediate_size")
        | shared(c)
        | softmax_of_chosen()
        | multipliers(c)
        | {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "shared_expert_intermediate_size": c.whole("shared_intermediate_size", 0) or None,
        }
    )


def phimoe(c: Config) -> Fields:
    """Phi-3.5-MoE: LayerNorm with bias, attention and lm-head biases by switch."""
    bias = c.flag("attention_bias", False)
    c.unlike("experts are chosen and weighed by sparsemixer; here by softmax and top-k")
    return (
        base(c)
        | grouped_query(c, kv_default=True)
        | experts(c, "intermediate_size")
        | every_layer_window(c)
        | shared(c, theta=1e6, eps=1e-5)
        | {
            "attention_bias": bias,
            "attention_output_bias": bias,
            "lm_head_bias": c.flag("lm_head_bias", False),
            "norm": "layer_norm",
        }
    )


def dbrx(c: Config) -> Fields:
    """DBRX: nested attn_config and ffn_config, LayerNorm without bias."""
    attention, ffn = c.inner("attn_config"), c.inner("ffn_config")
    if c.flag("tie_word_embeddings", False):
        c.fail("tie_word_embeddings is true, which DBRX does not support")
    # transformers writes every config's own defaults into the nested ones; there the flag decides nothing
    for nested in (attention, ffn):
        nested.aside("tie_word_embeddings", "is_encoder_decoder", "add_cross_attention", "hidden_size")
    fields = {
        "hidden_size": c.whole("d_model"),
        "num_hidden_layers": c.whole("n_layers"),
        "vocab_size": c.whole("vocab_size"),
        "max_position_embeddings": c.whole("max_seq_len", None),
        "num_attention_heads": c.whole("n_heads"),
        "num_key_value_heads": attention.whole("kv_n_heads"),
        "num_experts": ffn.one_of(EXPERTS),
        "num_experts_per_tok": ffn.one_of(TOP_K),
        "moe_intermediate_size": ffn.whole("ffn_hidden_size"),
        "norm": "layer_norm_no_bias",
        "rms_norm_eps": 1e-5,  # torch's LayerNorm default, which the class leaves alone
    }
    fields |= dbrx_functions(c, attention, ffn)
    c.data = c.leftover() | attention.leftover() | ffn.leftover()
    c.taken, c.set_aside = set(), c.set_aside | attention.set_aside | ffn.set_aside
    return fields


def dbrx_functions(c: Config, attention: Config, ffn: Config) -> Fields:
    """DBRX's functions without weights; its rotary base stands in attn_config, where transformers 5.24 misses it."""
    fields = rotary(c, 10_000.0)
    theta = attention.number("rope_theta", fields["rope_theta"])
    if theta != fields["rope_theta"]:
        c.unlike(f"rope_theta is attn_config's {theta:g}; transformers 5.24 rotates by {fields['rope_theta']:g}")
    power = 1.0 if "moe_normalize_expert_weights" not in ffn.data else ffn.take("moe_normalize_expert_weights", None)
    if power not in (None, 1):
        c.unlike(f"the chosen scores are divided by their {power!r:.40}-norm; here by their sum")
    activation = ffn.take("ffn_act_fn", {"name": "silu"})
    if activation != {"name": "silu"}:
        c.unlike(f"ffn_act_fn is {activation!r:.40}; the gate here is silu")
    clipped(attention)
    c.functions += attention.functions
    return fields | {"rope_theta": theta, "scoring_func": "softmax", "norm_topk_prob": power is not None}


def minimax(c: Config) -> Fields:
    """MiniMax-Text-01: only its full-attention layers can be counted; lightning attention is refused."""
    if c.take("architectures", None) == ["MiniMaxM2ForCausalLM"]:  # M2 under the older name
        return minimax_m2(c)
    fields = base(c) | grouped_query(c, kv_default=True) | experts(c, "intermediate_size") | every_layer_window(c)
    types, legacy = c.items("layer_types"), c.items("attn_type_list")
    if types is None and legacy is None:
        c.fail("layer_types is missing; the class default has lightning (linear) attention in every other layer")
    if legacy is not None and (set(map(str, legacy)) != {"1"} or len(legacy) != fields["num_hidden_layers"]):
        c.fail("attn_type_list has lightning (linear) attention, which cannot be counted exactly here")
    for kind in types or ():
        if kind != "full_attention":
            c.fail(f"layer_types has {kind!r:.40}: lightning (linear) attention cannot be counted exactly here")
    if types is not None and len(types) != fields["num_hidden_layers"]:
        c.fail(f"layer_types lists {len(types)} layers, num_hidden_layers is {fields['num_hidden_layers']}")
    c.unlike("each residual starts after the norm, with factors of its own; here it starts before, and plain")
    return fields | shared(c, theta=1e6, eps=1e-5) | softmax_of_chosen()


def minimax_m2(c: Config) -> Fields:
    """MiniMax-M2: full attention, qk-norm over all heads; `intermediate_size` is the expert width."""
    fields = base(c) | grouped_query(c, kv_default=True, head_default=True) | experts(c, "intermediate_size")
    c.aside("mlp_intermediate_size")  # no layer is dense
    rotated, head = c.whole("rotary_dim", None), fields["head_dim"]
    partial = rotated / head if rotated and head else 1.0
    fields |= shared(c, theta=5e6, partial=partial) | sigmoid(c, scale=1.0)
    if rotated and head and fields["partial_rotary_factor"] != partial:
        c.fail(
            f"rotary_dim {rotated} of head_dim {head} is not partial_rotary_factor {fields['partial_rotary_factor']:g}"
        )
    return fields | {"qk_norm": "full"}


def llama4_text(c: Config) -> Fields:
    """Llama 4: `intermediate_size` is the expert (and shared) width, `intermediate_size_mlp` the dense one."""
    fields = base(c) | grouped_query(c, kv_default=True, head_default=True)
    fields |= experts(c, "intermediate_size")
    layers, bias = fields["num_hidden_layers"], c.flag("attention_bias", False)
    fields |= {
        "attention_bias": bias,
        "attention_output_bias": bias,
        "shared_expert_intermediate_size": fields["moe_intermediate_size"],
    }
    step, moe = c.whole("interleave_moe_layer_step", None), c.items("moe_layers")
    if moe is None:
        if not step:
            c.fail("neither moe_layers nor interleave_moe_layer_step says which layers route")
        moe = range(step - 1, layers, step)
    elif any(type(i) is not int or not 0 <= i < layers for i in moe):
        c.fail(f"moe_layers is {moe!r:.40}, not a list of layers below {layers}")
    fields |= with_dense(c, fields, tuple(i for i in range(layers) if i not in set(moe)), "intermediate_size_mlp")
    fields |= shared(c, theta=5e5, eps=1e-5, interleave=True) | {"scoring_func": "sigmoid", "norm_topk_prob": False}
    c.unlike("an expert's sigmoid score multiplies its input; here its output")
    if c.flag("use_qk_norm", True):
        c.unlike("queries and keys have an L2 norm without weights (use_qk_norm); here none")
    return fields | llama4_windows(c, fields)


def llama4_windows(c: Config, fields: Fields) -> Fields:
    """Layers with rotary positions attend within a chunk, the others to everything."""
    if "attention_chunk_size" not in c.data:
        c.fail("attention_chunk_size is missing; null means no chunks")
    chunk, layers = c.whole("attention_chunk_size", None), fields["num_hidden_layers"]
    kinds = listed_windows(c, fields, {"chunked_attention": "chunked_attention"})
    if kinds is None:
        every = c.whole("no_rope_layer_interval", 4) or layers + 1
        rope = c.items("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
        if len(rope) != layers or any(type(r) is not int or r not in (0, 1) for r in rope):
            c.fail(f"no_rope_layers is {rope!r:.40}, not one 0 or 1 for each of {layers} layers")
        kinds = tuple("chunked_attention" if r and chunk else "full_attention" for r in rope)
        if 0 in rope:
            c.unlike("some layers have no rotary positions but a temperature (no_rope_layers); here all rotate alike")
    return {"attention_chunk_size": chunk if "chunked_attention" in kinds else None, "layer_types": kinds}


def dense(c: Config) -> Fields:
    """What the dense families share."""
    return base(c) | {"intermediate_size": c.whole("intermediate_size")} | shared(c)


def llama(c: Config) -> Fields:
    """Llama 2 and 3."""
    bias = c.flag("attention_bias", False)
    fields = dense(c) | grouped_query(c)
    return fields | {
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": c.flag("mlp_bias", False),
    }


def mistral(c: Config) -> Fields:
    """Mistral: Llama with one window for all layers."""
    return dense(c) | grouped_query(c, kv_default=True) | every_layer_window(c)


def qwen2(c: Config) -> Fields:
    """Qwen2 dense: q/k/v biases."""
    fields = dense(c) | grouped_query(c, kv_default=True) | {"attention_bias": True}
    c.aside("attention_bias")
    return fields | qwen_windows(c, fields, lambda i, first: i >= first)


def qwen3(c: Config) -> Fields:
    """Qwen3 dense: per-head qk-norm."""
    bias = c.flag("attention_bias", False)
    fields = dense(c) | grouped_query(c, kv_default=True, head_default=True)
    fields |= {"qk_norm": "head", "attention_bias": bias, "attention_output_bias": bias}
    return fields | qwen_windows(c, fields, lambda i, first: i >= first)


def ouro(c: Config) -> Fields:
    """Ouro (arXiv:2510.25741): the whole stack run total_ut_steps times, four norms a layer, an exit gate."""
    fields = dense(c) | grouped_query(c)
    visits = c.whole("total_ut_steps")
    kinds = listed_windows(c, fields)
    if c.flag("use_sliding_window", False) or (kinds and "sliding_attention" in kinds):
        c.fail("sliding windows are not read for ouro")
    c.aside("sliding_window")
    return fields | {
        "norms_per_layer": 4,
        "early_exit_gate": True,
        "loop": {"start": 0, "stop": fields["num_hidden_layers"], "visits": visits, "residual_scale": 1.0},
    }


FAMILIES: dict[str, Callable[[Config], Fields]] = {
    "dbrx": dbrx,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "gpt_oss": gpt_oss,
    "granitemoe": granitemoe,
    "granitemoeshared": granitemoe,
    "kimi_k2": deepseek_v3,
    "llama": llama,
    "llama4_text": llama4_text,
    "minimax": minimax,
    "minimax_m2": minimax_m2,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "ouro": ouro,
    "phimoe": phimoe,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}

LINEAR = "it has linear-attention layers"
STATE = "it has state-space layers"
REFUSED = {
    "inkling2_loop": "its looped layers have gates, relative-position tables and residual blocks not counted here",
    "inkling2_loop_text": "its looped layers have gates, relative-position tables and residual blocks not counted here",
    "qwen3_next": LINEAR,
    "qwen3_5": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "kimi_linear": LINEAR,
    "minimax_text_01": LINEAR,
    "minimax_m1": LINEAR,
    "bailing_moe_linear": LINEAR,
    "rwkv": LINEAR,
    "mamba": STATE,
    "mamba2": STATE,
    "jamba": STATE,
    "bamba": STATE,
    "zamba2": STATE,
    "falcon_h1": STATE,
    "nemotron_h": STATE,
    "granitemoehybrid": STATE,
    "lfm2": "it has convolution layers",
    "lfm2_moe": "it has convolution layers",
    "recurrent_gemma": "it has recurrent layers",
    "deepseek_v32": "its attention has a sparse indexer",
    "deepseek_v4": "its attention is hybrid and sparse",
    "glm_moe_dsa": "its attention has a sparse indexer",
    "gemma4": "its keys serve as values and its heads differ by layer",
    "gemma4_text": "its keys serve as values and its heads differ by layer",
    "openelm": "its heads and widths differ by layer",
    "huginn_raven": "its recurrence has an adapter and a random state",
}
