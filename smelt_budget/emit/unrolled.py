"""Plain directories for engines that know no loop: the core's layers written out once a visit, its scale folded in.

    x + s f(x)  is  x + f'(x)        f' has s W in o_proj and down_proj; exact where s is a power of 2

qwen3_moe where heads are normed, mixtral where not. What these classes cannot hold is refused by name. Every visit has
weights of its own there, so training such a model unties the copies: it is for inference and evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smelt_budget.emit.features import Feature
from smelt_budget.emit.hf import rope
from smelt_budget.emit.target import ARMS, Answer, Content, Emission, Job, Target
from smelt_budget.emit.weights import (
    RANDOM,
    Tensors,
    Unit,
    contents,
    has_corrections,
    homes,
    mapping,
    of_run,
    opened,
    put,
    skeleton,
    source,
)
from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec

MIXTRAL = {"mlp.gate.": "block_sparse_moe.gate.", "mlp.experts.": "block_sparse_moe.experts."} | {
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
}
"""Our spelling, mixtral's."""


def family(spec: ModelSpec) -> str:
    """The plain class."""
    return "qwen3_moe" if spec.qk_norm == "head" else "mixtral"


def order(spec: ModelSpec) -> list[int]:
    """The stored layer that each executed one is."""
    layers, loop = list(range(spec.num_hidden_layers)), spec.loop
    if loop is None:
        return layers
    return layers[: loop.start] + layers[loop.start : loop.stop] * loop.visits + layers[loop.stop :]


def factor(spec: ModelSpec, layer: int) -> float:
    """What both branches of a layer are multiplied by."""
    loop = spec.loop
    looped = loop.residual_scale if loop and loop.start <= layer < loop.stop else 1.0
    return looped * spec.residual_multiplier


def config(spec: ModelSpec, context: int) -> dict[str, Any]:
    """`config.json` of one arm; rotary positions and experts also under the names of transformers 4."""
    told, plain = rope(spec), family(spec)
    fields: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if plain == "qwen3_moe" else "MixtralForCausalLM"],
        "model_type": plain,
        "dtype": "float32",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.effective_depth,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position_embeddings or context,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": told,
        "rope_theta": told["rope_theta"],
        "tie_word_embeddings": spec.tie_word_embeddings,
        "num_local_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "sliding_window": spec.sliding_window,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "use_cache": True,
    }
    if spec.rope_scaling is not None:
        fields["rope_scaling"] = {key: value for key, value in told.items() if key != "rope_theta"}
    if plain == "mixtral":
        return fields | {"intermediate_size": spec.moe_intermediate_size}
    return fields | {
        "num_experts": spec.num_experts,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "intermediate_size": spec.intermediate_size or spec.moe_intermediate_size,
        "mlp_only_layers": [slot for slot, layer in enumerate(order(spec)) if layer in spec.mlp_only_layers],
        "decoder_sparse_step": 1,
        "norm_topk_prob": spec.norm_topk_prob,
        "attention_bias": spec.attention_bias,
        "use_sliding_window": spec.sliding_window is not None,
        "max_window_layers": 0,
    }


def files(job: Job) -> Emission:
    """A directory for each arm."""
    job, notes = of_run(job)
    made: dict[str, Content] = {}
    for arm in ARMS:
        spec = job.spec(arm)
        if spec.num_experts == 1:
            raise BadInput(f"{arm}: one expert without a router has no place in {family(spec)}")
        made[f"{arm}/config.json"] = json.dumps(config(spec, job.training.context), indent=2) + "\n"
        made[f"{arm}/generation_config.json"] = json.dumps({"do_sample": False, "use_cache": True}, indent=2) + "\n"
        units = [] if job.weights is None else source(job, arm)
        if job.weights != RANDOM and has_corrections(units):
            raise BadInput(f"{arm}: its routers were balanced by corrections, which {family(spec)} has not")
        if units:
            units = [copy for unit in units if not has_corrections([unit]) for copy in copies(spec, unit)]
            made |= {f"{arm}/{name}": content for name, content in contents(units).items()}
    return Emission(made, notes=(*notes, *NOTES[job.weights is None]))


NOTES = {
    False: ("for inference and evaluation: training it unties the copies of the core's layers",),
    True: (
        "without --weights there are configs only; weights of its own class would have no residual scale",
        "for inference and evaluation: training it unties the copies of the core's layers",
    ),
}


def copies(spec: ModelSpec, unit: Unit) -> list[Unit]:
    """A unit of a looped model as those of the plain one, one for each visit."""
    layer = layer_of(unit.names[0])
    slots = [None] if layer is None else [slot for slot, stored in enumerate(order(spec)) if stored == layer]
    return [unit.renamed(to_plain(spec, slot), scale(spec)) for slot in slots]


