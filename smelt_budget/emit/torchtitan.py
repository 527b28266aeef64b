"""torchtitan 0.3: one importable package with both arms; `--module NAME --config baseline|twin`.

torchtitan has one config per layer, so sections, dense layers and windows are its own; what it lacks is the order of
visits, the residual scale and initial deviations by fan-in, which the package's `model.py` adds to its Qwen3.
"""

from __future__ import annotations

import json
from typing import Any

from smelt_budget.emit.features import Feature
from smelt_budget.emit.importable import taken
from smelt_budget.emit.launch import Arm
from smelt_budget.emit.target import ARMS, Answer, Content, Emission, Job, Target
from smelt_budget.emit.template import text
from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import Dense, GroupedQuery, MoE, Run, Window, unfold

# fmt: off
OCCUPIED = frozenset({
    "deepseek_v3", "flux", "gpt_oss", "kimi_k2_7", "llama3", "muse_glimmer", "qwen3", "qwen3_5", "rl", "dapo_math",
    "transformers_modeling_backend", "alphabet_sort", "search_r1",  # of torchtitan: --module finds these first
    "torch", "torchtitan", "torchdata", "datasets", "spmd_types", "tyro", "triton", "numpy",
})
"""What the package may not be called."""
HELD = frozenset({
    "loop", "residual_scale", "core", "vocab_size", "init", "schedule", "dense", "qk_norm", "balance.bias",
    "balance.none", "tie_word_embeddings", "attention_bias", "attention_output_bias", "sliding_window",
    "attention_chunk_size", "layer_types", "mlp_bias", "shared_expert_intermediate_size", "shared_expert_gate",
    "mlp_only_layers", "partial_rotary_factor", "rope_interleave", "scoring_func", "norm_topk_prob",
    "routed_scaling_factor", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
})
"""Features emitted as they are; any other is answered below, or refused."""
# fmt: on
GRANULE = 8
"""torch's grouped products take rows of whole 16 bytes, and torchtitan's experts compute in bfloat16."""
MOST_SEQUENCES = 8
"""Of one pass, torchtitan's own default."""


def answer(feature: Feature, job: Job) -> Answer | None:
    """What becomes of a feature."""
    core = job.twin.core
    if feature.key == "core" and core is not None and core.kv_lora_rank is not None:
        return None
    if feature.key in HELD:
        return Answer(feature.asked)
    otherwise = {"balance.aux": auxiliary, "z": unpenalised, "router_correction_bias": corrected, "n_group": grouped}
    return otherwise[feature.key](feature, job) if feature.key in otherwise else None


def auxiliary(_feature: Feature, job: Job) -> Answer:
    """Both arms are balanced, by the only means there is."""
    step = f"loss-free bias, step {job.training.bias_step:g}"
    return Answer(f"{step}: torchtitan 0.3 has no auxiliary loss", "otherwise")


def unpenalised(_feature: Feature, _job: Job) -> Answer:
    """Router logits may grow."""
    return Answer("torchtitan 0.3 has no router z-loss", "dropped")


def corrected(feature: Feature, job: Job) -> Answer:
    """The buffer is there where something moves it."""
    if job.training.balance == "none":
        return Answer("no buffer: without balancing it would stay 0", "dropped")
    return Answer(feature.asked)


