"""What has the pair that a trainer may lack? One line for each such feature, in words and with its value.

A pair always has the first six; the rest only where either arm departs from a plain decoder with grouped-query
attention, SwiGLU experts in every layer and a softmax router.
"""

from __future__ import annotations

from typing import NamedTuple

from smelt_budget.emit.training import Training
from smelt_budget.spec import ModelSpec


class Feature(NamedTuple):
    """Something asked."""

    key: str
    """For the target to answer by; stable."""
    name: str
    """For people."""
    asked: str


PLAIN: tuple[tuple[str, str, object], ...] = (
    # field of the spec, its name, the value that every trainer has
    ("tie_word_embeddings", "tied embeddings", False),
    ("lm_head_bias", "lm-head bias", False),
    ("attention_bias", "attention bias", False),
    ("attention_output_bias", "attention output bias", False),
    ("attention_sinks", "attention sinks", False),
    ("sliding_window", "sliding window", None),
    ("attention_chunk_size", "chunked attention", None),
    ("layer_types", "layer types", None),
    ("kv_lora_rank", "latent attention", None),
    ("mlp_bias", "MLP bias", False),
    ("shared_expert_intermediate_size", "shared expert", None),
    ("shared_expert_gate", "gate of the shared expert", False),
    ("router_bias", "router bias", False),
    ("expert_bias", "expert bias", False),
    ("mlp_only_layers", "dense layers", ()),
    ("norm", "normalisation", "rms_norm"),
    ("norms_per_layer", "norms per layer", 2),
    ("early_exit_gate", "early-exit gate", False),
    ("rope_scaling", "stretched rotary positions", None),
    ("partial_rotary_factor", "partial rotary factor", 1.0),
    ("rope_interleave", "interleaved rotary pairs", False),
    ("swiglu_limit", "clamped SwiGLU", None),
    ("scoring_func", "router score", "softmax"),
    ("norm_topk_prob", "renormalised top-k weights", True),
    ("routed_scaling_factor", "routed scaling factor", 1.0),
    ("n_group", "expert groups", None),
    ("router_correction_bias", "router correction bias", False),
    ("embedding_multiplier", "embedding multiplier", 1.0),
    ("residual_multiplier", "residual multiplier", 1.0),
    ("attention_multiplier", "attention multiplier", None),
    ("logits_scaling", "logits scaling", 1.0),
)
"""Of both arms: solve changes none of these by more than a width."""


def features(baseline: ModelSpec, twin: ModelSpec, training: Training) -> tuple[Feature, ...]:
    """All that the pair asks for."""
    loop = twin.loop
    found = [
        Feature("vocab_size", "vocabulary", f"{twin.vocab_size} rows"),
        Feature("init", "initial weights", "std 1/sqrt(fan-in), back into the stream / sqrt(2 x executed layers)"),
        Feature("qk_norm", "qk-norm", twin.qk_norm),
        Feature("schedule", "schedule", "warmup, stable, linear decay to 0"),
    ]
    if loop is not None:
        found.insert(0, Feature("loop", "loop", f"layers {loop.start} to {loop.stop - 1} run {loop.visits} times"))
        found.insert(1, Feature("residual_scale", "residual scale in the core", f"{loop.residual_scale:g}"))
    if twin.core is not None:
        own = ", ".join(f"{key} {value}" for key, value in twin.core.model_dump(exclude_none=True).items())
        found.append(Feature("core", "sectioned core", own))
    if twin.is_moe:
        asked = {
            "aux": f"auxiliary loss {training.auxiliary:g}, by visit",
            "bias": f"loss-free bias, step {training.bias_step:g}",
            "none": "none",
        }
        found.append(Feature(f"balance.{training.balance}", "balancing", asked[training.balance]))
        if training.z:
            found.append(Feature("z", "router z-loss", f"{training.z:g}"))
    for key, name, plain in PLAIN:
        value = getattr(twin, key)
        if value != plain or getattr(baseline, key) != plain:
            found.append(Feature(key, name, worded(value)))
    if twin.num_experts is None or baseline.num_experts is None:
        found.append(Feature("dense", "dense FFN", f"width {twin.intermediate_size}"))
    return tuple(found)


def worded(value: object) -> str:
    """A field's value, short."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        kinds = list(dict.fromkeys(map(str, value)))
        return ", ".join(kinds) if len(kinds) < 6 else f"{', '.join(kinds[:5])} and {len(kinds) - 5} more"
    if hasattr(value, "rope_type"):
        return f"{value.rope_type} x {value.factor:g}"  # pyright: ignore[reportAttributeAccessIssue]
    return f"{value:g}" if isinstance(value, float) else str(value)
