"""How is a vector brought to unit size? RMSNorm (arXiv:1910.07467) with a gain, or LayerNorm with or without a bias.

    y = x / sqrt(mean(x^2) + eps) * gain

Ledger rows: norm.*, final_norm, attention.qk_norm, attention.q_norm, attention.kv_norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smelt_budget.spec import ModelSpec


class RMSNorm(nn.Module):
    """Over the last dimension, in x's dtype: torch's fused kernel refuses a gain of another one."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def norm(spec: ModelSpec) -> nn.Module:
    """The spec's normalisation of the residual stream."""
    H, eps = spec.hidden_size, spec.rms_norm_eps
    return RMSNorm(H, eps) if spec.norm == "rms_norm" else nn.LayerNorm(H, eps, bias=spec.norm == "layer_norm")
