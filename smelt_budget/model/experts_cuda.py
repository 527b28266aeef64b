"""How are the two expert ops computed by the kernels of `kernels/`? On a GPU, or on a CPU by their emulated library.

    forward    plan -> up -> down -> combine                  pre = W_gate_up x, h = silu(gate) up, y = sum w_k W_down h
    backward   plan -> dact -> dweight, wgrad, dx, combine    dpre and w h from grad and pre; nothing else was kept

Rows are bf16, sums are float32. Matrices may be float32, as under autocast: they are rounded to bf16 here, and their
gradients come back in float32 straight from the sums. No call waits for the device, so a CUDA graph may hold them all.

N tokens, K choices each, S = N K slots sorted by expert, E experts, H hidden, F expert width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt_budget.model.kernel_library import Library, load

ALIGNED = 16  # bytes of a row's and a tensor's beginning: one asynchronous copy
PORTABLE, HOPPER = 80, 90
"""Tiers: mma.sync on every GPU from 8.0 on, wgmma on 9.0 alone."""
UP, WGRAD_UP, WGRAD_DOWN = 0, 4, 5
"""Stages by the numbers of abi.h, where `stage_tier` is asked."""
BF16, FLOAT32, FLOAT32_ADD = 0, 1, 2
"""How a weight gradient is written, by the numbers of abi.h."""


@dataclass(frozen=True)
class Plan:
    """Which slots belong to which expert, on the device; the arguments that every stage shares."""

    library: Library
    tier: int
    tile_rows: int
    sizes: tuple[int, int, int, int, int]
    """S, K, E, H, F."""
    offs: Tensor
    tile0: Tensor
    choice: Tensor
    """Of each slot, n K + k; -1 where spare."""
    slot: Tensor
    """Of each choice; -1 where it is not routed."""
    stream: int | None

    @property
    def end(self) -> tuple[int, int, int, int, int, int | None]:
        """E, H, F, tier, tile_rows, stream: what stages end with."""
        _, _, E, H, F = self.sizes
        return E, H, F, self.tier, self.tile_rows, self.stream


def forward(
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    b_gate_up_E2F: Tensor | None,
    b_down_EH: Tensor | None,
    limit: float | None,
    *,
    tier: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The rows y_NH and the sorted pre-activations pre_S2F, zero past the routed ones; `tier` is for comparisons."""
    refuse(x_NH, b_gate_up_E2F, b_down_EH, limit)
    (N, K), (_, H, F) = idx_NK.shape, w_down_EHF.shape
    S = N * K
    if S == 0:
        return x_NH.new_zeros(N, H), x_NH.new_empty(0, 2 * F)
    with on(x_NH.device):
        plan = planned(x_NH, idx_NK, w_down_EHF.shape, tier)
        tiles, library = (plan.offs, plan.tile0), plan.library
        pre, h, out, y = (x_NH.new_empty(*shape) for shape in ((S, 2 * F), (S, F), (S, H), (N, H)))
        library.up(*strided(x_NH), weights(w_gate_up_E2FH), pre, h, plan.choice, *tiles, S, K, *plan.end)
        library.down(h, weights(w_down_EHF), out, *tiles, S, *plan.end)
        library.combine(out, plan.slot, routing(weight_NK), y, N, K, H, plan.stream)
    return y, pre


