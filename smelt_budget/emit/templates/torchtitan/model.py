# SPDX-License-Identifier: Apache-2.0
"""A looped Mixture-of-Experts transformer on torchtitan's Qwen3 (arXiv 2609.01343, section 1).

    layers 0 .. start-1 once,  [start, stop) `visits` times as a block,  stop .. L-1 once
    x = x + s attention(norm(x));  x = x + s ffn(norm(x))        s < 1 in the looped block, on every visit

Layers are stored once and only the order of `Model.forward` is new, so FSDP, tensor and expert parallelism, compilation
and activation checkpointing are torchtitan's own. The baseline is the same class with one visit. Shapes are read from
`pair.json`; `model_config` turns one arm of it into torchtitan's configs.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import spmd_types as spmd
import torch
from torch import nn

from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.attention import (
    GQAttention,
    QKVLinear,
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
    get_fixed_block_mask_mod,
    get_sliding_window_mask_mod,
)
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
)
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.sharding import ShardingConfig


class FrontHalves(CosSinRoPE):
    """Rotates the first `dim` elements of a head, i with i + dim/2."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """Nothing of its own."""

    def forward(self, query, key, positions=None):
        return rotate_front(super().forward, self.config.dim, query, key, positions)


class FrontPairs(ComplexRoPE):
    """Rotates the first `dim` elements of a head, 2i with 2i + 1."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """Nothing of its own."""

    def forward(self, query, key, positions=None):
        return rotate_front(super().forward, self.config.dim, query, key, positions)


def rotate_front(rotate, dim, query, key, positions):
    """What lies behind the rotating elements passes."""
    if dim == query.shape[-1]:
        return rotate(query, key, positions)
    turned = rotate(query[..., :dim], key[..., :dim], positions)
    return tuple(torch.cat((t, x[..., dim:]), -1) for t, x in zip(turned, (query, key), strict=True))


class NormedQKV(QKVLinear):
    """Queries and keys normed over all heads at once (OLMoE). Not for tensor parallelism, which splits the heads."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        """The two norms."""

        q_norm: RMSNorm.Config
        k_norm: RMSNorm.Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.q_norm = config.q_norm.build()
        self.k_norm = config.k_norm.build()

    def forward(self, x):
        q, k, v = super().forward(x)
        return self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k), v


class Attention(GQAttention):
    """Grouped-query attention with its own factor on the scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        """The factor."""

        scale: float

    def __init__(self, config: Config):
        super().__init__(config)
        self.scaling = config.scale


