"""What does an OLMo-core config describe? Its JSON (`TransformerConfig.as_config_dict`), alone or under `model`.

    d_model, n_layers, vocab_size             the stream
    block, block_pattern, block_overrides     one config for each layer
    loop_start, loop_stop, loop_visits        of the classes that `emit --to olmo-core` writes

Layers have to be alike but for what a spec can vary; anything else is refused by name. Each block is read by
olmo_blocks.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smelt_budget.spec.config import MOST_LAYERS, Config, Fields
from smelt_budget.spec.model import ModelSpec, checked
from smelt_budget.spec.olmo_blocks import Told, absent_is_true, layer, normalisation


@dataclass
class Found:
    """A spec, and what is to be said about it."""

    spec: ModelSpec
    notes: tuple[str, ...]
    harmless: tuple[str, ...]
    functions: tuple[str, ...]


def recognised(data: dict[str, Any]) -> bool:
    """Whether this is a TransformerConfig, or holds one under `model`."""
    inner = data.get("model")
    shaped = data if "d_model" in data else inner if isinstance(inner, dict) else {}
    return {"d_model", "n_layers"} <= shaped.keys() and "model_type" not in shaped


def spec_of(data: dict[str, Any], origin: str) -> Found:
    """The spec of a config.

    Raises:
        BadInput: something is missing or cannot be held exactly.
    """
    told, context = Told(), None
    if "d_model" not in data:
        told.note(f"{origin}: read model of an OLMo-core experiment; its data and training are not counted")
        context = trained_length(data)
        data, origin = data["model"], f"{origin} model"
    c = Config(data, origin)
    if c.take("name", "default") not in ("default", "moe"):
        c.fail(f"the transformer {c.data['name']!r:.40} is not one of default, moe")
    layers, loop = c.whole("n_layers"), looped(c)
    if not 1 <= layers <= MOST_LAYERS:
        c.fail(f"n_layers is {layers}, not between 1 and {MOST_LAYERS}")
    read = [layer(Config(block, f"{origin} block"), told) for block in blocks(c, layers)]
    fields: Fields = {
        "hidden_size": c.whole("d_model"),
        "num_hidden_layers": layers,
        "vocab_size": c.whole("vocab_size"),
        "max_position_embeddings": context,
        "tie_word_embeddings": c.flag("tie_word_embeddings", False),
        "embedding_multiplier": c.number("embed_scale", 1.0),
        **headed(c.inner("lm_head"), told),
    }
    if c.take("embedding_norm", None) is not None:
        c.fail("embedding_norm has no place in a spec")
    told.finish(c, "model")
    fields |= together(c, read, loop)
    if fields.pop("norm") != fields.pop("final_norm"):
        c.fail("lm_head.layer_norm is another normalisation than the blocks'")
    fields["norm"], fields["rms_norm_eps"] = normed(read, fields.pop("final_eps"), told)
    spec = checked({key: value for key, value in fields.items() if value is not None}, origin)
    return Found(spec, tuple(told.notes), tuple(sorted(told.harmless)), tuple(told.functions))


def trained_length(data: dict[str, Any]) -> int | None:
    """The longest sequence that the experiment trains on."""
    module, dataset = data.get("train_module"), data.get("dataset")
    found = [
        part[key]
        for part, key in ((module, "max_sequence_length"), (dataset, "sequence_length"))
        if isinstance(part, dict) and type(part.get(key)) is int
    ]
    return max(found, default=None)


def looped(c: Config) -> tuple[range, int]:
    """The core and its visits, where the config is one that `emit` wrote."""
    start, stop, visits = c.whole("loop_start", 0), c.whole("loop_stop", 0), c.whole("loop_visits", 1)
    return range(start, stop) if visits > 1 else range(0), visits


def blocks(c: Config, layers: int) -> list[dict[str, Any]]:
    """The config of each layer (nn/transformer/config.py, resolve_block_configs)."""
    block, pattern = c.take("block"), c.items("block_pattern")
    overrides = c.take("block_overrides", {})
    if not isinstance(block, dict) or not isinstance(overrides, dict):
        c.fail("block and block_overrides have to be mappings")
    if any(key in block for key in ("sequence_mixer", "attention", "name")):
        if pattern is not None:
            c.fail("block_pattern with a single block")
        found = [block] * layers
    else:
        if pattern is None or any(name not in block for name in pattern) or not pattern:
            c.fail("block holds several, and block_pattern does not say which layer has which")
        found = [block[pattern[i % len(pattern)]] for i in range(layers)]
    for key, own in overrides.items():
        if not str(key).isdigit() or int(key) >= layers:
            c.fail(f"block_overrides names layer {key!r:.20} of {layers}")
        found[int(key)] = own
    if not all(isinstance(own, dict) for own in found):
        c.fail("a block is not a mapping")
    return found


def headed(c: Config, told: Told) -> Fields:
    """The final norm and the lm-head."""
    if c.take("name", "default") != "default":
        c.fail(f"the lm-head {c.data['name']!r:.40} is not default")
    norm = normalisation(c.inner("layer_norm"), told)
    found = {
        "lm_head_bias": absent_is_true(c, "bias", told),
        "final_norm": norm["norm"],
        "final_eps": norm["eps"],
    }
    told.finish(c, "lm_head")
    return found


VARIED = ("dense", "window", "attention_scale", "ffn_scale", "eps")
"""What differs from layer to layer, beside what a core may have of its own."""
OF_DENSE = ("intermediate_size",)
OF_EXPERTS = (
    "num_experts",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "num_experts_per_tok",
    "scoring_func",
    "norm_topk_prob",
    "router_correction_bias",
    "shared_expert_intermediate_size",
)
OF_CORE = ("num_key_value_heads", "num_experts")


def together(c: Config, read: list[Fields], loop: tuple[range, int]) -> Fields:
    """One spec for all layers."""
    core, visits = loop
    outside = [own for i, own in enumerate(read) if i not in core] or read
    inside = [own for i, own in enumerate(read) if i in core]
    fields: Fields = {}
    own_of_core: Fields = {}
    names = dict.fromkeys(name for own in read for name in own if name not in VARIED)
    for name in names:
        values = [own[name] for own in outside if name in own]
        cores = [own[name] for own in inside if name in own]
        if name in OF_CORE and cores and values and len(set(cores)) == 1 and cores[0] != values[0]:
            own_of_core[name] = cores[0]
            cores = []
        fields[name] = the_same(c, name, values + cores)
    if not all(own["dense"] for own in read):
        fields["mlp_only_layers"] = tuple(i for i, own in enumerate(read) if own["dense"])
    fields |= windows(c, [own.pop("window") for own in read])
    fields |= scales(c, read, core, visits)
    if own_of_core:
        fields["core"] = own_of_core
    return fields


def the_same(c: Config, name: str, values: list[Any]) -> Any:
    """A value that all layers share."""
    if any(value != values[0] for value in values):
        shown = ", ".join(dict.fromkeys(f"{value!r:.20}" for value in values))
        c.fail(f"layers differ in {name} ({shown}), which a spec cannot hold")
    return values[0]


def windows(c: Config, found: list[Any]) -> Fields:
    """Which layers see how far (nn/attention, SlidingWindowAttentionConfig)."""
    last, sizes = len(found) - 1, []
    for i, window in enumerate(found):
        if window is None:
            sizes.append(None)
            continue
        w = Config(window if isinstance(window, dict) else {}, f"{c.origin} sliding_window")
        pattern = w.items("pattern")
        if not pattern or any(type(size) is not int or (size < 1 and size != -1) for size in pattern):
            w.fail(f"pattern is {pattern!r:.40}, not window sizes")
        first = w.flag("force_full_attention_on_first_layer", True)
        full = (first and i == 0) or (w.flag("force_full_attention_on_last_layer", True) and i == last)
        size = -1 if full else pattern[(i - first) % len(pattern)]
        sizes.append(None if size == -1 else size)
    given = {size for size in sizes if size is not None}
    if not given:
        return {}
    if len(given) > 1:
        c.fail(f"windows of {', '.join(map(str, sorted(given)))} positions; a spec holds one size")
    kinds = tuple("full_attention" if size is None else "sliding_attention" for size in sizes)
    return {"sliding_window": given.pop(), "layer_types": kinds if None in sizes else None}


def scales(c: Config, read: list[Fields], core: range, visits: int) -> Fields:
    """Factors on the branches: one for all layers, and one more in the core."""
    found = [{own["attention_scale"], own["ffn_scale"]} for own in read]
    outside = set().union(*(own for i, own in enumerate(found) if i not in core)) or {1.0}
    inside = set().union(*(own for i, own in enumerate(found) if i in core)) or set(outside)
    if len(outside) > 1 or len(inside) > 1:
        c.fail("residual alphas differ by branch or layer, which a spec cannot hold")
    plain, in_core = outside.pop(), inside.pop()
    if plain <= 0:
        c.fail(f"a residual alpha of {plain:g} is no factor")
    fields: Fields = {"residual_multiplier": plain}
    if core:
        fields["loop"] = {
            "start": core.start,
            "stop": core.stop,
            "visits": visits,
            "residual_scale": in_core / plain,
        }
    return fields


def normed(read: list[Fields], final_eps: float, told: Told) -> tuple[str, float]:
    """The one normalisation of the model, and its epsilon."""
    eps = {own["eps"] for own in read}
    if eps != {final_eps}:
        told.unlike("epsilons differ between norms")
    return read[0]["norm"], read[0]["eps"]