def backward(
    grad_NH: Tensor,
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    b_gate_up_E2F: Tensor | None,
    b_down_EH: Tensor | None,
    limit: float | None,
    pre_S2F: Tensor,
    needs: Sequence[bool],
    *,
    tier: int | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of x, w_gate_up, w_down, weight and two biases; one that is not needed has no elements.

    Weight gradients have their weight's dtype. `into` are dense float32 buffers for both that they are added to, and
    which are returned in their place.
    """
    refuse(x_NH, b_gate_up_E2F, b_down_EH, limit)
    need_x, need_up, need_down, need_weight, *_ = needs
    (N, K), H = idx_NK.shape, x_NH.shape[1]
    S, dense = N * K, torch.contiguous_format
    if into is not None:
        refuse_buffers(into, w_gate_up_E2FH, w_down_EHF)
    make = torch.empty_like if S else torch.zeros_like
    dx = make(x_NH, memory_format=dense) if need_x else x_NH.new_empty(0)
    dw_up, dw_down = into or (
        make(w, memory_format=dense) if need else w.new_empty(0)
        for w, need in ((w_gate_up_E2FH, need_up), (w_down_EHF, need_down))
    )
    dweight_S = weight_NK.new_empty(S if need_weight else 0, dtype=torch.float32)
    if S and any((need_x, need_up, need_down, need_weight)):
        with on(x_NH.device):
            plan = planned(x_NH, idx_NK, w_down_EHF.shape, tier)
            dpre, hw, partial = grad_of_rows(plan, grad_NH, w_down_EHF, weight_NK, pre_S2F)
            if need_weight:
                plan.library.dweight(partial, len(partial), plan.slot, dweight_S, S, plan.stream)
            if need_up:
                grad_of_weights(plan, (dpre, None), (x_NH, plan.choice), dw_up, WGRAD_UP, into is not None)
            if need_down:
                grad_of_weights(plan, (grad_NH, plan.choice), (hw, None), dw_down, WGRAD_DOWN, into is not None)
            if need_x:
                dx_SH = x_NH.new_empty(S, H)
                plan.library.dx(dpre, weights(w_gate_up_E2FH), dx_SH, plan.offs, plan.tile0, S, *plan.end)
                plan.library.combine(dx_SH, plan.slot, None, dx, N, K, H, plan.stream)
    dweight = dweight_S.view(idx_NK.shape) if need_weight else dweight_S
    return dx, dw_up, dw_down, dweight.to(weight_NK.dtype), x_NH.new_empty(0), x_NH.new_empty(0)


def planned(x_NH: Tensor, idx_NK: Tensor, shape: Sequence[int], tier: int | None) -> Plan:
    """Every choice in its slot; the device works it out and nothing is read back."""
    (N, K), (E, H, F), device = idx_NK.shape, shape, x_NH.device
    S, library = N * K, library_of(device)
    tier = stage_tier(library, device, UP, S, E, H, F) if tier is None else tier
    tile_rows = library.tile_rows(tier, S, E, H, F)
    idx = idx_NK.to(torch.int64).contiguous()

    def indices(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32, device=device)

    offs, tile0, choice, slot = indices(E + 1), indices(E + 1), indices(S), indices(S)
    workspace = torch.empty(library.plan_workspace(S, E), dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    library.plan(idx, N, K, E, tile_rows, offs, tile0, choice, slot, workspace, stream)
    return Plan(library, tier, tile_rows, (S, K, E, H, F), offs, tile0, choice, slot, stream)


def grad_of_rows(
    plan: Plan, grad_NH: Tensor, w_down_EHF: Tensor, weight_NK: Tensor, pre_S2F: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dpre_S2F; weight h, hw_SF; and the parts of every slot's dweight."""
    S, K, E, H, F = plan.sizes
    dpre, hw = (pre_S2F.new_empty(S, width) for width in (2 * F, F))
    parts = plan.library.partials(plan.tier, S, E, H, F)
    partial = pre_S2F.new_empty(parts, S, dtype=torch.float32)
    given = (weights(w_down_EHF), aligned(pre_S2F), routing(weight_NK))
    made, where = (dpre, hw, partial), (plan.choice, plan.offs, plan.tile0)
    plan.library.dact(*strided(grad_NH), *given, *made, *where, S, K, *plan.end)
    return dpre, hw, partial


def grad_of_weights(
    plan: Plan,
    left: tuple[Tensor, Tensor | None],
    right: tuple[Tensor, Tensor | None],
    dw: Tensor,
    stage: int,
    add: bool,
) -> None:
    """dw[e] = the sum over slots s of e of left_s^T right_s; rows are slots, or with choices beside them tokens."""
    S, K, E, H, F = plan.sizes
    how = FLOAT32_ADD if add else FLOAT32 if dw.dtype == torch.float32 else BF16
    tier = plan.tier if plan.library.tile_columns(plan.tier, stage, S, E, H, F) > 0 else PORTABLE
    end = (dw, how, plan.offs, S, E, dw.shape[1], dw.shape[2], tier, plan.stream)
    plan.library.wgrad(*strided(left[0]), left[1], *strided(right[0]), right[1], K, *end)


def library_of(device: torch.device) -> Library:
    """The compiled kernels of a device."""
    return load("cuda" if device.type == "cuda" else "emulated")


def stage_tier(library: Library, device: torch.device, stage: int, S: int, E: int, H: int, F: int) -> int:
    """The fastest tier that has this stage here."""
    capability = capability_of(device.index) if device.type == "cuda" else library.capability()
    has_hopper = capability == HOPPER and library.tile_columns(HOPPER, stage, S, E, H, F) > 0
    return HOPPER if has_hopper else PORTABLE


@functools.cache
def capability_of(index: int | None) -> int:
    """Of a GPU: 90 is 9.0."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels start on the current GPU, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def strided(x: Tensor) -> tuple[Tensor, int]:
    """A matrix whose rows are dense and begin at multiples of 16 bytes, copied where they are not, and their stride."""
    dense = x.stride(1) == 1 and x.stride(0) * x.element_size() % ALIGNED == 0 and x.data_ptr() % ALIGNED == 0
    x = x if dense else x.clone(memory_format=torch.contiguous_format)
    return x, x.stride(0)


def weights(w: Tensor) -> Tensor:
    """Matrices as the kernels read them: dense bf16."""
    return aligned(w.to(torch.bfloat16))


def routing(weight_NK: Tensor) -> Tensor:
    """Routing weights as the kernels read them: dense float32."""
    return aligned(weight_NK.float())


def aligned(x: Tensor) -> Tensor:
    """Dense, and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


def refuse(x_NH: Tensor, b_gate_up: Tensor | None, b_down: Tensor | None, limit: float | None) -> None:
    """What no kernel computes.

    Raises:
        ValueError: biases, a clamp, or another dtype than bf16.
    """
    if x_NH.dtype != torch.bfloat16 or b_gate_up is not None or b_down is not None or limit is not None:
        raise ValueError(f"the kernels take bf16 rows without biases and clamp; x is {x_NH.dtype}")


def refuse_buffers(into: tuple[Tensor, Tensor], w_gate_up: Tensor, w_down: Tensor) -> None:
    """Gradients are added in place, so a buffer cannot be a copy.

    Raises:
        ValueError: one is not dense float32 of its weight's shape.
    """
    for buffer, weight in zip(into, (w_gate_up, w_down), strict=True):
        if buffer.shape != weight.shape or buffer.dtype != torch.float32 or not buffer.is_contiguous():
            raise ValueError(f"a buffer for this gradient is dense float32 {list(weight.shape)}")
