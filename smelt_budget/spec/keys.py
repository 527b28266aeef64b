"""Could this key change a count? What happens to the keys of a file that no field took.

Three answers, rule C1. *Harmless*: the key is known to change no width, count or layer; listed on `-v`. *Agrees*:
it restates what the spec already says (`use_qk_norm: true` for Qwen3). Anything else is an error: a key nobody
has looked at is not skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from smelt_budget.errors import BadInput
from smelt_budget.spec.model import ModelSpec

HARMLESS = frozenset(
    [
        "model_type",
        "architectures",
        "auto_map",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "_attn_implementation",
        "attn_implementation",
        "use_cache",
        "use_bfloat16",
        "torchscript",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "id2label",
        "label2id",
        "num_labels",
        "finetuning_task",
        "task_specific_params",
        "tokenizer_class",
        "prefix",
        "chat_template",
        "language",
        "license",
        "model_name",
        "name",
        "source",
        "hidden_act",
        "hidden_activation",
        "ffn_act_fn",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_interleave",
        "rope_local_base_freq",
        "rope_type",
        "rotary_dim",
        "rotary_pct",
        "rotary_base",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "initial_context_length",
        "no_rope_layers",
        "no_rope_layer_interval",
        "attn_temperature_tuning",
        "floor_scale",
        "attn_scale",
        "for_llm_class",
        "clip_qkv",
        "swiglu_limit",
        "swiglu_alpha",
        "embedding_multiplier",
        "logits_scaling",
        "residual_multiplier",
        "attention_multiplier",
        "init_method",
        "init_std",
        "initializer_range",
        "max_window_layers",
        "norm_topk_prob",
        "scoring_func",
        "topk_method",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "moe_normalize_expert_weights",
        "moe_loss_weight",
        "use_routing_bias",
        "router_dtype",
        "pretraining_tp",
        "mtp_transformer_layers",
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "num_mtp_modules",
        "use_mtp",
        "quantization_config",
        "compression_config",
        "early_exit_threshold",
        "qk_norm_type",
        "block_size",
        "postnorm",
        "full_attn_alpha_factor",
        "full_attn_beta_factor",
        "linear_attn_alpha_factor",
        "linear_attn_beta_factor",
        "mlp_alpha_factor",
        "mlp_beta_factor",
        "layernorm_full_attention_alpha",
        "layernorm_full_attention_beta",
        "layernorm_linear_attention_alpha",
        "layernorm_linear_attention_beta",
        "layernorm_mlp_alpha",
        "layernorm_mlp_beta",
        "shared_moe_mode",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "pruned_heads",
        "tf_legacy_loss",
        "cross_attention_hidden_size",
        "is_decoder",
        "tie_encoder_decoder",
    ]
)
HARMLESS_SHAPE = re.compile(
    r"(^|_)(dropout|dropout_prob|pdrop|eps|epsilon|token_ids?|token_index|jitter_noise|loss_coef|z_loss_coef|"
    r"aux_loss_coef|initializer_std)$|^_comment|^#"
)
NOTED = {
    "num_nextn_predict_layers": "multi-token-prediction layers are not part of the main model and are not counted",
    "num_mtp_layers": "multi-token-prediction layers are not part of the main model and are not counted",
    "num_mtp_modules": "multi-token-prediction layers are not part of the main model and are not counted",
    "quantization_config": "parameters are counted, not packed words or quantisation scales",
}

# key -> whether a value says no more than the spec does
AGREES: dict[str, Callable[[Any, ModelSpec], bool]] = {
    "use_qk_norm": lambda v, s: v is (s.qk_norm != "none"),
    "qkv_bias": lambda v, s: v is s.attention_bias,
    "attention_bias": lambda v, s: v is s.attention_bias,
    "attention_out_bias": lambda v, s: v is s.attention_output_bias,
    "mlp_bias": lambda v, s: v is s.mlp_bias,
    "lm_head_bias": lambda v, s: v is s.lm_head_bias,
    "head_dim": lambda v, s: v in (None, s.head_dim, s.qk_rope_head_dim),
    "qk_head_dim": lambda v, s: (
        s.kv_lora_rank is not None and v == (s.qk_nope_head_dim or 0) + (s.qk_rope_head_dim or 0)
    ),
    "num_key_value_heads": lambda v, s: v in (None, s.num_key_value_heads),
    "shared_expert_intermediate_size": lambda v, s: (v or None) == s.shared_expert_intermediate_size,
    "shared_intermediate_size": lambda v, s: (v or None) == s.shared_expert_intermediate_size,
    "n_shared_experts": lambda v, s: not v and s.shared_expert_intermediate_size is None,
    "num_shared_experts": lambda v, s: not v and s.shared_expert_intermediate_size is None,
    "moe_num_shared_experts": lambda v, s: not v and s.shared_expert_intermediate_size is None,
    "moe_intermediate_size": lambda v, s: v is None or v == s.moe_intermediate_size,
    "first_k_dense_replace": lambda v, s: not v and not s.mlp_only_layers,
    "mlp_only_layers": lambda v, s: not v and not s.mlp_only_layers,
    "moe_layer_freq": lambda v, s: v in (None, 1),
    "decoder_sparse_step": lambda v, s: v in (None, 1),
    "num_experts": lambda v, s: (v or None) == s.num_experts,
    "num_local_experts": lambda v, s: (v or None) == s.num_experts,
    "n_routed_experts": lambda v, s: (v or None) == s.num_experts,
    "num_experts_per_tok": lambda v, s: (v or None) == s.num_experts_per_tok,
    "experts_per_token": lambda v, s: (v or None) == s.num_experts_per_tok,
    "sliding_window": lambda v, s: (v or None) == s.sliding_window,
    "use_sliding_window": lambda v, s: v is (s.sliding_window is not None),
    "attention_chunk_size": lambda v, s: v is None,
    "layer_types": lambda v, s: v is None or (set(v) == {"full_attention"} and s.sliding_window is None),
    "attn_type_list": lambda v, s: v is None or set(v) == {1},
    "q_lora_rank": lambda v, s: v is None,
    "kv_lora_rank": lambda v, s: v is None,
    "multi_latent_attention": lambda v, s: v is (s.kv_lora_rank is not None),
    "is_encoder_decoder": lambda v, s: v is False,
    "add_cross_attention": lambda v, s: v is False,
    "use_parallel_residual": lambda v, s: v is False,
    "tie_word_embeddings": lambda v, s: v is s.tie_word_embeddings,
}


def is_harmless(key: str) -> bool:
    """Whether a key is known to change no width, count or layer."""
    return key in HARMLESS or HARMLESS_SHAPE.search(key) is not None


def sort_leftovers(leftover: dict[str, Any], spec: ModelSpec, origin: str) -> tuple[str, ...]:
    """The harmless keys, or a `BadInput` that names every key which could change a count."""
    harmful = []
    for key, value in leftover.items():
        if is_harmless(key):
            continue
        try:
            agrees = key in AGREES and AGREES[key](value, spec)
        except TypeError:
            agrees = False
        if not agrees:
            known = " contradicts this family" if key in AGREES else ""
            harmful.append(f"{key}: {value!r:.60}{known}")
    if harmful:
        raise BadInput(
            f"{origin} has keys that could change a count and are not understood",
            *harmful,
            "fix: remove the key if it changes no width, count or layer; otherwise describe the model in own YAML "
            "(docs/conventions.md, C1)",
        )
    return tuple(sorted(leftover))
