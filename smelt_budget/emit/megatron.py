"""What does Megatron-LM take? An argument file an arm, one `--spec` module for both, a script for its training loop.

The flags say everything that Megatron-Core can express; looping, the residual scale, a core of its own widths and the
initial weights are `templates/megatron/smelt_layers.py`. Flags are those of megatron-core 0.19 (`megatron.training`),
compared with its parser in `tests/interop/test_megatron.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from smelt_budget.emit import template
from smelt_budget.emit.features import Feature
from smelt_budget.emit.launch import Arm, stages
from smelt_budget.emit.target import ARMS, Answer, Emission, Job, Target
from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.model import RopeScaling

Flag = tuple[str, ...]
"""A flag and its values."""

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The one stretching of --use-rope-scaling: three are written into the code, and the factor's flag is not passed on."""
LATENT_EPS = 1e-6
"""Of the two norms inside latent attention; Megatron has one epsilon for all."""
ENGINES: dict[str, tuple[Flag, ...]] = {
    "transformer_engine": (("--transformer-impl", "transformer_engine"),),
    "local": (
        ("--transformer-impl", "local"),
        ("--no-rope-fusion",),
        ("--no-persist-layer-norm",),
        ("--no-gradient-accumulation-fusion",),
        ("--no-masked-softmax-fusion",),
    ),
}
"""Modules of Transformer Engine, or Megatron-Core's own; the latter need neither it nor Apex."""
ENGINES_MOE: dict[str, tuple[Flag, ...]] = {
    "transformer_engine": (("--moe-grouped-gemm",), ("--moe-token-dispatcher-type", "alltoall")),
    "local": (("--moe-token-dispatcher-type", "allgather"),),
}


def architecture(spec: ModelSpec) -> Iterator[Flag]:
    """The flags that say what the model is; read back by `smelt_budget.spec.megatron_arguments`."""
    yield "--num-layers", str(spec.num_hidden_layers)
    yield "--hidden-size", str(spec.hidden_size)
    yield from attention(spec)
    yield from ffn(spec)
    yield "--normalization", "RMSNorm" if spec.norm == "rms_norm" else "LayerNorm"
    yield "--norm-epsilon", repr(spec.rms_norm_eps)
    yield ("--disable-bias-linear",)
    yield "--position-embedding-type", "rope"
    yield "--rotary-base", str(int(spec.rope_theta))
    if spec.partial_rotary_factor != 1:
        yield "--rotary-percent", repr(spec.partial_rotary_factor)
    if spec.rope_interleave and spec.kv_lora_rank is None:  # latent attention has no other way
        yield ("--rotary-interleaved",)
    if spec.rope_scaling is not None:
        linear = spec.rope_scaling.rope_type == "linear"
        yield (
            ("--rotary-seq-len-interpolation-factor", str(int(spec.rope_scaling.factor)))
            if linear
            else ("--use-rope-scaling",)
        )
    yield "--vocab-size", str(spec.vocab_size)
    yield "--padded-vocab-size", str(spec.vocab_size)
    yield "--make-vocab-size-divisible-by", "1"
    if not spec.tie_word_embeddings:
        yield ("--untie-embeddings-and-output-weights",)


def attention(spec: ModelSpec) -> Iterator[Flag]:
    """Heads, or latents."""
    yield "--num-attention-heads", str(spec.num_attention_heads)
    if spec.kv_lora_rank is not None:
        yield ("--multi-latent-attention",)
        if spec.q_lora_rank is not None:
            yield "--q-lora-rank", str(spec.q_lora_rank)
        yield "--kv-lora-rank", str(spec.kv_lora_rank)
        yield "--qk-head-dim", str(spec.qk_nope_head_dim)
        yield "--qk-pos-emb-head-dim", str(spec.qk_rope_head_dim)
        yield "--v-head-dim", str(spec.v_head_dim)
        yield ("--qk-layernorm",)  # the norms of the latents
        yield "--rope-type", "rope"
        return
    yield ("--group-query-attention",)
    yield "--num-query-groups", str(spec.num_key_value_heads)
    yield "--kv-channels", str(spec.head_dim)
    if spec.attention_bias:
        yield ("--add-qkv-bias",)
    if spec.qk_norm == "head":
        yield ("--qk-layernorm",)
    if spec.sliding_window is not None:
        yield "--window-size", f"{spec.sliding_window - 1},0"  # positions before and after its own
        if spec.layer_types is not None:
            yield "--window-attn-skip-freq", listed(kind == "sliding_attention" for kind in spec.layer_types)


