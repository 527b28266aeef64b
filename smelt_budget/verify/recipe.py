"""How is an arm trained? The same recipe for both, written down; only the peak learning rate is each arm's own.

    rate(t) = peak * (t+1)/warmup                    first `warmup` steps
            = peak                                   stable
            = peak * (steps - t)/decay               last `decay_share` of the steps, linear to 0

Warmup-stable-decay after MiniCPM (arXiv:2404.06395). The rate tried first is 0.75 / hidden_size: Adam's best rate for
matrices falls as 1/width (muP, arXiv:2203.03466), and 0.75 was within a factor of 2 of the best at every width tried
(docs/log.md).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from smelt_budget.spec import ModelSpec
from smelt_budget.spec.model import Frozen

RATE_TIMES_WIDTH = 0.75
Balance = Literal["aux", "bias", "none"]


class Recipe(Frozen):
    """Everything that decides a training run beside the arm, its rate and its seed."""

    steps: Annotated[int, Field(ge=1, le=10**9)] = 160
    batch_size: Annotated[int, Field(ge=1, le=2**20)] = 8
    """Sequences of a step, over all micro-batches and ranks."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Micro-batches the batch is cut into; the tokens of a step stay the same."""
    context: Annotated[int, Field(ge=8, le=2**20)] = 256
    """Tokens of a sequence."""
    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Multiples of 0.75 / hidden_size that each arm tries; a single one is taken untried."""
    warmup: Annotated[int, Field(ge=0)] = 10
    decay_share: Annotated[float, Field(ge=0, le=1)] = 0.4
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """On matrices; not on gains, biases and sinks."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient over all parameters."""
    balance: Balance = "aux"
    """Auxiliary loss, loss-free bias (arXiv:2408.15664), or nothing."""
    auxiliary: Annotated[float, Field(ge=0)] = 0.01
    z: Annotated[float, Field(ge=0)] = 1e-3
    bias_step: Annotated[float, Field(ge=0)] = 1e-3
    held_out_rows: Annotated[int, Field(ge=1)] = 64
    """Rows per domain both arms are judged on."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 20
    """Steps between checkpoints."""

    @property
    def tokens(self) -> int:
        """Of a whole run."""
        return self.steps * self.batch_size * self.context

    def first_rate(self, spec: ModelSpec) -> float:
        """Where an arm's choice of rates is centred."""
        return RATE_TIMES_WIDTH / spec.hidden_size

    @property
    def warmup_steps(self) -> int:
        """`warmup`, at most a quarter of a short run."""
        return min(self.warmup, self.steps // 4)

    def share(self, step: int) -> float:
        """The schedule: what of the peak rate applies at a step, counted from 0."""
        warmup = self.warmup_steps
        decay = round(self.steps * self.decay_share)
        if step < warmup:
            return (step + 1) / warmup
        return 1.0 if step < self.steps - decay else (self.steps - step) / decay

    def shorter(self) -> Recipe:
        """The recipe for trying a rate: the same in a quarter of the steps."""
        return self.changed(steps=max(1, self.steps // 4))

    def changed(self, **fields: Any) -> Recipe:
        """A changed copy, validated again."""
        return Recipe.model_validate(self.model_dump() | fields)
