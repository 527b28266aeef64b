"""Which functions without weights does a config.json ask for? Rotary positions, epsilons, how experts are chosen.

They change no count, so unlike widths they have defaults: where the file is silent, the family's class in
transformers 5.24 speaks (rule C20). What the torch model does differently is said by `Config.unlike`, one line each.
"""

from __future__ import annotations

from typing import Any

from smelt_budget.spec.config import EXPERTS, Config, Fields

SILU = ("silu", "swish")
UNSTRETCHED = (None, "default", "mrope")  # text alone has one position per token, where mrope is plain
LAYER_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
STRETCHED = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
"""What each kind of stretching reads (transformers 5.24, modeling_rope_utils.py)."""
OUTSIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""What may stand beside the nested mappings too."""


def shared(c: Config, *, theta: float = 10_000.0, eps: float = 1e-6, **rope: Any) -> Fields:
    """What every family has: activation, epsilon, rotary positions, with the class's defaults."""
    activation = c.take("hidden_act", SILU[0])
    if activation not in SILU:
        c.unlike(f"hidden_act is {activation!r:.40}; the gate here is silu")
    return {"rms_norm_eps": c.number("rms_norm_eps", eps)} | rotary(c, theta, **rope)


def rotary(
    c: Config, theta: float, *, partial: float | None = None, interleave: bool = False, stretched: Fields | None = None
) -> Fields:
    """Rotary positions from `rope_parameters`, `rope_scaling` and the keys beside them, which have to agree.

    Args:
        theta: the class's default base.
        partial: the class's default share of the head that rotates; `None` where the class rotates all of it.
        interleave: whether neighbours rotate together.
        stretched: the class's own stretching where the file has neither mapping (gpt-oss).
    """
    rope = Rope(c, stretched)
    share = rope.number("partial_rotary_factor", 1.0 if partial is None else partial)
    if partial is None and share != 1:
        c.unlike(f"partial_rotary_factor is {share:g}, which this family's class does not read: the whole head rotates")
        share = 1.0
    return {
        "rope_theta": rope.number("rope_theta", theta),
        "rope_scaling": rope.scaling(),
        "partial_rotary_factor": share,
        "rope_interleave": interleave,
    }


