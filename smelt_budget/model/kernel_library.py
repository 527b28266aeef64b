"""How does Python call the expert kernels? Through ctypes, by one table for the CUDA and the emulated library.

A pointer is a tensor, which then outlives the call, or its `data_ptr()`; None is the null pointer. N tokens, K choices,
S = N K rows sorted by expert, E experts, H hidden, F expert width; the meaning of every function is in
`kernels/include/abi.h`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smelt_budget.errors import SmeltError
from smelt_budget.model import kernel_build
from smelt_budget.model.kernel_build import Target, log

ABI_VERSION = 1
POINTER, INT, LONG, TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p

ANSWERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "abi_version": (INT, ()),
    "message": (TEXT, (INT,)),
    # tier, S, E, H, F
    "tile_rows": (INT, (INT, LONG, INT, INT, INT)),
    # tier, stage, S, E, H, F
    "tile_columns": (INT, (INT, INT, LONG, INT, INT, INT)),
    # S, E
    "plan_workspace": (LONG, (LONG, INT)),
    # tier, S, E, H, F
    "partials": (INT, (INT, LONG, INT, INT, INT)),
}
"""Functions that return what they say: the type, and those of the arguments."""

WORK: dict[str, tuple[Any, ...]] = {
    # idx, N, K, E, tile_rows, offs, tile0, choice, slot, workspace, stream
    "plan": (POINTER, LONG, INT, INT, INT, *[POINTER] * 6),
    # x, ldx, w_gate_up, pre, h, choice, offs, tile0, S, K, E, H, F, tier, tile_rows, stream
    "up": (POINTER, LONG, *[POINTER] * 6, LONG, *[INT] * 6, POINTER),
    # h, w_down, out, offs, tile0, S, E, H, F, tier, tile_rows, stream
    "down": (*[POINTER] * 5, LONG, *[INT] * 5, POINTER),
    # out, slot, weight, y, N, K, H, stream
    "combine": (*[POINTER] * 4, LONG, INT, INT, POINTER),
    # grad, ldg, w_down, pre, weight, dpre, hw, partial, choice, offs, tile0, S, K, E, H, F, tier, tile_rows, stream
    "dact": (POINTER, LONG, *[POINTER] * 9, LONG, *[INT] * 6, POINTER),
    # partial, parts, slot, dweight, S, stream
    "dweight": (POINTER, INT, POINTER, POINTER, LONG, POINTER),
    # dpre, w_gate_up, dx, offs, tile0, S, E, H, F, tier, tile_rows, stream
    "dx": (*[POINTER] * 5, LONG, *[INT] * 5, POINTER),
    # left, ldl, left_choice, right, ldr, right_choice, K, dw, how, offs, S, E, rows, columns, tier, stream
    "wgrad": (POINTER, LONG, POINTER, POINTER, LONG, POINTER, INT, POINTER, INT, POINTER, LONG, *[INT] * 4, POINTER),
}
"""Functions that return 0 or a code: the types of their arguments."""

EMULATOR: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "emulator_seed": (None, (ctypes.c_uint64,)),
    "emulator_threads": (None, (INT,)),
    "emulator_counts": (INT, (POINTER, INT)),
}
"""Only the emulated library has these."""


class KernelError(SmeltError):
    """A kernel was not started, or the emulator found a fault in it."""


class LibraryError(SmeltError):
    """The file is no library of ours, or one of another version."""


class Library:
    """Every function of the table as a method; one that returns a code raises KernelError instead."""

    def __init__(self, path: Path):
        """Raises LibraryError: the file cannot be loaded, or lacks a function, or has another ABI version."""
        self.path = path
        try:
            self._loaded = ctypes.CDLL(str(path))
            own = ("smelt_emulator_seed",) if hasattr(self._loaded, "smelt_emulator_seed") else ()
            self.emulated = bool(own)
            version = self._function("abi_version", *ANSWERS["abi_version"])()
            if version != ABI_VERSION:
                raise LibraryError(f"{path} has version {version} of the interface, not {ABI_VERSION}")
            answers = {**ANSWERS, **EMULATOR} if self.emulated else ANSWERS
            functions = {name: self._function(name, *types) for name, types in answers.items()}
            self._message = functions.pop("message")
            for name, types in WORK.items():
                functions[name] = self._checked(self._function(name, INT, types))
            self._capability = self._checked(self._function("capability", INT, (POINTER,)))
        except (OSError, AttributeError) as error:
            raise LibraryError(f"{path} does not load: {error}") from None
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """What is in the instance is found before this is asked; here for the type checker."""
        raise AttributeError(f"{self.path} has no function {name}")

    def message(self, code: int) -> str:
        """What a code means."""
        return self._message(code).decode(errors="replace")

    def capability(self) -> int:
        """Of the current GPU: 90 is 9.0.

        Raises:
            KernelError: there is none, or no driver for it.
        """
        value = ctypes.c_int()
        self._capability(ctypes.byref(value))
        return value.value

    def _function(self, name: str, result: Any, types: tuple[Any, ...]) -> Callable[..., Any]:
        function = getattr(self._loaded, f"smelt_{name}")
        function.restype, function.argtypes = result, types
        return function

    def _checked(self, function: Any) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            code = function(*(a.data_ptr() if hasattr(a, "data_ptr") else a for a in arguments))
            if code:
                raise KernelError(f"{function.__name__}: {self.message(code)}")

        return call


def load(target: Target, path: Path | None = None) -> Library:
    """The library, compiled first if need be; one that does not load is compiled again, once.

    With a `path` that file is loaded as it is.

    Raises:
        LibraryError: it does not load.
        KernelBuildError: it cannot be compiled.
    """
    return of_cache(target) if path is None else Library(Path(path))


@functools.cache
def of_cache(target: Target) -> Library:
    """Loaded once a process; compiled for the GPUs that are here alone, which is faster."""
    here = gpus() if target == "cuda" else ()
    build = functools.partial(kernel_build.build, target, architectures=here or kernel_build.ARCHITECTURES)
    try:
        return Library(build())
    except LibraryError as error:
        log.info("%s", error)
        return Library(build(anew=True))


def gpus() -> tuple[str, ...]:
    """The architectures of this machine's GPUs: sm_80, sm_90a."""
    import torch

    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    names = (f"sm_{major}{minor}" for major, minor in sorted(found) if major >= 8)
    return tuple(f"{name}a" if name == "sm_90" else name for name in names)
