"""How is a vector brought to unit size? RMSNorm (arXiv:1910.07467) with a gain, or LayerNorm with or without a bias.

    y = x / sqrt(mean(x^2) + eps) * gain

Ledger rows: norm.*, final_norm, attention.qk_norm, attention.q_norm, attention.kv_norm.
"""

from __future__ import annotations

from typing import Any

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
        if x.device.type == "cpu" and x.dtype == self.weight.dtype and x.dtype.itemsize >= 4:
            return OnCpu.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class OnCpu(torch.autograd.Function):
    """RMSNorm in 3 passes forward and 6 back; torch's CPU form composes 5 and about 12 (docs/log.md)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """The equation above."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = (size.square() / x.shape[-1] + eps).rsqrt()
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, gain)
        return normed * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """dx = (g gain - n mean(g gain n)) / rms, dgain = sum(g n), with n = x / rms."""
        normed, inverse, gain = ctx.saved_tensors
        product = grad * normed
        along = (product @ gain)[..., None] / gain.shape[0]
        dx = torch.addcmul(grad * gain, normed, along, value=-1).mul_(inverse)
        return dx, product.flatten(0, -2).sum(0), None


def norm(spec: ModelSpec) -> nn.Module:
    """The spec's normalisation of the residual stream."""
    H, eps = spec.hidden_size, spec.rms_norm_eps
    return RMSNorm(H, eps) if spec.norm == "rms_norm" else nn.LayerNorm(H, eps, bias=spec.norm == "layer_norm")
