"""Do all experts work, and does a second visit choose others? From what the routers decided on held-out rows.

    entropy        - sum p ln p / ln E          p = share of assignments; 1 when even
    max_violation  E max p - 1                  (max - mean) / mean of the load (arXiv:2408.15664); 0 when even
    dead           experts without a single token
    overlap        share of a token's K experts on one visit that it has on the next visit too
    chance         K / E; given the loads of both visits it is sum_e load_e load'_e / (N^2 K)

Looped MoE is said to gain from visits that choose differently (arXiv:2605.09165); overlap near 1 says they do not.
`max_violation` grows with E at a fixed number of tokens, and an expert can only be called dead over many (8k or more):
compare entropies. N tokens, E experts, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from smelt_budget.model import Output, Step, Transformer
from smelt_budget.model.router import Routed
from smelt_budget.verify.data import HeldOut
from smelt_budget.verify.look import Autocast, looking, shown


def routing(
    model: Transformer, held_out: HeldOut, batch_size: int, autocast: Autocast = nullcontext
) -> dict[str, list[dict[str, Any]]]:
    """Load of each MoE layer on each visit, and overlap of each pair of visits in a row, over all rows."""
    tally = Tally(model.order)
    with looking(model):
        for batch in held_out.batches(batch_size):
            tally.add(shown(model, batch, autocast, losses=False))
    return tally.result()


class Tally:
    """Sums over batches, so that one evaluation serves several looks: `evaluate(..., also=tally.add)`."""

    def __init__(self, order: Sequence[Step]):
        self.order = order
        self.count: dict[Step, Tensor] = {}
        self.top_k: dict[Step, int] = {}
        self.again: dict[Step, float] = {}

    def add(self, output: Output) -> None:
        """Count one batch."""
        chosen: dict[Step, Tensor] = {}
        for step, routed in zip(self.order, output.routed, strict=True):
            if routed is None:
                continue
            count = routed.count_E.cpu().double()
            self.count[step] = self.count.get(step, 0) + count
            self.top_k[step] = routed.chosen_NK.shape[1]
            chosen[step] = routed.chosen_NK
            earlier = chosen.get(Step(step.layer, step.visit - 1))
            if earlier is not None:
                self.again[step] = self.again.get(step, 0.0) + repeated(earlier, routed.chosen_NK, len(count))

    def result(self) -> dict[str, list[dict[str, Any]]]:
        """In order of execution; layers without a router are left out."""
        return {
            "load": [self.load(step) for step in self.order if step in self.count],
            "overlap": [self.overlap(step) for step in self.order if step in self.again],
        }

    def load(self, step: Step) -> dict[str, Any]:
        """One layer on one visit."""
        count = self.count[step]
        entropy, most, dead = load_of(count).tolist()
        return {
            "layer": step.layer,
            "visit": step.visit,
            "experts": len(count),
            "top_k": self.top_k[step],
            "tokens": round(float(count.sum()) / self.top_k[step]),
            "entropy": entropy,
            "max_share": most,
            "max_violation": most * len(count) - 1,
            "dead": int(dead),
        }

    def overlap(self, step: Step) -> dict[str, Any]:
        """One layer on one visit and the visit before it."""
        earlier = Step(step.layer, step.visit - 1)
        now, then, K = self.count[step], self.count[earlier], self.top_k[step]
        assignments = float(now.sum())
        return {
            "layer": step.layer,
            "visits": [earlier.visit, step.visit],
            "overlap": self.again[step] / assignments,
            "chance": K / len(now),
            "chance_given_load": float((now * then).sum()) / assignments**2 * K,
        }


def load_summary(routed: Sequence[Routed | None], order: Sequence[Step]) -> dict[str, list[Any]]:
    """Columns over `order` from one training step, for a log: one transfer from the device; `None` for dense layers."""
    moe = [index for index, decided in enumerate(routed) if decided is not None]
    rows = torch.stack([load_of(r.count_E) for r in routed if r is not None]).tolist() if moe else []
    columns: dict[str, list[Any]] = {
        "layer": [step.layer for step in order],
        "visit": [step.visit for step in order],
        **{name: [None] * len(order) for name in ("entropy", "max_share", "dead")},
    }
    for index, (entropy, most, dead) in zip(moe, rows, strict=True):
        columns["entropy"][index] = entropy
        columns["max_share"][index] = most
        columns["dead"][index] = int(dead)
    return columns


def load_of(count_E: Tensor) -> Tensor:
    """[3]: normalised entropy, largest share, dead experts."""
    p_E = count_E / count_E.sum()
    return torch.stack((torch.special.entr(p_E).sum() / math.log(len(p_E)), p_E.max(), (count_E == 0).sum()))


def repeated(then_NK: Tensor, now_NK: Tensor, experts: int) -> float:
    """How many of the choices now were also made then, by the same token."""
    had_NE = torch.zeros(len(then_NK), experts, dtype=torch.bool, device=then_NK.device).scatter_(1, then_NK, True)
    return float(had_NE.gather(1, now_NK).sum())
