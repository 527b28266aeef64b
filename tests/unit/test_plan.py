"""Where the core lies: the paper's placements, odd depths, dense-first layers, other depths."""

from fractions import Fraction

import pytest

from smelt_budget.errors import BadInput
from smelt_budget.solver import solve
from smelt_budget.solver.plan import Plan, place
from smelt_budget.spec import ModelSpec, read

FIELDS = {
    "hidden_size": 64, "vocab_size": 9, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip


def core(depth, **plan):
    """1-based first and last core layer."""
    placed = place(ModelSpec(**FIELDS, num_hidden_layers=depth), Plan(**plan))
    return placed.loop.start + 1, placed.loop.stop


@pytest.mark.parametrize(("layers", "expected"), [(10, (3, 7)), (12, (4, 9)), (20, (6, 15)), (30, (8, 22))])
def test_the_papers_placements(layers, expected):
    """SMELT section 1: floor((L - m) / 2) layers before the core."""
    assert core(layers) == expected


@pytest.mark.parametrize(("percent", "layers"), [(17, 2), (33, 4), (50, 6), (67, 8), (83, 10), (100, 12)])
def test_the_papers_spans(percent, layers):
    """Section 5: spans of 12 layers."""
    first, last = core(12, span=Fraction(percent, 100))
    assert last - first + 1 == layers


def test_odd_depths_round_down_and_say_so():
    """Half of 61 layers: 30 loop."""
    placed = place(read("deepseek-v3").spec, Plan())
    assert placed.loop.stop - placed.loop.start == 30
    assert placed.notes == ("half a layer cannot loop: the core is 30 of 61 layers",)
    assert core(1, span=Fraction(1)) == (1, 1)
    with pytest.raises(BadInput, match="is no layer"):
        core(1)


def test_the_core_stays_behind_dense_first_layers_unless_asked():
    """A dense-first layer loops only by --start."""
    spec = ModelSpec(**FIELDS, num_hidden_layers=8, mlp_only_layers=(0, 1, 2), intermediate_size=9)
    placed = place(spec, Plan(span=Fraction(5, 8)))
    assert (placed.loop.start, placed.loop.stop) == (3, 8)
    assert "dense-first" in placed.notes[0]
    assert place(spec, Plan(span=Fraction(5, 8), start=1)).loop.start == 1
    with pytest.raises(BadInput, match="does not fit"):
        place(spec, Plan(span=Fraction(3, 4)))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"span": Fraction(0)}, "not above 0"),
        ({"span": Fraction(3, 2)}, "not above 0 and at most 1"),
        ({"span": Fraction(1, 100)}, "is no layer"),
        ({"visits": 0}, "--visits 0"),
        ({"start": 7}, "does not fit into 12 layers"),
        ({"start": -1}, "does not fit"),
        ({"layers": 0}, "--layers 0"),
    ],
)
def test_plans_that_leave_no_core(plan, words):
    """Each says which flag."""
    with pytest.raises(BadInput, match=words):
        core(12, **plan)


def test_a_looped_baseline_is_refused():
    """A twin is found for an unlooped model."""
    with pytest.raises(BadInput, match="looped already"):
        solve(read("ouro-1.4b").spec)


def test_another_depth_continues_the_pattern():
    """Alternating windows go on, dense-first layers stay, a pattern of no period is refused."""
    depth = place(read("gpt-oss-20b").spec, Plan(layers=27)).depth
    assert depth["layer_types"] == tuple(("sliding_attention", "full_attention")[i % 2] for i in range(27))
    assert place(read("deepseek-v3").spec, Plan(layers=70)).depth["mlp_only_layers"] == (0, 1, 2)
    maverick = place(read("llama-4-maverick").spec, Plan(layers=50)).depth
    assert maverick["mlp_only_layers"] == tuple(range(0, 50, 2))
    odd = ModelSpec(**FIELDS, num_hidden_layers=6, mlp_only_layers=(0, 3, 4), intermediate_size=9)
    with pytest.raises(BadInput, match="no pattern"):
        place(odd, Plan(layers=9))
