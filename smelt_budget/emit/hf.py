"""Model directories for transformers: `baseline/` and `twin/`, each a config and the two files of remote code.

The stored layers are N, the executed ones are walked in order; every visit has a cache slot of its own. The code is the
same for both arms, and holds whatever `smelt_budget.model` can build. Names on disk are those of our checkpoints.
"""

from __future__ import annotations

import json
from typing import Any

from smelt_budget.emit.features import Feature
from smelt_budget.emit.target import ARMS, Answer, Content, Emission, Job, Target
from smelt_budget.emit.template import text
from smelt_budget.emit.training import Training
from smelt_budget.emit.weights import RANDOM, contents, corrected, has_corrections, of_run, source
from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import layer_kinds

CODE = ("configuration_smelt.py", "modeling_smelt.py")
SAME = (
    # fields that have the same name and the same meaning there
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "tie_word_embeddings",
    "lm_head_bias",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attention_bias",
    "attention_output_bias",
    "attention_sinks",
    "qk_norm",
    "sliding_window",
    "attention_chunk_size",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
    "intermediate_size",
    "mlp_bias",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_expert_gate",
    "expert_bias",
    "swiglu_limit",
    "mlp_only_layers",
    "router_bias",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "norm",
    "rms_norm_eps",
    "norms_per_layer",
    "early_exit_gate",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
ALWAYS = ("tie_word_embeddings", "qk_norm", "norm_topk_prob", "rms_norm_eps")
"""Written although they are what they would be: other readers have other defaults."""

NOTES = (
    "load with trust_remote_code=True; put your tokenizer's files into both directories",
    "train.py takes a file of token ids (tokens.bin, or --data)",
    "the loss counts balancing by visit while training; in eval mode it is the plain cross-entropy",
)
TOLD = {
    "init": "the same, drawn by _init_weights",
    "schedule": "the same, by train.py",
    "balance.bias": "the same, moved by train.py",
}


def config(spec: ModelSpec, training: Training, corrections: bool) -> dict[str, Any]:
    """`config.json` of one arm; what is left out is None, false or 1. `corrections`: whether routers have one."""
    core = {} if spec.core is None else {f"core_{key}": value for key, value in spec.core.model_dump().items()}
    loop = spec.loop
    fields: dict[str, Any] = {
        "architectures": ["SmeltForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_smelt.SmeltConfig",
            "AutoModel": "modeling_smelt.SmeltModel",
            "AutoModelForCausalLM": "modeling_smelt.SmeltForCausalLM",
        },
        "model_type": "smelt_moe",
        "dtype": "float32",
        "loop_start": loop.start if loop else 0,
        "loop_end": loop.stop if loop else 0,
        "loop_visits": loop.visits if loop else 1,
        "loop_residual_scale": loop.residual_scale if loop else 1.0,
        **{key: value for key, value in core.items() if value is not None},
    }
    for name in SAME:
        value = getattr(spec, name)
        if name in ALWAYS or (value != ModelSpec.model_fields[name].default and value is not None):
            fields[name] = list(value) if isinstance(value, tuple) else value
    fields["max_position_embeddings"] = spec.max_position_embeddings or training.context
    fields["layer_types"] = [window for _, window, _ in layer_kinds(spec)]
    fields["rope_parameters"] = rope(spec)
    if corrections:
        fields["router_correction_bias"] = True
        fields["group_scored_by"] = 2 if spec.router_correction_bias else 1
    if spec.is_moe:
        fields["router_aux_loss_coef"] = training.auxiliary if training.balance == "aux" else 0.0
        fields["router_z_loss_coef"] = training.z
    return fields


def rope(spec: ModelSpec) -> dict[str, Any]:
    """`rope_parameters`."""
    stretched = {} if spec.rope_scaling is None else spec.rope_scaling.model_dump(exclude_none=True)
    told = {"rope_type": "default", "rope_theta": spec.rope_theta, **stretched}
    if told["rope_type"] != "yarn":
        told = {key: value for key, value in told.items() if key not in ("beta_fast", "beta_slow", "truncate")}
    if spec.partial_rotary_factor != 1:
        told["partial_rotary_factor"] = spec.partial_rotary_factor
    return told


def files(job: Job) -> Emission:
    """A directory for each arm, and what trains them."""
    job, notes = of_run(job)
    made: dict[str, Content] = {"train.py": text("hf/train.py"), "train.json": json.dumps(recipe(job), indent=2) + "\n"}
    for arm in ARMS:
        spec = job.spec(arm)
        check(arm, spec)
        units = [] if job.weights is None else source(job, arm)
        moving = job.training.balance == "bias" and spec.is_moe
        moved = job.weights != RANDOM and has_corrections(units)
        corrections = spec.router_correction_bias or moving or moved
        made[f"{arm}/config.json"] = json.dumps(config(spec, job.training, corrections), indent=2) + "\n"
        made[f"{arm}/generation_config.json"] = json.dumps({"do_sample": False, "use_cache": True}, indent=2) + "\n"
        made |= {f"{arm}/{name}": text(f"hf/{name}") for name in CODE}
        if units:
            weights = contents(corrected(units, corrections, spec))
            made |= {f"{arm}/{name}": content for name, content in weights.items()}
    return Emission(made, {arm: ("train.py", arm) for arm in ARMS}, (*notes, *NOTES))


def recipe(job: Job) -> dict[str, Any]:
    """`train.json`."""
    t = job.training
    return {
        **t.model_dump(mode="json", exclude={"rates", "warmup_share", "decay_share"}),
        "steps": t.steps,
        "warmup_steps": t.warmup_steps,
        "decay_steps": t.decay_steps,
        "rates": dict(zip(ARMS, t.rates, strict=True)),
    }


def check(arm: str, spec: ModelSpec) -> None:
    """Refuse what our own model refuses (`check_buildable`), without loading torch.

    Raises:
        BadInput: it can be counted, not computed.
    """
    turning = int((spec.qk_rope_head_dim or spec.head_dim or 0) * spec.partial_rotary_factor)
    if turning < 2 or turning % 2:
        raise BadInput(f"{arm}: {turning} elements of each head rotate, and rotation takes pairs")
    if spec.lm_head_bias and spec.logits_scaling != 1:
        raise BadInput(f"{arm}: logits_scaling together with lm_head_bias is not defined")


def answer(feature: Feature, job: Job) -> Answer | None:
    """Everything our model can build is held, but for a window of one position."""
    if feature.key in ("sliding_window", "attention_chunk_size") and 1 in (
        getattr(job.spec(arm), feature.key) for arm in ARMS
    ):
        return None  # transformers' DynamicSlidingWindowLayer keeps the last `window - 1` keys by [-0:], which is all
    if feature.key == "loop":
        slots = job.twin.effective_depth
        return Answer(f"{feature.asked}; {slots} layers executed, {slots} cache slots")
    if feature.key == "balance.aux":
        return Answer(f"{feature.asked}; each rank's own load")
    return Answer(TOLD.get(feature.key, feature.asked))


HF = Target(
    name="hf",
    title="Model directories for transformers (trust_remote_code)",
    tested="transformers 5.12.1, 5.19.0, 5.24.0",
    needs="transformers; train.py also accelerate",
    emit=files,
    answer=answer,
    takes_weights=True,
)
