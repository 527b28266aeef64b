"""MaxText 0.2.5: the baseline's YAML on top of its `base.yml`. MaxText cannot loop, so the twin is left out.

Its decoder scans one stack of layers, whose parameters lie on a layer axis (layers/nnx_decoders.py); no key and no
plug-in runs a part of them twice. docs/emit-maxtext.md says what a fork would change.
"""

from __future__ import annotations

from typing import Any

from smelt_budget.emit.features import Feature
from smelt_budget.emit.on_hf import as_yaml
from smelt_budget.emit.target import Answer, Emission, Job, Target
from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec

HELD = ("vocab_size", "tie_word_embeddings", "norm_topk_prob")
"""Features of the baseline that are emitted as they are."""
OF_TWIN = ("loop", "residual_scale", "core")
DENSE, EXPERTS = "qwen3", "qwen3_moe"
"""MaxText's decoder blocks that are a plain layer of ours."""


def answer(feature: Feature, job: Job) -> Answer | None:
    """What becomes of a feature of the baseline."""
    training = job.training
    held = Answer(feature.asked)
    otherwise = {
        "init": Answer("MaxText's: truncated normal by fan-in, no scaling by depth", "otherwise"),
        "schedule": Answer(f"{feature.asked}; warmup from 0, a step late", "otherwise"),
        "balance.aux": Answer(f"auxiliary loss {training.auxiliary:g}, over each sequence", "otherwise"),
        "balance.bias": Answer("none: the bias is not in this decoder block", "dropped"),
        "balance.none": held,
        "z": Answer("none: MaxText's z-loss is the lm-head's", "dropped"),
        "qk_norm": held if job.baseline.qk_norm != "full" else None,
        "dense": held,
        "n_group": held if (job.baseline.n_group or 1) == 1 else None,
        **dict.fromkeys(OF_TWIN, Answer("the twin is left out: MaxText cannot loop", "dropped")),
        **dict.fromkeys(HELD, held),
    }
    return otherwise.get(feature.key)


def emit(job: Job) -> Emission:
    """`baseline.yml`.

    Raises:
        BadInput: a number that MaxText takes whole is not.
    """
    if job.baseline.num_experts == 1:
        raise BadInput("the baseline has one expert, and MaxText's is a dense layer; fix: intermediate_size")
    if job.baseline.rope_theta != int(job.baseline.rope_theta):
        raise BadInput(f"rope_theta {job.baseline.rope_theta:g} is not whole, and MaxText's is")
    about = f"The baseline of {job.name} for MaxText; its twin is left out, for MaxText cannot loop."
    return Emission(
        {"baseline.yml": as_yaml(settings(job, job.baseline), about)},
        notes=(
            "python -m maxtext.trainers.pre_train.train baseline.yml dataset_type=... tokenizer_path=...",
            f"a step is per_device_batch_size x devices x gradient_accumulation_steps: make it "
            f"{job.training.batch_sequences} sequences",
            "only the baseline: a fork that loops is described in docs/emit-maxtext.md",
        ),
    )


def settings(job: Job, spec: ModelSpec) -> dict[str, Any]:
    """The keys that differ from base.yml."""
    training = job.training
    width = spec.moe_intermediate_size if spec.is_moe else spec.intermediate_size
    aux = training.auxiliary if training.balance == "aux" and spec.is_moe else 0.0
    experts = {
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "base_moe_mlp_dim": width,
        "norm_topk_prob": spec.norm_topk_prob,
        "capacity_factor": -1.0,
        "load_balance_loss_weight": aux,
    }
    return {
        "base_config": "base.yml",
        "run_name": f"{job.name}-baseline",
        "base_output_directory": "runs",
        "decoder_block": EXPERTS if spec.is_moe else DENSE,
        "base_emb_dim": spec.hidden_size,
        "base_num_decoder_layers": spec.num_hidden_layers,
        "base_num_query_heads": spec.num_attention_heads,
        "base_num_kv_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "base_mlp_dim": width,
        "mlp_activations": ["silu", "linear"],
        "vocab_size": spec.vocab_size,
        "logits_via_embedding": spec.tie_word_embeddings,
        "normalize_embedding_logits": False,
        "normalization_layer_epsilon": spec.rms_norm_eps,
        "rope_max_timescale": int(spec.rope_theta),
        "use_qk_norm": spec.qk_norm == "head",
        **(experts if spec.is_moe else {}),
        "enable_dropout": False,
        "max_target_length": training.context,
        "per_device_batch_size": 1.0,
        "steps": training.steps,
        "learning_rate": training.rates[0],
        "lr_schedule_type": "wsd",
        "warmup_steps_fraction": training.warmup_share,
        "wsd_decay_steps_fraction": training.decay_share,
        "wsd_decay_style": "linear",
        "learning_rate_final_fraction": 0.0,
        "adam_b1": training.betas[0],
        "adam_b2": training.betas[1],
        "adam_eps": training.epsilon,
        "adam_weight_decay": training.weight_decay,
        "gradient_clipping_threshold": training.clip,
        "init_weights_seed": job.seed,
    }


MAXTEXT = Target(
    name="maxtext",
    title="MaxText: the baseline's YAML",
    tested="key names of maxtext 0.2.5",
    needs="maxtext (Python 3.12)",
    emit=emit,
    answer=answer,
)
