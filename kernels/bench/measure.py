"""How fast is every form on one shape? Each unit is one form under one routing, measured by itself.

The order is that of what is wanted most: routings one after another, and within each our kernels, then rivals; what may
spend its time on tuning (Liger) comes last of all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from problems import Inputs, inputs
from records import Unit
from rivals import FORMS, dense_inputs
from shapes import REHEARSED, ROUTINGS, SETS, SHAPES, Shape
from timing import Form, Times, clock_of, memory, timed
from torch import Tensor

from smelt_budget.model.experts import experts_definition

AGREES = 2e-2
"""Relative norm: bf16 rounding gives 4e-3 a step, and rivals round up to four times on the way to a gradient."""
LAST = "liger"


def units(device: str, number: str) -> Iterator[Unit]:
    """What is measured on the shape of this number, in order."""
    shape = (SHAPES if device == "cuda" else REHEARSED)[int(number)]
    order = [(routing, form) for routing in ROUTINGS for form in FORMS if form != "dense" or routing == ROUTINGS[0]]
    order.sort(key=lambda each: each[1] == LAST)
    sets = functools.lru_cache(1)(lambda routing: drawn(shape, routing, device))
    reference = functools.lru_cache(1)(lambda routing: exact(sets(routing)[0]))
    form_of = functools.cache(lambda name: FORMS[name](device))
    for routing, name in order:

        def unit(routing: str = routing, name: str = name) -> dict[str, Any]:
            form, given = form_of(name), sets(routing)
            found = {"shape": list(shape), "routing": routing, "form": name, "ok": True}
            if name == "dense":
                given = [dense_inputs(each) for each in given]
            else:
                found |= agreement(form, given[0], reference(routing))
            found["busy"] = len(given[0].idx_NK.unique())
            found |= times(timed(form, given, clock_of(device)))
            return found | memory(form, given[0], device)._asdict()

        yield f"{routing}: {name}", unit


def drawn(shape: Shape, routing: str, device: str) -> list[Inputs]:
    """The sets that take turns."""
    return [inputs(shape, routing, seed, device) for seed in range(SETS)]


def times(found: Times) -> dict[str, float | None]:
    """In milliseconds."""
    return {"forward_ms": found.forward, "backward_ms": found.backward}


def exact(given: Inputs) -> tuple[Tensor, ...]:
    """y and the gradients of the definition, in float32 on the same bf16 numbers."""
    wide = given._replace(
        **{
            name: tensor.detach().float().requires_grad_(tensor.requires_grad)
            for name, tensor in given._asdict().items()
            if name != "idx_NK"
        }
    )
    y = experts_definition(*wide.operands)
    return y.detach(), *torch.autograd.grad(y, wide.leaves, wide.grad_NH)


def agreement(form: Form, given: Inputs, reference: Sequence[Tensor]) -> dict[str, Any]:
    """The worst relative norm over y and its gradients, and whether that is rounding: no race of unequal runners."""
    y = form(*given.operands)
    found = (y.detach(), *torch.autograd.grad(y, given.leaves, given.grad_NH))
    worst = max((distance(ours, exact) for ours, exact in zip(found, reference, strict=True)), key=nan_first)
    return {"distance": worst, "ok": worst <= AGREES}


def distance(found: Tensor, reference: Tensor) -> float:
    """Relative norm of the difference."""
    return float((found.float() - reference.float()).norm() / reference.float().norm())


def nan_first(number: float) -> float:
    """A key for `max` under which nan is the largest."""
    return float("inf") if math.isnan(number) else number