def layer_of(name: str) -> int | None:
    """The layer that a name on disk belongs to."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


def to_plain(spec: ModelSpec, slot: int | None) -> Callable[[str], str]:
    """Our name on disk as the plain class's, in an executed layer."""

    def plain(name: str) -> str:
        if slot is None:
            return name
        rest = name.split(".", 3)[3]
        if family(spec) == "mixtral" and rest.startswith("mlp."):
            for ours, theirs in MIXTRAL.items():
                rest = rest.replace(ours, theirs)
        return f"model.layers.{slot}.{rest}"

    return plain


def scale(spec: ModelSpec) -> Callable[[str], float]:
    """What is folded into a tensor of that name."""

    def folded(name: str) -> float:
        layer = layer_of(name)
        back = ".o_proj." in name or ".down_proj." in name
        return factor(spec, layer) if layer is not None and back else 1.0

    return folded


def from_unrolled(folder: Path, spec: ModelSpec, out: Path) -> None:
    """A plain directory as a folder that our model loads, if the copies of each layer are still one layer.

    Raises:
        BadInput: it is another model, its weights are not whole, a layer's copies differ, or `out` is taken.
    """
    from smelt_budget.model.weights import named

    told, want = mapping(folder / "config.json"), config(spec, 1)
    for key in ("model_type", "num_hidden_layers", "hidden_size"):
        if told.get(key) != want[key]:
            raise BadInput(
                f"{folder / 'config.json'} has {key} {told.get(key)!r:.40}; unrolled, this one has {want[key]}"
            )
    found = opened(folder)
    model, units, wanted = skeleton(spec), list[Unit](), set[str]()
    for name, tensor, names in homes(model):
        if name.endswith("e_score_correction_bias"):
            continue
        unit = Unit(names, 4 * tensor.numel(), dict)
        visits = copies(spec, unit)
        wanted |= {n for visit in visits for n in visit.names}
        units.append(Unit(names, unit.bytes, merged(spec, names, [visit.names for visit in visits], found)))
    problems = [*named("missing", sorted(wanted - found.keys())), *named("unknown", sorted(found.keys() - wanted))]
    if problems:
        raise BadInput(f"the weights in {folder} are not this model's, unrolled", *problems)
    put(out, {"spec.json": json.dumps(spec.compact(), indent=1), **contents(units)})


def merged(
    spec: ModelSpec, names: tuple[str, ...], visits: list[tuple[str, ...]], found: dict[str, Any]
) -> Callable[[], Tensors]:
    """What reads the copies, compares them and takes the factor out again."""

    def make() -> Tensors:
        import torch

        tensors = {}
        for ours, *plain in zip(names, *visits, strict=True):
            first, *others = (found[name].get_tensor(name) for name in plain)
            if not all(torch.equal(first, other) for other in others):
                raise BadInput(
                    f"layer {layer_of(ours)}: its {len(plain)} copies differ ({', '.join(plain[:3])})",
                    "was it trained unrolled? what was one layer is then several, and no looped model",
                )
            tensors[ours] = first / scale(spec)(ours)
        return tensors

    return make


def answer(feature: Feature, job: Job) -> Answer | None:
    """What the plain class holds as it is, otherwise, or not at all."""
    spec, plain = job.twin, family(job.twin)
    qwen, written_out = plain == "qwen3_moe", Answer(f"written out: {job.twin.effective_depth} layers", "otherwise")
    usual = set(spec.layer_types or ()) <= {"full_attention" if spec.sliding_window is None else "sliding_attention"}
    same_bias = qwen and spec.attention_bias == spec.attention_output_bias
    asked = Answer(feature.asked)
    held: dict[str, Answer | None] = {
        "loop": written_out,
        "residual_scale": Answer("folded into o_proj and down_proj", "otherwise"),
        "residual_multiplier": Answer("folded into o_proj and down_proj", "otherwise"),
        "vocab_size": asked,
        "init": asked if job.weights == RANDOM else Answer("not of a plain config", "dropped"),
        "qk_norm": None if spec.qk_norm == "full" else Answer(f"{feature.asked}, as {plain} has it"),
        "tie_word_embeddings": asked,
        "attention_bias": asked if same_bias else None,
        "attention_output_bias": asked if same_bias else None,
        "sliding_window": asked if usual else None,
        "layer_types": asked if usual else None,
        "mlp_only_layers": asked if qwen else None,
        "norm_topk_prob": asked if qwen else None,
        "rope_scaling": asked,
    }
    if feature.key in ("schedule", "z") or feature.key.startswith("balance."):
        return Answer("not for training", "dropped")
    return held.get(feature.key)


HF_UNROLLED = Target(
    name="hf-unrolled",
    title="Plain qwen3_moe or mixtral, for vLLM, SGLang, llama.cpp and evaluation harnesses",
    tested="transformers 5.12.1, 5.19.0, 5.24.0",
    needs="what reads Hugging Face's qwen3_moe or mixtral",
    emit=files,
    answer=answer,
    takes_weights=True,
    parallel=frozenset(),
)
