# SPDX-License-Identifier: Apache-2.0
"""The looped Mixture-of-Experts decoder for transformers: prelude, core x visits, coda (arXiv:2609.01343, section 1).

    x = x + s attention(norm(x));  x = x + s ffn(norm(x))      s = 1, in the core `loop_residual_scale`

Layers [loop_start, loop_end) run `loop_visits` times as one block. Weights, norms and routers are shared between
visits, keys and values are not: every visit of a layer has a dispatch module of its own, without parameters, that owns
one cache slot. With one visit this is a plain decoder.

B batch, T new tokens, S tokens seen, N = B T, H hidden, n query heads, g key/value heads, d head size, R latent rank,
E experts, K of them a token, F expert width.
"""

import copy
import inspect
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import DynamicCache
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.generation import GenerationMixin
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple

from .configuration_smelt import SmeltConfig

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""What transformers calls the cache: past_key_values up to 5.23, cache from 5.24."""
LATENT_EPS = 1e-6
"""Of the two norms inside latent attention, whatever rms_norm_eps says (DeepSeek)."""
CLAMPED_SLOPE = 1.702
"""Of the gate where `swiglu_limit` clamps it (gpt-oss)."""
MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "chunked_attention": create_chunked_causal_mask,
}


# ---------------------------------------------------------------------------------------------------- positions


def frequencies(config: SmeltConfig, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position for each rotating pair, and the factor that YaRN puts on cosines and sines."""
    rope = config.rope_parameters
    size = int((config.qk_rope_head_dim or config.head_dim) * rope.get("partial_rotary_factor", 1.0))
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        kept = ((turns - low) / max(high - low, 1e-9)).clamp(0, 1)
        return plain / rope["factor"] * (1 - kept) + plain * kept, 1.0
    if kind == "yarn":
        return yarn(plain, rope, size), yarn_factor(rope)
    return plain, 1.0


