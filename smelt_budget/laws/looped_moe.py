"""The law of looped Mixture-of-Experts of arXiv 2609.40316: loss from active size, loops, experts and tokens.

    N_eff = N_act + k1 m^-th N_loop (1 - exp(-(R-1) / (k2 m^-th)))          m = N_act / N_total, embeddings left out
    L = A Eh^d N_eff^(al + g ln Eh) + B Eh^w D^(be + z ln Eh) + c           N and D in billions
    1/Eh = 1/(E - 1 + 1/(1/Es - 1/Em)) + 1/Em                               E = routed experts / top-k
    training FLOPs = 6 N_unroll D                                           N_unroll = N_act + (R-1) N_loop

Its coefficients are published and its runs are not, so it is evaluated here and not fitted: fifteen coefficients need
more than one kind of table, and `law fit` would not know them apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SOURCE = "arXiv 2609.40316"
RMSE = 0.0037
COEFFICIENTS = {
    "A": 0.8085, "al": -0.1951, "B": 3.4291, "be": -0.7548, "c": 1.3555, "d": -0.1935, "g": -0.0137,
    "w": -0.2056, "z": 0.0881, "Es": 1.3174, "Em": 57.1201, "k1": 0.3682, "k2": 1.4037, "th": 0.3286,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A looped MoE as this law sees it."""

    active: float
    """N_act, parameters a token uses in one pass, embeddings left out."""
    total: float
    """N_total, stored, embeddings left out."""
    looped: float
    """N_loop, active parameters of the layers that loop."""
    loops: int
    """R; 1 is no loop."""
    experts: float
    """E, routed experts over top-k; 1 is dense."""

    @property
    def unrolled(self) -> float:
        """N_unroll, active parameters over all loops."""
        return self.active + (self.loops - 1) * self.looped


def loss(shape: Shape, tokens: float) -> float:
    """Nats per token."""
    k, (size, data) = COEFFICIENTS, (effective(shape) / 1e9, tokens / 1e9)
    log_experts = math.log(saturated(shape.experts))
    capacity = k["A"] * math.exp(k["d"] * log_experts) * size ** (k["al"] + k["g"] * log_experts)
    training = k["B"] * math.exp(k["w"] * log_experts) * data ** (k["be"] + k["z"] * log_experts)
    return capacity + training + k["c"]


def effective(shape: Shape) -> float:
    """N_eff: what R loops are worth in active parameters."""
    k = COEFFICIENTS
    density = (shape.active / shape.total) ** -k["th"]
    return shape.active + k["k1"] * density * shape.looped * (1 - math.exp(-(shape.loops - 1) / (k["k2"] * density)))


def saturated(experts: float) -> float:
    """Eh: experts over top-k, between Es and Em."""
    least, most = COEFFICIENTS["Es"], COEFFICIENTS["Em"]
    return 1 / (1 / (experts - 1 + 1 / (1 / least - 1 / most)) + 1 / most)


def tokens(shape: Shape, training_flops: float) -> float:
    """D that a budget buys."""
    return training_flops / (6 * shape.unrolled)


@dataclass(frozen=True)
class Family:
    """Shapes to choose among; total parameters grow with experts as the expert share of the active ones does."""

    active: tuple[float, ...] = (0.1e9, 0.16e9, 0.25e9, 0.4e9, 0.6e9, 1.0e9, 1.6e9, 2.5e9, 4.0e9, 6.3e9)
    experts: tuple[int, ...] = (1, 2, 8, 16, 32, 64)
    loops: tuple[int, ...] = (1, 2, 3, 4)
    expert_share: float = 2 / 3
    """Of active parameters, in routed experts: of N_act 1, N_total is 1 + share (E - 1)."""
    looped_share: float = 0.5
    """N_loop / N_act; the paper's middle half."""

    def shapes(self) -> list[Shape]:
        """Every combination."""
        return [
            Shape(n, n * (1 + self.expert_share * (e - 1)), n * self.looped_share, r, e)
            for n in self.active
            for e in self.experts
            for r in self.loops
        ]


def optimum(training_flops: float, memory: float, bytes_per_parameter: float, family: Family) -> Shape | None:
    """The shape of least loss whose weights fit; `None` if none does."""
    fitting = [s for s in family.shapes() if s.total * bytes_per_parameter <= memory]
    return min(fitting, key=lambda shape: loss(shape, tokens(shape, training_flops)), default=None)