def ffn(spec: ModelSpec) -> Iterator[Flag]:
    """Gated MLPs and experts. `--ffn-hidden-size` is always given: without it Megatron makes a width up."""
    yield ("--swiglu",)
    moe = spec.is_moe
    one = spec.num_experts == 1  # a dense layer of the expert's width (rule C7)
    dense = None if one else spec.intermediate_size
    yield "--ffn-hidden-size", str(dense or spec.moe_intermediate_size)
    if not moe:
        return
    yield "--num-experts", str(spec.num_experts)
    yield "--moe-router-topk", str(spec.num_experts_per_tok)
    yield "--moe-ffn-hidden-size", str(spec.moe_intermediate_size)
    if spec.mlp_only_layers:
        yield "--moe-layer-freq", listed(i not in spec.mlp_only_layers for i in range(spec.num_hidden_layers))
    if spec.shared_expert_intermediate_size is not None:
        yield "--moe-shared-expert-intermediate-size", str(spec.shared_expert_intermediate_size)
    if spec.shared_expert_gate:
        yield ("--moe-shared-expert-gate",)
    yield "--moe-router-dtype", "fp32"
    yield "--moe-router-score-function", spec.scoring_func
    if spec.scoring_func == "softmax" and not spec.norm_topk_prob:
        yield ("--moe-router-pre-softmax",)  # without it the chosen logits are renormalised
    if spec.routed_scaling_factor != 1:
        yield "--moe-router-topk-scaling-factor", repr(spec.routed_scaling_factor)
    if grouped(spec):
        yield "--moe-router-num-groups", str(spec.n_group)
        yield "--moe-router-group-topk", str(spec.topk_group)


def balancing(spec: ModelSpec, job: Job) -> Iterator[Flag]:
    """Losses and bias. Megatron adds the layers' losses up where `verify` takes their mean, so each gets its share."""
    if not spec.is_moe:
        return
    training, executed = job.training, routed_layers(spec)
    kind = balance(job)
    yield "--moe-router-load-balancing-type", "aux_loss" if kind == "aux" else "none"
    if kind == "aux":
        yield "--moe-aux-loss-coeff", repr(training.auxiliary / executed)
    if training.z and training.balance != "none":
        yield "--moe-z-loss-coeff", repr(training.z / executed)
    if spec.scoring_func == "sigmoid" and (spec.router_correction_bias or kind == "bias"):
        yield ("--moe-router-enable-expert-bias",)
        yield "--moe-router-bias-update-rate", repr(training.bias_step if kind == "bias" else 0.0)


def schedule(job: Job, arm: Arm) -> Iterator[Flag]:
    """Budget, learning rate and optimiser."""
    t = job.training
    spec = job.spec(arm)
    yield "--seq-length", str(t.context)
    yield "--max-position-embeddings", str(max(t.context, spec.max_position_embeddings or 0))
    yield "--micro-batch-size", "1"
    yield "--global-batch-size", str(t.batch_sequences)
    yield "--train-iters", str(t.steps)
    yield "--lr", repr(t.rates[ARMS.index(arm)])
    yield "--min-lr", "0.0"
    yield "--lr-warmup-iters", str(t.warmup_steps)
    yield "--lr-decay-iters", str(t.steps)
    if t.decay_steps:
        yield "--lr-decay-style", "WSD"
        yield "--lr-wsd-decay-style", "linear"
        yield "--lr-wsd-decay-iters", str(t.decay_steps)
    else:
        yield "--lr-decay-style", "constant"
    yield "--weight-decay", repr(t.weight_decay)
    yield "--adam-beta1", repr(t.betas[0])
    yield "--adam-beta2", repr(t.betas[1])
    yield "--adam-eps", repr(t.epsilon)
    yield "--clip-grad", repr(t.clip)
    yield "--attention-dropout", "0.0"
    yield "--hidden-dropout", "0.0"
    yield ("--bf16",)
    yield ("--use-distributed-optimizer",)
    yield ("--overlap-grad-reduce",)
    yield ("--overlap-param-gather",)


