"""What does a token compute by itself? A gated MLP, or K of E experts that its router picks.

    dense     y = W_down (silu(W_gate x) * (W_up x))                             (arXiv:2002.05202, eq. 6)
    MoE       y = sum over the K chosen of weight_k expert_k(x), plus the shared expert

B batch, T tokens, N = B T, H hidden, E experts, K top-k, F expert width. Ledger rows: dense, experts, shared_expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smelt_budget.model.experts import experts
from smelt_budget.model.experts_choice import Choice, Circumstances, asked_for, chosen
from smelt_budget.model.router import Routed, Router
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import MoE


class GatedMLP(nn.Module):
    """Gate, up and down."""

    def __init__(self, hidden: int, width: int, bias: bool):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """E gated MLPs, stored together: gate and up [E, 2F, H], down [E, H, F]."""

    def __init__(self, hidden: int, m: MoE, limit: float | None):
        super().__init__()
        self.limit = limit
        self.asked: str | None = None
        """Which implementation; None is for the environment to say."""
        self.gate_up_proj = nn.Parameter(torch.empty(m.experts, 2 * m.width, hidden))
        self.down_proj = nn.Parameter(torch.empty(m.experts, hidden, m.width))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(m.experts, 2 * m.width)) if m.bias else None
        self.down_proj_bias = nn.Parameter(torch.zeros(m.experts, hidden)) if m.bias else None

    def forward(self, x_NH: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        return experts(
            x_NH,
            self.gate_up_proj,
            self.down_proj,
            chosen_NK,
            weight_NK,
            self.gate_up_proj_bias,
            self.down_proj_bias,
            self.limit,
            self.asked,
        )

    def choice(self, device: str, rows: torch.dtype) -> Choice:
        """Which implementation computes rows of this dtype there, and why.

        Raises:
            BadInput: one was asked for that cannot be had.
        """
        E, H, F = self.down_proj.shape
        biased = self.gate_up_proj_bias is not None
        at = Circumstances(torch.device(device), rows, self.down_proj.dtype, (E, H, F), biased, self.limit is not None)
        return chosen(asked_for(self.asked), at)


def ask(model: nn.Module, asked: str) -> None:
    """Let all experts of a model be computed so; see experts_choice.py."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.asked = asked


def choices(model: nn.Module, device: str, rows: torch.dtype) -> list[Choice]:
    """What computes the experts of a model, each once, in order of the layers; nothing where all layers are dense.

    Raises:
        BadInput: one was asked for that cannot be had.
    """
    found = (module.choice(device, rows) for module in model.modules() if isinstance(module, Experts))
    return list(dict.fromkeys(found))


class MixtureOfExperts(nn.Module):
    """Router, experts, and perhaps a shared expert with or without a sigmoid gate; one expert needs no router."""

    def __init__(self, spec: ModelSpec, m: MoE):
        super().__init__()
        H = spec.hidden_size
        self.gate = Router(spec, m) if m.has_router else None
        self.experts = Experts(H, m, spec.swiglu_limit)
        self.shared_expert = None if m.shared is None else GatedMLP(H, m.shared, m.shared_bias)
        self.shared_expert_gate = nn.Linear(H, 1, bias=False) if m.shared_gate else None

    def forward(self, x_BTH: Tensor) -> tuple[Tensor, Routed | None]:
        """[B, T, H] -> [B, T, H], and what the router decided."""
        x_NH = x_BTH.flatten(0, 1)
        routed = None
        if self.gate is None:
            chosen = torch.zeros(x_NH.shape[0], 1, dtype=torch.long, device=x_NH.device)
            weight = torch.ones(x_NH.shape[0], 1, device=x_NH.device)
        else:
            weight, routed = self.gate(x_NH)
            chosen = routed.chosen_NK
        y_NH = self.experts(x_NH, chosen, weight)
        if self.shared_expert is not None:
            always = self.shared_expert(x_NH)
            if self.shared_expert_gate is not None:
                always = always * self.shared_expert_gate(x_NH).sigmoid()
            y_NH = y_NH + always
        return y_NH.view_as(x_BTH), routed
