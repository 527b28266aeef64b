"""How fast could the expert op be on this GPU at all? Each stage by two numbers, its FLOPs and its bytes.

    floor = sum over the stages of max(FLOPs / peak rate, bytes / bandwidth)

Stages are kernels: they run one after another and share nothing but device memory, so within one the slower of the two
decides, and the stages add up. Bytes: bf16 operands and results, each tensor once; rows that are gathered by token are
read once per choice (S H, not N H), since the K choices of a token lie in tiles of different experts. Ids, offsets and
routing weights are left out: 4 to 8 bytes a row beside 2 H.

The two ceilings are measured on the same card (ceilings.py); REFERENCE is what an H200 gave.

N tokens, K choices each, S = N K rows, E experts, of which `busy` have rows, H hidden, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shapes import Shape

BF16 = 2  # bytes


@dataclass(frozen=True)
class Ceilings:
    """What the card does at best."""

    flops: float
    """Per second."""
    bytes: float
    """Per second, read and written."""


REFERENCE = Ceilings(790e12, 4.3e12)
"""Of one H200, October 2026: torch.mm on random data, and copy_ (both ways counted)."""


@dataclass(frozen=True)
class Stage:
    """One kernel."""

    name: str
    flops: int
    bytes: int

    def seconds(self, ceilings: Ceilings) -> float:
        """At least."""
        return max(self.flops / ceilings.flops, self.bytes / ceilings.bytes)


def forward(shape: Shape, busy: int | None = None) -> tuple[Stage, ...]:
    """Gate, up and their product; down; the weighted sum over K. Matrices of experts without rows are not read."""
    N, H, F, E, K = shape
    S, matrix = N * K, H * F * (E if busy is None else busy)
    return (
        stage("up", 2 * S * 2 * F * H, [S * H, 2 * matrix], [S * 2 * F, S * F]),
        stage("down", 2 * S * F * H, [S * F, matrix], [S * H]),
        stage("combine", 0, [S * H], [N * H]),
    )


def backward(shape: Shape, busy: int | None = None) -> tuple[Stage, ...]:
    """Through down and the activation; to the rows of x; their sum; to both matrices, which are written for all E.

    The gradient of y is gathered twice (dact, wgrad_down), x once more (wgrad_up); `dact` reads the pre-activations and
    writes their gradient and the weighted activations that `wgrad_down` reads.
    """
    N, H, F, E, K = shape
    S, one = N * K, H * F
    matrix = one * (E if busy is None else busy)
    return (
        stage("dact", 2 * S * F * H, [S * H, matrix, S * 2 * F], [S * 2 * F, S * F]),
        stage("dx", 2 * S * 2 * F * H, [S * 2 * F, 2 * matrix], [S * H]),
        stage("combine", 0, [S * H], [N * H]),
        stage("wgrad_up", 2 * S * 2 * F * H, [S * 2 * F, S * H], [2 * E * one]),
        stage("wgrad_down", 2 * S * F * H, [S * F, S * H], [E * one]),
    )


def stage(name: str, flops: int, reads: Sequence[int], writes: Sequence[int]) -> Stage:
    """From the elements that it reads and writes."""
    return Stage(name, flops, BF16 * (sum(reads) + sum(writes)))


def seconds(stages: Sequence[Stage], ceilings: Ceilings) -> float:
    """The floor."""
    return sum(one.seconds(ceilings) for one in stages)


def flops(stages: Sequence[Stage]) -> int:
    """Of all."""
    return sum(one.flops for one in stages)