class Block(Qwen3TransformerBlock):
    """One physical layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        """What Qwen3's block does not say."""

        residual_scale: float
        window: tuple[str, int] | None
        """("sliding", positions seen) or ("chunked", positions of a chunk)."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.residual_scale = config.residual_scale
        self.mask = mask_name(config.window)

    def forward(self, x, attention_masks, positions=None):
        s = self.residual_scale
        x = x + s * self.attention(self.attention_norm(x), attention_masks[self.mask], positions)
        ffn = self.moe if self.moe_enabled else self.feed_forward
        return x + s * ffn(self.ffn_norm(x))


class Model(Qwen3Model):
    """Walks the layers in the order of their visits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """Which layers run how often."""

        start: int
        stop: int
        visits: int
        embedding_multiplier: float
        logits_scaling: float

        def order(self) -> list[int]:
            """Every execution of a layer, in order of time."""
            layers = list(range(len(self.layers)))
            core = layers[self.start : self.stop] * self.visits
            return [*layers[: self.start], *core, *layers[self.stop :]]

        def update_from_config(self, *, config, **kwargs) -> None:
            """Sharding of what Qwen3 does not have."""
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            parallelism = config.parallelism
            replicated = ShardingConfig(state_shardings={"weight": dense_param_placement(tp=spmd.R)})
            for layer in self.layers:
                qkv = layer.attention.qkv_linear
                if isinstance(qkv, NormedQKV.Config):
                    if parallelism.tensor_parallel_degree > 1:
                        raise NotImplementedError("qk-norm over all heads, and tensor parallelism splits them")
                    qkv.q_norm.sharding_config = qkv.k_norm.sharding_config = replicated
                gate = getattr(layer.moe and layer.moe.shared_experts, "gate", None)
                if gate is not None:
                    into = dense_activation_placement(tp=spmd.R)
                    sequence = dense_sequence_parallel_placement() if parallelism.enable_sequence_parallel else into
                    gate.sharding_config = ShardingConfig(
                        state_shardings=replicated.state_shardings, out_src_shardings=into, out_dst_shardings=sequence
                    )

        def get_nparams_and_flops(self, model, seq_len: int) -> tuple[int, int]:
            """Parameters stored, each once; training FLOPs per token over the layers executed.

            As torchtitan's own meter: 6 for each active parameter but the input embedding, and attention over the
            whole square; windows shorten it.
            """
            flops = 6 * (counted(model.norm) + counted(model.lm_head))
            for i, times in Counter(self.order()).items():
                layer, block = self.layers[i], model.layers[str(i)]
                active = counted(block)
                if layer.moe is not None:
                    experts = counted(block.moe.routed_experts)
                    active -= experts - experts * layer.moe.router.top_k // layer.moe.num_experts
                seen = seq_len if layer.window is None else min(seq_len, layer.window[1])
                heads = layer.attention.n_heads * 2 * layer.attention.head_dim
                flops += times * 6 * (active + heads * seen)
            return counted(model), flops

    def forward(self, tokens, positions=None, attention_masks=None):
        h = self.tok_embeddings(tokens) * self.config.embedding_multiplier
        for i in self.config.order():
            h = self.layers[str(i)](h, attention_masks, positions)
        h = self.norm(h) / self.config.logits_scaling
        return h if self._skip_lm_head else self.lm_head(h)

    def get_attention_masks(self, positions):
        """One mask for each kind of window: tokens see their own document, backwards."""
        own = [get_causal_mask_mod(), get_efficient_causal_mask_mod_for_packed_document(positions)]
        limits = {"sliding": get_sliding_window_mask_mod, "chunked": get_fixed_block_mask_mod}
        masks = {}
        for layer in self.config.layers:
            limit = [] if layer.window is None else [limits[layer.window[0]](layer.window[1])]
            name = mask_name(layer.window)
            if name not in masks:
                masks[name] = self._create_flex_attention_mask(positions, layer.attention, own + limit)
        return masks


def mask_name(window: tuple[str, int] | None) -> str:
    """Layers with equal windows share a mask."""
    return "full" if window is None else f"{window[0]} {window[1]}"


def counted(module: nn.Module) -> int:
    """Elements of all parameters, shared ones once."""
    return sum(p.numel() for p in module.parameters())


def model_config(arm: dict[str, Any]) -> Model.Config:
    """One arm of `pair.json`."""
    H, V = arm["hidden_size"], arm["vocab_size"]
    tied = arm["tie_word_embeddings"]
    return Model.Config(
        dim=H,
        vocab_size=V,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=V, embedding_dim=H, param_init={"weight": skip_param_init if tied else drawn(1.0)}
        ),
        norm=norm(arm, H),
        lm_head=linear(H, V),
        layers=[block(arm, run) for run in arm["layers"] for _ in range(run["layers"])],
        start=arm["loop"]["start"],
        stop=arm["loop"]["stop"],
        visits=arm["loop"]["visits"],
        embedding_multiplier=arm["embedding_multiplier"],
        logits_scaling=arm["logits_scaling"],
    )


def block(arm: dict[str, Any], run: dict[str, Any]) -> Block.Config:
    """One layer of a run of equal ones."""
    H, back = arm["hidden_size"], (2 * arm["effective_depth"]) ** -0.5
    ffn, moe = run["feed_forward"], run["moe"]
    return Block.Config(
        attention_norm=norm(arm, H),
        ffn_norm=norm(arm, H),
        attention=attention(arm, run["attention"], back),
        feed_forward=None if ffn is None else feed_forward(H, ffn["width"], ffn["bias"], back),
        moe=None if moe is None else mixture(arm, moe, back),
        residual_scale=run["residual_scale"],
        window=None if run["window"] is None else tuple(run["window"]),
    )