def habits() -> Iterator[Flag]:
    """Data and logging; anything given behind the file holds instead."""
    yield "--tokenizer-type", "NullTokenizer"
    yield "--split", "99,1,0"
    yield ("--no-create-attention-mask-in-dataloader",)
    yield "--eval-interval", "1000"
    yield "--eval-iters", "10"
    yield "--save-interval", "1000"
    yield "--log-interval", "10"
    yield ("--log-throughput",)


def parallel(spec: ModelSpec, job: Job) -> Iterator[Flag]:
    """How the layers are spread; nothing where no launch was asked."""
    layout = job.layout
    if layout is None:
        return
    yield "--tensor-model-parallel-size", str(layout.tensor)
    if layout.tensor > 1:
        yield ("--sequence-parallel",)  # which experts under tensor parallelism need
    yield "--pipeline-model-parallel-size", str(layout.pipeline)
    if layout.pipeline > 1:
        letters = ["t" * len(stage) for stage in stages(spec, layout.pipeline)]
        yield "--pipeline-model-parallel-layout", "|".join(["E" + letters[0], *letters[1:-1], letters[-1] + "L"])
    if spec.is_moe:
        yield "--expert-model-parallel-size", str(layout.expert)
        yield "--expert-tensor-parallel-size", "1"


def arguments(job: Job, arm: Arm) -> tuple[Flag, ...]:
    """All flags of one arm but those of the engine."""
    spec = job.spec(arm)
    flags = [*architecture(spec), *balancing(spec, job), *schedule(job, arm), *habits(), *parallel(spec, job)]
    return (("--spec", "smelt_layers", arm), *flags)


def engine(name: str, job: Job) -> tuple[Flag, ...]:
    """The flags of one implementation of the modules."""
    return ENGINES[name] + (ENGINES_MOE[name] if job.baseline.is_moe or job.twin.is_moe else ())


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
    misfits = [f"{arm}: {what}" for arm in ARMS for what in unheld(job.spec(arm), job)]
    if misfits:
        raise BadInput("megatron cannot hold this pair", *misfits, "fix: --to hf, which holds whatever solve finds")
    pair = {arm: told_to_layers(job.spec(arm)) for arm in ARMS}
    files = {
        "pretrain.py": template.text("megatron/pretrain.py"),
        "smelt_layers.py": template.text("megatron/smelt_layers.py"),
        "smelt_pair.json": json.dumps(pair, indent=2) + "\n",
        **{f"{arm}/arguments.txt": lines_of(arguments(job, arm)) for arm in ARMS},
        **{f"{name}.txt": lines_of(engine(name, job)) for name in ENGINES},
    }
    train: dict[Arm, Flag] = {arm: ("pretrain.py", f"@{arm}/arguments.txt", "@transformer_engine.txt") for arm in ARMS}
    return Emission(files, train, NOTES)


def lines_of(flags: tuple[Flag, ...]) -> str:
    """A flag a line, nothing quoted, for `$(cat FILE)` splits at blanks and takes no quotes away."""
    return "".join(" ".join(flag) + "\n" for flag in flags)


NOTES = (
    "give the data behind the files: --data-path PREFIX (or --mock-data), --save FOLDER, and --tokenizer-type with its "
    "model where documents have to be told apart",
    "without Transformer Engine: @local.txt in place of @transformer_engine.txt",
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


def grouped(spec: ModelSpec) -> bool:
    """Whether experts are chosen by groups."""
    return spec.n_group not in (None, 1)


def routed_layers(spec: ModelSpec) -> int:
    """Executed layers that route."""
    visits, core = (spec.loop.visits, range(spec.loop.start, spec.loop.stop)) if spec.loop else (1, range(0))
    return sum(visits if i in core else 1 for i in range(spec.num_hidden_layers) if i not in spec.mlp_only_layers)


def listed(flags: Any) -> str:
    """A list of 0 and 1 as one word."""
    return f"[{','.join(str(int(flag)) for flag in flags)}]"


def balance(job: Job) -> str:
    """How it is balanced: Megatron has the bias with sigmoid scores only."""
    softmax = job.twin.scoring_func == "softmax"
    return "aux" if job.training.balance == "bias" and softmax else job.training.balance


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
    """Latent attention as DeepSeek has it: neighbours rotate together, one epsilon, no bias, no window."""
    return (
        spec.kv_lora_rank is not None
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
