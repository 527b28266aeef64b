"""What does Megatron-LM take? An argument file an arm, one `--spec` module for both, a script for its training loop.

The flags (megatron_flags.py) say everything that Megatron-Core can express; looping, the residual scale, a core of its
own widths and the initial weights are `templates/megatron/smelt_layers.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from smelt_budget.emit import template
from smelt_budget.emit.features import Feature
from smelt_budget.emit.launch import Arm
from smelt_budget.emit.megatron_flags import arguments, balance, engine, grouped, lines_of, routed_layers
from smelt_budget.emit.target import ARMS, Answer, Emission, Job, Target
from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.model import RopeScaling

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The one stretching of --use-rope-scaling: three are written into the code, and the factor's flag is not passed on."""
LATENT_EPS = 1e-6
"""Of the two norms inside latent attention; Megatron has one epsilon for all."""


def told_to_layers(spec: ModelSpec) -> dict[str, Any]:
    """What `smelt_layers.py` has to know beside the flags."""
    own = spec.core.model_dump(exclude_none=True) if spec.core else {}
    names = {"num_key_value_heads": "num_query_groups", "num_experts": "num_moe_experts"}
    loop = spec.loop
    return {
        "start": loop.start if loop else 0,
        "stop": loop.stop if loop else 0,
        "visits": loop.visits if loop else 1,
        "residual_scale": loop.residual_scale if loop else 1.0,
        "tied": spec.tie_word_embeddings,
        "core": {names.get(name, name): value for name, value in own.items()},
    }


def emit(job: Job) -> Emission:
    """The folder: two argument files, one module, one script, one file for each engine.

    Raises:
        BadInput: Megatron cannot hold the pair in a way that no feature names.
    """
    files = layers(job, "megatron") | {
        "pretrain.py": template.text("megatron/pretrain.py"),
        **{f"{arm}/arguments.txt": lines_of(arguments(job, arm)) for arm in ARMS},
        "transformer_engine.txt": lines_of(engine("transformer_engine", job)),
    }
    notes = NOTES
    if job.twin.kv_lora_rank is None and (job.layout is None or job.layout.tensor == 1):
        files["local.txt"] = lines_of(engine("local", job))
        notes += ("without Transformer Engine: @local.txt in place of @transformer_engine.txt",)
    train: dict[Arm, tuple[str, ...]] = {
        arm: ("pretrain.py", f"@{arm}/arguments.txt", "@transformer_engine.txt") for arm in ARMS
    }
    return Emission(files, train, notes)


def layers(job: Job, target: str) -> dict[str, str]:
    """The module of both arms and what it reads.

    Raises:
        BadInput: Megatron-Core cannot hold the pair in a way that no feature names.
    """
    misfits = [f"{arm}: {what}" for arm in ARMS for what in unheld(job.spec(arm), job)]
    if misfits:
        raise BadInput(f"{target} cannot hold this pair", *misfits, "fix: --to hf, which holds whatever solve finds")
    pair = {arm: told_to_layers(job.spec(arm)) for arm in ARMS}
    return {
        "smelt_layers.py": template.text("megatron/smelt_layers.py"),
        "smelt_pair.json": json.dumps(pair, indent=2) + "\n",
    }


NOTES = (
    "give the data behind the files: --data-path PREFIX (or --mock-data), --save FOLDER, and --tokenizer-type with its "
    "model where documents have to be told apart",
    "pretrain.py counts executed layers in TFLOP/s; Megatron-LM's own pretrain_gpt.py counts stored ones",
    "balancing is over the tokens of a micro-batch; Megatron's logged losses add the visits of a layer up",
)


def unheld(spec: ModelSpec, job: Job) -> list[str]:
    """What of one arm has no feature of its own and cannot be held."""
    found = []
    if spec.rope_theta != int(spec.rope_theta):
        found.append(f"rope_theta {spec.rope_theta:g}: --rotary-base takes whole numbers")
    if spec.is_moe and spec.num_experts_per_tok == 1 and spec.norm_topk_prob:
        found.append("num_experts_per_tok 1 with norm_topk_prob: Megatron never divides one score by itself")
    if spec.num_experts == 1 and (spec.shared_expert_intermediate_size is not None or spec.mlp_only_layers):
        found.append("num_experts 1 beside a shared expert or dense layers")
    own = spec.core.num_experts if spec.core else None
    if own is not None and 1 in (own, spec.num_experts):
        found.append(f"core.num_experts {own} of {spec.num_experts}: Megatron has no expert without a router")
    split = job.layout.tensor if job.layout else 1
    for name in ("intermediate_size", "shared_expert_intermediate_size"):
        if (getattr(spec, name) or 0) % split:
            found.append(f"{name} {getattr(spec, name)} does not divide by tensor {split}")
    if job.training.context % split:
        found.append(f"context {job.training.context} does not divide by tensor {split}")
    return found


def of_both(held: Callable[[ModelSpec], bool]) -> Callable[[Feature, Job], Answer | None]:
    """As asked where both arms pass, else refused."""
    return lambda feature, job: Answer(feature.asked) if held(job.baseline) and held(job.twin) else None


def asked(feature: Feature, _job: Job) -> Answer:
    """A flag, or `smelt_layers.py`, does it."""
    return Answer(feature.asked)


def refused(_feature: Feature, _job: Job) -> None:
    """Megatron has nothing for it."""


def aux(_feature: Feature, job: Job) -> Answer:
    """The share of a layer is said."""
    shares = " and ".join(f"{job.training.auxiliary:g} / {routed_layers(job.spec(arm))}" for arm in ARMS)
    return Answer(f"auxiliary loss by visit, {shares} for each executed layer, which Megatron adds up")


