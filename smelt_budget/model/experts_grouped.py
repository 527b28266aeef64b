"""How are the two expert ops computed with grouped matrix products, and without asking the device anything?

The CUDA path in plain torch (`grouped_mm`: torch 2.9 or later, widths in multiples of 16 bytes). The tests run it on
the CPU; it has not run on a GPU.

N tokens, K choices each, S = N K rows sorted by expert, H hidden, F expert width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt_budget.model import swiglu
from smelt_budget.model.swiglu import wide


@dataclass(frozen=True)
class Sorted:
    """The N K choices, sorted by expert; those that name none come last."""

    choice_S: Tensor
    token_S: Tensor
    expert_S: Tensor
    """Of each row; 0 for those not routed."""
    dead_S1: Tensor
    """Whether a row is not routed: `grouped_mm` leaves it unwritten."""
    ends_E: Tensor
    """Where each expert's rows end, int32."""


def sort(idx_NK: Tensor, experts: int) -> Sorted:
    """Stable order by expert, on the device."""
    ids = idx_NK.reshape(-1)
    keys, choice_S = torch.where((ids >= 0) & (ids < experts), ids, experts).sort(stable=True)
    ends_E = torch.searchsorted(keys, torch.arange(experts, device=keys.device, dtype=keys.dtype), right=True)
    dead_S = keys == experts
    return Sorted(
        choice_S=choice_S,
        token_S=choice_S // max(idx_NK.shape[1], 1),
        expert_S=keys.masked_fill(dead_S, 0),
        dead_S1=dead_S[:, None],
        ends_E=ends_E.int(),
    )


def forward(
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    b_gate_up_E2F: Tensor | None,
    b_down_EH: Tensor | None,
    limit: float | None,
) -> tuple[Tensor, Tensor]:
    """The rows y_NH and the sorted pre-activations pre_S2F, zero past the routed ones."""
    order = sort(idx_NK, len(w_gate_up_E2FH))
    weight_S1 = weight_NK.reshape(-1, 1)[order.choice_S]
    pre = rows(x_NH[order.token_S], w_gate_up_E2FH.mT, order)
    if b_gate_up_E2F is not None:
        pre = (pre + b_gate_up_E2F[order.expert_S]).masked_fill(order.dead_S1, 0)
    out = rows(swiglu.weighted(pre, weight_S1.to(wide(pre.dtype)), limit), w_down_EHF.mT, order)
    if b_down_EH is not None:
        out = out + (b_down_EH[order.expert_S] * weight_S1).masked_fill(order.dead_S1, 0)
    return summed(out, order, idx_NK), pre


def backward(
    grad_NH: Tensor,
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    _b_gate_up_E2F: Tensor | None,
    b_down_EH: Tensor | None,
    limit: float | None,
    pre_S2F: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Gradients of x, w_gate_up, w_down, weight, b_gate_up and b_down; one that is not needed has no elements."""
    need_x, need_up, need_down, need_weight, need_b_up, need_b_down = needs
    order = sort(idx_NK, len(w_gate_up_E2FH))
    weight_S1 = weight_NK.reshape(-1, 1)[order.choice_S]
    dx, dw_up, dw_down, db_up, db_down = (x_NH.new_empty(0) for _ in range(5))  # an op's outputs are no aliases
    dweight = weight_NK.new_empty(0)
    x, grad = x_NH[order.token_S], grad_NH[order.token_S]
    dh = rows(grad, w_down_EHF, order)
    h, dweight_S, dpre = swiglu.backward(dh, pre_S2F, weight_S1.to(wide(x.dtype)), limit)
    if need_weight:
        if b_down_EH is not None:
            biased = (grad * b_down_EH[order.expert_S]).sum(1, dtype=dweight_S.dtype)
            dweight_S += biased.masked_fill(order.dead_S1[:, 0], 0)
        dweight = unsorted(dweight_S, order).view(idx_NK.shape).to(weight_NK.dtype)
    if need_down:
        dw_down = outer(grad, h, order)
    if need_up:
        dw_up = outer(dpre, x, order)
    if need_b_up:
        db_up = outer(dpre, ones(x), order)[..., 0]
    if need_b_down:
        db_down = outer((grad * weight_S1).to(x.dtype), ones(x), order)[..., 0]
    if need_x:
        dx = summed(rows(dpre, w_gate_up_E2FH, order), order, idx_NK)
    return dx, dw_up, dw_down, dweight, db_up, db_down


def rows(left_SX: Tensor, matrix_EXY: Tensor, order: Sorted) -> Tensor:
    """Each row times its expert's matrix; zero where it has none."""
    return grouped_mm(left_SX, matrix_EXY, order.ends_E).masked_fill(order.dead_S1, 0)


def outer(left_SX: Tensor, right_SY: Tensor, order: Sorted) -> Tensor:
    """left^T right over the rows of each expert, [E, X, Y]."""
    return grouped_mm(left_SX.t(), right_SY, order.ends_E).contiguous()


def grouped_mm(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm`, which torch 2.9 has under another name."""
    public = getattr(torch.nn.functional, "grouped_mm", None)
    if public is None:
        return torch._grouped_mm(left, right, ends_E)  # pyright: ignore[reportPrivateImportUsage]
    return public(left, right, offs=ends_E)


def ones(x_SH: Tensor) -> Tensor:
    """As many columns as `grouped_mm` wants: a sum over each expert's rows without atomics."""
    return x_SH.new_ones(len(x_SH), 16 // x_SH.dtype.itemsize)


def unsorted(rows_SX: Tensor, order: Sorted) -> Tensor:
    """Rows back in the order of the choices."""
    return torch.empty_like(rows_SX).index_copy_(0, order.choice_S, rows_SX)


def summed(out_SH: Tensor, order: Sorted, idx_NK: Tensor) -> Tensor:
    """Each token's K rows added up in float32 or better."""
    out_NKH = unsorted(out_SH, order).view(*idx_NK.shape, out_SH.shape[1])
    return out_NKH.sum(1, dtype=wide(out_SH.dtype)).to(out_SH.dtype)
