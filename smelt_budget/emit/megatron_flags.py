"""Which flags does an arm become? Those of megatron-core 0.19, compared with its parser in the tests.

The architecture's are read back by `smelt_budget.spec.megatron_arguments`. What no flag says is in `smelt_layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smelt_budget.emit.launch import Arm, stages
from smelt_budget.emit.target import ARMS, Job
from smelt_budget.spec import ModelSpec

Flag = tuple[str, ...]
"""A flag and its values."""

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


def lines_of(flags: tuple[Flag, ...]) -> str:
    """A flag a line, nothing quoted, for `$(cat FILE)` splits at blanks and takes no quotes away."""
    return "".join(" ".join(flag) + "\n" for flag in flags)


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
