"""Could this key change a count? What happens to the keys of a file that no field took.

Three answers, rule C1. *Harmless*: the key is known to change no width, count or layer; listed on `-v`. *Agrees*:
it restates what the spec already says (`use_qk_norm: true` for Qwen3). Anything else is an error: a key nobody
has looked at is not skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from smelt_budget.errors import BadInput
from smelt_budget.spec.model import ModelSpec

LISTED = (files("smelt_budget.spec") / "harmless.txt").read_text(encoding="utf-8")
HARMLESS = frozenset(key for line in LISTED.splitlines() if not line.startswith("#") for key in line.split())
HARMLESS_SHAPE = re.compile(
    r"(^|_)(dropout|dropout_prob|pdrop|eps|epsilon|token_ids?|token_index|jitter_noise|loss_coef|z_loss_coef|"
    r"aux_loss_coef|initializer_std)$|^_comment|^#"
)
FUNCTIONS = frozenset({
    "hidden_act", "hidden_activation", "ffn_act_fn", "rotary_dim", "rotary_pct", "rotary_base", "rope_local_base_freq",
    "rope_type", "no_rope_layers", "clip_qkv", "swiglu_alpha", "topk_method", "moe_normalize_expert_weights",
})  # fmt: skip
"""Harmless to a count, but the torch model would be another: no field of a spec holds them."""
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
        if value is None or is_harmless(key):  # null is absent
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
