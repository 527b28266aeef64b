"""Are there kernels to measure, and does the emulator do what this GPU does? Libraries are built, then compared.

What the tests found out on the emulator holds for a GPU as far as the two agree, primitive by primitive.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import conformance
from records import Missing, Unit

from smelt_budget.model import kernel_library


def built(device: str, _: str) -> list[Unit]:
    """The library of the GPU, the emulated one, and the primitives of both; in the cache from now on."""
    units: list[Unit] = []
    for target in ("cuda", "emulated"):
        units.append((target, functools.partial(loaded, target, device)))
        units.append((f"primitives, {target}", functools.partial(primitives, target, device)))
    return units


def loaded(target: str, device: str) -> dict[str, Any]:
    """Compiled for the GPU that is here.

    Raises:
        Missing: there is none.
    """
    possible(target, device)
    library = kernel_library.load(target)
    return {"capability": library.capability(), "library": Path(library.path).name}


def primitives(target: str, device: str) -> dict[str, Any]:
    """The kernels that call one primitive each.

    Raises:
        Missing: there is no GPU.
    """
    possible(target, device)
    return {"capability": conformance.capability(conformance.library(target))}


def possible(target: str, device: str) -> None:
    """Raises Missing: this library wants a GPU and there is none."""
    if target == "cuda" and device != "cuda":
        raise Missing("needs a GPU")


def compared(device: str, _: str) -> list[Unit]:
    """The GPU with the emulator; in a rehearsal the emulator with itself."""
    return [("primitives", functools.partial(agreement, device))]


def agreement(device: str) -> dict[str, Any]:
    """Every primitive of device.h and hopper.h, and in words those that differ."""
    of_device = conformance.library("cuda" if device == "cuda" else "emulated")
    found = conformance.compare(of_device, conformance.library("emulated"), device=device)
    wrong = [f"{each.primitive}: {each.text}" for each in found if not each.agrees]
    texts = {each.primitive: each.text for each in found}
    return {"ok": bool(found) and not wrong, "what": "; ".join(wrong), "primitives": texts}
