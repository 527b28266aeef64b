"""How long is each shape trained, and what do several lengths share? Warmup-stable-decay with branch points.

    trunk:                                  warmup, then the peak rate up to the last branch point
    from each branch point:                 a decay to zero, which ends one horizon

    D of a horizon    = stable tokens up to its branch point + decay tokens
    shared            = the longest stable phase + one decay for each horizon
    separate          = the sum of all D, every horizon trained from its first step

After the branch points nothing is shared; before them runs of one cell and arm are the same run (arXiv:2404.06395, and
2609.01343 section 6, whose six horizons are the defaults).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from smelt_budget.spec.blocks import Frozen


def whole(value: Any) -> Any:
    """1e10 is how people write a number of tokens; 1.5 is not a number of tokens."""
    return int(value) if type(value) is float and value.is_integer() else value


Tokens = Annotated[int, BeforeValidator(whole), Field(ge=0, le=10**18)]
Steps = Annotated[int, BeforeValidator(whole), Field(ge=1, le=10**12)]


PAPER = (10_000, 20_000, 50_000, 100_000, 150_000, 196_075)


class Horizons(Frozen):
    """The lengths of one cell's runs; the defaults are the paper's."""

    context: Annotated[int, Field(ge=8, le=10**9)] = 4096
    """Tokens of a sequence."""
    batch_sequences: Annotated[int, Field(ge=1, le=10**9)] = 256
    """Sequences of an optimiser step."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**12)] = 2000
    """Of the stable steps, linear to the peak. Not printed in the paper; in no count."""
    stable_steps: list[Steps] = Field(default_factory=lambda: list(PAPER))
    """Branch points, warmup included."""
    decay_tokens: Tokens = 10_000_000_000
    """Of the decay to zero at the end of each horizon."""

    @field_validator("stable_steps")
    @classmethod
    def _ascending(cls, steps: list[int]) -> list[int]:
        if not steps or any(after <= before for before, after in pairwise(steps)):
            raise ValueError("branch points are at least one, each later than the one before")
        return steps

    @model_validator(mode="after")
    def _warmed_up_before_branching(self) -> Horizons:
        if self.warmup_steps >= self.stable_steps[0]:
            raise ValueError(f"warmup_steps {self.warmup_steps} is not below the first branch point")
        return self

    @property
    def batch_tokens(self) -> int:
        """Of an optimiser step."""
        return self.batch_sequences * self.context

    @property
    def tokens(self) -> list[int]:
        """D of each horizon."""
        return [steps * self.batch_tokens + self.decay_tokens for steps in self.stable_steps]

    @property
    def shared_tokens(self) -> int:
        """Trained by one arm of one cell where branches go on from the trunk."""
        return self.stable_steps[-1] * self.batch_tokens + len(self.stable_steps) * self.decay_tokens

    @property
    def separate_tokens(self) -> int:
        """Trained by one arm of one cell where every horizon is a run of its own."""
        return sum(self.tokens)

    @property
    def decay_steps(self) -> int:
        """Optimiser steps of a decay; the last may pass `decay_tokens` by less than a batch."""
        return -(-self.decay_tokens // self.batch_tokens)

    def as_dict(self) -> dict[str, Any]:
        """As plain data, with what follows from it."""
        return {
            **self.model_dump(),
            "decay_steps": self.decay_steps,
            "runs": [
                {"stable_steps": steps, "tokens": tokens}
                for steps, tokens in zip(self.stable_steps, self.tokens, strict=True)
            ],
            "shared_tokens": self.shared_tokens,
            "separate_tokens": self.separate_tokens,
        }
