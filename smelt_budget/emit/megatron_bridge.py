"""What does Megatron-Bridge take? Megatron's flags as fields of its providers, a recipe, the same looped layers.

Bridge cannot be imported without Transformer Engine, so the fields are compared with a list recorded from the sources
of version 0.6.2, and those of the model with the TransformerConfig that Megatron makes of the flags.
"""

from __future__ import annotations

import json
from typing import Any

from smelt_budget.emit import template
from smelt_budget.emit.launch import Arm
from smelt_budget.emit.megatron import NOTES, answer, layers
from smelt_budget.emit.megatron_flags import architecture, balancing, engine, parallel
from smelt_budget.emit.target import ARMS, Emission, Job, Target

RENAMED: dict[str, str | None] = {
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "group_query_attention": None,
    "padded_vocab_size": None,
    "untie_embeddings_and_output_weights": None,
    "swiglu": "gated_linear_unit",
}
"""A flag's name with underscores to the provider's field; `None` where there is none."""
SWITCHED_OFF = {"disable_bias_linear": "add_bias_linear"}


def model(job: Job, arm: Arm) -> dict[str, Any]:
    """Fields of the provider."""
    spec = job.spec(arm)
    flags = [*architecture(spec), *balancing(spec, job), *engine("transformer_engine", job), *parallel(spec, job)]
    fields: dict[str, Any] = {
        "share_embeddings_and_output_weights": spec.tie_word_embeddings,
        "should_pad_vocab": False,
        "seq_length": job.training.context,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    for flag, *values in flags:
        name = flag.removeprefix("--").replace("-", "_")
        if name in SWITCHED_OFF:
            fields[SWITCHED_OFF[name]] = False
            continue
        field = RENAMED.get(name, name)
        if field is not None:
            fields[field] = valued(values[0]) if values else True
    if fields.get("rope_scaling"):
        fields["rope_scaling_factor"] = 8.0  # which Megatron-LM has, and Bridge not
    return fields


def valued(word: str) -> Any:
    """A flag's value as JSON has it: numbers, lists, two numbers with a comma, text."""
    try:
        return json.loads(word)
    except ValueError:
        return json.loads(f"[{word}]") if word.replace(",", "").isdigit() else word


def settings(job: Job, arm: Arm) -> dict[str, dict[str, Any]]:
    """Every section of the ConfigContainer but its precision."""
    t, spec = job.training, job.spec(arm)
    decay = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": t.decay_steps}
    return {
        "model": model(job, arm),
        "train": {
            "train_iters": t.steps,
            "global_batch_size": t.batch_sequences,
            "micro_batch_size": 1,
        },
        "validation": {"eval_interval": 1000, "eval_iters": 10},
        "optimizer": {
            "optimizer": "adam",
            "lr": t.rates[ARMS.index(arm)],
            "min_lr": 0.0,
            "weight_decay": t.weight_decay,
            "adam_beta1": t.betas[0],
            "adam_beta2": t.betas[1],
            "adam_eps": t.epsilon,
            "clip_grad": t.clip,
            "bf16": True,
            "use_distributed_optimizer": True,
        },
        "scheduler": {
            **(decay if t.decay_steps else {"lr_decay_style": "constant"}),
            "lr_warmup_iters": t.warmup_steps,
            "lr_decay_iters": t.steps,
            "start_weight_decay": t.weight_decay,
            "end_weight_decay": t.weight_decay,
            "weight_decay_incr_style": "constant",
        },
        "ddp": {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "grad_reduce_in_fp32": True,
            "check_for_nan_in_grad": True,
        },
        "dataset": {
            "random_seed": 1234,
            "seq_length": t.context,
            "blend": None,
            "split": "99,1,0",
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "dataloader_type": "single",
            "skip_getting_attention_mask_from_dataset": True,
        },
        "logger": {"log_interval": 10, "log_throughput": True},
        "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": spec.vocab_size},
        "checkpoint": {"save": None, "load": None, "save_interval": 1000},
        "rng": {"seed": 1234},
    }


def emit(job: Job) -> Emission:
    """The recipe, its values for both arms, the looped layers.

    Raises:
        BadInput: Megatron-Core cannot hold the pair in a way that no feature names.
    """
    files = layers(job, "megatron-bridge") | {
        "recipe.py": template.text("megatron_bridge/recipe.py"),
        **{f"{arm}.json": json.dumps(settings(job, arm), indent=2) + "\n" for arm in ARMS},
    }
    train: dict[Arm, tuple[str, ...]] = {arm: ("recipe.py", arm) for arm in ARMS}
    notes = (
        "give the data behind the arm: dataset.data_path=PREFIX; without it they are mock",
        "Bridge's TFLOP/s count a looped layer once",
        *NOTES[-1:],
    )
    return Emission(files, train, notes)


MEGATRON_BRIDGE = Target(
    name="megatron-bridge",
    title="Megatron-Bridge: a recipe and its values, the --spec module of megatron",
    tested="field names of 0.6.2 as recorded; its layers with megatron-core 0.19.2",
    needs="megatron-bridge 0.6 with Transformer Engine, GPUs",
    emit=emit,
    answer=answer,
    parallel=frozenset({"data", "tensor", "expert", "pipeline"}),
)
