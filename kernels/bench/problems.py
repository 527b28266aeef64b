"""On which problems are the expert kernels measured? Five shapes, three routings, random data of unit scale.

N tokens, K choices each, H hidden, F expert width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """Of one problem."""

    N: int
    H: int
    F: int
    E: int
    K: int

    def __str__(self) -> str:
        """As the tables name it."""
        return " ".join(f"{letter}={size}" for letter, size in self._asdict().items())


SHAPES = (
    Shape(32768, 1056, 128, 64, 8),  # 1056: the hidden size of the smallest looped model, 16.5 x 64
    Shape(32768, 1056, 256, 64, 8),
    Shape(32768, 1056, 768, 128, 8),
    Shape(8192, 1056, 128, 512, 8),  # 128 rows an expert
    Shape(32768, 2048, 768, 128, 8),  # Qwen3-30B-A3B, in the published figures of others
)
REHEARSED = (Shape(24, 40, 16, 6, 2),)
"""Tiny, for the CPU: it shows that the script runs, nothing else."""

ROUTINGS = ("balanced", "zipf", "half empty")
SETS = 3
"""Inputs that take turns, so that nothing a round reads is left in the cache (60 MB) by the round before."""


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