def attention(arm: dict[str, Any], a: dict[str, Any], back: float) -> Attention.Config:
    """Grouped-query attention, its norms and its rotary positions."""
    H, n, g, d = arm["hidden_size"], a["query_heads"], a["kv_heads"], a["head_dim"]
    rope, kind = arm["rope"], {"none": None, "head": norm(arm, d), "full": None}[a["qk_norm"]]
    projections: dict[str, Any] = {
        "head_dim": d,
        "wq": linear(H, n * d, bias=a["bias"]),
        "wkv": linear(H, g * d, bias=a["bias"]),
    }
    if a["qk_norm"] == "full":
        qkv = NormedQKV.Config(**projections, q_norm=norm(arm, n * d), k_norm=norm(arm, g * d))
    else:
        qkv = QKVLinear.Config(**projections)
    rotation = FrontPairs if rope["interleaved"] else FrontHalves
    return Attention.Config(
        dim=H,
        n_heads=n,
        n_kv_heads=g,
        head_dim=d,
        qkv_linear=qkv,
        wo=back_in(n * d, H, back, a["output_bias"]),
        qk_norm=kind,
        inner_attention=get_attention_config("flex"),
        rope=rotation.Config(dim=rope["dim"], max_seq_len=rope["max_seq_len"], theta=rope["theta"]),
        scale=a["scale"],
    )


def feed_forward(H: int, F: int, bias: bool, back: float, gated: bool = False) -> FeedForward.Config:
    """Gate, up and down (w1, w3, w2)."""
    matrices = {"w1": linear(H, F, bias=bias), "w2": back_in(F, H, back, bias), "w3": linear(H, F, bias=bias)}
    return SigmoidGatedFeedForward.Config(**matrices, gate=linear(H, 1)) if gated else FeedForward.Config(**matrices)


def mixture(arm: dict[str, Any], m: dict[str, Any], back: float):
    """Router, routed experts, and perhaps a shared one."""
    H, E, K, F, router = arm["hidden_size"], m["experts"], m["top_k"], m["width"], arm["router"]
    shared = m["shared"]
    return make_moe_config(
        num_experts=E,
        load_balance_coeff=router["bias_step"],
        router=make_router_config(
            dim=H,
            num_experts=E,
            gate_param_init={"weight": drawn(H**-0.5)},
            top_k=K,
            score_func=router["score"],
            route_norm=router["renormalise"],
            route_scale=router["factor"],
            num_expert_groups=router["groups"],
            num_limited_groups=router["kept_groups"],
        ),
        routed_experts=make_routed_experts_config(
            dim=H,
            hidden_dim=F,
            num_experts=E,
            top_k=K,
            param_init={"w1_EFD": drawn(H**-0.5), "w2_EDF": drawn(back * F**-0.5), "w3_EFD": drawn(H**-0.5)},
            comm_backend="standard",
        ),
        shared_experts=None
        if shared is None
        else feed_forward(H, shared["width"], shared["bias"], back, shared["gated"]),
    )


def linear(fan_in: int, fan_out: int, factor: float = 1.0, bias: bool = False, kind=Linear) -> Linear.Config:
    """A matrix drawn with standard deviation factor / sqrt(fan-in)."""
    init = {"weight": drawn(factor * fan_in**-0.5), "bias": nn.init.zeros_}
    return kind.Config(in_features=fan_in, out_features=fan_out, bias=bias, param_init=init)


def back_in(fan_in: int, fan_out: int, factor: float, bias: bool) -> Linear.Config:
    """A matrix into the residual stream. Tensor ranks add up what they have, each its part of the bias."""
    return linear(fan_in, fan_out, factor, bias, ScaledBiasRowwiseLinear if bias else Linear)


def drawn(std: float):
    """Normal, mean 0."""
    return partial(nn.init.normal_, std=std)


def norm(arm: dict[str, Any], size: int) -> RMSNorm.Config:
    """Gains of 1."""
    return RMSNorm.Config(normalized_shape=size, eps=arm["rms_norm_eps"], param_init={"weight": nn.init.ones_})