def yarn(plain: Tensor, rope: dict, size: int) -> Tensor:
    """Pairs that turn less than beta_slow times in the trained context slow down by the factor (arXiv:2309.00071)."""
    trained, theta = rope["original_max_position_embeddings"], rope["rope_theta"]
    first, last = (
        size * math.log(trained / (rope.get(name, turns) * 2 * math.pi)) / (2 * math.log(theta))
        for name, turns in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    step = torch.arange(plain.shape[0], device=plain.device, dtype=torch.float32)
    slow = ((step - first) / max(last - first, 0.001)).clamp(0, 1)
    return plain / rope["factor"] * slow + plain * (1 - slow)


def temperature(factor: float, scale: float) -> float:
    """0.1 m ln(s) + 1 (arXiv:2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def yarn_factor(rope: dict) -> float:
    """Of cosines and sines; where two scales are given it is their ratio (DeepSeek)."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    scale, everywhere = rope.get("mscale"), rope.get("mscale_all_dim")
    if scale and everywhere:
        return temperature(rope["factor"], scale) / temperature(rope["factor"], everywhere)
    return temperature(rope["factor"], 1.0)


def rotate(x_BhTd: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Turn the first elements of each head, in pairs; the rest passes."""
    cos, sin = (angle.to(x_BhTd.dtype)[:, None] for angle in angles)
    turning, passing = x_BhTd.split((2 * cos.shape[-1], x_BhTd.shape[-1] - 2 * cos.shape[-1]), -1)
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((turned, passing), -1)


# ---------------------------------------------------------------------------------------------------- attention


class SmeltRMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * gain, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def stream_norm(config: SmeltConfig) -> nn.Module:
    """The normalisation of the residual stream."""
    if config.norm == "rms_norm":
        return SmeltRMSNorm(config.hidden_size, config.rms_norm_eps)
    return nn.LayerNorm(config.hidden_size, config.rms_norm_eps, bias=config.norm == "layer_norm")


def into_stream(linear: nn.Linear) -> nn.Linear:
    """Mark a matrix that writes into the residual stream: it begins smaller, see `_init_weights`."""
    linear.into_stream = True
    return linear


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, s_aux=None, **_):
    """softmax(q k^T scaling + mask) v, written out. A sink [n] is one more logit that takes mass and gives nothing."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    score = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        score = score + attention_mask[..., : key.shape[-2]]
    score = score.float()
    if s_aux is not None:
        score = torch.cat((score, s_aux.float()[None, :, None, None].expand(*score.shape[:-1], 1)), -1)
    weights = score.softmax(-1)[..., : key.shape[-2]].to(value.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class SmeltVisit(nn.Module):
    """One visit of one layer: where keys and values are kept and queries meet them. It has no parameters."""

    def __init__(self, config: SmeltConfig, slot: int, groups: int, scaling: float, sliding_window: int | None):
        super().__init__()
        self.config, self.layer_idx = config, slot
        self.num_key_value_groups, self.scaling, self.sliding_window = groups, scaling, sliding_window
        self.is_causal = True

    def forward(self, query, key, value, attention_mask, **kwargs):
        """[B, n, T, d], [B, g, S, d] twice -> [B, T, n, d_v], and the weights where they are written out."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        return attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )


class SmeltAttention(nn.Module):
    """n query heads share g key/value heads (arXiv:2305.13245)."""

    def __init__(self, config: SmeltConfig, layer: int, slots: list[int]):
        super().__init__()
        H, n, d = config.hidden_size, config.num_attention_heads, config.head_dim
        g = (config.core_num_key_value_heads if layer in config.core else None) or config.num_key_value_heads
        self.head_dim, self.interleaved, self.qk_norm = d, config.rope_interleave, config.qk_norm
        self.q_proj = nn.Linear(H, n * d, bias=config.attention_bias)
        self.k_proj = nn.Linear(H, g * d, bias=config.attention_bias)
        self.v_proj = nn.Linear(H, g * d, bias=config.attention_bias)
        self.o_proj = into_stream(nn.Linear(n * d, H, bias=config.attention_output_bias))
        if self.qk_norm != "none":
            self.q_norm = SmeltRMSNorm(d if self.qk_norm == "head" else n * d, config.rms_norm_eps)
            self.k_norm = SmeltRMSNorm(d if self.qk_norm == "head" else g * d, config.rms_norm_eps)
        self.sinks = nn.Parameter(torch.zeros(n)) if config.attention_sinks else None
        scaling = d**-0.5 if config.attention_multiplier is None else config.attention_multiplier
        window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        self.visits = nn.ModuleList(SmeltVisit(config, slot, n // g, scaling, window) for slot in slots)

    def forward(self, x, angles, attention_mask, visit, cache=None, **kwargs):
        """[B, T, H] -> [B, T, H], and the weights where they are written out."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = rotate(q, angles, self.interleaved), rotate(k, angles, self.interleaved)
        where = self.visits[visit]
        if cache is not None:
            k, v = cache.update(k, v, where.layer_idx)
        if self.sinks is not None:
            kwargs["s_aux"] = self.sinks
        y, weights = where(q, k, v, attention_mask, **kwargs)
        return self.o_proj(y.flatten(2)), weights


class SmeltLatentAttention(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434): the cache holds a latent [R] and one rotary key a token."""

    def __init__(self, config: SmeltConfig, layer: int, slots: list[int]):
        super().__init__()
        H, n = config.hidden_size, config.num_attention_heads
        R = (config.core_kv_lora_rank if layer in config.core else None) or config.kv_lora_rank
        self.parts, self.values, self.n = (config.qk_nope_head_dim, config.qk_rope_head_dim), config.v_head_dim, n
        self.rank, self.interleaved = R, config.rope_interleave
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(H, n * sum(self.parts), bias=False)
        else:
            self.q_a_proj = nn.Linear(H, config.q_lora_rank, bias=config.attention_bias)
            self.q_a_layernorm = SmeltRMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, n * sum(self.parts), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(H, R + self.parts[1], bias=config.attention_bias)
        self.kv_a_layernorm = SmeltRMSNorm(R, LATENT_EPS)
        self.kv_b_proj = nn.Linear(R, n * (self.parts[0] + self.values), bias=False)
        self.o_proj = into_stream(nn.Linear(n * self.values, H, bias=config.attention_output_bias))
        scaling = sum(self.parts) ** -0.5 if config.attention_multiplier is None else config.attention_multiplier
        rope = config.rope_parameters
        if rope.get("rope_type") == "yarn" and rope.get("mscale_all_dim"):
            scaling *= temperature(rope["factor"], rope["mscale_all_dim"]) ** 2
        window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        self.visits = nn.ModuleList(SmeltVisit(config, slot, 1, scaling, window) for slot in slots)

    def forward(self, x, angles, attention_mask, visit, cache=None, **kwargs):
        """[B, T, H] -> [B, T, H], and the weights where they are written out."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if hasattr(self, "q_a_proj") else self.q_proj(x)
        q_nope, q_rope = q.unflatten(-1, (self.n, -1)).transpose(1, 2).split(self.parts, -1)
        latent, rotary = self.kv_a_proj_with_mqa(x).split((self.rank, self.parts[1]), -1)
        latent, rotary = self.kv_a_layernorm(latent)[:, None], rotary[:, None]
        q_rope, rotary = rotate(q_rope, angles, self.interleaved), rotate(rotary, angles, self.interleaved)
        where = self.visits[visit]
        if cache is not None:
            latent, rotary = cache.update(latent, rotary, where.layer_idx)
        k_nope, v = (
            self.kv_b_proj(latent[:, 0])
            .unflatten(-1, (self.n, -1))
            .transpose(1, 2)
            .split((self.parts[0], self.values), -1)
        )
        q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, rotary.expand(-1, self.n, -1, -1)), -1)
        y, weights = where(q, k, v, attention_mask, **kwargs)
        return self.o_proj(y.flatten(2)), weights


# ---------------------------------------------------------------------------------------------------------- FFN


class SmeltMLP(nn.Module):
    """y = W_down (silu(W_gate x) * (W_up x))   (arXiv:2002.05202, eq. 6)."""

    def __init__(self, hidden: int, width: int, bias: bool):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = into_stream(nn.Linear(width, hidden, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@use_experts_implementation
class SmeltExperts(nn.Module):
    """E gated MLPs stored together. `forward` is the eager form; transformers has grouped_mm, batched_mm and more."""

    def __init__(self, config: SmeltConfig, experts: int):
        super().__init__()
        H, width = config.hidden_size, config.moe_intermediate_size
        self.num_experts, self.limit = experts, config.swiglu_limit
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, H))
        self.down_proj = nn.Parameter(torch.empty(experts, H, width))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * width)) if config.expert_bias else None
        self.down_proj_bias = nn.Parameter(torch.zeros(experts, H)) if config.expert_bias else None
        self.act_fn = F.silu

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        if self.limit is None:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * (CLAMPED_SLOPE * gate).sigmoid()

    def forward(self, x_NH: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """[N, H] -> [N, H], one expert after another."""
        y_NH = torch.zeros_like(x_NH)
        biased = self.gate_up_proj_bias is not None
        for e, (gate_up, down) in enumerate(zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)):
            token, k = torch.where(chosen_NK == e)
            both = F.linear(x_NH[token], gate_up, self.gate_up_proj_bias[e] if biased else None)
            out = F.linear(self._apply_gate(both), down, self.down_proj_bias[e] if biased else None)
            y_NH = y_NH.index_add(0, token, (out * weight_NK[token, k, None]).to(x_NH.dtype))
        return y_NH


