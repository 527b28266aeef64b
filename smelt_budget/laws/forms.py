"""Which law? Loss as a sum of powers, each with its published coefficients.

    smelt       L = E + A (1-S)^b / F^a + K / D^c                 arXiv 2609.01343, section 6
    chinchilla  L = E + A / N^alpha + B / D^beta                  arXiv:2203.15556, eq. 10

F training FLOPs per token, S compute-equivalent sparsity, D tokens, N parameters, L nats per token. Both are

    L = e^t0 + e^(t1 + sum of exponents x log features) + e^(...)

so one fit serves both, in log space, where no coefficient can turn negative. The looped-MoE law is no sum of powers of
its columns; it is in looped_moe.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Power:
    """One term: constant x product of column^(sign x exponent)."""

    constant: str
    powers: tuple[tuple[str, str, int], ...]
    """(exponent's name, feature, sign): exponents are positive as printed."""


@dataclass(frozen=True)
class Form(ABC):
    """A law with coefficients by name, and its vector theta, in which every value is allowed."""

    name: str
    equation: str
    source: str
    columns: tuple[str, ...]
    """What a table has to have beside the loss."""
    presets: Mapping[str, Mapping[str, float]]
    """Published coefficients, by preset name."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Coefficients, as many as theta has numbers."""

    @abstractmethod
    def theta(self, coefficients: Mapping[str, float]) -> Array:
        """The vector [P]."""

    @abstractmethod
    def coefficients(self, theta: Array) -> dict[str, float]:
        """As printed."""

    @abstractmethod
    def loss(self, coefficients: Mapping[str, float], columns: Mapping[str, Array]) -> Array:
        """L in nats [n]."""

    @abstractmethod
    def training_flops(self, columns: Mapping[str, Array]) -> Array:
        """C of each run [n]."""

    @property
    def by_arm(self) -> bool:
        """Whether every arm is fitted by itself; else all runs are one surface."""
        return True

    def least_different(self, column: str) -> int:  # noqa: ARG002
        """Fewest values of a column from which its coefficients can be told."""
        return 2

    def wrong(self, values: Mapping[str, float]) -> list[str]:  # noqa: ARG002
        """What is impossible in a run all of whose numbers are finite and in range."""
        return []


@dataclass(frozen=True)
class SumOfPowers(Form):
    """Terms beside the irreducible E."""

    terms: tuple[Power, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Coefficients in the order of the vector theta: E, then each term's constant and exponents."""
        return ("E", *(name for term in self.terms for name in (term.constant, *(p[0] for p in term.powers))))

    @property
    def constants(self) -> tuple[bool, ...]:
        """Which of `names` are constants: theta holds their logarithms."""
        return (True, *(flag for term in self.terms for flag in (True, *(False for _ in term.powers))))

    def theta(self, coefficients: Mapping[str, float]) -> Array:
        """The vector of logarithms and exponents."""
        values = zip(self.names, self.constants, strict=True)
        return np.array([np.log(coefficients[name]) if constant else coefficients[name] for name, constant in values])

    def coefficients(self, theta: Array) -> dict[str, float]:
        """As printed."""
        values = zip(self.names, self.constants, theta, strict=True)
        return {name: float(np.exp(value) if constant else value) for name, constant, value in values}

    def design(self, columns: Mapping[str, Array]) -> Array:
        """What turns theta [P] into the log terms [J, n]: matrices [J, n, P] with `log_terms = design @ theta`."""
        number = len(next(iter(columns.values())))
        matrix = np.zeros((1 + len(self.terms), number, len(self.names)))
        matrix[0, :, 0] = 1
        place = 1
        for j, term in enumerate(self.terms, 1):
            matrix[j, :, place] = 1
            for offset, (_, feature, sign) in enumerate(term.powers, 1):
                matrix[j, :, place + offset] = sign * features(columns)[feature]
            place += 1 + len(term.powers)
        return matrix

    def loss(self, coefficients: Mapping[str, float], columns: Mapping[str, Array]) -> Array:
        """L in nats."""
        return np.exp(self.design(columns) @ self.theta(coefficients)).sum(0)

    def training_flops(self, columns: Mapping[str, Array]) -> Array:
        """C = F D; a parameter is 6 FLOPs a token where only parameters are known."""
        flops = columns["flops_per_token"] if "flops_per_token" in columns else 6 * columns["parameters"]
        return flops * columns["tokens"]


def features(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Logarithms of what the terms are powers of."""
    found = {f"log {name}": np.log(values) for name, values in columns.items() if name != "sparsity"}
    if "sparsity" in columns:
        found["log density"] = np.log1p(-columns["sparsity"])
    return found


SMELT = SumOfPowers(
    name="smelt",
    equation="L = E + A (1-S)^b / F^a + K / D^c",
    source="arXiv 2609.01343, section 6",
    columns=("flops_per_token", "sparsity", "tokens"),
    terms=(
        Power("A", (("a", "log flops_per_token", -1), ("b", "log density", 1))),
        Power("K", (("c", "log tokens", -1),)),
    ),
    presets={
        "smelt-baseline": {"E": 1.4439, "A": 1.366e3, "K": 1.975e6, "a": 0.3703, "b": 0.1530, "c": 0.6594},
        "smelt-looped": {"E": 1.4493, "A": 1.963e3, "K": 5.264e6, "a": 0.3892, "b": 0.1460, "c": 0.7011},
    },
)
CHINCHILLA = SumOfPowers(
    name="chinchilla",
    equation="L = E + A / N^alpha + B / D^beta",
    source="arXiv:2203.15556, eq. 10; refitted on its public points in arXiv:2404.10102",
    columns=("parameters", "tokens"),
    terms=(
        Power("A", (("alpha", "log parameters", -1),)),
        Power("B", (("beta", "log tokens", -1),)),
    ),
    presets={
        "chinchilla": {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28},
        "chinchilla-refit": {"E": 1.8172, "A": 477.8, "alpha": 0.3473, "B": 2143.0, "beta": 0.3672},
    },
)
