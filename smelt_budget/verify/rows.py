"""Which ledger row does a weight, or an operation, of the model belong to?

The only place where the ledger's names and the model's meet: neither knows the other. A name that fits nothing raises,
so that a new weight cannot go uncounted.
"""

from __future__ import annotations

import re

PATTERNS = {
    r"embed_tokens\.weight": "embedding",
    r"lm_head\.weight": "lm_head",
    r"lm_head\.bias": "lm_head.bias",
    r"norm\.(weight|bias)": "final_norm",
    r"early_exit_gate\.weight": "early_exit_gate",
    r"early_exit_gate\.bias": "early_exit_gate.bias",
    r"(input|post_attention)_layernorm(_2)?\.(weight|bias)": "norms",
    r"self_attn\.(q|k|v)_proj\.bias": "attention.qkv_bias",
    r"self_attn\.(q|k|v|o)_proj\.weight": r"attention.\1",
    r"self_attn\.o_proj\.bias": "attention.o_bias",
    r"self_attn\.[qk]_norm\.weight": "attention.qk_norm",
    r"self_attn\.sinks": "attention.sinks",
    r"self_attn\.q_a_proj\.weight": "attention.q_down",
    r"self_attn\.q_a_layernorm\.weight": "attention.q_norm",
    r"self_attn\.q_b_proj\.weight": "attention.q_up",
    r"self_attn\.kv_a_proj_with_mqa\.weight": "attention.kv_down",
    r"self_attn\.kv_a_layernorm\.weight": "attention.kv_norm",
    r"self_attn\.kv_b_proj\.weight": "attention.kv_up",
    r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.bias": "attention.down_bias",
    r"self_attn": "attention.scores and values",
    r"mlp\.gate\.weight": "router",
    r"mlp\.gate\.bias": "router.bias",
    r"mlp\.experts\.(gate_up|down)_proj": "experts",
    r"mlp\.experts": "experts",
    r"mlp\.experts\.(gate_up|down)_proj_bias": "experts.bias",
    r"mlp\.shared_expert\.(gate|up|down)_proj\.weight": "shared_expert",
    r"mlp\.shared_expert\.(gate|up|down)_proj\.bias": "shared_expert.bias",
    r"mlp\.shared_expert_gate\.weight": "shared_expert.gate",
    r"mlp\.(gate|up|down)_proj\.weight": "dense",
    r"mlp\.(gate|up|down)_proj\.bias": "dense.bias",
}
"""A weight's name behind `layers.N.`, or a module's where the module computes without a weight of its own."""

TOGETHER = {
    "attention.scores": "attention.scores and values",
    "attention.values": "attention.scores and values",
    **{f"norm.{i}": "norms" for i in range(1, 5)},
}
"""Rows of the ledger that the model cannot tell apart."""


def of_model(name: str) -> str:
    """The row of a parameter, or of a module that does arithmetic.

    Raises:
        KeyError: the ledger has no row for it.
    """
    inner = re.sub(r"^layers\.\d+\.", "", name)
    for pattern, row in PATTERNS.items():
        match = re.fullmatch(pattern, inner)
        if match:
            return match.expand(row) if "\\" in row else row
    raise KeyError(name)


def of_ledger(name: str) -> str:
    """The row under the name that both sides use."""
    return TOGETHER.get(name, name)