class Rope:
    """The mappings that say how positions rotate, read as one."""

    def __init__(self, c: Config, stretched: Fields | None):
        self.c = c
        found = {name: self.block(name) for name in ("rope_parameters", "rope_scaling")}
        self.blocks = {name: block for name, block in found.items() if block is not None}
        if not self.blocks and stretched is not None:
            self.blocks = {"the class's default": stretched}
        self.blocks["this file"] = {key: c.data.get(key) for key in OUTSIDE}
        c.taken.update(OUTSIDE)
        known = {key for keys in STRETCHED.values() for key in keys} | {*OUTSIDE, "rope_type", "type", "mrope_section"}
        stray = sorted({key for block in self.blocks.values() for key in block} - known)
        if stray and self.kind() in (*UNSTRETCHED, *STRETCHED):
            c.unlike(f"not read from the rotary settings: {', '.join(stray):.120}")

    def block(self, name: str) -> Fields | None:
        """One mapping; of several, one for each layer type, full attention's, and it is said where they differ."""
        value = self.c.take(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.c.fail(f"{name} is {value!r:.40}, not a mapping")
        kinds = [inner for key, inner in value.items() if key in LAYER_KINDS and isinstance(inner, dict)]
        if not kinds:
            return value
        if any(kind != kinds[0] for kind in kinds):
            self.c.unlike(f"{name} differs by layer type; here all layers rotate alike")
        return value["full_attention"] if isinstance(value.get("full_attention"), dict) else kinds[0]

    def value(self, key: str, default: Any) -> Any:
        """What the mappings and the file say of one key; two values are an error."""
        said = {name: block[key] for name, block in self.blocks.items() if block.get(key) is not None}
        if any(value != next(iter(said.values())) for value in said.values()):
            self.c.fail(", ".join(f"{key} of {name} is {value!r:.40}" for name, value in said.items()) + ": which?")
        return next(iter(said.values()), default)

    def number(self, key: str, default: Any) -> Any:
        """A number; whole numbers too become floats."""
        value = self.value(key, default)
        return value if value is None else self.c.as_number(key, value)

    def kind(self) -> str | None:
        """`rope_type`, or `type` as older files spell it; of both in one mapping the first holds, as in the class."""
        said = {name: block.get("rope_type") or block.get("type") for name, block in self.blocks.items()}
        said = {name: kind for name, kind in said.items() if kind is not None}
        if len(set(map(repr, said.values()))) > 1:
            self.c.fail(", ".join(f"rope_type of {name} is {kind!r:.40}" for name, kind in said.items()) + ": which?")
        kind = next(iter(said.values()), None)
        if kind is not None and not isinstance(kind, str):
            self.c.fail(f"rope_type is {kind!r:.40}, not text")
        return kind

    def scaling(self) -> Fields | None:
        """The fields of `RopeScaling`; `None` for plain positions and for what the torch model does not have."""
        kind = self.kind()
        if kind in UNSTRETCHED:
            return None
        if kind not in STRETCHED:
            self.c.unlike(f"rope_type {kind!r:.40} is not built; positions rotate unstretched")
            return None
        fields: Fields = {"rope_type": kind}
        for key in STRETCHED[kind]:
            if key == "truncate":
                fields[key] = self.value(key, True)
            elif key == "original_max_position_embeddings":
                fields[key] = self.value(key, self.c.data.get("max_position_embeddings"))
            else:
                fields[key] = self.number(key, None)
        if fields["factor"] is None:
            fields["factor"] = self.implied_factor(kind)
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            if key in fields:
                fields[key] = fields[key] or default  # 0 too means the default, as in the class
        return fields

    def implied_factor(self, kind: str) -> float:
        """yarn without a factor: context over original context (transformers 5.24)."""
        context, before = self.c.data.get("max_position_embeddings"), self.value(OUTSIDE[2], None)
        if kind != "yarn" or type(context) is not int or type(before) is not int or before < 1:
            self.c.fail(f"rope_type {kind} needs a factor")
        return context / before


def softmax(c: Config, *, norm: bool) -> Fields:
    """Softmax scores; `norm`: the class's default for dividing the chosen ones by their sum."""
    return {"scoring_func": "softmax", "norm_topk_prob": c.flag("norm_topk_prob", norm)}


def softmax_of_chosen() -> Fields:
    """Always divided by their sum (Mixtral), which equals a softmax over the chosen logits only (gpt-oss, Granite)."""
    return {"scoring_func": "softmax", "norm_topk_prob": True}


def sigmoid(c: Config, *, scale: float, groups: tuple[int, int] | None = None) -> Fields:
    """DeepSeek-V3's router (arXiv:2412.19437, 2.1.2) with the class's defaults; `None`: the class has no groups."""
    expects(c, "scoring_func", "sigmoid")
    fields = {"scoring_func": "sigmoid", "router_correction_bias": True}
    if groups is None:
        return fields | {"norm_topk_prob": True, "routed_scaling_factor": scale}
    expects(c, "topk_method", "noaux_tc")
    return (
        fields
        | {"norm_topk_prob": c.flag("norm_topk_prob", True)}
        | {"routed_scaling_factor": c.number("routed_scaling_factor", scale)}
        | grouped(c, *groups)
    )


def greedy(c: Config) -> Fields:
    """DeepSeek-V2's router: softmax, groups only by `topk_method`, scores scaled and, in the class, never divided."""
    expects(c, "scoring_func", "softmax")
    if c.flag("norm_topk_prob", False):
        c.unlike("norm_topk_prob is true, which this family's class does not read: scores are not divided")
    fields = {"norm_topk_prob": False, "routed_scaling_factor": c.number("routed_scaling_factor", 1.0)}
    method = c.take("topk_method", "greedy")
    if method == "group_limited_greedy":
        return fields | grouped(c, None, None)
    if method != "greedy":
        c.unlike(f"topk_method is {method!r:.40}; here the best experts of all are chosen")
    c.taken.update(("n_group", "topk_group"))
    return fields


def grouped(c: Config, groups: int | None, chosen: int | None) -> Fields:
    """Groups of experts with the class's defaults; an explicit null, and 1, mean none."""
    if "n_group" in c.data:
        groups = c.whole("n_group", None)
    elif groups is not None and c.one_of(EXPERTS) % groups:
        c.unlike(f"n_group is missing and the class's {groups} does not divide the experts; here there are no groups")
        groups = None
    chosen = c.whole("topk_group", None) if "topk_group" in c.data else chosen
    c.taken.update(("n_group", "topk_group"))
    return {} if groups in (None, 0, 1) else {"n_group": groups, "topk_group": chosen}


def expects(c: Config, key: str, only: str) -> None:
    """A key whose one meaning is built into the family's class; another value is said, not followed."""
    value = c.take(key, only)
    if value != only:
        c.unlike(f"{key} is {value!r:.40}; this family's class does {only}")


def multipliers(c: Config) -> Fields:
    """Granite's four factors; where the file is silent its class scales attention by 1, not 1 / sqrt(head_dim)."""
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return {name: c.number(name, 1.0) for name in names}


def clipped(c: Config) -> None:
    """Queries, keys and values clamped (DBRX, OLMoE); said, not built."""
    limit = c.take("clip_qkv", None)
    if limit is not None:
        c.unlike(f"clip_qkv is {limit!r:.40}; here queries, keys and values are not clipped")
