"""What does a law say about a budget? The best split of compute, and what looping saves at equal loss.

    C = F D     F* = (a A (1-S)^b C^c / (c K))^(1/(a+c))     D* = C / F*     gamma = a c / (a+c)
    loss on the frontier = E + G C^-gamma                     tokens per parameter = D* / (F*/6)
    gain = 1 - C_looped / C_baseline at equal loss: the looped frontier's loss at C, the baseline's frontier inverted

(arXiv 2609.01343, section 6). For the Chinchilla form C = 6 N D, which is F = 6 N with A 6^alpha in the place of A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Frontier:
    """A law at one sparsity, as powers of compute."""

    E: float
    A: float
    """At the sparsity: A (1-S)^b."""
    K: float
    a: float
    c: float

    @property
    def gamma(self) -> float:
        """How fast the reducible loss falls with compute."""
        return self.a * self.c / (self.a + self.c)

    def flops(self, compute: float) -> float:
        """F*, training FLOPs per token."""
        ratio = self.a * self.A / (self.c * self.K)
        return (ratio * compute**self.c) ** (1 / (self.a + self.c))

    def tokens(self, compute: float) -> float:
        """D*."""
        return compute / self.flops(compute)

    def tokens_per_parameter(self, compute: float) -> float:
        """D* / (F*/6)."""
        return 6 * self.tokens(compute) / self.flops(compute)

    def loss(self, compute: float) -> float:
        """Nats per token at the best split."""
        return self.E + self.A / self.flops(compute) ** self.a + self.K / self.tokens(compute) ** self.c

    @property
    def scale(self) -> float:
        """G of E + G C^-gamma: the reducible loss at one FLOP."""
        return self.A / self.flops(1.0) ** self.a + self.K / self.tokens(1.0) ** self.c

    def compute(self, loss: float) -> float:
        """The budget whose frontier loss this is; infinite at or below E."""
        return (self.scale / (loss - self.E)) ** (1 / self.gamma) if loss > self.E else float("inf")


def frontier(coefficients: Mapping[str, float], sparsity: float) -> Frontier:
    """Of the smelt form."""
    k = coefficients
    return Frontier(E=k["E"], A=k["A"] * (1 - sparsity) ** k["b"], K=k["K"], a=k["a"], c=k["c"])


def chinchilla_frontier(coefficients: Mapping[str, float]) -> Frontier:
    """Of the Chinchilla form, with F = 6 N."""
    k = coefficients
    return Frontier(E=k["E"], A=k["A"] * 6 ** k["alpha"], K=k["B"], a=k["alpha"], c=k["beta"])


def gain(baseline: Frontier, looped: Frontier, compute: float) -> float:
    """Share of the baseline's compute that the looped arm saves, trained with `compute`."""
    return 1 - compute / baseline.compute(looped.loss(compute))
