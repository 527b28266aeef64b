"""How do tokens look at each other? Grouped-query and latent attention.

    grouped    o = softmax(q k^T / sqrt(d)) v            n query heads share g key/value heads (arXiv:2305.13245)
    latent     c = norm(x W_down), k = [c W_uk ; r], v = c W_uv      what is kept is c and the rotary key r
                                                                     (arXiv:2405.04434, eq. 9-19)

B batch, T new tokens, S tokens seen, n query heads, g KV heads, d head size, R latent rank, H hidden.
Ledger rows: attention.*
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smelt_budget.model.cache import Slot
from smelt_budget.model.norms import RMSNorm
from smelt_budget.model.rotary import Angles, latent_temperature, rotate
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import GroupedQuery, Latent

Watch = Callable[[Tensor, Tensor, float, Tensor | None, Tensor | None], None]
"""Called with q [B, n, T, d], k [B, g, S, d], scale, mask, sinks [n] just before they meet (the sink measurement)."""

LATENT_EPS = 1e-6
"""DeepSeek's latent norms keep this epsilon whatever rms_norm_eps says (its published modelling code)."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None) -> Tensor:
    """softmax(scale q k^T + mask) v -> [B, n, T, d_v]; without a mask it is causal over equal lengths.

    A sink [n] is one more logit per head that takes mass and gives nothing (gpt-oss); torch's fused kernels have
    none, so there the scores are written out.
    """
    causal = mask is None and q.shape[2] > 1
    if sinks is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    score = (q @ k.transpose(-1, -2)).float() * scale
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    total = torch.logaddexp(score.logsumexp(-1, keepdim=True), sinks.float()[None, :, None, None])
    return (score - total).exp().to(v.dtype) @ v


class GroupedQueryAttention(nn.Module):
    """Attention whose n query heads share g key/value heads."""

    def __init__(self, spec: ModelSpec, a: GroupedQuery):
        super().__init__()
        self.n, self.g, self.d = a.query_heads, a.kv_heads, a.head_dim
        self.scale = self.d**-0.5 if spec.attention_multiplier is None else spec.attention_multiplier
        self.interleaved, self.norm_heads = spec.rope_interleave, a.qk_norm == "head"
        H, q, kv = spec.hidden_size, self.n * self.d, self.g * self.d
        self.q_proj = nn.Linear(H, q, bias=a.bias)
        self.k_proj = nn.Linear(H, kv, bias=a.bias)
        self.v_proj = nn.Linear(H, kv, bias=a.bias)
        self.o_proj = nn.Linear(q, H, bias=a.output_bias)
        if a.qk_norm != "none":
            self.q_norm = RMSNorm(self.d if self.norm_heads else q, spec.rms_norm_eps)
            self.k_norm = RMSNorm(self.d if self.norm_heads else kv, spec.rms_norm_eps)
        self.sinks = nn.Parameter(torch.zeros(self.n)) if a.sinks else None
        self.normed = a.qk_norm != "none"

    def forward(
        self, x_BTH: Tensor, turn: Angles, mask: Tensor | None, slot: Slot | None = None, watch: Watch | None = None
    ) -> Tensor:
        """[B, T, H] -> [B, T, H]; `slot` holds what earlier tokens left."""
        q, k, v = self.q_proj(x_BTH), self.k_proj(x_BTH), self.v_proj(x_BTH)
        if self.normed and not self.norm_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, self.d)) for x in (q, k, v))
        if self.normed and self.norm_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k = rotate(q, turn, self.interleaved), rotate(k, turn, self.interleaved)
        if slot is not None:
            k, v = slot.extend(k, v)
        if watch is not None:
            watch(q, k, self.scale, mask, self.sinks)
        return self.o_proj(attend(q, k, v, mask, self.scale, self.sinks).transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention; decoding works on the latents themselves (the absorbed form)."""

    def __init__(self, spec: ModelSpec, a: Latent):
        super().__init__()
        self.n, self.nope, self.rope, self.v, self.R = a.query_heads, a.nope, a.rope, a.value, a.kv_rank
        plain = (self.nope + self.rope) ** -0.5 if spec.attention_multiplier is None else spec.attention_multiplier
        self.scale, self.interleaved = plain * latent_temperature(spec.rope_scaling), spec.rope_interleave
        H, q = spec.hidden_size, self.n * (self.nope + self.rope)
        self.compressed = a.q_rank is not None
        if a.q_rank is None:
            self.q_proj = nn.Linear(H, q, bias=False)
        else:
            self.q_a_proj = nn.Linear(H, a.q_rank, bias=a.bias)
            self.q_a_layernorm = RMSNorm(a.q_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(a.q_rank, q, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(H, self.R + self.rope, bias=a.bias)
        self.kv_a_layernorm = RMSNorm(self.R, LATENT_EPS)
        self.kv_b_proj = nn.Linear(self.R, self.n * (self.nope + self.v), bias=False)
        self.o_proj = nn.Linear(self.n * self.v, H, bias=a.output_bias)

    def forward(
        self, x_BTH: Tensor, turn: Angles, mask: Tensor | None, slot: Slot | None = None, watch: Watch | None = None
    ) -> Tensor:
        """[B, T, H] -> [B, T, H]; `slot` holds the latents and rotary keys earlier tokens left."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTH))) if self.compressed else self.q_proj(x_BTH)
        q = q.unflatten(-1, (self.n, -1)).transpose(1, 2)
        q_nope, q_rope = q.split((self.nope, self.rope), -1)
        c, r = self.kv_a_proj_with_mqa(x_BTH).split((self.R, self.rope), -1)
        c, r = self.kv_a_layernorm(c)[:, None], r[:, None]
        q_rope, r = rotate(q_rope, turn, self.interleaved), rotate(r, turn, self.interleaved)
        decoding = slot is not None and slot.seen > 0
        if slot is not None:
            c, r = slot.extend(c, r)
        form = self.absorbed if decoding else self.expanded
        return self.o_proj(form(q_nope, q_rope, c, r, mask, watch).transpose(1, 2).flatten(2))

    def expanded(self, q_nope: Tensor, q_rope: Tensor, c: Tensor, r: Tensor, mask: Any, watch: Watch | None) -> Tensor:
        """Keys and values of every head written out, as in training (rule C9)."""
        k_nope, v = self.kv_b_proj(c[:, 0]).unflatten(-1, (self.n, -1)).transpose(1, 2).split((self.nope, self.v), -1)
        q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, r.expand(-1, self.n, -1, -1)), -1)
        if watch is not None:
            watch(q, k, self.scale, mask, None)
        return attend(q, k, v, mask, self.scale)

    def absorbed(self, q_nope: Tensor, q_rope: Tensor, c: Tensor, r: Tensor, mask: Any, watch: Watch | None) -> Tensor:
        """(q W_uk) c^T = q (c W_uk^T)^T: the up-projections move to the query's side, one latent head serves all."""
        w_uk, w_uv = self.kv_b_proj.weight.unflatten(0, (self.n, -1)).split((self.nope, self.v), 1)
        q = torch.cat((torch.einsum("bntd,ndr->bntr", q_nope, w_uk), q_rope), -1)
        k = torch.cat((c, r), -1)
        if watch is not None:
            watch(q, k, self.scale, mask, None)
        return torch.einsum("bntr,nvr->bntv", attend(q, k, c, mask, self.scale), w_uv)
