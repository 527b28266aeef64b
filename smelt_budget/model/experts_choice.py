"""Which code computes the experts here, and what speaks against the kernels?

    auto       the CUDA kernels on a GPU, the native ones on a CPU, where everything fits; else torch's operations
    cuda       the CUDA kernels, or an error that says what is in their way
    native     the C++ kernels for this CPU, or an error
    torch      torch's operations, on any device
    emulated   the CUDA kernels on a CPU: a test back end, very slow; by the environment only

`SMELT_EXPERTS` is asked where no option was given. E experts, H hidden, F expert width.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Literal

import torch

from smelt_budget.errors import BadInput, SmeltError
from smelt_budget.model import experts_cuda, experts_native
from smelt_budget.model.kernel_build import log
from smelt_budget.model.kernel_library import load

Asked = Literal["auto", "cuda", "native", "torch", "emulated"]
Name = Literal["cuda", "native", "torch", "emulated"]
VARIABLE = "SMELT_EXPERTS"
VALUES: tuple[Asked, ...] = ("auto", "cuda", "native", "torch", "emulated")
MULTIPLE = 8  # bf16 elements of 16 bytes, what an asynchronous copy moves
MOST_EXPERTS = 65_535  # blocks on the third axis of a CUDA grid
INSTRUCTIONS = {experts_cuda.PORTABLE: "mma.sync", experts_cuda.HOPPER: "wgmma"}
"""What the products of a tier are made of."""


@dataclass(frozen=True)
class Circumstances:
    """All that decides: where, in which types, of which shape."""

    device: torch.device
    rows: torch.dtype
    matrices: torch.dtype
    shape: tuple[int, int, int]
    """E, H, F."""
    biases: bool
    clamp: bool


@dataclass(frozen=True)
class Choice:
    """What is taken; the reasons are those against the kernels that were not, or why none was looked for."""

    name: Name
    tier: int | None = None
    """Of the CUDA kernels; of the native ones, floats in a vector."""
    reasons: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """cuda (wgmma), native (16 floats at a time), torch (the experts have biases): with the first reason."""
        if self.tier is None:
            return f"{self.name} ({self.reasons[0]})"
        return f"{self.name} ({INSTRUCTIONS.get(self.tier) or f'{self.tier} floats at a time'})"

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"name": self.name, "tier": self.tier, "words": self.words, "reasons": list(self.reasons)}


def asked_for(given: str | None) -> Asked:
    """What was given, else what the environment says, else auto.

    Raises:
        BadInput: it is none of VALUES.
    """
    value = given or os.environ.get(VARIABLE) or "auto"
    for name in VALUES:
        if value == name:
            return name
    raise BadInput(f"{VARIABLE}={value} is none of {', '.join(VALUES)}", f"fix: {VARIABLE}=auto")


def chosen(asked: Asked, at: Circumstances) -> Choice:
    """The choice for one expert layer; decided, and compiled if need be, once a process.

    Raises:
        BadInput: the kernels were asked for and cannot be had.
    """
    choice = decided(asked, at)
    if choice.name == "torch":
        refuse(asked, choice.reasons)
    return choice


def check_device(asked: Asked, device: str) -> None:
    """What has no kernels whatever the model is fails before the work.

    Raises:
        BadInput: the kernels were asked for and this device has none.
    """
    refuse(asked, of_device(asked, torch.device(device)))


def refuse(asked: Asked, reasons: tuple[str, ...]) -> None:
    """Reasons are an error for those who asked for the kernels."""
    if reasons and asked in ("cuda", "native", "emulated"):
        what, *more = reasons
        fix = f"fix: --experts auto, or {VARIABLE}=auto"
        raise BadInput(f"the {asked} experts were asked for, but {what}", *more, fix)


@functools.cache
def decided(asked: Asked, at: Circumstances) -> Choice:
    """The same, where an answer is never an error."""
    if asked == "torch":
        return Choice("torch", reasons=("as asked",))
    name: Name = asked if asked != "auto" else "native" if at.device.type == "cpu" else "cuda"
    reasons = (*of_device(name, at.device), *of_model(name, at))
    tier = None
    if not reasons:
        try:
            E, H, F = at.shape
            if name == "native":
                tier = experts_native.lanes()
            else:
                tier = experts_cuda.stage_tier(load(name), at.device, experts_cuda.UP, E, E, H, F)
        except SmeltError as error:
            reasons = tuple(line.strip() for line in str(error).splitlines())
            log.warning("the experts are computed by torch: %s", error)
    rest: tuple[str, ...] = ()
    if asked == "auto" and name == "native":
        rest = (*of_device("cuda", at.device), *of_model("cuda", at))
    if reasons:
        return Choice("torch", None, tuple(dict.fromkeys((*reasons, *rest))))
    return Choice(name, tier, rest)


def of_device(asked: Asked, device: torch.device) -> tuple[str, ...]:
    """What keeps kernels from a device, in words; the emulated ones read the memory of the CPU."""
    if asked == "emulated":
        return () if device.type == "cpu" else (f"the emulator runs on the CPU, the tensors are on {device.type}",)
    if asked == "native" or (asked == "auto" and device.type == "cpu"):
        return () if device.type == "cpu" else (f"the native kernels run on the CPU, the tensors are on {device.type}",)
    if device.type != "cuda":
        return ("no CUDA device",) if not torch.cuda.is_available() else (f"it runs on the {device.type}",)
    if torch.version.hip is not None:
        return ("this GPU has no CUDA",)
    capability = experts_cuda.capability_of(device.index)
    if capability < experts_cuda.PORTABLE:
        return (f"this GPU has capability {capability / 10:.1f}, the kernels need 8.0",)
    return ()


def of_model(name: Name, at: Circumstances) -> tuple[str, ...]:
    """What the kernels do not compute on any device, in words."""
    E, H, F = at.shape
    both = {"the experts have biases": at.biases, "the activation is clamped": at.clamp}
    if name == "native":
        wrong = at.rows if at.rows != torch.float32 else at.matrices
        against = {f"the native kernels take float32, these are {words(wrong)}": wrong != torch.float32, **both}
        return tuple(reason for reason, true in against.items() if true)
    against = {
        f"the rows are {words(at.rows)}, the kernels take bf16": at.rows != torch.bfloat16,
        f"the matrices are {words(at.matrices)}": at.matrices not in (torch.bfloat16, torch.float32),
        f"hidden size {H} is not a multiple of {MULTIPLE}": H % MULTIPLE != 0,
        f"expert width {F} is not a multiple of {MULTIPLE}": F % MULTIPLE != 0,
        f"{E} experts are not between 1 and {MOST_EXPERTS}": not 1 <= E <= MOST_EXPERTS,
        **both,
    }
    return tuple(reason for reason, true in against.items() if true)


def words(dtype: torch.dtype) -> str:
    """float32."""
    return str(dtype).removeprefix("torch.")