class SmeltRouter(nn.Module):
    """Which K experts does a token run, with what weight? In float32; shared by all visits of its layer."""

    def __init__(self, config: SmeltConfig, experts: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(experts)) if config.router_bias else None
        corrected = config.router_correction_bias
        self.register_buffer("e_score_correction_bias", torch.zeros(experts) if corrected else None)
        self.load: Tensor | None = None
        """Assignments since the corrections moved last; no buffer, for DDP would overwrite it with rank 0's."""

    def _apply(self, fn, recurse=True):
        """The correction stays in float32: in bfloat16 a step of 0.001 is lost beside 1."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if after is not None and after.dtype != torch.float32:
            self.e_score_correction_bias = before.float().to(after.device)
        return self

    def forward(self, x_NH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> logits [N, E], the experts chosen and their weights [N, K]."""
        with torch.autocast(x_NH.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            logits = F.linear(x_NH.float(), self.weight.float(), bias)
        score = scores(self.config, logits)
        ranked = score if self.e_score_correction_bias is None else score + self.e_score_correction_bias
        chosen = self.allowed(ranked).topk(self.config.num_experts_per_tok, -1, sorted=False).indices
        weight = score.gather(-1, chosen)
        if self.config.norm_topk_prob:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        if self.training and self.e_score_correction_bias is not None:
            new = count(chosen, score.shape[-1], None)
            self.load = new if self.load is None else self.load + new
        return logits, chosen, weight * self.config.routed_scaling_factor

    def allowed(self, ranked_NE: Tensor) -> Tensor:
        """Experts outside the best groups are out (arXiv:2405.04434, section 2.1.2)."""
        groups = self.config.n_group or 1
        if groups == 1:
            return ranked_NE
        grouped = ranked_NE.unflatten(-1, (groups, -1))
        value = grouped.topk(min(self.config.group_scored_by, grouped.shape[-1]), -1).values.sum(-1)
        kept = torch.zeros_like(value).scatter(-1, value.topk(self.config.topk_group, -1).indices, 1.0).bool()
        return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


class SmeltMoE(nn.Module):
    """K of E experts, and perhaps a shared expert with or without a gate; one expert needs no router."""

    def __init__(self, config: SmeltConfig, layer: int):
        super().__init__()
        H = config.hidden_size
        experts = (config.core_num_experts if layer in config.core else None) or config.num_experts
        self.gate = SmeltRouter(config, experts) if experts > 1 else None
        self.experts = SmeltExperts(config, experts)
        self.experts.has_bias = config.expert_bias  # the decorator takes it for the class, not for the model
        shared = config.shared_expert_intermediate_size
        self.shared_expert = None if shared is None else SmeltMLP(H, shared, config.mlp_bias)
        self.shared_expert_gate = nn.Linear(H, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x_BTH: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """[B, T, H] -> [B, T, H], and what the router said: logits [N, E], chosen [N, K]."""
        x_NH, routed = x_BTH.flatten(0, 1), None
        if self.gate is None:
            chosen = torch.zeros(x_NH.shape[0], 1, dtype=torch.long, device=x_NH.device)
            weight = torch.ones(x_NH.shape[0], 1, device=x_NH.device)
        else:
            logits, chosen, weight = self.gate(x_NH)
            routed = (logits, chosen)
        y_NH = self.experts(x_NH, chosen, weight)
        if self.shared_expert is not None:
            always = self.shared_expert(x_NH)
            if self.shared_expert_gate is not None:
                always = always * self.shared_expert_gate(x_NH).sigmoid()
            y_NH = y_NH + always
        return y_NH.view_as(x_BTH), routed


def scores(config: SmeltConfig, logits: Tensor) -> Tensor:
    """Router logits as scores of the experts."""
    return logits.softmax(-1) if config.scoring_func == "softmax" else logits.sigmoid()


def count(chosen_NK: Tensor, experts: int, weight_N: Tensor | None) -> Tensor:
    """How many tokens chose each expert, [E]; a token counts `weight`."""
    each = torch.ones(chosen_NK.shape, device=chosen_NK.device)
    each = each if weight_N is None else each * weight_N[:, None]
    return torch.zeros(experts, device=chosen_NK.device).scatter_add(0, chosen_NK.flatten(), each.flatten())


def balancing(config: SmeltConfig, routed: tuple, mask_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Auxiliary loss and z-loss, means over executed MoE layers: each visit is a layer of its own here.

    With f_e the share of assignments and P_e the mean score of expert e, E sum_e f_e P_e is 1 when even (Switch,
    arXiv:2101.03961, eq. 4); z is the mean of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, eq. 5). Padding counts
    for nothing.
    """
    auxiliary, z = [], []
    for logits, chosen in routed:
        score = scores(config, logits)
        share = score if config.scoring_func == "softmax" else score / (score.sum(-1, keepdim=True) + 1e-20)
        weight = torch.ones_like(score[:, 0]) if mask_N is None else mask_N.to(score)
        total = weight.sum().clamp(min=1)
        load = count(chosen, score.shape[-1], weight).detach()
        mean = (share * weight[:, None]).sum(0) / total
        auxiliary.append(score.shape[-1] * (load / load.sum().clamp(min=1) * mean).sum())
        z.append((logits.logsumexp(-1).square() * weight).sum() / total)
    return torch.stack(auxiliary).mean(), torch.stack(z).mean()


# -------------------------------------------------------------------------------------------------------- model


class SmeltDecoderLayer(GradientCheckpointingLayer):
    """One stored layer; `slots` are the cache slots of its visits."""

    def __init__(self, config: SmeltConfig, layer: int, slots: list[int]):
        super().__init__()
        looped = config.loop_residual_scale if layer in config.core else 1.0
        self.scale = looped * config.residual_multiplier
        self.kind = config.layer_types[layer]
        attention = SmeltAttention if config.kv_lora_rank is None else SmeltLatentAttention
        self.self_attn = attention(config, layer, slots)
        dense = config.num_experts is None or layer in config.mlp_only_layers
        self.mlp = (
            SmeltMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
            if dense
            else SmeltMoE(config, layer)
        )
        self.input_layernorm, self.post_attention_layernorm = stream_norm(config), stream_norm(config)
        four = config.norms_per_layer == 4
        self.input_layernorm_2 = stream_norm(config) if four else nn.Identity()
        self.post_attention_layernorm_2 = stream_norm(config) if four else nn.Identity()

    def forward(self, x, angles, attention_mask, visit, cache=None, **kwargs):
        """[B, T, H] -> [B, T, H], the attention weights and what the router said, where there are any."""
        y, weights = self.self_attn(self.input_layernorm(x), angles, attention_mask, visit, cache, **kwargs)
        x = torch.add(x, self.input_layernorm_2(y), alpha=self.scale)
        y, routed = self.mlp(self.post_attention_layernorm(x)), None
        if isinstance(y, tuple):
            y, routed = y
        return torch.add(x, self.post_attention_layernorm_2(y), alpha=self.scale), weights, routed


@dataclass
class SmeltModelOutput(MoeModelOutputWithPast):
    """One entry of router_logits [N, E] and router_choices [N, K] per executed MoE layer."""

    router_choices: tuple | None = None


class SmeltPreTrainedModel(PreTrainedModel):
    """What transformers has to know."""

    config_class = SmeltConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("SmeltDecoderLayer",)
    _skip_keys_device_placement = ("past_key_values", "cache")
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = ("e_score_correction_bias",)

    def __init__(self, config: SmeltConfig, *args, **kwargs):
        # torch's fused attention has no sinks
        self._supports_sdpa = not config.attention_sinks
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load weights; a missing one is an error, never silently drawn at random.

        Raises:
            ValueError: names what is missing.
        """
        told = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if info["missing_keys"]:
            missing = sorted(info["missing_keys"])
            raise ValueError(f"{len(missing)} weights are missing: {', '.join(missing[:5])}")
        return (model, info) if told else model

    def _init_weights(self, module: nn.Module) -> None:
        """Normal by fan-in; what writes into the residual stream / sqrt(2 x executed layers); gains 1, biases 0."""
        config = self.config
        depth = math.sqrt(2 * len(config.order))
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0)
        elif isinstance(module, nn.Linear):
            scale = depth if getattr(module, "into_stream", False) else 1.0
            init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5 / scale)
        elif isinstance(module, SmeltRouter):
            init.normal_(module.weight, std=config.hidden_size**-0.5)
        elif isinstance(module, SmeltExperts):
            init.normal_(module.gate_up_proj, std=module.gate_up_proj.shape[-1] ** -0.5)
            init.normal_(module.down_proj, std=module.down_proj.shape[-1] ** -0.5 / depth)
        elif isinstance(module, SmeltRMSNorm | nn.LayerNorm):
            init.ones_(module.weight)
        zero = ("bias", "sinks", "gate_up_proj_bias", "down_proj_bias", "e_score_correction_bias")
        for name in zero:
            if isinstance(getattr(module, name, None), Tensor):
                init.zeros_(getattr(module, name))


