"""Which model do Megatron's arguments describe? Flags of megatron-core 0.19 to one spec.

Where a flag is absent, Megatron's default holds if it is a definition (`--moe-ffn-hidden-size` falls back to
`--ffn-hidden-size`: said) or a function without weights; a width that would come from a default is an error (rule C1).
Flags that change no weight are listed; any other is refused by name.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NoReturn

from smelt_budget.errors import BadInput
from smelt_budget.spec.config import MOST_LAYERS, Fields
from smelt_budget.spec.megatron_text import Flags, flags_of_text, flags_of_yaml, is_yaml_of_arguments, recognised
from smelt_budget.spec.model import ModelSpec, checked

__all__ = ["Flags", "Read", "flags_of_text", "flags_of_yaml", "is_yaml_of_arguments", "recognised", "spec_of"]

LISTED = (files("smelt_budget.spec") / "megatron_harmless.txt").read_text(encoding="utf-8")
HARMLESS = frozenset(name for line in LISTED.splitlines() if not line.startswith("#") for name in line.split())
UNLIKE = {
    "activation-func-clamp-value": "the experts' inputs are clamped; here they are not",
    "apply-residual-connection-post-layernorm": "the residual is taken after the norm; here before it",
    "glu-linear-offset": "an offset on the linear branch of the MLPs; here there is none",
    "moe-apply-probs-on-input": "experts' inputs are weighted; here their outputs",
    "mup-attn-scale-power": "muP's attention scale is not built",
    "no-rope-freq": "some layers do not rotate; here all do",
    "qk-l2-norm": "queries and keys are brought to unit length; here they are not",
    "quick-geglu": "the gate is quick-gelu; here it is silu",
    "use-mup": "muP's multipliers are not built",
}
"""Functions without weights that the torch model does otherwise."""
LLAMA3_FACTOR = 8.0
"""megatron-core 0.19 does not pass --rope-scaling-factor on, so its model's default holds."""
LATENT_EPS = 1e-6


@dataclass
class Read:
    """A spec, and what to say about the reading."""

    spec: ModelSpec
    notes: list[str] = field(default_factory=list)
    harmless: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()


class Arguments:
    """Flags being read: which were taken, so that what is left can be judged."""

    def __init__(self, flags: Flags, origin: str):
        self.flags, self.origin = flags, origin
        self.taken: set[str] = set()
        self.notes: list[str] = []
        self.functions: list[str] = []

    def fail(self, what: str, *more: str) -> NoReturn:
        """Raise with the file named."""
        raise BadInput(f"{self.origin}: {what}", *more)

    def has(self, name: str) -> bool:
        """A switch."""
        self.taken.add(name)
        values = self.flags.get(name)
        if values:
            self.fail(f"--{name} takes no value, and stands with {' '.join(values)!r:.60}")
        return values is not None

    def word(self, name: str, default: str | None = None) -> str | None:
        """One value, as it is written."""
        self.taken.add(name)
        values = self.flags.get(name)
        if values is None:
            return default
        if len(values) != 1:
            self.fail(f"--{name} takes one value, not {' '.join(values)!r:.60}")
        if "$" in values[0]:
            self.fail(f"--{name} is {values[0]!r:.60}, which this file does not set", "fix: write the number")
        return values[0]

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number."""
        word = self.word(name)
        if word is None or word.lower() == "none":
            return default
        if not (word.isascii() and word.isdigit()) or len(word) > 18:
            self.fail(f"--{name} is {word!r:.40}, not a whole number")
        return int(word)

    def width(self, name: str, why: str = "") -> int:
        """A whole number that has to be there."""
        value = self.whole(name)
        if value is None:
            self.fail(f"--{name} is missing, and never guessed{why}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number of a function without weights."""
        word = self.word(name)
        if word is None:
            return default
        try:
            return float(word)
        except ValueError:
            self.fail(f"--{name} is {word!r:.40}, not a number")


