"""OLMo-core 3.0: an experiment config per arm as JSON, and the package of classes that it names.

The JSON is what OLMo-core's own `as_config_dict` writes; `solve --baseline` reads it back (spec/olmo_core.py). Blocks
differ by `block_overrides`, so sections, dense layers and windows are OLMo-core's own.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from smelt_budget.emit.features import Feature
from smelt_budget.emit.importable import taken
from smelt_budget.emit.launch import Arm
from smelt_budget.emit.target import ARMS, Answer, Content, Emission, Job, Target
from smelt_budget.emit.template import text
from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.blocks import RopeScaling
from smelt_budget.spec.runs import Dense, GroupedQuery, MoE, Run, Window, unfold

# fmt: off
OCCUPIED = frozenset({"olmo_core", "torch", "numpy", "rich", "safetensors", "cached_path", "dataclass_extensions"})
"""What the package may not be called."""
HELD = frozenset({
    "loop", "residual_scale", "core", "vocab_size", "init", "schedule", "dense", "qk_norm", "balance.aux",
    "balance.bias", "balance.none", "z", "tie_word_embeddings", "lm_head_bias", "attention_sinks", "sliding_window",
    "layer_types", "mlp_bias", "shared_expert_intermediate_size", "mlp_only_layers", "norm", "partial_rotary_factor",
    "rope_interleave", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "embedding_multiplier",
    "residual_multiplier",
})
"""Features emitted as they are; any other is answered below, or refused."""
# fmt: on
TRANSFORMER = "olmo_core.nn.transformer.config"
ROTATED = {"linear": "PIRoPEScalingConfig", "llama3": "StepwiseRoPEScalingConfig"}


def answer(feature: Feature, job: Job) -> Answer | None:
    """What becomes of a feature."""
    key, spec, core = feature.key, job.twin, job.twin.core
    held = Answer(feature.asked)
    if key == "router_correction_bias":
        return held if job.training.balance == "bias" else Answer("no buffer: nothing would move it", "dropped")
    conditions = {
        "core": core is None or core.kv_lora_rank is None,
        "attention_bias": spec.attention_bias == spec.attention_output_bias,
        "attention_output_bias": spec.attention_bias == spec.attention_output_bias,
        "layer_types": "chunked_attention" not in (spec.layer_types or ()),
        "n_group": (spec.n_group or 1) == 1,
        "rope_scaling": spec.rope_scaling is None or spec.rope_scaling.rope_type in ROTATED,
        "lm_head_bias": not spec.tie_word_embeddings,
        "attention_sinks": spec.sliding_window is None or spec.layer_types is not None,
    }
    return held if conditions.get(key, key in HELD) else None


def emit(job: Job) -> Emission:
    """The package `NAME/`.

    Raises:
        BadInput: the name is taken, or something has no place in OLMo-core's configs.
    """
    problems = taken(job.name, OCCUPIED)
    for arm in ARMS:
        problems += [f"{arm}: {problem}" for problem in misfits(job.spec(arm), job)]
    if problems:
        raise BadInput("OLMo-core cannot run this pair so", *problems)
    package = {f"{job.name}/{file}": text(f"olmo_core/{file}") for file in ("__init__.py", "model.py", "train.py")}
    arms = {f"{job.name}/{arm}.json": json.dumps(experiment(job, arm), indent=2) + "\n" for arm in ARMS}
    files: dict[str, Content] = {**package, **arms}
    train: dict[Arm, tuple[str, ...]] = {
        arm: ("-m", f"{job.name}.train", arm, "--save-folder", f"runs/{arm}") for arm in ARMS
    }
    notes = [
        "data are yours: --dataset.paths='[data/*.npy]' (arrays of token ids) and "
        "--dataset.tokenizer.{eos,pad}_token_id, 0 in the files",
        "the schedule is one step longer than the run, which hard_stop ends: OLMo-core's last step would have rate 0",
        "num_flops_per_token counts executed blocks",
    ]
    if job.twin.is_moe:
        notes.append("experts run fast with the package grouped_gemm, which computes them in bfloat16")
    if job.training.balance == "aux" and job.twin.is_moe:
        notes.append("the auxiliary loss is over each rank's own tokens, the mean over executed layers")
    return Emission(files, train, tuple(notes))


def misfits(spec: ModelSpec, job: Job) -> list[str]:
    """What of one arm has no place in the configs."""
    found = []
    if spec.rope_theta != int(spec.rope_theta):
        found.append(f"rope_theta {spec.rope_theta:g} is not whole, and OLMo-core's is")
    experts = {spec.num_experts, (spec.core.num_experts if spec.core else None) or spec.num_experts}
    if 1 in experts and spec.shared_expert_intermediate_size is not None:
        found.append("one expert is a dense layer, and a dense layer has no shared expert in OLMo-core")
    if job.layout is not None and job.layout.expert > 1 and not spec.is_moe:
        found.append(f"--expert-parallel {job.layout.expert}, and there are no experts")
    return found


def named(module: str, **fields: Any) -> dict[str, Any]:
    """A config as OLMo-core writes it: without what is None, its class last."""
    return {key: value for key, value in fields.items() if value is not None} | {"_CLASS_": module}


def experiment(job: Job, arm: Arm) -> dict[str, Any]:
    """One arm's file: model, data, training."""
    training, spec = job.training, job.spec(arm)
    tokenizer = named(
        "olmo_core.data.tokenizer.TokenizerConfig", vocab_size=spec.vocab_size, eos_token_id=0, pad_token_id=0
    )
    return named(
        "olmo_core.script_utils.ExperimentConfig",
        model=model(job, spec),
        dataset=named(
            "olmo_core.data.numpy_dataset.NumpyFSLDatasetConfig",
            tokenizer=tokenizer,
            paths=["data/*.npy"],
            expand_glob=True,
            sequence_length=training.context,
        ),
        data_loader=named(
            "olmo_core.data.data_loader.NumpyDataLoaderConfig",
            global_batch_size=training.batch_sequences * training.context,
            seed=0,
            num_workers=4,
        ),
        train_module=train_module(job, arm),
        trainer=named(
            "olmo_core.train.config.TrainerConfig",
            save_folder=f"runs/{arm}",
            max_duration=steps(training.steps + 1),
            hard_stop=steps(training.steps),
            callbacks={
                "checkpointer": named(
                    "olmo_core.train.callbacks.checkpointer.CheckpointerCallback",
                    save_interval=max(1, training.steps // 20),
                    pre_train_checkpoint=False,  # saving untrained Adam counts as a step of it
                )
            },
        ),
        init_seed=job.seed,
    )


def steps(number: int) -> dict[str, Any]:
    """A duration."""
    return named("olmo_core.train.common.Duration", value=number, unit="steps")


def train_module(job: Job, arm: Arm) -> dict[str, Any]:
    """Optimiser, schedule and how the run is spread."""
    training, layout, spec = job.training, job.layout, job.spec(arm)
    expert = layout.expert if layout else 1
    undecayed = ["*norm.weight", *(["*.bias"] if biased(spec) else []), *(["*.sinks"] if spec.attention_sinks else [])]
    return named(
        "olmo_core.train.train_module.transformer.config.TransformerTrainModuleConfig",
        rank_microbatch_size=training.context,
        max_sequence_length=training.context,
        optim=named(
            "olmo_core.optim.adamw.AdamWConfig",
            lr=training.rates[ARMS.index(arm)],
            betas=list(training.betas),
            eps=training.epsilon,
            weight_decay=training.weight_decay,
            group_overrides=[
                named("olmo_core.optim.config.OptimGroupOverride", params=undecayed, opts={"weight_decay": 0.0})
            ],
        ),
        max_grad_norm=training.clip,
        scheduler=named(
            "olmo_core.optim.scheduler.WSD",
            warmup=training.warmup_steps,
            decay_fraction=training.decay_steps / (training.steps + 1),
        ),
        compile_model=layout is not None,
        dp_config=named(
            "olmo_core.train.train_module.transformer.config.TransformerDataParallelConfig",
            name="hsdp" if expert > 1 else "fsdp",
            param_dtype="bfloat16",
            reduce_dtype="float32",
            shard_degree=expert if expert > 1 else None,
        ),
        ep_config=named(
            "olmo_core.train.train_module.transformer.config.TransformerExpertParallelConfig", degree=expert
        )
        if expert > 1
        else None,
    )


def biased(spec: ModelSpec) -> bool:
    """Whether any vector adds."""
    mlps = spec.mlp_bias and (
        spec.num_experts is None or bool(spec.mlp_only_layers) or spec.shared_expert_intermediate_size is not None
    )
    return spec.attention_bias or mlps or spec.lm_head_bias or spec.norm == "layer_norm"


def model(job: Job, spec: ModelSpec) -> dict[str, Any]:
    """The transformer; the block that most layers have is `block`, the others are overrides."""
    loop, runs = spec.loop, unfold(spec)
    blocks = [json.dumps(block(job, spec, run)) for run in runs for _ in range(run.layers)]
    usual = Counter(blocks).most_common(1)[0][0]
    overrides = {str(i): json.loads(own) for i, own in enumerate(blocks) if own != usual}
    return named(
        f"{job.name}.model.LoopedConfig",
        d_model=spec.hidden_size,
        vocab_size=spec.vocab_size,
        n_layers=spec.num_hidden_layers,
        block=json.loads(usual),
        lm_head=named(
            "olmo_core.nn.lm_head.LMHeadConfig", layer_norm=norm(spec), bias=spec.lm_head_bias, dtype="float32"
        ),
        name="moe",
        dtype="float32",
        init_method="fan_in",
        init_seed=job.seed,
        block_overrides=overrides or None,
        embed_scale=None if spec.embedding_multiplier == 1 else spec.embedding_multiplier,
        tie_word_embeddings=spec.tie_word_embeddings,
        loop_start=loop.start if loop else 0,
        loop_stop=loop.stop if loop else 0,
        loop_visits=loop.visits if loop else 1,
    )


def block(job: Job, spec: ModelSpec, run: Run) -> dict[str, Any]:
    """A layer of a run of equal ones; one expert is a dense layer (rule C7)."""
    a, ffn = run.layer.attention, run.layer.ffn
    assert isinstance(a, GroupedQuery)
    dense = ffn if isinstance(ffn, Dense) else None if ffn.has_router else Dense(ffn.width, bias=False)
    inner = spec.loop.residual_scale if spec.loop and run.section == "core" else 1.0
    scale = inner * spec.residual_multiplier
    return named(
        f"{job.name}.model.BlockConfig",
        sequence_mixer=attention(spec, a, run.layer.window),
        layer_norm=norm(spec),
        feed_forward=None if dense is None else feed_forward(dense.width, dense.bias),
        feed_forward_moe=mixture(job, spec, ffn) if isinstance(ffn, MoE) and dense is None else None,
        name="moe" if dense is None else "default",
        attention_residual_alpha=scale,
        feed_forward_residual_alpha=scale,
    )


def attention(spec: ModelSpec, a: GroupedQuery, window: Window | None) -> dict[str, Any]:
    """Grouped-query attention, its norms, window and rotary positions."""
    rope = named(
        "olmo_core.nn.rope.RoPEConfig",
        name="complex" if spec.rope_interleave else "default",
        theta=int(spec.rope_theta),
        scaling=None if spec.rope_scaling is None else stretched(spec.rope_scaling),
        partial_rotary_factor=spec.partial_rotary_factor,
    )
    return named(
        "olmo_core.nn.attention.AttentionConfig",
        name="default",
        n_heads=a.query_heads,
        n_kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        bias=a.bias,
        rope=rope,
        qk_norm=None if a.qk_norm == "none" else norm(spec, "rms_norm"),
        use_head_qk_norm=None if a.qk_norm == "none" else a.qk_norm == "head",
        sliding_window=None
        if window is None
        else named(
            "olmo_core.nn.attention.SlidingWindowAttentionConfig",
            pattern=[window.size],
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=False,
        ),
        attention_sinks=a.sinks,
        dtype="float32",
    ) | {"type": "attention"}


def stretched(scaling: RopeScaling) -> dict[str, Any]:
    """How the frequencies are stretched."""
    module = f"olmo_core.nn.rope.{ROTATED[scaling.rope_type]}"
    if scaling.rope_type == "linear":
        return named(module, factor=scaling.factor)
    return named(
        module,
        factor=scaling.factor,
        low_freq_proportion=1 - 1 / (scaling.low_freq_factor or 1.0),
        high_freq_proportion=1 / (scaling.high_freq_factor or 1.0),
        old_context_len=scaling.original_max_position_embeddings,
    )


def norm(spec: ModelSpec, kind: str | None = None) -> dict[str, Any]:
    """A normalisation; that of queries and keys is always by the root mean square."""
    kind = kind or spec.norm
    return named(
        "olmo_core.nn.layer_norm.LayerNormConfig",
        name="rms" if kind == "rms_norm" else "default",
        eps=spec.rms_norm_eps,
        bias=kind == "layer_norm",
    )


def feed_forward(width: int, bias: bool) -> dict[str, Any]:
    """A gated MLP."""
    return named("olmo_core.nn.feed_forward.FeedForwardConfig", hidden_size=width, bias=bias)


def mixture(job: Job, spec: ModelSpec, m: MoE) -> dict[str, Any]:
    """Router, experts, the shared one, and balancing: losses are means over the executed layers with experts."""
    training = job.training
    executed = sum(
        run.layers * run.visits for run in unfold(spec) if isinstance(run.layer.ffn, MoE) and run.layer.ffn.has_router
    )
    router = named(
        "olmo_core.nn.moe.router.MoERouterConfig",
        top_k=m.top_k,
        normalize_expert_weights=1.0 if spec.norm_topk_prob else None,  # by their sum
        bias_gamma=training.bias_step or None if training.balance == "bias" else None,
        gating_function=spec.scoring_func,
    )
    return named(
        f"{job.name}.model.MixtureConfig",
        name="dropless",
        num_experts=m.experts,
        hidden_size=m.width,
        router=router,
        shared_mlp=None if m.shared is None else feed_forward(m.shared, m.shared_bias),
        lb_loss_weight=training.auxiliary / executed if training.balance == "aux" else None,
        z_loss_weight=training.z / executed or None,
        scale_loss_by_num_layers=False,
        dtype="float32",
        routed_scale=spec.routed_scaling_factor,
    )


OLMO_CORE = Target(
    name="olmo-core",
    title="OLMo-core: JSON configs and the classes they name",
    tested="ai2-olmo-core 3.0.0 with torch 2.13",
    needs="ai2-olmo-core; for experts, grouped_gemm",
    emit=emit,
    answer=answer,
    parallel=frozenset({"data", "expert"}),
)
