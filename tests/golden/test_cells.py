"""The paper's twelve sparse cells (arXiv 2609.01343, tables of section 4), as printed.

`smelt_cells.json` holds what is printed, and the widths that reproduce every printed digit.
"""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from smelt_budget.ledger import Ledger, Setting
from smelt_budget.solver import Lattice, Request, solve
from smelt_budget.spec import ModelSpec

CELLS = json.loads(Path(__file__).with_name("smelt_cells.json").read_text(encoding="utf-8"))
LENGTH = Fraction(390)
KV_HEADS = 4  # with four every head size is whole, in both arms of all cells


def arm(cell, name):
    """One arm of a cell as a spec."""
    printed, inferred = cell["published"][name], cell["inferred"][name]
    head = inferred["kv_width"] // KV_HEADS
    loop = None
    if name == "smelt":
        first, last = printed["loop_layers_1based"]
        loop = {"start": first - 1, "stop": last, "visits": printed["visits"], "residual_scale": 0.5}
    return ModelSpec(
        hidden_size=printed["H"],
        num_hidden_layers=printed["L"],
        vocab_size=50_304,
        num_attention_heads=inferred["q_width"] // head,
        num_key_value_heads=KV_HEADS,
        head_dim=head,
        num_experts=printed["E"],
        num_experts_per_tok=printed["topk"],
        moe_intermediate_size=inferred["expert_ffn"],
        loop=loop,
    )


def counted(spec):
    return Ledger(spec, Setting.of(spec, attention_length=LENGTH))


def names(cell):
    return f"{cell['scale']}-S{cell['S_label']}"


every_cell = pytest.mark.parametrize("cell", CELLS, ids=names)


@every_cell
@pytest.mark.parametrize("name", ["base", "smelt"])
def test_printed_sizes(cell, name):
    """Total (2 decimals) and active (3 decimals) parameters in billions, rounded as printed."""
    ledger, printed = counted(arm(cell, name)), cell["published"][name]
    assert round(ledger.non_embedding / 1e9, 2) == printed["total_B"]
    assert round(ledger.active_non_embedding / 1e9, 3) == printed["active_B"]


@every_cell
def test_printed_ratios(cell):
    """Training-FLOP and KV ratios of SMELT over baseline, 3 decimals as printed."""
    before, after, printed = counted(arm(cell, "base")), counted(arm(cell, "smelt")), cell["published"]["smelt"]
    assert round(after.training_flops / before.training_flops, 3) == printed["F_ratio"]
    assert round(after.kv_elements_per_token / before.kv_elements_per_token, 3) == printed["KV_ratio"]


@every_cell
def test_baseline_sparsity(cell):
    """Compute-equivalent sparsity of the baseline, to the printed tenth of a point."""
    measured = 100 * counted(arm(cell, "base")).compute_equivalent_sparsity
    assert abs(measured - cell["published"]["base"]["S_pct"]) <= 0.0501


@every_cell
def test_looping_leaves_sparsity_where_it_was(cell):
    """S is compute-equivalent (rule C15): the paper's two arms differ by under half a point."""
    before, after = counted(arm(cell, "base")), counted(arm(cell, "smelt"))
    assert abs(before.compute_equivalent_sparsity - after.compute_equivalent_sparsity) < 0.005


def test_placement_of_the_core():
    """1-based core of L = 10, 12, 20, 30 (section 1): 3-7, 4-9, 6-15, 8-22."""
    placed = {}
    for cell in CELLS:
        loop = solve(arm(cell, "base"), Request(attention_length=LENGTH)).twin.loop
        placed[cell["published"]["base"]["L"]] = (loop.start + 1, loop.stop)
    assert placed == {10: (3, 7), 12: (4, 9), 20: (6, 15), 30: (8, 22)}


@every_cell
def test_the_papers_lattice_is_met_better_than_by_the_paper(cell):
    """Even head sizes, uniform heads: no gap above 1.0 % (the paper's largest is 3.9 %)."""
    request = Request(attention_length=LENGTH, heads="uniform", lattice=Lattice(head_multiple=2))
    gaps = solve(arm(cell, "base"), request).gaps.as_dict()
    assert max(map(abs, gaps.values())) <= 0.010


@every_cell
def test_defaults(cell):
    """Head sizes in eights, hidden in sixteens, auto: FLOPs 1.0 %, parameters 0.5 %, KV 1.6 %."""
    gaps = solve(arm(cell, "base"), Request(attention_length=LENGTH)).gaps
    assert abs(gaps.flops) <= 0.010
    assert abs(gaps.non_embedding_parameters) <= 0.005
    assert abs(gaps.kv_cache) <= 0.016


@every_cell
def test_sectioned_cache_is_exact(cell):
    """KV heads halved in the core: the cache exactly, FLOPs and parameters to 0.2 %."""
    request = Request(attention_length=LENGTH, heads="sectioned", lattice=Lattice(hidden_multiple=8))
    gaps = solve(arm(cell, "base"), request).gaps
    assert gaps.kv_cache == 0
    assert abs(gaps.flops) <= 0.002
    assert abs(gaps.non_embedding_parameters) <= 0.002


def test_the_quoted_example():
    """200M S95: hidden 1024..1056, 18 executed layers, core 4..9, about 1.5x experts, higher GQA, smaller heads."""
    cell = next(c for c in CELLS if names(c) == "200M-S95")
    base = arm(cell, "base")
    twin = solve(base, Request(attention_length=LENGTH)).twin
    assert 1024 <= twin.hidden_size <= 1056
    assert twin.effective_depth == 18
    assert (twin.loop.start + 1, twin.loop.stop, twin.loop.visits, twin.loop.residual_scale) == (4, 9, 2, 0.5)
    assert 1.45 <= twin.num_experts / base.num_experts <= 1.55
    ratios = [s.num_attention_heads / s.num_key_value_heads for s in (base, twin)]
    assert ratios[1] > ratios[0]
    assert twin.head_dim < base.head_dim