class SmeltModel(SmeltPreTrainedModel):
    """Embedding, layers in their order of execution, last norm."""

    def __init__(self, config: SmeltConfig):
        super().__init__(config)
        self.order = config.order
        slots: dict[int, list[int]] = {layer: [] for layer in range(config.num_hidden_layers)}
        for slot, (layer, _) in enumerate(self.order):
            slots[layer].append(slot)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(SmeltDecoderLayer(config, layer, at) for layer, at in slots.items())
        self.norm = stream_norm(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1) if config.early_exit_gate else None
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        cache=None,
        output_hidden_states=None,
        output_attentions=None,
        output_router_logits=None,
        **kwargs,
    ) -> SmeltModelOutput:
        """Ids or embeddings to hidden states. `cache` and `past_key_values` are one thing under two names."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        config = self.config
        wanted = {
            "hidden_states": config.output_hidden_states if output_hidden_states is None else output_hidden_states,
            "attentions": config.output_attentions if output_attentions is None else output_attentions,
            "router_logits": config.output_router_logits if output_router_logits is None else output_router_logits,
        }
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = (config.use_cache and not self.training) if use_cache is None else use_cache
        cache = cache if cache is not None else past_key_values
        if self.gradient_checkpointing and self.training:
            cache, use_cache = None, False
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        if cache is not None:
            one_slot_per_execution(cache, self.order, config.num_hidden_layers)
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen)[None]
        masks = attention_mask
        if not isinstance(masks, dict):
            masks = attention_masks(config, x, attention_mask, position_ids=position_ids, **{CACHE: cache})
        frequency, factor = frequencies(config, x.device)
        phase = position_ids[..., None].float() * frequency
        angles = (phase.cos() * factor, phase.sin() * factor)

        x = scaled(x, config.embedding_multiplier)
        seen, weights, routed = [], [], []
        for number, visit in self.order:
            layer = self.layers[number]
            seen.append(x)
            x, weight, said = layer(
                x, angles, masks[layer.kind], visit, cache=cache, position_ids=position_ids, **kwargs
            )
            weights.append(weight)
            if said is not None:
                routed.append(said)
            if self.early_exit_gate is not None and number == len(self.layers) - 1:
                x = self.norm(x)
                self.early_exit_gate(x)
        if self.early_exit_gate is None:
            x = self.norm(x)
        routed = routed if wanted["router_logits"] else []
        return SmeltModelOutput(
            last_hidden_state=x,
            hidden_states=(*seen, x) if wanted["hidden_states"] else None,
            attentions=tuple(weights) if wanted["attentions"] else None,
            router_logits=tuple(logits for logits, _ in routed) or None,
            router_choices=tuple(chosen for _, chosen in routed) or None,
            **{CACHE: cache},
        )


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a factor that is nearly always 1."""
    return x if factor == 1 else x * factor