def spec_of(flags: Flags, origin: str) -> Read:
    """The model.

    Raises:
        BadInput: a width is missing, or a flag is not understood; nothing is guessed.
    """
    a = Arguments(flags, origin)
    layers = a.width("num-layers")
    if not 1 <= layers <= MOST_LAYERS:
        a.fail(f"--num-layers is {layers}, not between 1 and {MOST_LAYERS}")
    norm = a.word("normalization", "LayerNorm")
    if norm not in ("LayerNorm", "RMSNorm"):
        a.fail(f"--normalization is {norm!r:.40}, not LayerNorm or RMSNorm")
    fields: Fields = {
        "hidden_size": a.width("hidden-size"),
        "num_hidden_layers": layers,
        "vocab_size": vocabulary(a),
        "max_position_embeddings": a.whole("max-position-embeddings"),
        "tie_word_embeddings": not a.has("untie-embeddings-and-output-weights"),
        "norm": "rms_norm" if norm == "RMSNorm" else "layer_norm",
        "rms_norm_eps": a.number("norm-epsilon", 1e-5),
    }
    fields |= attention(a, fields)
    fields |= positions(a, fields) | windows(a, layers) | ffn(a, layers)
    plain_spec(a)
    if a.whole("mtp-num-layers"):
        a.notes.append("mtp-num-layers: multi-token-prediction layers are not part of the main model, not counted")
    harmless = leftover(a)
    return Read(checked(fields, origin), a.notes, harmless, tuple(a.functions))


