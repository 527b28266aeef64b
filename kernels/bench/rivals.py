"""What is measured? The kernels, and other ways to the same y and the same gradients, each called as its authors do.

    smelt 80, smelt 90   the kernels: mma.sync, and wgmma on Hopper
    grouped op           smelt_budget's torch path: grouped_mm with sorting, gathers and a backward written by hand
    grouped plain        gather, grouped_mm, silu(gate) up, grouped_mm, and the sum over K, under autograd
    ... compiled         the same two under torch.compile, which fuses what is between the products
    liger                liger_kernel's fused MoE in Triton, if it is installed
    dense                a gated MLP of width K F on every token: the same FLOPs without any routing

N tokens, K choices each, S = N K rows, E experts, H hidden, F expert width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from problems import Inputs
from records import Missing
from timing import Form
from torch import Tensor
from torch.nn import functional

from smelt_budget.model import experts_cuda, experts_grouped
from smelt_budget.model.experts_grouped import grouped_mm


def smelt(tier: int) -> Callable[[str], Form]:
    """The kernels of one tier, forward and backward.

    Raises:
        Missing: this GPU has no wgmma.
    """

    def make(device: str) -> Form:
        capability = experts_cuda.library_of(torch.device(device)).capability()
        if tier == experts_cuda.HOPPER != capability:
            raise Missing(f"needs compute capability 9.0; here it is {capability / 10:.1f}")
        return by_hand(*(functools.partial(each, tier=tier) for each in (experts_cuda.forward, experts_cuda.backward)))

    return make


def grouped_op(_device: str) -> Form:
    """As eager torch runs it."""
    return by_hand(experts_grouped.forward, experts_grouped.backward)


def grouped_op_compiled(device: str) -> Form:
    """Each direction compiled by itself."""
    return by_hand(compiled(experts_grouped.forward, device), compiled(experts_grouped.backward, device))


def grouped_plain(_device: str) -> Form:
    """As eager torch runs it."""
    return plain


def grouped_plain_compiled(device: str) -> Form:
    """The whole, with the backward that torch derives."""
    return compiled(plain, device)


def liger(device: str) -> Form:
    """Called as liger_kernel/transformers/swiglu.py: LigerExperts.forward does, with int32 ids.

    Its forward waits for the GPU once, to learn how many tiles there are.

    Raises:
        Missing: it is not installed, or there is no GPU for Triton.
    """
    if device != "cuda":
        raise Missing("needs a GPU")
    try:
        from liger_kernel.ops import LigerFusedMoEFunction
    except ImportError as error:
        raise Missing(f"liger_kernel with a fused MoE is not installed: {error}") from None
    return lambda x, w_gate_up, w_down, idx, weight: LigerFusedMoEFunction.apply(
        x, w_gate_up, w_down, idx.int(), weight
    )


def dense(_device: str) -> Form:
    """By cuBLAS: silu(x Wg^T) (x Wu^T) Wd^T, 2 N 3 H (K F) FLOPs forward, as many as 2 S 3 H F."""

    def form(x: Tensor, w_gate_up: Tensor, w_down: Tensor, _idx: Tensor, _weight: Tensor) -> Tensor:
        gate, up = functional.linear(x, w_gate_up).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, w_down)

    return form


def dense_inputs(given: Inputs) -> Inputs:
    """Two matrices of K times the width in place of the experts'; the routing weights get no gradient."""
    (_, H, F), K = given.w_down_EHF.shape, given.idx_NK.shape[1]
    device = given.x_NH.device
    w_gate_up = (torch.randn(2 * K * F, H, device=device) * H**-0.5).bfloat16()
    w_down = (torch.randn(H, K * F, device=device) * (K * F) ** -0.5).bfloat16()
    return given._replace(
        w_gate_up_E2FH=w_gate_up.requires_grad_(),
        w_down_EHF=w_down.requires_grad_(),
        weight_NK=given.weight_NK.detach(),
    )


FORMS: dict[str, Callable[[str], Form]] = {
    "smelt 80": smelt(80),
    "smelt 90": smelt(90),
    "grouped op": grouped_op,
    "grouped plain": grouped_plain,
    "dense": dense,
    "grouped op compiled": grouped_op_compiled,
    "grouped plain compiled": grouped_plain_compiled,
    "liger": liger,
}
"""How each is made for a device. Those that compile come late: they may take their time."""


def plain(x: Tensor, w_gate_up: Tensor, w_down: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
    """As a user writes it: the weights on the narrow rows, and the sum in the order of the choices, without atomics."""
    N, K = idx.shape
    keys, order = idx.flatten().sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(len(w_down), device=keys.device), right=True).int()
    gate, up = grouped_mm(x[order // K], w_gate_up.mT, ends).chunk(2, -1)
    h = functional.silu(gate) * up * weight.flatten()[order, None].to(x.dtype)
    out = grouped_mm(h, w_down.mT, ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(N * K, device=order.device))
    return out[back].view(N, K, -1).sum(1)


def by_hand(forward: Callable[..., Any], backward: Callable[..., Any]) -> Form:
    """A form from the two functions of an implementation of the op, without the op's dispatch."""

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *operands: Tensor) -> Tensor:
            y, pre = forward(*operands, None, None, None)
            ctx.save_for_backward(*operands, pre)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            *operands, pre = ctx.saved_tensors
            needs = [True, True, True, True, False, False]
            dx, dw_gate_up, dw_down, dweight, *_ = backward(grad, *operands, None, None, None, pre, needs)
            return dx, dw_gate_up, dw_down, None, dweight

    return ByHand.apply


def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """For these shapes alone; a rehearsal stops before code is generated."""
    return torch.compile(function, dynamic=False, backend="inductor" if device == "cuda" else "aot_eager")
