"""How are the two expert ops computed by the C++ of `kernels/cpu`? In float32, by g++ for the CPU it runs on.

    forward    pre = W_gate_up x, h = w silu(gate) up, W_down h, by blocks of an expert's rows; then the sum over K
    backward   dh, dpre and dx by the same blocks, then every weight's gradient by blocks of its rows

A block is one thread's from beginning to end, and every sum is in a fixed order: results do not depend on the number of
threads. N tokens, K choices each, S = N K rows sorted by expert, E experts, H hidden, F expert width.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from smelt_budget.model import kernel_build
from smelt_budget.model.experts_cpu import Slots, by_slot, sort
from smelt_budget.model.kernel_build import log
from smelt_budget.model.kernel_library import LibraryError

ABI_VERSION = 1
POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
SIZES = (LONG, LONG, LONG, INT, INT, INT)  # N, K, E, H, F, threads
ARGUMENTS = {
    # x, ldx, w_gate_up, w_down, token, weight, offs, slot, pre, out, y
    "forward": (POINTER, LONG, *[POINTER] * 9, *SIZES),
    # grad, ldg, x, ldx, w_gate_up, w_down, token, weight, offs, slot, pre, hw, dpre, dx_rows, dx, dw_gate_up, dw_down,
    # dweight
    "backward": (POINTER, LONG, POINTER, LONG, *[POINTER] * 14, *SIZES),
}


def forward(
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    _b_gate_up_E2F: None,
    _b_down_EH: None,
    _limit: None,
) -> tuple[Tensor, Tensor]:
    """The rows y_NH and the sorted pre-activations pre_S2F, zero past the routed ones."""
    (N, K), (E, H, F) = idx_NK.shape, w_down_EHF.shape
    slots = sort(idx_NK, E, x_NH.dtype)
    pre = x_NH.new_empty(N * K, 2 * F)
    pre[slots.routed :].zero_()
    out, y = x_NH.new_empty(slots.routed, H), x_NH.new_empty(N, H)
    matrices = w_gate_up_E2FH.contiguous(), w_down_EHF.contiguous()
    call("forward", *strided(x_NH), *matrices, *places(slots, weight_NK), pre, out, y, N, K, E, H, F)
    return y, pre


def backward(
    grad_NH: Tensor,
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    _b_gate_up_E2F: None,
    _b_down_EH: None,
    _limit: None,
    pre_S2F: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Gradients of x, w_gate_up, w_down, weight and two biases; one that is not needed has no elements."""
    (N, K), (E, H, F) = idx_NK.shape, w_down_EHF.shape
    need_x, need_up, need_down, need_weight, *_ = needs
    slots = sort(idx_NK, E, x_NH.dtype)
    S = slots.routed
    hw, dpre = x_NH.new_empty(S, F), x_NH.new_empty(S, 2 * F)
    dx_rows, dx = (x_NH.new_empty(rows, H) if need_x else None for rows in (S, N))
    dw_up = x_NH.new_empty(E, 2 * F, H) if need_up else None
    dw_down = x_NH.new_empty(E, H, F) if need_down else None
    dweight = x_NH.new_zeros(S + 1)  # the last for choices that are not routed
    matrices = w_gate_up_E2FH.contiguous(), w_down_EHF.contiguous()
    inputs = (*strided(grad_NH), *strided(x_NH), *matrices, *places(slots, weight_NK), pre_S2F.contiguous())
    call("backward", *inputs, hw, dpre, dx_rows, dx, dw_up, dw_down, dweight, N, K, E, H, F)
    dx, dw_up, dw_down = (x_NH.new_empty(0) if made is None else made for made in (dx, dw_up, dw_down))
    dweight_NK = dweight[slots.slot_NK].to(weight_NK.dtype) if need_weight else weight_NK.new_empty(0)
    return dx, dw_up, dw_down, dweight_NK, x_NH.new_empty(0), x_NH.new_empty(0)


def places(slots: Slots, weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every row its token and weight; where each expert's rows begin; the row of every choice."""
    offs = torch.from_numpy(np.concatenate([[0], np.cumsum(slots.counts)]).astype(np.int64))
    return slots.token_P, by_slot(weight_NK, slots, torch.float32), offs, slots.slot_NK


def strided(x: Tensor) -> tuple[Tensor, int]:
    """A matrix whose rows are dense, copied where they are not, and their stride."""
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, x.stride(0)


def call(name: str, *arguments: Tensor | int | None) -> None:
    """A function of the library; a tensor is its address, None the null pointer, and the threads are torch's."""
    plain = (a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
    getattr(library(), f"smelt_cpu_{name}")(*plain, torch.get_num_threads())


def lanes() -> int:
    """Floats in a vector: 16 with AVX-512.

    Raises:
        KernelBuildError: the library cannot be compiled here.
        LibraryError: it does not load.
    """
    return library().smelt_cpu_lanes()


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, loaded once a process; one that does not load is compiled again, once."""
    try:
        return loaded(kernel_build.build("native"))
    except LibraryError as error:
        log.info("%s", error)
        return loaded(kernel_build.build("native", anew=True))


def loaded(path: object) -> ctypes.CDLL:
    """The functions of a library, with the types of their arguments.

    Raises:
        LibraryError: it does not load, or is of another version.
    """
    try:
        found = ctypes.CDLL(str(path))
        if found.smelt_cpu_abi_version() != ABI_VERSION:
            raise LibraryError(f"{path} has another version of the interface than {ABI_VERSION}")
        for name, types in ARGUMENTS.items():
            function = getattr(found, f"smelt_cpu_{name}")
            function.restype, function.argtypes = None, types
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{path} does not load: {error}") from None
    return found
