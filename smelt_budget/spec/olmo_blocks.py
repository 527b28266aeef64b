"""What does one block of an OLMo-core config say? Under the names of a spec, with window and scales beside them.

OLMo-core leaves out what is None, and takes an absent `bias` as true (nn/attention, nn/feed_forward.py,
nn/layer_norm.py, nn/lm_head.py of ai2-olmo-core 3.0.0); that is said. A missing width is an error, although the classes
have defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from smelt_budget.spec.config import Config, Fields

WRITTEN = ("_CLASS_", "type")
"""What OLMo-core writes beside the fields."""
HARMLESS = {
    "model": "dtype init_method init_seed init_std embedding_init_std freeze_params",
    "block": "",
    "attention": "dropout use_flash backend dtype mxfp8_projections mxfp8_qkv_projection mxfp8_out_projection "
    "use_recompute_qkv_prep mxfp8_save_qkv_for_backward",
    "rope": "full_precision",
    "norm": "full_precision dtype",
    "feed_forward": "dtype",
    "experts": "lb_loss_weight lb_loss_granularity z_loss_weight scale_loss_by_num_layers dtype capacity_factor",
    "router": "dtype jitter_eps",
    "lm_head": "dtype loss_implementation",
}
"""By config: what changes no width, count or layer."""
RMS = ("rms", "qwen_rms", "cute_rms", "fused_rms", "nemotron_rms")
BLOCKS = {
    # name: norms a layer, and what it does otherwise than ours, if anything
    "default": (2, None),
    "moe": (2, None),
    "peri_norm": (4, None),
    "reordered_norm": (2, "norms stand behind the branches"),
    "moe_reordered_norm": (2, "norms stand behind the branches"),
    "default_scaled": (2, "norms are scaled by depth"),
}


@dataclass
class Told:
    """What is gathered on the way."""

    notes: list[str] = field(default_factory=list)
    harmless: set[str] = field(default_factory=set)
    functions: list[str] = field(default_factory=list)

    def unlike(self, what: str) -> None:
        """A function without weights that the torch model does otherwise."""
        if what not in self.functions:
            self.functions.append(what)

    def note(self, what: str) -> None:
        """Said always, once."""
        if what not in self.notes:
            self.notes.append(what)

    def finish(self, c: Config, kind: str) -> None:
        """Nothing may be left that could change a count."""
        left = [key for key in c.leftover() if key not in WRITTEN]
        harmless = HARMLESS[kind].split()
        unknown = [key for key in left if key not in harmless]
        if unknown:
            c.fail(f"{', '.join(unknown)} is not read here; it could change a count, so it is not skipped")
        self.harmless.update(f"{kind}.{key}" for key in left)


def layer(c: Config, told: Told) -> Fields:
    """A block: its mixer, norms and FFN."""
    name = c.take("name", "default")
    if name not in BLOCKS:
        c.fail(f"the block {name!r:.40} is not one of {', '.join(BLOCKS)}")
    norms, unlike = BLOCKS[name]
    if unlike:
        told.unlike(unlike)
    c.take("dropout", None)
    mixer = c.inner("attention" if "attention" in c.data else "sequence_mixer")
    moe = name.startswith("moe")
    found = {
        "norms_per_layer": norms,
        "dense": not moe,
        "attention_scale": c.number("attention_residual_alpha", 1.0),
        "ffn_scale": c.number("feed_forward_residual_alpha", 1.0),
        **attention(mixer, told),
        **normalisation(c.inner("layer_norm"), told),
        **(experts(c.inner("feed_forward_moe"), told) if moe else dense(c.inner("feed_forward"), told)),
    }
    told.finish(c, "block")
    return found


def attention(c: Config, told: Told) -> Fields:
    """Grouped-query attention; another mixer is refused by its name."""
    kind = c.data.get("type", "attention"), str(c.data.get("_CLASS_", "AttentionConfig")).rpartition(".")[2]
    if kind != ("attention", "AttentionConfig"):
        c.fail(f"the sequence mixer {kind[1]:.60} ({kind[0]!r:.40}) is not attention")
    if c.take("name", "default") not in ("default", "fused", "fused_v2"):
        c.fail(f"attention {c.data['name']!r:.40} is not one of default, fused_v2")
    for key in ("gate", "scalable_softmax", "qk_norm_per_head_gains"):
        if c.take(key, None):
            c.fail(f"{key} has weights that no spec holds")
    if c.take("clip_qkv", None) is not None:
        told.unlike("queries, keys and values are clipped")
    bias = absent_is_true(c, "bias", told)
    found = {
        "num_attention_heads": c.whole("n_heads"),
        "num_key_value_heads": c.whole("n_kv_heads", None),
        "head_dim": c.whole("head_dim", None),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "attention_sinks": c.flag("attention_sinks", False),
        "qk_norm": qk_norm(c, told),
        "window": c.take("sliding_window", None),
        **rotary(c, told),
    }
    told.finish(c, "attention")
    return found


def qk_norm(c: Config, told: Told) -> str:
    """By head or over all heads, root mean square without a bias."""
    by_head = c.flag("use_head_qk_norm", False)
    if c.take("qk_norm", None) is None:
        return "none"
    if normalisation(c.inner("qk_norm"), told)["norm"] != "rms_norm":
        c.fail("qk_norm is not a root mean square norm without bias")
    return "head" if by_head else "full"


def rotary(c: Config, told: Told) -> Fields:
    """Rotary positions."""
    if c.take("rope", None) is None:
        told.unlike("layers without positions")
        return {"rope_theta": 10_000.0}
    rope = c.inner("rope")
    name = rope.take("name", "default")
    if name not in ("default", "fused", "complex"):
        rope.fail(f"name is {name!r:.40}, not one of default, fused, complex")
    if rope.flag("no_global_rope", False):
        told.unlike("layers without positions")
    found = {
        "rope_theta": rope.number("theta", 500_000.0),
        "partial_rotary_factor": rope.number("partial_rotary_factor", 1.0),
        "rope_interleave": name == "complex",
        "rope_scaling": None if rope.take("scaling", None) is None else scaling(rope.inner("scaling"), told),
    }
    told.finish(rope, "rope")
    return found


def scaling(c: Config, told: Told) -> Fields:
    """How frequencies are stretched (nn/rope.py)."""
    kind = str(c.data.get("_CLASS_", "")).rpartition(".")[2]
    if c.number("attention_rescale_factor", 1.0) != 1:
        told.unlike("attention is rescaled with the positions")
    if kind == "PIRoPEScalingConfig":
        return {"rope_type": "linear", "factor": c.number("factor", 2.0)}
    if kind == "StepwiseRoPEScalingConfig":
        low, high = c.number("low_freq_proportion", 0.0), c.number("high_freq_proportion", 0.25)
        if not 0 <= low < 1 or high <= 0:
            c.fail(f"proportions of {low:g} and {high:g} are no bands of frequencies")
        return {
            "rope_type": "llama3",
            "factor": c.number("factor", 32.0),
            "low_freq_factor": 1 / (1 - low),
            "high_freq_factor": 1 / high,
            "original_max_position_embeddings": c.whole("old_context_len", 8192),
        }
    if kind == "YaRNRoPEScalingConfig":
        told.unlike("yarn's last stretched dimension")
        return {
            "rope_type": "yarn",
            "factor": c.number("factor", 8.0),
            "beta_fast": c.number("beta_fast", 32.0),
            "beta_slow": c.number("beta_slow", 1.0),
            "original_max_position_embeddings": c.whole("old_context_len", 8192),
        }
    return c.fail(f"the scaling {kind:.60} is not one of PI, Stepwise, YaRN")


def normalisation(c: Config, told: Told) -> Fields:
    """Which norm, and its epsilon."""
    name = c.take("name", "default")
    if name not in (*RMS, "default"):
        c.fail(f"the norm {name!r:.40} is not one of default, {', '.join(RMS)}")
    if not c.flag("elementwise_affine", True):
        c.fail("a norm without gains is not counted here")
    bias = absent_is_true(c, "bias", told)
    if name in RMS and bias:
        c.fail(f"{name} with a bias: a spec's root mean square norm has none; say bias: false")
    if name == "nemotron_rms":
        told.unlike("norm gains are around 0, not 1")
    eps = c.number("eps", 1e-5)
    told.finish(c, "norm")
    return {"norm": "rms_norm" if name in RMS else "layer_norm" if bias else "layer_norm_no_bias", "eps": eps}


def dense(c: Config, told: Told) -> Fields:
    """A gated MLP."""
    if c.take("name", "default") != "default":
        c.fail(f"feed_forward {c.data['name']!r:.40} is not default")
    if c.take("activation", "silu") != "silu":
        told.unlike(f"the activation {c.data['activation']!r:.40}")
    found = {"intermediate_size": c.whole("hidden_size"), "mlp_bias": absent_is_true(c, "bias", told)}
    told.finish(c, "feed_forward")
    return found


def experts(c: Config, told: Told) -> Fields:
    """Routed experts, and perhaps a shared one, which OLMo-core's own class averages with them."""
    if c.take("name", "default") not in ("default", "dropless"):
        c.fail(f"feed_forward_moe {c.data['name']!r:.40} is not one of default, dropless")
    if c.data.get("name", "default") == "default":
        told.unlike("tokens beyond an expert's capacity are dropped")
    if c.take("latent_moe", None) is not None:
        c.fail("latent_moe has weights that no spec holds")
    summed = "routed_scale" in c.data  # of the class that emit writes
    found: Fields = {
        "num_experts": c.whole("num_experts"),
        "moe_intermediate_size": c.whole("hidden_size"),
        "routed_scaling_factor": c.number("routed_scale", 1.0),
        **router(c.inner("router"), told),
    }
    if c.take("shared_mlp", None) is not None:
        shared = dense(c.inner("shared_mlp"), told)
        found |= {
            "shared_expert_intermediate_size": shared["intermediate_size"],
            "mlp_bias": shared["mlp_bias"],
        }
        if not summed:
            told.unlike("the shared expert is averaged with the routed ones")
    told.finish(c, "experts")
    return found


def router(c: Config, told: Told) -> Fields:
    """How experts are chosen and weighted."""
    if c.take("name", "default") != "default":
        c.fail(f"the router {c.data['name']!r:.40} is not default")
    for key in ("uniform_expert_assignment", "random_expert_assignment"):
        if c.flag(key, False):
            told.unlike(key.replace("_", " "))
    score, power = c.take("gating_function", "softmax"), c.take("normalize_expert_weights", None)
    if score not in ("softmax", "sigmoid"):
        c.fail(f"gating_function is {score!r:.40}, not softmax or sigmoid")
    if power not in (None, 1):
        told.unlike(f"experts' weights are divided by their {power!r:.20}-norm")
    found = {
        "num_experts_per_tok": c.whole("top_k"),
        "scoring_func": score,
        "norm_topk_prob": power is not None,
        "router_correction_bias": c.take("bias_gamma", None) is not None,
    }
    told.finish(c, "router")
    return found


def absent_is_true(c: Config, key: str, told: Told) -> bool:
    """OLMo-core's own meaning of a bias that is not written down."""
    if c.data.get(key) is None:
        told.note(f"{c.origin}: {key} is absent, which OLMo-core takes as true")
    return c.flag(key, True)
