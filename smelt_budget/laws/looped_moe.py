"""The law of looped Mixture-of-Experts of arXiv 2609.40316: loss from active size, loops, experts and tokens.

    L = c + A Eh^d N_eff^(al + g ln Eh) + B Eh^w D^(be + z ln Eh)           N and D in billions
    N_eff = N_act + k1 x N_loop (1 - exp(-(R-1) / (k2 x)))                  x = (N_act / N_total)^-th
    1/Eh = 1/(E - 1 + u) + 1/Em     u = 1/(1/Es - 1/Em)                     E = routed experts / top-k
    training FLOPs = 6 N_unroll D                                           N_unroll = N_act + (R-1) N_loop

N without embeddings; Eh is Es where E is 1 and Em where E is large. theta holds u and not Es, so that Es < Em always.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from smelt_budget.laws.forms import Array, Form

BILLION = 1e9
NAMES = ("c", "A", "al", "d", "g", "B", "be", "w", "z", "Es", "Em", "k1", "k2", "th")
LOGARITHMS = tuple(NAMES.index(name) for name in ("c", "A", "B", "Es", "Em", "k1", "k2"))
"""Of these theta holds the logarithm; in the place of Es, that of u."""


@dataclass(frozen=True)
class LoopedMoe(Form):
    """Fourteen coefficients; a loop and no loop are points of one surface."""

    @property
    def names(self) -> tuple[str, ...]:
        """Irreducible loss, capacity, training, experts, loops."""
        return NAMES

    @property
    def by_arm(self) -> bool:
        """Loops are a column of this law: runs with R = 1 alone would say nothing of k1, k2 and th."""
        return False

    def least_different(self, column: str) -> int:
        """Four of experts: A, d, al, g take up any a + b ln Eh, so three leave Es or Em open. Three of loops."""
        return {"experts": 4, "loops": 3}.get(column, 2)

    def theta(self, coefficients: Mapping[str, float]) -> Array:
        """Logarithms of what is positive."""
        k = dict(coefficients) | {"Es": 1 / (1 / coefficients["Es"] - 1 / coefficients["Em"])}
        return np.array([np.log(k[name]) if i in LOGARITHMS else k[name] for i, name in enumerate(NAMES)])

    def coefficients(self, theta: Array) -> dict[str, float]:
        """As printed in the paper."""
        k = {name: float(np.exp(theta[i]) if i in LOGARITHMS else theta[i]) for i, name in enumerate(NAMES)}
        return k | {"Es": 1 / (1 / k["Es"] + 1 / k["Em"])}

    def loss(self, coefficients: Mapping[str, float], columns: Mapping[str, Array]) -> Array:
        """Nats per token [n]."""
        return np.exp(log_law(self.theta(coefficients), columns)[0])

    def training_flops(self, columns: Mapping[str, Array]) -> Array:
        """C = 6 N_unroll D."""
        return 6 * unrolled(columns) * columns["tokens"]

    def wrong(self, values: Mapping[str, float]) -> list[str]:
        """Sizes that contain each other, loops that are whole."""
        active, total, looped, loops = (values[name] for name in ("active", "total", "looped", "loops"))
        found = []
        if active > total:
            found.append(f"active {active:g} is more than total {total:g}")
        if looped > active:
            found.append(f"looped {looped:g} is more than active {active:g}")
        if loops < 1 or loops != round(loops):
            found.append(f"loops {loops:g} is not 1, 2, 3 ...")
        elif loops > 1 and looped == 0:
            found.append(f"looped is 0, and loops {loops:g}")
        if values["experts"] < 1:
            found.append(f"experts {values['experts']:g} is below 1: it is routed experts over top-k, 1 if dense")
        return found


def unrolled(columns: Mapping[str, Array]) -> Array:
    """N_unroll [n], active parameters over all loops."""
    return columns["active"] + (columns["loops"] - 1) * columns["looped"]


def log_experts(theta: Array, experts: Array) -> tuple[Array, Array, Array]:
    """ln Eh [n], and its derivatives by ln u and ln Em."""
    u, most = np.exp(theta[9:11])
    above = experts - 1 + u
    inverse = 1 / above + 1 / most
    return -np.log(inverse), u / above**2 / inverse, 1 / most / inverse


def log_size(theta: Array, columns: Mapping[str, Array]) -> tuple[Array, Array, Array, Array]:
    """ln N_eff [n], billions, and its derivatives by ln k1, ln k2 and th."""
    (k1, k2), th = np.exp(theta[11:13]), theta[13]
    log_sparser = -np.log(columns["active"] / columns["total"])
    x = np.exp(th * log_sparser)
    rate = (columns["loops"] - 1) / (k2 * x)
    ceiling = k1 * x * columns["looped"] / BILLION
    worth, late = -ceiling * np.expm1(-rate), ceiling * rate * np.exp(-rate)
    size = columns["active"] / BILLION + worth
    return np.log(size), worth / size, -late / size, (worth - late) / size * log_sparser


def log_law(theta: Array, columns: Mapping[str, Array]) -> tuple[Array, Array]:
    """Log of the loss [n] and its derivatives by theta [P, n]; not finite where theta is far off."""
    log_c, log_A, al, d, g, log_B, be, w, z = theta[:9]
    with np.errstate(all="ignore"):
        h, h_u, h_Em = log_experts(theta, columns["experts"])
        n, n_k1, n_k2, n_th = log_size(theta, columns)
        t = np.log(columns["tokens"] / BILLION)
        terms = np.stack([log_c + 0 * n, log_A + d * h + (al + g * h) * n, log_B + w * h + (be + z * h) * t])
        largest = terms.max(0)
        shares = np.exp(terms - largest)
        total = shares.sum(0)
        first, capacity, training = shares / total
        by_h, by_n = capacity * (d + g * n) + training * (w + z * t), capacity * (al + g * h)
        slopes = np.stack(
            [
                *(first, capacity, capacity * n, capacity * h, capacity * h * n),
                *(training, training * t, training * h, training * h * t),
                *(by_h * h_u, by_h * h_Em, by_n * n_k1, by_n * n_k2, by_n * n_th),
            ]
        )
        return largest + np.log(total), slopes


LOOPED_MOE = LoopedMoe(
    name="looped-moe",
    equation="L = c + A Eh^d N_eff^(al + g ln Eh) + B Eh^w D^(be + z ln Eh)",
    source="arXiv 2609.40316",
    columns=("active", "total", "looped", "loops", "experts", "tokens"),
    presets={
        "looped-moe": {
            "A": 0.8085, "al": -0.1951, "B": 3.4291, "be": -0.7548, "c": 1.3555, "d": -0.1935, "g": -0.0137,
            "w": -0.2056, "z": 0.0881, "Es": 1.3174, "Em": 57.1201, "k1": 0.3682, "k2": 1.4037, "th": 0.3286,
        }
    },
)  # fmt: skip
"""Its runs are not public; its fit's RMSE is .0037 nats."""
