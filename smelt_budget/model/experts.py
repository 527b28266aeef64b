"""What do the K chosen of E experts make of each token?

    gate, up = the halves of W_gate_up[e] x (+ b_gate_up[e])
    h        = silu(gate) up                       (arXiv:2002.05202 eq. 6; `limit`: see swiglu.py)
    y        = sum over k of weight_k (W_down[e_k] h_k (+ b_down[e_k]))

N tokens, K choices each, S = N K rows sorted by expert, H hidden, F expert width, E experts. Ledger row: experts.

`experts_definition` is the meaning. `smelt::experts` and `smelt::experts_backward` are the ops that compute it, by the
module that experts_choice.py picks. Between the two only the inputs and the pre-activations are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from smelt_budget.model import experts_cpu, experts_cuda, experts_grouped, experts_native
from smelt_budget.model.experts_choice import Circumstances, asked_for, chosen
from smelt_budget.model.swiglu import swiglu


def experts(
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    b_gate_up_E2F: Tensor | None = None,
    b_down_EH: Tensor | None = None,
    limit: float | None = None,
    asked: str | None = None,
) -> Tensor:
    """y_NH in x's dtype, half precision added up in float32; ids outside [0, E) add nothing.

    Under autocast x, matrices and biases are cast, the last two within the op, so that a kernel can give their
    gradients unrounded; the routing weights are not. `limit` is gpt-oss's clamp, `asked` is what experts_choice.py
    takes. Deterministic for a given number of threads; there is no second derivative.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        BadInput: an implementation was asked for that cannot be had.
    """
    device, x = x_NH.device.type, x_NH
    others = (w_gate_up_E2FH, w_down_EHF, idx_NK, weight_NK, b_gate_up_E2F, b_down_EH)
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    check(x, *others, same_dtype=not autocast)
    if autocast:
        x = x.to(torch.get_autocast_dtype(device))
    return torch.ops.smelt.experts(x, *others, limit, asked)[0]


def experts_definition(
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    b_gate_up_E2F: Tensor | None = None,
    b_down_EH: Tensor | None = None,
    limit: float | None = None,
) -> Tensor:
    """The same one expert after another, in the dtype it is given; autograd does the rest."""
    y_NH = torch.zeros_like(x_NH)
    for e, (w_gate_up, w_down) in enumerate(zip(w_gate_up_E2FH.unbind(), w_down_EHF.unbind(), strict=True)):
        token, k = (idx_NK == e).nonzero(as_tuple=True)
        pre = x_NH[token] @ w_gate_up.t()
        if b_gate_up_E2F is not None:
            pre = pre + b_gate_up_E2F[e]
        out = swiglu(pre, limit) @ w_down.t()
        if b_down_EH is not None:
            out = out + b_down_EH[e]
        y_NH = y_NH.index_add(0, token, (out * weight_NK[token, k, None]).to(x_NH.dtype))
    return y_NH


INPUTS = "Tensor x, Tensor w_gate_up, Tensor w_down, Tensor idx, Tensor weight, Tensor? b_gate_up, Tensor? b_down"
torch.library.define("smelt::experts", f"({INPUTS}, float? limit, str? asked=None) -> (Tensor y, Tensor pre)")
torch.library.define(
    "smelt::experts_backward",
    f"(Tensor grad, {INPUTS}, float? limit, Tensor pre, bool[6] needs, str? asked=None)"
    " -> (Tensor x, Tensor w_gate_up, Tensor w_down, Tensor weight, Tensor b_gate_up, Tensor b_down)",
)


@torch.library.impl("smelt::experts", ("cpu", "cuda"))
def _(x, w_gate_up, w_down, idx, weight, b_gate_up, b_down, limit, asked=None):
    module, matrices = implementation(x, (w_gate_up, w_down, b_gate_up, b_down), limit, asked)
    w_gate_up, w_down, b_gate_up, b_down = matrices
    return module.forward(x, w_gate_up, w_down, idx, weight, b_gate_up, b_down, limit)


@torch.library.impl("smelt::experts_backward", ("cpu", "cuda"))
def _(grad, x, w_gate_up, w_down, idx, weight, b_gate_up, b_down, limit, pre, needs, asked=None):
    dtype = w_down.dtype
    module, matrices = implementation(x, (w_gate_up, w_down, b_gate_up, b_down), limit, asked)
    w_gate_up, w_down, b_gate_up, b_down = matrices
    inputs = (x, w_gate_up, w_down, idx, weight, b_gate_up, b_down)
    dx, dw_up, dw_down, dweight, db_up, db_down = module.backward(grad, *inputs, limit, pre, needs)
    return dx, dw_up.to(dtype), dw_down.to(dtype), dweight, db_up.to(dtype), db_down.to(dtype)


def implementation(
    x_NH: Tensor, matrices: tuple[Tensor | None, ...], limit: float | None, asked: str | None
) -> tuple[Any, tuple[Tensor | None, ...]]:
    """The module that computes both ops here, and the matrices as it takes them: torch has no product of two dtypes."""
    w_gate_up, w_down, *biases = matrices
    assert w_gate_up is not None
    assert w_down is not None
    E, H, F = w_down.shape
    biased, clamped = any(b is not None for b in biases), limit is not None
    at = Circumstances(x_NH.device, x_NH.dtype, w_down.dtype, (E, H, F), biased, clamped)
    name = chosen(asked_for(asked), at).name
    if name != "torch":
        return experts_native if name == "native" else experts_cuda, matrices
    module = experts_cpu if x_NH.device.type == "cpu" else experts_grouped
    return module, tuple(None if m is None else m.to(x_NH.dtype) for m in matrices)


@torch.library.register_fake("smelt::experts")
def _(x, w_gate_up, _w_down, idx, *_):
    return x.new_empty(x.shape), x.new_empty(idx.numel(), w_gate_up.shape[1])


@torch.library.register_fake("smelt::experts_backward")
def _(_grad, x, w_gate_up, w_down, _idx, weight, _b_gate_up, _b_down, _limit, _pre, needs):
    shaped = (x, w_gate_up, w_down, weight, w_gate_up[:, :, 0], w_down[:, :, 0])
    return tuple(t.new_empty(t.shape if need else 0) for t, need in zip(shaped, needs, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.limit, ctx.asked = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _pre: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    *inputs, pre = ctx.saved_tensors
    x, up, down, _, weight, b_up, b_down, *_ = ctx.needs_input_grad
    needs = [x, up, down, weight, b_up, b_down]
    grads = torch.ops.smelt.experts_backward(grad, *inputs, ctx.limit, pre, needs, ctx.asked)
    dx, dup, ddown, dweight, db_up, db_down = (g if need else None for g, need in zip(grads, needs, strict=True))
    return dx, dup, ddown, None, dweight, db_up, db_down, None, None


def _twice(_ctx: Any, *_grads: Tensor) -> None:
    raise NotImplementedError("experts has no second derivative; experts_definition has one")


torch.library.register_autograd("smelt::experts", _backward, setup_context=_save)
torch.library.register_autograd("smelt::experts_backward", _twice)


@register_flop_formula(torch.ops.smelt.experts)
def _(_x, _w_gate_up, w_down, idx, *_, **_named) -> int:
    """Two FLOPs for each of the 3 H F weights of an expert, K times a token."""
    return 2 * idx[0] * idx[1] * 3 * w_down[1] * w_down[2]


@register_flop_formula(torch.ops.smelt.experts_backward)
def _(_grad, _x, _w_gate_up, w_down, idx, _weight, _b_gate_up, _b_down, _limit, _pre, needs, *_, **_named) -> int:
    """As much again for the gradients of rows and for those of matrices; dh is always made, the rest where needed."""
    need_x, need_up, need_down, *_ = needs
    return 2 * idx[0] * idx[1] * (1 + 2 * need_x + 2 * need_up + need_down) * w_down[1] * w_down[2]


def check(
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    b_gate_up_E2F: Tensor | None,
    b_down_EH: Tensor | None,
    *,
    same_dtype: bool,
) -> None:
    """Refuse what does not fit together.

    Raises:
        ValueError: with both shapes, or both dtypes.
    """
    (E, H, F), N = w_down_EHF.shape, x_NH.shape[0]
    for name, tensor, shape in (
        ("x", x_NH, (N, H)),
        ("w_gate_up", w_gate_up_E2FH, (E, 2 * F, H)),
        ("idx", idx_NK, (N, idx_NK.shape[-1])),
        ("weight", weight_NK, idx_NK.shape),
        ("b_gate_up", b_gate_up_E2F, (E, 2 * F)),
        ("b_down", b_down_EH, (E, H)),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)}; with w_down {list(w_down_EHF.shape)} it is {list(shape)}"
            )
        if same_dtype and name not in ("idx", "weight") and tensor.dtype != w_down_EHF.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and w_down {w_down_EHF.dtype}; cast one, or use torch.autocast")