def vocabulary(a: Arguments) -> int:
    """Rows of the embedding: as given, or padded the way Megatron pads."""
    padded, size = a.whole("padded-vocab-size"), a.whole("vocab-size")
    multiple = (a.whole("make-vocab-size-divisible-by") or 128) * (a.whole("tensor-model-parallel-size") or 1)
    if padded is not None:
        return padded
    if size is None:
        a.fail(
            "--vocab-size is missing: Megatron asks the tokenizer, which is not read here",
            "fix: add --padded-vocab-size with the rows of the embedding",
        )
    if a.flags.get("tokenizer-type", ["NullTokenizer"]) != ["NullTokenizer"]:
        a.notes.append(f"the vocabulary is --vocab-size {size}; Megatron asks its tokenizer")
    rows = -(-size // multiple) * multiple
    if rows != size:
        a.notes.append(f"vocab-size {size} is padded to {rows} rows, the next multiple of {multiple}")
    return rows


def attention(a: Arguments, fields: Fields) -> Fields:
    """Grouped-query heads, or latents; biases are everywhere unless they are switched off."""
    biased = not a.has("disable-bias-linear")
    qkv, normed = a.has("add-qkv-bias") or biased, a.has("qk-layernorm")
    heads = {"num_attention_heads": a.width("num-attention-heads")}
    kind = a.word("softmax-type", "vanilla")
    if a.has("multi-latent-attention"):
        if biased or qkv or kind != "vanilla":
            a.fail("latent attention with biases or --softmax-type is not described by a spec")
        return heads | latent(a, normed, fields)
    if normed and fields["norm"] != "rms_norm":
        a.fail("--qk-layernorm under LayerNorm has biases, which a spec does not")
    groups = a.whole("num-query-groups")
    if a.has("group-query-attention"):
        if groups is None:
            a.fail("--num-query-groups is missing, and never guessed (Megatron would take 1)")
    elif groups is not None:
        a.notes.append(f"num-query-groups {groups} is ignored, as Megatron does without --group-query-attention")
        groups = None
    if kind not in ("vanilla", "learnable"):
        a.functions.append(f"softmax-type is {kind!r:.40}, which is not built")
    return heads | {
        "num_key_value_heads": groups,
        "head_dim": a.whole("kv-channels"),
        "attention_bias": qkv,
        "attention_output_bias": biased,
        "mlp_bias": biased,
        "qk_norm": "head" if normed else "none",
        "attention_sinks": kind == "learnable",
    }


def latent(a: Arguments, normed: bool, fields: Fields) -> Fields:
    """DeepSeek's attention; Megatron's class has defaults for its widths, which are not this model's."""
    compressed = a.whole("q-lora-rank")
    if not normed or compressed is None:
        a.fail(
            "latent attention without --qk-layernorm or --q-lora-rank has other norms than a spec describes",
            "fix: add both, or describe the model in own YAML",
        )
    if fields["rms_norm_eps"] != LATENT_EPS:
        a.functions.append(f"norm-epsilon {fields['rms_norm_eps']:g} holds for the latents too; here theirs is 1e-6")
    for name in ("group-query-attention", "num-query-groups", "kv-channels"):
        a.taken.add(name)
    return {
        "q_lora_rank": compressed,
        "kv_lora_rank": a.width("kv-lora-rank"),
        "qk_nope_head_dim": a.width("qk-head-dim"),
        "qk_rope_head_dim": a.width("qk-pos-emb-head-dim"),
        "v_head_dim": a.width("v-head-dim"),
    }


def positions(a: Arguments, fields: Fields) -> Fields:
    """Rotary positions; learned ones are weights that a spec does not have."""
    kind = a.word("position-embedding-type", "learned_absolute")
    old = a.has("use-rotary-position-embeddings")
    a.has("no-position-embedding")
    if kind == "learned_absolute" and not old:
        a.fail("learned positions are weights that a spec does not have", "fix: --position-embedding-type rope")
    if kind not in ("rope", "learned_absolute"):
        a.functions.append(f"position-embedding-type is {kind!r:.40}; here positions rotate unstretched")
    if a.word("rope-type", "rope") != "rope" and a.number("rotary-scaling-factor", 1.0) != 1:
        a.functions.append("rope-type is yarn, which is not read; positions rotate unstretched")
    a.taken.add("rotary-scaling-factor")
    interpolated, llama = a.whole("rotary-seq-len-interpolation-factor"), a.has("use-rope-scaling")
    a.number("rope-scaling-factor", LLAMA3_FACTOR)
    scaling: Fields | None = None
    if llama:
        scaling = {"rope_type": "llama3", "factor": LLAMA3_FACTOR, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling |= {"original_max_position_embeddings": 8192}
    elif interpolated is not None:
        scaling = {"rope_type": "linear", "factor": float(interpolated)}
    latent_attention = fields.get("kv_lora_rank") is not None  # whose neighbours rotate together, flag or not
    interleaved = a.has("rotary-interleaved") or latent_attention
    return {
        "rope_theta": a.number("rotary-base", 10_000.0),
        "partial_rotary_factor": a.number("rotary-percent", 1.0),
        "rope_interleave": interleaved,
        "rope_scaling": scaling,
    }


def windows(a: Arguments, layers: int) -> Fields:
    """`--window-size BEFORE,AFTER` counts neighbours; a spec counts the position itself too."""
    word, every = a.word("window-size"), a.word("window-attn-skip-freq")
    if word is None:
        return {}
    parts = word.strip("()[] ").split(",")
    if len(parts) != 2 or not parts[0].strip().isdigit() or parts[1].strip() != "0":
        a.fail(f"--window-size is {word!r:.40}, not BEFORE,0: a window that a decoder can see")
    fields: Fields = {"sliding_window": int(parts[0]) + 1}
    if every is None:
        return fields
    skip = pattern(a, "window-attn-skip-freq", every)
    windowed = [bool((i + 1) % skip) for i in range(layers)] if isinstance(skip, int) else [bool(x) for x in skip]
    if len(windowed) != layers:
        a.fail(f"--window-attn-skip-freq lists {len(windowed)} layers, --num-layers is {layers}")
    return fields | {"layer_types": tuple("sliding_attention" if one else "full_attention" for one in windowed)}


def ffn(a: Arguments, layers: int) -> Fields:
    """Gated MLPs, routed experts, and which layers have which."""
    if not (a.has("swiglu") or "quick-geglu" in a.flags):
        a.fail("without --swiglu the MLP has no gate, and is not counted here")
    biased = "disable-bias-linear" not in a.flags
    dense, experts = a.whole("ffn-hidden-size"), a.whole("num-experts")
    if not experts:
        if dense is None:
            a.fail("--ffn-hidden-size is missing, and never guessed")
        return {"intermediate_size": dense}
    if experts == 1:
        a.fail("--num-experts 1 has a router in Megatron, and none in a spec (rule C7)", "fix: leave it out")
    width = a.whole("moe-ffn-hidden-size")
    if width is None and dense is not None:
        width = dense
        a.notes.append(f"moe-ffn-hidden-size is left out: Megatron takes --ffn-hidden-size, {dense}")
    if width is None:
        a.fail("--moe-ffn-hidden-size is missing, and so is --ffn-hidden-size that it falls back to")
    freq = pattern(a, "moe-layer-freq", a.word("moe-layer-freq", "1") or "1")
    moe = [i % freq == 0 for i in range(layers)] if isinstance(freq, int) else [bool(x) for x in freq]
    if len(moe) != layers:
        a.fail(f"--moe-layer-freq lists {len(moe)} layers, --num-layers is {layers}")
    plain = tuple(i for i, one in enumerate(moe) if not one)
    if plain and dense is None:
        a.fail("--ffn-hidden-size is missing: some layers are dense, and their width is never guessed")
    return {
        "num_experts": experts,
        "num_experts_per_tok": a.width("moe-router-topk"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": a.whole("moe-shared-expert-intermediate-size"),
        "shared_expert_gate": a.has("moe-shared-expert-gate"),
        "mlp_only_layers": plain,
        "intermediate_size": dense if plain else None,
        "router_bias": biased,
        "expert_bias": biased,
    } | routing(a)


def routing(a: Arguments) -> Fields:
    """How experts are chosen: renormalised unless a softmax comes before the choice."""
    score = a.word("moe-router-score-function", "softmax")
    if score not in ("softmax", "sigmoid"):
        a.functions.append(f"moe-router-score-function is {score!r:.40}; here it is sigmoid")
        score = "sigmoid"
    groups = a.whole("moe-router-num-groups")
    return {
        "scoring_func": score,
        "norm_topk_prob": not a.has("moe-router-pre-softmax") or score == "sigmoid",
        "routed_scaling_factor": a.number("moe-router-topk-scaling-factor", 1.0),
        "router_correction_bias": a.has("moe-router-enable-expert-bias"),
        "n_group": groups,
        "topk_group": a.whole("moe-router-group-topk") if groups else None,
    }


def pattern(a: Arguments, name: str, word: str) -> int | list[int]:
    """An interval, or a list written out or as sums and multiples of lists: `([0]*1+[1]*11)`."""
    try:
        value = evaluated(ast.parse(word, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        a.fail(f"--{name} is {word!r:.60}, not a number or a list of 0 and 1")
    if isinstance(value, int) and value < 1:
        a.fail(f"--{name} is {value}, and has to be at least 1")
    return value


def evaluated(node: ast.AST) -> Any:
    """Lists of 0 and 1, `+` and `*`; everything else is a ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MOST_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        items = [evaluated(item) for item in node.elts]
        if all(item in (0, 1) for item in items):
            return items
    if isinstance(node, ast.BinOp):
        left, right = evaluated(node.left), evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            times, items = (right, left) if isinstance(left, list) else (left, right)
            if times * len(items) <= MOST_LAYERS:
                return items * times
    raise ValueError


def plain_spec(a: Arguments) -> None:
    """`--spec` replaces the layers; of ours only the baseline's leaves them as the flags say."""
    a.taken.add("spec")
    values = a.flags.get("spec")
    if values in (None, ["smelt_layers", "baseline"], ["local"]):
        return
    fix = "fix: read the pair that was emitted" if values[:1] == ["smelt_layers"] else "fix: own YAML"
    a.fail(f"--spec {' '.join(values)!r:.60} replaces the layers, and is not read", fix)


def leftover(a: Arguments) -> tuple[str, ...]:
    """The harmless flags; raises with every other."""
    left = {name for name in a.flags if name not in a.taken}
    for name in sorted(left & UNLIKE.keys()):
        a.functions.append(f"{name}: {UNLIKE[name]}")
    harmful = sorted(left - HARMLESS - UNLIKE.keys())
    if harmful:
        a.fail(
            "flags that could change the architecture and are not understood",
            *(f"--{name} {' '.join(a.flags[name])}".rstrip()[:100] for name in harmful),
            "fix: remove the flag if it changes no width, count or layer; otherwise describe the model in own YAML",
        )
    return tuple(sorted(left & HARMLESS))