def balance(optimizers, model_parts, parallel_dims) -> None:
    """torchtitan's bias update, for the layers of each expert count on their own: it stacks their counts.

    A looped layer's counts are added up over its visits. Does nothing where `load_balance_coeff` is None.
    """
    for part in model_parts:
        for experts in {block.moe.router.num_experts for block in part.layers.values() if block.moe_enabled}:
            alike = nn.Module()
            alike.layers = nn.ModuleDict(
                {
                    name: block
                    for name, block in part.layers.items()
                    if block.moe_enabled and block.moe.router.num_experts == experts
                }
            )
            register_moe_load_balancing_hook(optimizers, [alike], parallel_dims)


class Names(Qwen3StateDictAdapter):
    """Weights under the names of Hugging Face's qwen3_moe, each layer once; what that lacks, as its kin spell it."""

    def __init__(self, model_config, hf_assets_path):
        super().__init__(model_config, hf_assets_path)
        self.parts = {}
        for i, layer in enumerate(model_config.layers):
            experts = layer.moe.num_experts if layer.moe is not None else 0
            if experts not in self.parts:
                self.parts[experts] = Part(model_config.enable_weight_tying and not self.parts)
            self.parts[experts].take(str(i), layer)
        if model_config.enable_weight_tying and self.fqn_to_index_mapping:
            self.fqn_to_index_mapping.pop("lm_head.weight", None)

    def part(self, layer: str | None):
        """The adapter of a layer; what is in no layer goes with the first."""
        return next(part for part in self.parts.values() if layer is None or layer in part.owned)

    def sorted(self, weights: dict[str, Any], at: int):
        """Each part and its share of the weights; `at` is where a name says its layer."""
        shares = {id(part): (part, {}) for part in self.parts.values()}
        for name, weight in weights.items():
            words = name.split(".")
            layer = words[at] if "layers" in words else None
            shares[id(self.part(layer))][1][name] = weight
        return shares.values()

    def to_hf(self, state_dict):
        """A router's bias is written once it has moved."""
        moved = {k: v for k, v in state_dict.items() if not k.endswith("expert_bias_E") or bool((v != 0).any())}
        return {k: v for part, share in self.sorted(moved, 1) for k, v in part.to_hf(share).items()}

    def from_hf(self, hf_state_dict):
        return {k: v for part, share in self.sorted(hf_state_dict, 2) for k, v in part.from_hf(share).items()}


class Part(Qwen3StateDictAdapter):
    """Layers with equally many experts, which is what torchtitan's adapter takes."""

    def __init__(self, tied: bool):
        super().__init__(SimpleNamespace(layers=[], enable_weight_tying=tied), None)
        self.owned: set[str] = set()
        hf, titan = "model.layers.{}.", "layers.{}."
        for name in ("q", "k", "v", "o"):
            of = "attention.wo" if name == "o" else f"attention.qkv_linear.w{name}"
            self.from_hf_map[f"{hf}self_attn.{name}_proj.bias"] = f"{titan}{of}.bias"
        for name, of in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            self.from_hf_map[f"{hf}mlp.{name}_proj.bias"] = f"{titan}feed_forward.{of}.bias"
            for kind in ("weight", "bias"):
                shared = f"{hf}mlp.shared_expert.{name}_proj.{kind}"
                self.from_hf_map[shared] = f"{titan}moe.shared_experts.{of}.{kind}"
        self.from_hf_map[f"{hf}mlp.shared_expert_gate.weight"] = f"{titan}moe.shared_experts.gate.weight"
        self.from_hf_map[f"{hf}mlp.gate.e_score_correction_bias"] = f"{titan}moe.expert_bias_E"

    def take(self, name: str, layer) -> None:
        """One more layer."""
        self.owned.add(name)
        self.model_config.layers.append(layer)
        if isinstance(layer.attention.qkv_linear, NormedQKV.Config):
            for kind in ("q", "k"):
                hf = f"model.layers.{{}}.self_attn.{kind}_norm.weight"
                self.from_hf_map[hf] = f"layers.{{}}.attention.qkv_linear.{kind}_norm.weight"

    def _validate_hf_rope_config(self, expected_rope_cls):
        """Heads lie as the model rotates them, in pairs too."""
