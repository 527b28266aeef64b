"""What would the baseline be at another sparsity? Top-k, active shape and depth kept; experts moved until S is met.

A dense baseline first becomes the MoE of equal active width: top-k experts, each 1/top-k of the dense MLP wide.
"""

from __future__ import annotations

from smelt_budget.errors import BadInput
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.solver.problem import least_experts, whole_groups
from smelt_budget.spec import ModelSpec

MOST_EXPERTS = 65_536


def sparsified(baseline: ModelSpec, sparsity: float, setting: Setting, top_k: int | None, multiple: int) -> ModelSpec:
    """The baseline with the expert count whose compute-equivalent sparsity is nearest to `sparsity` (rule C15).

    Args:
        top_k: experts per token of a baseline that is dense so far; a MoE keeps its own.
        multiple: step of the expert count.

    Raises:
        BadInput: the sparsity is out of range or out of reach, or the dense width does not divide.
    """
    if not 0 <= sparsity < 1:
        percent = [f"fix: --sparsity {sparsity / 100:g}"] if 2 <= sparsity < 100 else []
        raise BadInput(f"--sparsity {sparsity!r} is not at least 0 and below 1", *percent)
    if baseline.is_moe and top_k not in (None, baseline.num_experts_per_tok):
        raise BadInput(
            f"--top-k {top_k}: the baseline is a MoE with top-{baseline.num_experts_per_tok} already, which is kept"
        )
    model = baseline if baseline.is_moe else routed(baseline, 8 if top_k is None else top_k)

    def reached(experts: int) -> float:
        return Ledger(model.replace(num_experts=experts), setting).compute_equivalent_sparsity

    multiple = whole_groups(model, multiple)
    first = -(-least_experts(model) // multiple) * multiple
    last = MOST_EXPERTS // multiple * multiple
    most = max(first, last)
    if first > last or reached(last) < sparsity:
        raise BadInput(
            f"--sparsity {sparsity!r} is out of reach: {most} experts give {reached(most):.4f}",
            f"fix: --sparsity {int(reached(most) * 1000) / 1000:g}",
        )
    low, high = first, last  # S grows with the count: bisect to neighbours, then take the nearer
    while high - low > multiple:
        middle = (low + high) // 2 // multiple * multiple
        low, high = (middle, high) if reached(middle) <= sparsity else (low, middle)
    return model.replace(num_experts=min((low, high), key=lambda e: (abs(reached(e) - sparsity), e)))


def routed(dense: ModelSpec, top_k: int) -> ModelSpec:
    """A dense model as the fully active MoE of the same active FFN width, before experts are added."""
    all_dense = len(dense.mlp_only_layers) == dense.num_hidden_layers or dense.num_experts is None
    width = (dense.intermediate_size if all_dense else dense.moe_intermediate_size) or 0
    if top_k < 1:
        raise BadInput(f"--top-k {top_k} is not at least 1")
    if width % top_k:
        near = next(k for k in range(min(top_k, width), 0, -1) if width % k == 0)
        raise BadInput(
            f"a dense width of {width} does not divide into {top_k} experts of equal width",
            f"fix: --top-k {near} (experts {width // near} wide)",
        )
    return dense.replace(
        intermediate_size=None,
        mlp_only_layers=(),
        num_experts=max(top_k, 2),
        n_group=None,
        topk_group=None,
        num_experts_per_tok=top_k,
        moe_intermediate_size=width // top_k,
        mlp_bias=False,
        expert_bias=dense.mlp_bias,
    )
