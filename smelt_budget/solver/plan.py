"""Which layers loop? A plan (span, place, visits, depth) laid onto a baseline.

The core is the middle round(span * L) layers, halves rounded down; floor((L - m)/2) layers come before it
(SMELT, section 1). It is moved behind dense-first layers unless its place was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from smelt_budget.errors import BadInput
from smelt_budget.spec import Loop, ModelSpec
from smelt_budget.spec.runs import layer_kinds


@dataclass(frozen=True)
class Plan:
    """What was asked of the loop; the defaults are the paper's."""

    span: Fraction = Fraction(1, 2)
    """Share of the physical layers in the core."""
    visits: int = 2
    start: int | None = None
    """First core layer, 0-based; `None` centres the core."""
    layers: int | None = None
    """Physical depth of the twin; `None` keeps the baseline's."""


@dataclass(frozen=True)
class Placed:
    """A plan on a baseline: the fields of the twin that depth decides, its loop, and what to tell the user."""

    depth: dict[str, Any]
    loop: Loop
    notes: tuple[str, ...]


def place(baseline: ModelSpec, plan: Plan) -> Placed:
    """Lay a plan onto a baseline.

    Raises:
        BadInput: the core would be empty or too long, or the depth cannot change.
    """
    if not 0 < plan.span <= 1:
        raise BadInput(f"--span {float(plan.span):g} is not above 0 and at most 1", "fix: --span 0.5")
    if plan.visits < 1:
        raise BadInput(f"--visits {plan.visits} is not at least 1")
    depth, notes = stretched(baseline, plan.layers), []
    layers = depth["num_hidden_layers"]
    core = ceil(layers * plan.span - Fraction(1, 2))
    if core < 1:
        least = float(Fraction(1, layers))
        raise BadInput(f"--span {float(plan.span):g} of {layers} layers is no layer", f"fix: --span {least:.3f}")
    if (layers * plan.span) % 1 == Fraction(1, 2):
        notes.append(f"half a layer cannot loop: the core is {core} of {layers} layers")
    first_dense = leading_dense(depth["mlp_only_layers"])
    start = plan.start if plan.start is not None else (layers - core) // 2
    if plan.start is None and start < first_dense:
        if first_dense + core > layers:
            raise BadInput(
                f"a core of {core} layers behind {first_dense} dense-first layers does not fit into {layers}",
                f"fix: --span {(layers - first_dense) / layers:.3f}, or --start 0 to loop dense layers too",
            )
        notes.append(
            f"the core starts behind the {first_dense} dense-first layers, not centred (--start {start} would)"
        )
        start = first_dense
    if not 0 <= start <= layers - core:
        raise BadInput(
            f"--start {start} with a core of {core} layers does not fit into {layers} layers",
            f"fix: --start {layers - core}",
        )
    if start < first_dense:
        notes.append(f"the core holds {first_dense - start} dense-first layers, as asked")
    loop = Loop(start=start, stop=start + core, visits=plan.visits, residual_scale=1 / plan.visits)
    return Placed(depth, loop, tuple(notes))


def leading_dense(layers: tuple[int, ...]) -> int:
    """How many dense layers stand before the first MoE layer."""
    first = 0
    while first in layers:
        first += 1
    return first


def stretched(baseline: ModelSpec, layers: int | None) -> dict[str, Any]:
    """Depth fields for another number of layers: dense-first layers stay, a periodic pattern goes on."""
    old = baseline.num_hidden_layers
    if layers is None or layers == old:
        return {
            "num_hidden_layers": old,
            "layer_types": baseline.layer_types,
            "mlp_only_layers": baseline.mlp_only_layers,
        }
    if not 1 <= layers <= 10_000:
        raise BadInput(f"--layers {layers} is not between 1 and 10000")
    first = leading_dense(baseline.mlp_only_layers)
    kinds = [(window, dense) for _, window, dense in layer_kinds(baseline)]
    if baseline.layer_types is None:
        kinds = [("full_attention", dense) for _, dense in kinds]
    # a window pattern may start at layer 0 or behind the dense-first layers: take the shortest period of each
    windows = repeated([window for window, _ in kinds], 0, layers)
    dense = repeated([dense for _, dense in kinds], first, layers)
    if windows is None or dense is None or all(dense):
        raise BadInput(f"--layers {layers}: the baseline's {old} layers follow no pattern that could be continued")
    return {
        "num_hidden_layers": layers,
        "layer_types": baseline.layer_types and tuple(windows),
        "mlp_only_layers": tuple(i for i, is_dense in enumerate(dense) if is_dense),
    }


def repeated(pattern: list[Any], first: int, length: int) -> list[Any] | None:
    """`pattern` cut or continued to `length`, periodic from `first` on; `None` if no period repeats twice."""
    body = pattern[first:]
    for period in range(1, len(body) // 2 + 1):
        if all(body[i] == body[i % period] for i in range(len(body))):
            return (pattern[:first] + [body[i % period] for i in range(max(0, length - first))])[:length]
    return list(pattern[:length]) if length <= len(pattern) else None
