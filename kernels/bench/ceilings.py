"""What does this card do at best? The rate of a large matrix product and of a large copy.

peak      = 2 n^3 / time of an n^3 bf16 product                      (a multiply and an add for each of n^3 terms)
bandwidth = 2 bytes / time of a device-to-device copy                (read and written)
"""

from __future__ import annotations

import functools

import torch
from records import Unit
from timing import clock_of, timed_alone

SIDE = 8192
COPIED = 4 * 2**30  # bytes: 70 times the L2 cache of an H200
REHEARSED_SIDE, REHEARSED_COPIED = 64, 2**12


def units(device: str, _: str) -> list[Unit]:
    """Both."""
    return [(each.__name__, functools.partial(each, device)) for each in (product, copy)]


def product(device: str) -> dict[str, float | None]:
    """FLOP/s of cuBLAS on random data."""
    side = SIDE if device == "cuda" else REHEARSED_SIDE
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    milliseconds = timed_alone(lambda: torch.mm(left, right, out=out), clock_of(device))
    return {"flops": None if milliseconds is None else 2 * side**3 / milliseconds * 1e3}


def copy(device: str) -> dict[str, float | None]:
    """Bytes/s, both ways counted."""
    source = torch.randn((COPIED if device == "cuda" else REHEARSED_COPIED) // 4, device=device)
    target = torch.empty_like(source)
    milliseconds = timed_alone(lambda: target.copy_(source), clock_of(device))
    return {"bytes": None if milliseconds is None else 2 * source.nbytes / milliseconds * 1e3}