def one_slot_per_execution(cache, order: list[tuple[int, int]], stored: int) -> None:
    """A cache made from the config has a slot per stored layer; give it one per executed layer, of the same kind."""
    layers = getattr(cache, "layers", None)
    if layers is not None and len(layers) == stored != len(order):
        layers[:] = [layers[layer] if visit == 0 else copy.deepcopy(layers[layer]) for layer, visit in order]


def attention_masks(config, inputs_embeds, attention_mask=None, cache=None, past_key_values=None, **kwargs) -> dict:
    """One mask for each kind of layer, as the chosen attention implementation takes it."""
    cache = cache if cache is not None else past_key_values
    position_ids, kinds = kwargs.get("position_ids"), dict.fromkeys(config.layer_types)
    masks = {}
    for kind in kinds:
        of_kind = cache
        if {"sliding_attention", "chunked_attention"} <= kinds.keys() and getattr(cache, "layers", None):
            # transformers sizes both masks by the first cache layer that has a window; show it layers of one kind
            of_kind = copy.copy(cache)
            executed = len(cache.layers) == len(config.order)
            layers = [layer for layer, _ in config.order] if executed else range(config.num_hidden_layers)
            of_kind.layers = [
                kept for kept, layer in zip(cache.layers, layers, strict=True) if config.layer_types[layer] == kind
            ]
        masks[kind] = MASKS[kind](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: of_kind},
        )
    return masks


