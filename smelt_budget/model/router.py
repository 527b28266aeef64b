"""Which K experts does a token run, with what weight, and how even is the load?

    s = softmax(W x) or sigmoid(W x)                   scores, in fp32 whatever the model computes in
    chosen = the K largest of s + correction           the correction only chooses (loss-free, arXiv:2408.15664)
    weight = s[chosen], renormalised or not, times routed_scaling_factor

Balancing, each visit for itself: with f_e the share of assignments and P_e the mean normalised score of expert e,
auxiliary loss = E sum_e f_e P_e (1 when even; Switch, arXiv:2101.03961, eq. 4), z-loss = mean logsumexp(W x)^2
(ST-MoE, arXiv:2202.08906, eq. 5), or the correction moves by a fixed step against the load of all visits.
N tokens, E experts, K top-k, H hidden. Ledger row: router.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import MoE


class Routed(NamedTuple):
    """What one MoE layer decided on one visit; losses and reports are made from it."""

    count_E: Tensor
    """Assignments to each expert, N K in all."""
    mean_score_E: Tensor
    """P: mean over the tokens of scores that sum to 1; carries the auxiliary loss's gradient."""
    z: Tensor
    """The z-loss."""
    chosen_NK: Tensor
    """The experts each token runs."""


class Router(nn.Module):
    """One score per expert; shared, weights and correction alike, by all visits of its layer."""

    def __init__(self, spec: ModelSpec, m: MoE):
        super().__init__()
        self.K, self.scoring, self.factor = m.top_k, spec.scoring_func, spec.routed_scaling_factor
        self.renormalise = spec.norm_topk_prob
        self.groups, self.kept_groups = spec.n_group or 1, spec.topk_group or 1
        self.best_of_group = 2 if spec.router_correction_bias else 1
        self.weight = nn.Parameter(torch.empty(m.experts, spec.hidden_size))
        self.bias = nn.Parameter(torch.zeros(m.experts)) if m.router_bias else None
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(m.experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """The correction stays in fp32 whatever the model is cast to: in bf16 a step of 0.001 is lost beside 1."""
        correction = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if self.e_score_correction_bias.dtype != correction.dtype:
            self.e_score_correction_bias = correction.to(self.e_score_correction_bias.device)
        return self

    def forward(self, x_NH: Tensor) -> tuple[Tensor, Routed]:
        """-> weights [N, K] in fp32, and what was decided."""
        logits = in_fp32(x_NH, self.weight, self.bias)
        score = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        chosen = self.allowed(score + self.e_score_correction_bias).topk(self.K, -1, sorted=False).indices
        weight = score.gather(-1, chosen)
        if self.renormalise:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        shares = score if self.scoring == "softmax" else score / (score.sum(-1, keepdim=True) + 1e-20)
        ones = torch.ones(1, device=x_NH.device).expand(chosen.numel())
        count = logits.new_zeros(logits.shape[1]).scatter_add(0, chosen.flatten(), ones)
        z = logits.logsumexp(-1).square().mean()
        return weight * self.factor, Routed(count.detach(), shares.mean(0), z, chosen)

    def allowed(self, score_NE: Tensor) -> Tensor:
        """Group-limited routing (arXiv:2405.04434, section 2.1.2): experts outside the best groups are out.

        A group is as good as its best expert, or where a correction steers it as its best two (DeepSeek-V3).
        """
        if self.groups == 1:
            return score_NE
        grouped = score_NE.unflatten(-1, (self.groups, -1))
        value = grouped.topk(min(self.best_of_group, grouped.shape[-1]), -1).values.sum(-1)
        kept = torch.zeros_like(value).scatter(-1, value.topk(self.kept_groups, -1).indices, 1.0).bool()
        return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def in_fp32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map in fp32, also under autocast."""
    bias = None if bias is None else bias.float()
    if x.device.type == "meta":  # autocast knows no meta device
        return F.linear(x.float(), weight.float(), bias)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight.float(), bias)


def auxiliary_loss(count_E: Tensor, mean_score_E: Tensor) -> Tensor:
    """E sum_e f_e P_e. `count_E` may be summed over ranks first: the loss then sees the whole batch."""
    return count_E.numel() * (count_E / count_E.sum() * mean_score_E).sum()


@torch.no_grad()
def correct(router: Router, count_E: Tensor, step: float) -> None:
    """Move the correction by `step` towards experts below the mean load, away from those above."""
    router.e_score_correction_bias += step * (count_E.mean() - count_E).sign()
