"""What does a GPU do in an hour, and what does it hold? Peak bf16 without sparsity, from makers' data sheets.

NVIDIA prints tensor-core peaks with 2:4 sparsity, which no trainer here uses: half of the printed figure is taken.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from smelt_budget.errors import BadInput


@dataclass(frozen=True)
class Gpu:
    """One GPU's peak and memory."""

    name: str
    tflops: float
    """bf16, dense, 1e12 operations a second."""
    memory: float
    """1e9 bytes."""
    source: str

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312, 80, "NVIDIA A100 80GB data sheet, SXM"),
        Gpu("h100", 989.5, 80, "NVIDIA H100 data sheet, SXM: 1,979 with sparsity"),
        Gpu("h200", 989.5, 141, "NVIDIA H200 data sheet, SXM: 1,979 with sparsity"),
        Gpu("b200", 2250, 180, "NVIDIA Blackwell data sheet, HGX B200: 4,500 with sparsity"),
        Gpu("mi300x", 1307.4, 192, "AMD Instinct MI300X data sheet"),
    )
}
MOST_TFLOPS, MOST_MEMORY = 1e6, 1e6
"""A typed-in FLOP/s instead of TFLOP/s is noticed."""


def gpu(name: str, tflops: float | None = None, memory: float | None = None) -> Gpu:
    """One of the table, or one with a peak or a memory of its own.

    Raises:
        BadInput: there is no such GPU, or a number is out of range.
    """
    if name not in GPUS:
        raise BadInput(f"there is no GPU {name!r:.40}", f"fix: one of {', '.join(GPUS)}, or --gpu-tflops")
    for flag, value, most in (("--gpu-tflops", tflops, MOST_TFLOPS), ("--gpu-memory", memory, MOST_MEMORY)):
        if value is not None and not 0 < value <= most:
            raise BadInput(f"{flag} {value:g} is not above 0 and at most {most:g}")
    found = GPUS[name]
    if tflops is None and memory is None:
        return found
    given = [flag for flag, value in (("--gpu-tflops", tflops), ("--gpu-memory", memory)) if value is not None]
    return replace(
        found,
        name=f"{name} with {' and '.join(given)}",
        tflops=tflops or found.tflops,
        memory=memory or found.memory,
        source=f"{found.source}; {' and '.join(given)} as given",
    )
