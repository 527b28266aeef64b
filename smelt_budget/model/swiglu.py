"""What does an expert do between its two matrices, and what is the derivative of that?

    h = silu(gate) up                          (arXiv:2002.05202 eq. 6)
    h = (up + 1) gate sigmoid(1.702 gate)      with `limit`: gate <= limit and |up| <= limit are clamped first (gpt-oss)

gate_PF and up_PF are the two halves of pre_P2F.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLOPE = 1.702  # gpt-oss, modeling_gpt_oss.py: alpha
"""Of the sigmoid, where activations are limited."""


def swiglu(pre_P2F: Tensor, limit: float | None) -> Tensor:
    """The hidden row h_PF of each pre-activation."""
    gate, up = pre_P2F.chunk(2, -1)
    if limit is None:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * SLOPE).sigmoid() * gate * (up + 1)


def swiglu_backward(dh_PF: Tensor, pre_P2F: Tensor, limit: float | None) -> Tensor:
    """The gradient dpre_P2F; where a clamp holds, it is zero."""
    dpre = torch.empty_like(pre_P2F)
    (gate, up), (dgate, dup) = pre_P2F.chunk(2, -1), dpre.chunk(2, -1)
    if limit is None:
        torch.mul(dh_PF, torch.nn.functional.silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(dh_PF * up, gate, grad_input=dgate)
        return dpre
    free_gate, free_up = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    sigma = (gate * SLOPE).sigmoid()
    torch.mul(dh_PF * sigma * gate, free_up, out=dup)
    slope = sigma * (1 + SLOPE * gate * (1 - sigma))
    torch.mul(dh_PF * (up + 1) * slope, free_gate, out=dgate)
    return dpre
