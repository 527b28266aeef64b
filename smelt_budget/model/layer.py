"""What is one layer? Norm, attention, norm, FFN, each branch added to the residual stream.

    x = x + s attention(norm(x));  x = x + s ffn(norm(x))      s = 1, in the core 1/visits (SMELT, section 1)

With four norms a layer (Ouro) each branch is normed again before it is added. Ledger rows: norm.*
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smelt_budget.model.attention import GroupedQueryAttention, LatentAttention, Watch
from smelt_budget.model.cache import Slot
from smelt_budget.model.ffn import GatedMLP, MixtureOfExperts
from smelt_budget.model.norms import norm
from smelt_budget.model.rotary import Angles
from smelt_budget.model.router import Routed
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import Dense, Latent, Layer


class DecoderLayer(nn.Module):
    """One physical layer. `scale` is on both branches, on every visit."""

    def __init__(self, spec: ModelSpec, layer: Layer, scale: float):
        super().__init__()
        self.scale, self.window = scale * spec.residual_multiplier, layer.window
        self.input_layernorm = norm(spec)
        a = layer.attention
        self.self_attn = LatentAttention(spec, a) if isinstance(a, Latent) else GroupedQueryAttention(spec, a)
        self.post_attention_layernorm = norm(spec)
        f = layer.ffn
        self.mlp = GatedMLP(spec.hidden_size, f.width, f.bias) if isinstance(f, Dense) else MixtureOfExperts(spec, f)
        self.input_layernorm_2 = norm(spec) if layer.norms == 4 else nn.Identity()
        self.post_attention_layernorm_2 = norm(spec) if layer.norms == 4 else nn.Identity()

    def forward(
        self, x: Tensor, turn: Angles, mask: Tensor | None, slot: Slot | None = None, watch: Watch | None = None
    ) -> tuple[Tensor, Routed | None]:
        """[B, T, H] -> [B, T, H], and what the router decided (a dense layer has none)."""
        y = self.input_layernorm_2(self.self_attn(self.input_layernorm(x), turn, mask, slot, watch))
        x = torch.add(x, y, alpha=self.scale)
        y, routed = self.mlp(self.post_attention_layernorm(x)), None
        if isinstance(y, tuple):
            y, routed = y
        return torch.add(x, self.post_attention_layernorm_2(y), alpha=self.scale), routed
