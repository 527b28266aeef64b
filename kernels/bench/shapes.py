"""On which shapes are the expert kernels measured, and how are tokens spread over experts?

N tokens, K choices each, H hidden, F expert width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Of one problem."""

    N: int
    H: int
    F: int
    E: int
    K: int

    def __str__(self) -> str:
        """As the tables name it."""
        return " ".join(f"{letter}={size}" for letter, size in self._asdict().items())


SHAPES = (
    Shape(32768, 1056, 128, 64, 8),  # 1056: the hidden size of the smallest looped model, 16.5 x 64
    Shape(32768, 1056, 256, 64, 8),
    Shape(32768, 1056, 768, 128, 8),
    Shape(8192, 1056, 128, 512, 8),  # 128 rows an expert
    Shape(32768, 2048, 768, 128, 8),  # Qwen3-30B-A3B, in the published figures of others
)
REHEARSED = (Shape(24, 40, 16, 6, 2),)
"""Tiny, for the CPU: it shows that the script runs, nothing else."""

ROUTINGS = ("balanced", "zipf", "half empty")
SETS = 3
"""Inputs that take turns, so that nothing a round reads is left in the cache (60 MB) by the round before."""
