"""Which operations count, and over how many positions? Four named conventions (rules C8, C11, C12).

They differ only in what they leave out and in how attention is averaged; the rows are the same. Each was checked
against the values its owner publishes or computes (`tests/golden/test_conventions.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from smelt_budget.ledger.rows import Kind, Row
from smelt_budget.spec.runs import Window


@dataclass(frozen=True)
class Convention:
    """What a FLOP count includes. `counted` lists row kinds; attention and matrices always count."""

    name: str
    about: str
    counted: frozenset[Kind]
    default_positions: Literal["causal", "half", "full"]
    """Mean positions at context C: causal (C+1)/2, half C/2, full C."""
    windows: Literal["exact", "capped", "ignored"]
    """exact: the causal mean inside the window; capped: min(window, length); ignored: as if full."""

    def attention_length(self, context: int) -> Fraction:
        """Mean number of positions a token attends to in a full-attention layer, at a context."""
        return {
            "causal": Fraction(context + 1, 2),
            "half": Fraction(context, 2),
            "full": Fraction(context),
        }[self.default_positions]

    def positions(self, window: Window | None, length: Fraction) -> Fraction:
        """Mean positions in a layer with `window`, where a full layer's mean is `length`."""
        if window is None or self.windows == "ignored":
            return length
        if self.windows == "capped":
            return min(length, Fraction(window.size))
        return windowed_mean(window, length)

    def counts(self, row: Row) -> bool:
        """Whether a row's multiply-adds are in this convention's FLOPs."""
        return row.kind in self.counted


def windowed_mean(window: Window, length: Fraction) -> Fraction:
    """Exact mean of attended positions in a causal sequence of n = 2*length - 1 tokens (rule C8).

    A sliding window W: (W(W+1)/2 + (n-W)W) / n. A chunk W: every block restarts at one position.
    """
    n, W = 2 * length - 1, window.size
    if n <= W:
        return length
    if window.chunked:
        blocks = n // W
        rest = n - blocks * W
        return (Fraction(blocks * W * (W + 1), 2) + rest * (rest + 1) / 2) / n
    return (Fraction(W * (W + 1), 2) + (n - W) * W) / n


def kinds(*names: Kind) -> frozenset[Kind]:
    """Matrices and attention, which always count, and the named kinds."""
    return frozenset(("matrix", "attention", *names))


SMELT = Convention(
    "smelt",
    "SMELT, arXiv 2609.01343: layers only (router in, lm-head out), causal mean",
    kinds("router", "gate"),
    "causal",
    "exact",
)
MEGATRON = Convention(
    "megatron",
    "Megatron-LM num_floating_point_operations: lm-head in, router and gates out, half the square, windows ignored",
    kinds("lm_head", "latent_norm"),
    "half",
    "ignored",
)
TORCHTITAN = Convention(
    "torchtitan",
    "torchtitan: 6 x active parameters (norms, biases, lm-head in) + attention over the full square, windows capped",
    kinds("lm_head", "router", "gate", "vector", "latent_norm"),
    "full",
    "capped",
)
FULL_SQUARE = Convention(
    "full-square",
    "what torch's FLOP counter sees: every matmul, lm-head in, attention over the whole square",
    kinds("lm_head", "router", "gate"),
    "full",
    "ignored",
)
CONVENTIONS = {c.name: c for c in (SMELT, MEGATRON, TORCHTITAN, FULL_SQUARE)}