class SmeltForCausalLM(SmeltPreTrainedModel, GenerationMixin):
    """The model with its lm-head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    create_masks_for_generate = staticmethod(attention_masks)

    def __init__(self, config: SmeltConfig):
        super().__init__(config)
        self.model = SmeltModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        cache=None,
        output_router_logits=None,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Ids to logits, with `labels` to a loss.

        While training, the loss includes the balancing losses that the config has coefficients for; otherwise only
        with `output_router_logits`.
        """
        config = self.config
        has_losses = config.router_aux_loss_coef != 0 or config.router_z_loss_coef != 0
        if output_router_logits is None:
            output_router_logits = config.output_router_logits or (labels is not None and self.training and has_losses)
        loss_arguments = {name: kwargs[name] for name in ("num_items_in_batch", "shift_labels") if name in kwargs}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache if cache is not None else past_key_values,
            output_router_logits=output_router_logits,
            return_dict=True,
            **{name: value for name, value in kwargs.items() if name not in loss_arguments},
        )
        x = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(scaled(x[:, kept], 1 / config.logits_scaling))
        loss = auxiliary = None
        if outputs.router_logits is not None:
            mask = None
            if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
                mask = attention_mask[:, -x.shape[1] :].flatten()
            auxiliary, z = balancing(
                config, tuple(zip(outputs.router_logits, outputs.router_choices, strict=True)), mask
            )
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size, **loss_arguments)
            if auxiliary is not None:
                balance = config.router_aux_loss_coef * auxiliary + config.router_z_loss_coef * z
                loss = loss + balance.to(loss.device) * share_of_step(labels, **loss_arguments)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=auxiliary,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            **{CACHE: getattr(outputs, CACHE)},
        )

    @torch.no_grad()
    def move_corrections(self, step: float) -> None:
        """Loss-free balancing (arXiv:2408.15664): after an optimiser step, against the load since the last call."""
        for router in self.modules():
            load = getattr(router, "load", None)
            if load is None:
                continue
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(load)
            router.e_score_correction_bias += step * (load.mean() - load).sign()
            router.load = None

    def floating_point_ops(self, input_dict: dict, exclude_embeddings: bool = True) -> int:
        """Of a training step: 6 a token for each weight it meets, on each visit; attention scores are left out."""
        return 6 * input_dict["input_ids"].numel() * self.weights_a_token_meets()

    def weights_a_token_meets(self) -> int:
        """Matrix weights over all executed layers and the lm-head; of the experts K."""
        met = self.config.vocab_size * self.config.hidden_size
        for number, _ in self.model.order:
            for name, weight in self.model.layers[number].named_parameters():
                if ".experts." in name and weight.ndim == 3:
                    met += weight.numel() // weight.shape[0] * min(self.config.num_experts_per_tok, weight.shape[0])
                elif weight.ndim == 2 and not name.endswith("_bias"):
                    met += weight.numel()
        return met


def share_of_step(labels: Tensor, num_items_in_batch=None, shift_labels=None):
    """What of an optimiser step's tokens these are, so that balancing losses weigh the same in any accumulation."""
    if num_items_in_batch is None:
        return 1.0
    targets = labels[..., 1:] if shift_labels is None else shift_labels
    return (targets != -100).sum() / num_items_in_batch


# --------------------------------------------------------------------------------------------------- checkpoints

# On disk each expert has tensors of its own, as in qwen3_moe; here they are stored together.
register_checkpoint_conversion_mapping(
    SmeltConfig.model_type,
    [
        WeightConverter(
            source_patterns=[f"mlp.experts.*.{part}_proj.{kind}" for part in parts],
            target_patterns=f"mlp.experts.{target}",
            operations=operations,
        )
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
        for parts, target, operations in (
            (("gate", "up"), f"gate_up_proj{suffix}", [MergeModulelist(dim=0), Concatenate(dim=1)]),
            (("down",), f"down_proj{suffix}", [MergeModulelist(dim=0)]),
        )
    ],
    overwrite=True,
)

SmeltConfig.register_for_auto_class()
SmeltModel.register_for_auto_class("AutoModel")
SmeltForCausalLM.register_for_auto_class("AutoModelForCausalLM")
