"""How will the pair be trained? What an emitted file says beside the architecture, the same for both arms.

Only the peak learning rate is each arm's own. Balancing and z-loss mean what they mean in `verify` (rule C24).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from smelt_budget.ledger import Ledger, Setting
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.blocks import Frozen
from smelt_budget.verify.recipe import RATE_TIMES_WIDTH, Balance, Recipe

TOKENS_PER_ACTIVE = 20  # Hoffmann et al., arXiv:2203.15556: about 20 tokens a parameter
Positive = Annotated[float, Field(gt=0)]


class Training(Frozen):
    """Budget, schedule and balancing of both arms."""

    context: Annotated[int, Field(ge=8)]
    """Tokens of a sequence."""
    tokens: Annotated[int, Field(ge=1)]
    """Of a whole run."""
    batch_sequences: Annotated[int, Field(ge=1)] = 256
    """Sequences of an optimiser step, over all ranks."""
    rates: tuple[Positive, Positive]
    """Peak learning rates of baseline and twin."""
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.01
    decay_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Of the steps, at the end, linear to 0 (warmup-stable-decay, arXiv:2404.06395)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: Positive = 1e-8
    clip: Positive = 1.0
    balance: Balance = "aux"
    auxiliary: Annotated[float, Field(ge=0)] = Recipe().auxiliary
    z: Annotated[float, Field(ge=0)] = Recipe().z
    bias_step: Annotated[float, Field(ge=0)] = Recipe().bias_step

    @property
    def steps(self) -> int:
        """Optimiser steps, at least one; the last may pass `tokens` by less than a batch."""
        return -(-self.tokens // (self.batch_sequences * self.context))

    @property
    def warmup_steps(self) -> int:
        """Linear to the peak."""
        return round(self.steps * self.warmup_share)

    @property
    def decay_steps(self) -> int:
        """Linear to 0."""
        return round(self.steps * self.decay_share)


def training(
    baseline: ModelSpec,
    twin: ModelSpec,
    context: int,
    tokens: int | None = None,
    batch_sequences: int = 256,
    rates: tuple[float | None, float | None] = (None, None),
    balance: Balance = "aux",
) -> Training:
    """What was asked; left out: 20 tokens per active parameter of the baseline, and 0.75 / hidden_size each."""
    counted = Ledger(baseline, Setting.of(baseline)).as_dict()["parameters"]
    own = tuple(
        RATE_TIMES_WIDTH / spec.hidden_size if rate is None else rate
        for rate, spec in zip(rates, (baseline, twin), strict=True)
    )
    return Training(
        context=context,
        tokens=tokens or TOKENS_PER_ACTIVE * int(counted["active_non_embedding"]),
        batch_sequences=batch_sequences,
        rates=(own[0], own[1]),
        balance=balance,
    )