def bias(feature: Feature, job: Job) -> Answer:
    """Only with sigmoid scores."""
    if balance(job) == "bias":
        return Answer(feature.asked)
    return Answer(f"auxiliary loss {job.training.auxiliary:g}: the bias needs sigmoid scores here", "otherwise")


def z(feature: Feature, job: Job) -> Answer:
    """Nothing without balancing, as in `verify`."""
    return Answer("none, as without balancing") if job.training.balance == "none" else Answer(feature.asked)


def correction(feature: Feature, job: Job) -> Answer:
    """A bias that only chooses; it starts at 0 and stays there unless it balances."""
    if job.twin.scoring_func == "sigmoid":
        return Answer(feature.asked)
    return Answer("none: the bias needs sigmoid scores here", "dropped")


def rms_or_plain(spec: ModelSpec) -> bool:
    """Norms on queries and keys are of the layers' kind."""
    return spec.qk_norm == "none" or (spec.qk_norm == "head" and spec.norm == "rms_norm")


def latent_held(spec: ModelSpec) -> bool:
    """Latent attention as DeepSeek-V3 has it: compressed queries, neighbours rotate together, one epsilon, no bias.

    Where queries are not compressed, Megatron with `--qk-layernorm` puts a norm of its own before their projection.
    """
    return (
        spec.kv_lora_rank is not None
        and spec.q_lora_rank is not None
        and spec.rope_interleave
        and spec.rms_norm_eps == LATENT_EPS
        and spec.norm == "rms_norm"
        and not spec.attention_bias
        and spec.sliding_window is None
        and spec.rope_scaling is None
        and spec.partial_rotary_factor == 1
    )


def stretched(spec: ModelSpec) -> bool:
    """Positions interpolated by a whole factor, or exactly Llama 3.1's constants."""
    scaling: RopeScaling | None = spec.rope_scaling
    if scaling is None or spec.kv_lora_rank is not None:
        return scaling is None
    if scaling.rope_type == "linear":
        return scaling.factor == int(scaling.factor)
    return scaling.rope_type == "llama3" and all(getattr(scaling, name) == value for name, value in LLAMA3.items())


def renormalised(spec: ModelSpec) -> bool:
    """Scores of a sigmoid are always divided by their sum, unless there is one."""
    return spec.norm_topk_prob or spec.scoring_func == "softmax" or spec.num_experts_per_tok == 1


def groups_held(spec: ModelSpec) -> bool:
    """Megatron rates a group by its best top-k / group-top-k experts, which has to be as many as here.

    With renormalised softmax scores it rates logits, of which only the best one orders groups as scores do.
    """
    if not grouped(spec):
        return True
    rated = (spec.num_experts_per_tok or 0) // (spec.topk_group or 1)
    return rated == (2 if spec.router_correction_bias else 1) and (rated == 1 or spec.scoring_func == "sigmoid")


ANSWERS: dict[str, Callable[[Feature, Job], Answer | None]] = {
    "loop": asked,
    "residual_scale": asked,
    "core": asked,
    "vocab_size": lambda feature, _job: Answer(f"{feature.asked}, not padded"),
    "init": asked,
    "qk_norm": of_both(rms_or_plain),
    "schedule": asked,
    "balance.aux": aux,
    "balance.bias": bias,
    "balance.none": asked,
    "z": z,
    "tie_word_embeddings": asked,
    "lm_head_bias": refused,
    "attention_bias": of_both(lambda spec: spec.kv_lora_rank is None),
    "attention_output_bias": refused,
    "attention_sinks": refused,
    "sliding_window": of_both(lambda spec: spec.kv_lora_rank is None),
    "attention_chunk_size": refused,
    "layer_types": of_both(lambda spec: "chunked_attention" not in (spec.layer_types or ())),
    "kv_lora_rank": of_both(latent_held),
    "mlp_bias": refused,
    "shared_expert_intermediate_size": asked,
    "shared_expert_gate": asked,
    "router_bias": refused,
    "expert_bias": refused,
    "mlp_only_layers": asked,
    "norm": of_both(lambda spec: spec.norm != "layer_norm_no_bias"),
    "norms_per_layer": refused,
    "early_exit_gate": refused,
    "rope_scaling": of_both(stretched),
    "partial_rotary_factor": of_both(lambda spec: spec.kv_lora_rank is None),
    "rope_interleave": asked,
    "swiglu_limit": refused,
    "scoring_func": asked,
    "norm_topk_prob": of_both(renormalised),
    "routed_scaling_factor": asked,
    "n_group": of_both(groups_held),
    "router_correction_bias": correction,
    "embedding_multiplier": refused,
    "residual_multiplier": refused,
    "attention_multiplier": refused,
    "logits_scaling": refused,
    "dense": asked,
}


def answer(feature: Feature, job: Job) -> Answer | None:
    """What becomes of a feature; one that nobody looked at is refused."""
    return ANSWERS.get(feature.key, refused)(feature, job)


MEGATRON = Target(
    name="megatron",
    title="Megatron-LM: argument files, --spec module, training script",
    tested="megatron-core 0.19.2 on Python 3.12, its layers also 0.16.1 on 3.11",
    needs="megatron-core >= 0.19 with its training part, Transformer Engine (or @local.txt), GPUs",
    emit=emit,
    answer=answer,
    parallel=frozenset({"data", "tensor", "expert", "pipeline"}),
)
