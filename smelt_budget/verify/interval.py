"""How well do seeds tell two arms apart? A t-interval of the paired difference, and the seeds a narrower one takes.

    d_i = twin_i - baseline_i                    same seed, same data, same held-out rows; i = 1..n
    mean d +- t(n) sd / sqrt(n)                  t(n): 97.5 % quantile of Student's t with n - 1 degrees of freedom
    seeds for a half-width h                     the least n with t(n) sd / sqrt(n) <= h, were the sd known

Pairing takes out what data order and held-out rows do to both arms. It does not take out initialisation, which at a few
million parameters is most of the noise. So the standard error over rows of one seed, here `rows_error`, is not the
error of a comparison: it leaves out what another seed would have changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any

CONFIDENCE = 0.95
MOST = 10**6
"""Seeds beyond this are given up on: `None`."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with what surrounds it; without a spread where there is one seed."""

    mean: float
    sd: float | None
    half_width: float | None
    seeds: int

    @classmethod
    def over(cls, values: Sequence[float]) -> Interval:
        """Of one value a seed; at least one."""
        n = len(values)
        sd = stdev(values) if n > 1 else None
        return cls(fmean(values), sd, None if sd is None else quantile(n) * sd / math.sqrt(n), n)

    @property
    def excludes_zero(self) -> bool:
        """Whether all of the interval lies on one side of 0; never of one seed."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        width = self.half_width
        return {
            "mean": self.mean,
            "sd": self.sd,
            "half_width": width,
            "low": None if width is None else self.mean - width,
            "high": None if width is None else self.mean + width,
            "seeds": self.seeds,
            "confidence": CONFIDENCE,
        }


def quantile(n: int) -> float:
    """t(n): 12.7 for 2 seeds, 4.3 for 3, 2.6 for 6, 1.96 for ever so many."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))


def seeds_for(half_width: float, sd: float | None) -> int | None:
    """The least n that gives the half-width, at least 2; `None` where no sd is known or `MOST` are not enough."""
    from scipy.special import ndtri

    if sd is None or half_width <= 0:
        return None
    least = max(2.0, (float(ndtri((1 + CONFIDENCE) / 2)) * sd / half_width) ** 2)  # t(n) is above the normal quantile
    if least > MOST:
        return None
    n = math.ceil(least)
    while quantile(n) * sd / math.sqrt(n) > half_width:
        n += 1
    return n


def rows_error(baseline: dict[str, Any], twin: dict[str, Any]) -> float | None:
    """Standard error over held-out rows of one seed's difference; from two `rows` of `evaluate`, within domains."""
    if baseline["domain"] != twin["domain"]:
        return None
    by_domain: dict[str, list[float]] = {}
    for domain, before, after in zip(
        baseline["domain"], baseline["nats_per_token"], twin["nats_per_token"], strict=True
    ):
        by_domain.setdefault(domain, []).append(after - before)
    if not by_domain or min(map(len, by_domain.values())) < 2:
        return None
    total = sum(map(len, by_domain.values()))
    return math.sqrt(sum(len(rows) * variance(rows) for rows in by_domain.values())) / total