def grouped(feature: Feature, job: Job) -> Answer | None:
    """torchtitan's groups count by their two best experts."""
    experts = [job.spec(arm).num_experts for arm in ARMS]
    experts += [job.twin.core.num_experts] if job.twin.core else []
    groups = job.twin.n_group or 1
    if groups == 1:
        return Answer(feature.asked)
    if any(e is not None and e // groups < 2 for e in experts):
        return None
    if all(job.spec(arm).router_correction_bias for arm in ARMS):
        return Answer(feature.asked)
    return Answer(f"{groups}, a group counts by its two best experts, not by its best", "otherwise")


def emit(job: Job) -> Emission:
    """The package `NAME/`.

    Raises:
        BadInput: the name is taken, or a width cannot be computed or split.
    """
    check(job)
    package = {
        f"{job.name}/{file}": text(f"torchtitan/{file}") for file in ("__init__.py", "config_registry.py", "model.py")
    }
    pair = json.dumps(described(job), indent=2) + "\n"
    files: dict[str, Content] = {**package, f"{job.name}/pair.json": pair}
    train: dict[Arm, tuple[str, ...]] = {
        arm: ("-m", "torchtitan.train", "--module", job.name, "--config", arm) for arm in ARMS
    }
    notes = [
        "text and tokenizer are yours: --hf_assets_path FOLDER --dataloader.dataset_path FOLDER (defaults: tokenizer, "
        "data), and the tokenizer's ids have to be below the vocabulary",
        "the FLOP meter counts executed layers (6 per active parameter, attention over the whole square)",
        "experts compute in bfloat16 whatever the model does, as everywhere in torchtitan",
    ]
    if job.training.balance != "none" and job.twin.is_moe:
        notes.append("the bias of a looped layer moves by the load of all its visits")
    return Emission(files, train, tuple(notes))


def check(job: Job) -> None:
    """Names that cannot be imported, widths that cannot be computed."""
    problems = taken(job.name, OCCUPIED)
    for arm in ARMS:
        problems += [f"{arm}: {problem}" for problem in misfits(job.spec(arm), job)]
    if problems:
        raise BadInput("torchtitan cannot run this pair so", *problems)


def misfits(spec: ModelSpec, job: Job) -> list[str]:
    """What of one arm torchtitan's kernels or its tensor parallelism do not take."""
    found = []
    tensor = job.layout.tensor if job.layout else 1
    expert = job.layout.expert if job.layout else 1
    if tensor > 1 and spec.qk_norm == "full":
        found.append(f"qk_norm full norms all heads at once, and --tensor-parallel {tensor} splits them")
    if tensor > 1 and job.training.context % tensor:
        found.append(f"context {job.training.context} does not divide by tensor {tensor}")
    widths = {"intermediate_size": spec.intermediate_size, "shared_expert_intermediate_size": None}
    if spec.num_experts is not None:
        widths["shared_expert_intermediate_size"] = spec.shared_expert_intermediate_size
        routed = {"hidden_size": spec.hidden_size, "moe_intermediate_size": spec.moe_intermediate_size}
        found += [
            f"{name} {size} is no multiple of {GRANULE}" for name, size in routed.items() if (size or 0) % GRANULE
        ]
        if expert == 1:
            widths["moe_intermediate_size"] = spec.moe_intermediate_size
        experts = {spec.num_experts, (spec.core.num_experts if spec.core else None) or spec.num_experts}
        if 1 in experts and spec.shared_expert_intermediate_size is not None:
            found.append("one expert is a dense layer, and a dense layer has no shared expert in torchtitan")
    found += [
        f"{name} {size} does not divide by tensor {tensor}" for name, size in widths.items() if (size or 0) % tensor
    ]
    return found


def described(job: Job) -> dict[str, Any]:
    """What `pair.json` holds."""
    training, layout = job.training, job.layout
    return {
        "name": job.name,
        "training": {
            "context": training.context,
            "steps": training.steps,
            "batch_sequences": training.batch_sequences,
            "rate": dict(zip(ARMS, training.rates, strict=True)),
            "warmup_steps": training.warmup_steps,
            "decay_share": training.decay_share,
            "weight_decay": training.weight_decay,
            "betas": list(training.betas),
            "epsilon": training.epsilon,
            "clip": training.clip,
        },
        "layout": {
            "sequences_per_pass": sequences_per_pass(job),
            "tensor": layout.tensor if layout else 1,
            "expert": layout.expert if layout else 1,
            "compile": layout is not None,
        },
        **{arm: architecture(job.spec(arm), job) for arm in ARMS},
    }


def sequences_per_pass(job: Job) -> int:
    """The most that divide a rank's share of the batch; 1 where the ranks are not known."""
    if job.layout is None:
        return 1
    share = job.training.batch_sequences // job.layout.data
    return max(n for n in range(1, MOST_SEQUENCES + 1) if share % n == 0)


def architecture(spec: ModelSpec, job: Job) -> dict[str, Any]:
    """One arm, its layers as runs of equal ones."""
    loop, context = spec.loop, job.training.context
    rotating = int((spec.head_dim or 0) * spec.partial_rotary_factor)
    return {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope": {
            "dim": rotating,
            "theta": spec.rope_theta,
            "interleaved": spec.rope_interleave,
            "max_seq_len": max(context, spec.max_position_embeddings or context),
        },
        "embedding_multiplier": spec.embedding_multiplier,
        "logits_scaling": spec.logits_scaling,
        "loop": {"start": loop.start, "stop": loop.stop, "visits": loop.visits}
        if loop
        else {"start": 0, "stop": 0, "visits": 1},
        "effective_depth": spec.effective_depth,
        "router": {
            "score": spec.scoring_func,
            "renormalise": spec.norm_topk_prob,
            "factor": spec.routed_scaling_factor,
            "groups": spec.n_group if (spec.n_group or 1) > 1 else None,
            "kept_groups": spec.topk_group if (spec.n_group or 1) > 1 else None,
            "bias_step": None if job.training.balance == "none" else job.training.bias_step or None,
        },
        "layers": [layers(spec, run) for run in unfold(spec)],
    }


def layers(spec: ModelSpec, run: Run) -> dict[str, Any]:
    """A run of equal layers; one expert is a dense layer (rule C7)."""
    a, ffn = run.layer.attention, run.layer.ffn
    assert isinstance(a, GroupedQuery)
    scale = spec.loop.residual_scale if spec.loop and run.section == "core" else 1.0
    dense = ffn if isinstance(ffn, Dense) else None if ffn.has_router else Dense(ffn.width, bias=False)
    return {
        "layers": run.layers,
        "residual_scale": scale * spec.residual_multiplier,
        "attention": {
            "query_heads": a.query_heads,
            "kv_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "scale": a.head_dim**-0.5 if spec.attention_multiplier is None else spec.attention_multiplier,
            "bias": a.bias,
            "output_bias": a.output_bias,
            "qk_norm": a.qk_norm,
        },
        "window": windowed(run.layer.window),
        "feed_forward": None if dense is None else {"width": dense.width, "bias": dense.bias},
        "moe": mixture(ffn) if isinstance(ffn, MoE) and dense is None else None,
    }


def windowed(window: Window | None) -> list[Any] | None:
    """Kind and size."""
    return None if window is None else ["chunked" if window.chunked else "sliding", window.size]


def mixture(m: MoE) -> dict[str, Any]:
    """The experts of a layer."""
    shared = None if m.shared is None else {"width": m.shared, "bias": m.shared_bias, "gated": m.shared_gate}
    return {"experts": m.experts, "top_k": m.top_k, "width": m.width, "shared": shared}


TORCHTITAN = Target(
    name="torchtitan",
    title="torchtitan: an importable package",
    tested="torchtitan 0.3.0 with torch 2.13",
    needs="torchtitan, triton, torch 2.14 (its trainer does not run on 2.13)",
    emit=emit,
    answer=answer,
    parallel=frozenset({"data", "tensor", "expert"}),
)
