"""What are the kernels given? Random data of unit scale, and tokens spread over experts in one of three ways.

N tokens, K choices each, H hidden, F expert width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from shapes import Shape
from torch import Tensor


class Inputs(NamedTuple):
    """What the op is given, and the gradient of what it returns."""

    x_NH: Tensor
    w_gate_up_E2FH: Tensor
    w_down_EHF: Tensor
    idx_NK: Tensor
    weight_NK: Tensor
    grad_NH: Tensor

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """In the op's order."""
        return self[:5]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Those that get a gradient."""
        return tuple(tensor for tensor in self.operands if tensor.requires_grad)


def inputs(shape: Shape, routing: str, seed: int, device: str) -> Inputs:
    """bf16 operands, fp32 routing weights; never zeros, on which a GPU is faster."""
    N, H, F, E, K = shape
    random = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(sizes, generator=random, device=device, dtype=torch.bfloat16) * scale

    x, grad = normal(N, H).requires_grad_(), normal(N, H)
    w_gate_up, w_down = normal(E, 2 * F, H, scale=H**-0.5), normal(E, H, F, scale=F**-0.5)
    idx = chosen(shape, routing, random)
    weight = torch.rand(N, K, generator=random, device=device).softmax(1)
    return Inputs(x, w_gate_up.requires_grad_(), w_down.requires_grad_(), idx, weight.requires_grad_(), grad)


def chosen(shape: Shape, routing: str, random: torch.Generator) -> Tensor:
    """idx_NK: K different experts for each token.

    balanced: every expert as often, up to one row. zipf: the e-th most popular expert is drawn with weight 1 / e
    (Gumbel noise and top-k draw without replacement). half empty: balanced over every second expert.
    """
    N, _, _, E, K = shape
    device = random.device
    if routing == "zipf":
        rank = 1 + torch.randperm(E, generator=random, device=device)
        noise = torch.empty(N, E, device=device).exponential_(generator=random).log()
        return (-rank.log() - noise).topk(K, 1).indices
    step = 2 if routing == "half empty" else 1
    used = -(-E // step)
    token = torch.randperm(N, generator=random, device=device)
    return (token[:, None] * K + torch.arange(K, device=device)) % used * step
