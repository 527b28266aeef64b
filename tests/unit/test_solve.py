"""What can be asked of the solver, and that what it says is true: policies, pins, sparsity, ablations, refusals."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt_budget.errors import BadInput, Infeasible
from smelt_budget.ledger import CONVENTIONS, Ledger
from smelt_budget.solver import Lattice, Plan, Request, Tolerance, solve
from smelt_budget.solver.relax import relax
from smelt_budget.spec import ModelSpec, read

PAPER = read("smelt-200m-s95").spec
AT_390 = Request(attention_length=Fraction(390))


def gaps(solution):
    """The three gaps, counted again from the specs."""
    before, after = (Ledger(s, solution.setting) for s in (solution.baseline, solution.twin))
    return [
        Fraction(new, old) - 1
        for new, old in (
            (after.training_flops, before.training_flops),
            (after.non_embedding, before.non_embedding),
            (after.kv_elements_at_context, before.kv_elements_at_context),
        )
    ]


@pytest.mark.parametrize(
    "name", ["smelt-200m-s95", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "llama-4-scout"]
)
@pytest.mark.parametrize("heads", ["uniform", "sectioned"])
def test_at_most_never_exceeds_a_budget(name, heads):
    """All three gaps are at most zero, and within tolerance."""
    solution = solve(read(name).spec, Request(policy="at-most", heads=heads))
    assert all(-Fraction(2, 100) <= gap <= 0 for gap in gaps(solution))


def test_reported_gaps_are_the_recounted_ones():
    """`gaps` is what anyone gets from the two specs."""
    solution = solve(PAPER, AT_390)
    assert list(solution.gaps.as_dict().values()) == pytest.approx([float(g) for g in gaps(solution)], abs=1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    hidden=st.sampled_from([512, 768, 1280, 2048]),
    layers=st.integers(4, 40),
    kv_heads=st.sampled_from([2, 4, 8]),
    ratio=st.integers(1, 8),
    experts=st.integers(8, 300),
    k=st.sampled_from([1, 2, 8]),
    width=st.integers(20, 200).map(lambda n: 8 * n),
    convention=st.sampled_from(sorted(CONVENTIONS)),
)
def test_every_twin_recounts_to_its_promise(hidden, layers, kv_heads, ratio, experts, k, width, convention):
    """Any baseline: within tolerance by exact recount, depth and top-k kept, or refused."""
    base = ModelSpec(
        hidden_size=hidden, num_hidden_layers=layers, vocab_size=999, num_attention_heads=kv_heads * ratio,
        num_key_value_heads=kv_heads, head_dim=64, num_experts=experts, num_experts_per_tok=k,
        moe_intermediate_size=width,
    )  # fmt: skip
    try:
        solution = solve(base, Request(convention=CONVENTIONS[convention]))
    except Infeasible:
        return
    assert max(map(abs, gaps(solution))) <= Fraction(2, 100) + Fraction(1, 10**9)
    twin = solution.twin
    assert (twin.num_hidden_layers, twin.num_experts_per_tok, twin.vocab_size) == (layers, k, 999)
    assert twin.head_dim <= 64


def test_auto_says_which_heads_and_why():
    """Uniform where it meets the tolerance; sectioned otherwise, with the budget that binds."""
    assert solve(PAPER, AT_390).notes[-1].startswith("heads: uniform")
    strict = solve(PAPER, replace(AT_390, tolerance=Tolerance(kv_cache=0.01)))
    assert strict.problem.heads == "sectioned"
    assert re.search(r"heads: sectioned, because .*binding: KV cache, nearest is -1\.56 %", strict.notes[-1])
    assert strict.gaps.kv_cache == 0


def test_a_refusal_binds_and_its_fixes_work():
    """Exit 3's text: the budget, the nearest point, and flags that find a twin when they are tried."""
    request = replace(AT_390, heads="uniform", tolerance=Tolerance(0.01, 0.01, 0.01))
    with pytest.raises(Infeasible) as error:
        solve(PAPER, request)
    text = str(error.value)
    assert "no uniform twin within 1 % on all three budgets" in text
    assert "binding: KV cache, nearest is -1.56 %" in text
    fixes = re.findall(r"fix: (.+)", text)
    assert fixes == ["--heads sectioned", "--head-multiple 2", "--tolerance-kv 0.016"]
    changed = {
        "--heads sectioned": replace(request, heads="sectioned"),
        "--head-multiple 2": replace(request, lattice=Lattice(head_multiple=2)),
        "--tolerance-kv 0.016": replace(request, tolerance=Tolerance(0.01, 0.01, 0.016)),
    }
    for fix in fixes:
        assert solve(PAPER, changed[fix]).twin


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 1000),
        ("num_experts", 300),
        ("moe_intermediate_size", 350),
        ("head_dim", 56),
        ("num_attention_heads", 16),
    ],
)
def test_a_pin_holds(field, value):
    """Whatever the lattice's steps; heads are free to be sectioned."""
    solution = solve(PAPER, replace(AT_390, keep={field: value}, tolerance=Tolerance(0.05, 0.05, 0.07)))
    assert getattr(solution.twin, field) == value


def test_pins_of_latent_attention_and_following_widths():
    """The KV rank and the shared width can be pinned; what is not free is refused with the list."""
    lite = read("deepseek-v2-lite").spec
    solution = solve(lite, Request(keep={"kv_lora_rank": 320, "shared_expert_intermediate_size": 2000}))
    assert (solution.twin.kv_lora_rank, solution.twin.shared_expert_intermediate_size) == (320, 2000)
    with pytest.raises(BadInput, match="free are: hidden_size"):
        solve(lite, Request(keep={"num_hidden_layers": 3}))
    with pytest.raises(BadInput, match="not a whole number"):
        solve(lite, Request(keep={"hidden_size": 0}))


def test_a_pin_above_the_baselines_head_size_is_asking():
    """Head sizes grow only by --keep."""
    solution = solve(PAPER, replace(AT_390, heads="uniform", keep={"head_dim": 84}, tolerance=Tolerance(kv_cache=0.03)))
    assert solution.twin.head_dim == 84


def test_alternatives_are_ranked_and_different():
    """Best first, one per hidden size and attention geometry, all within tolerance."""
    solution = solve(PAPER, replace(AT_390, top=5))
    scores = [solution.certificate.score, *(a.score for a in solution.alternatives)]
    assert len(scores) == 6
    assert scores == sorted(scores)
    shapes = {
        (s.hidden_size, s.num_attention_heads, s.num_key_value_heads, s.head_dim)
        for s in (solution.twin, *(a.spec for a in solution.alternatives))
    }
    assert len(shapes) == 6
    assert all(max(map(abs, a.gaps.as_dict().values())) <= 0.02 for a in solution.alternatives)


@pytest.mark.parametrize("target", [0.5, 0.85, 0.95, 0.97])
def test_sparsity_is_met_by_the_nearest_count(target):
    """The expert count moves until S is met: no neighbour is nearer; shape and depth stay."""
    solution = solve(PAPER, replace(AT_390, sparsity=target))

    def off(experts):
        spec = solution.baseline.replace(num_experts=experts)
        return abs(Ledger(spec, solution.setting).compute_equivalent_sparsity - target)

    count = solution.baseline.num_experts
    assert off(count) <= min(off(count - 1), off(count + 1))
    assert solution.baseline.replace(num_experts=192) == PAPER == solution.given
    assert "given" in solution.as_dict()


def test_the_papers_labels():
    """S 85 / 95 / 97 % are 64 / 192 / 336 experts: asking for the S they measure gives them back."""
    for experts in (64, 192, 336):
        sparsity = Ledger(PAPER.replace(num_experts=experts), solve(PAPER, AT_390).setting).compute_equivalent_sparsity
        assert solve(PAPER, replace(AT_390, sparsity=sparsity)).baseline.num_experts == experts


def test_a_dense_baseline_becomes_the_moe_of_equal_active_width():
    """Llama 3.1 8B: 14336 = 8 experts of 1792; without a sparsity it is refused with the fix."""
    llama = read("llama-3.1-8b").spec
    solution = solve(llama, Request(sparsity=0.95))
    assert (solution.baseline.num_experts_per_tok, solution.baseline.moe_intermediate_size) == (8, 1792)
    assert solution.baseline_ledger.compute_equivalent_sparsity == pytest.approx(0.95, abs=5e-4)
    assert solve(llama, Request(sparsity=0.9, top_k=4)).baseline.moe_intermediate_size == 3584
    with pytest.raises(BadInput, match=r"--sparsity 0\.95"):
        solve(llama)
    with pytest.raises(BadInput, match="--top-k 4"):
        solve(llama, Request(sparsity=0.9, top_k=5))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(sparsity=95.0), "fix: --sparsity 0.95"),
        (Request(sparsity=0.9999999), "out of reach"),
        (Request(top_k=4), "goes with --sparsity"),
        (Request(sparsity=0.9, top_k=4), "top-8 already"),
        (Request(top=-1), "--top -1"),
    ],
)
def test_requests_that_make_no_sense(request_, words):
    """Each says what, and a fix where there is one."""
    with pytest.raises(BadInput, match=re.escape(words)):
        solve(PAPER, request_)


@pytest.mark.parametrize("span", ["1/6", "1/3", "1/2", "2/3", "5/6", "1"])
@pytest.mark.parametrize("visits", [2, 3, 4])
def test_the_papers_ablations_can_be_rematched(span, visits):
    """Section 5: any span and visit count, re-matched within 2 % on all three budgets on the paper's lattice."""
    plan = Plan(span=Fraction(span), visits=visits)
    solution = solve(PAPER, replace(AT_390, plan=plan, lattice=Lattice(8, 2)))
    assert max(map(abs, gaps(solution))) <= Fraction(2, 100)
    assert solution.twin.effective_depth == 12 + (visits - 1) * round(12 * Fraction(span))


@pytest.mark.parametrize(("layers", "effective"), [(8, 12), (10, 15), (12, 18), (14, 21)])
def test_the_papers_depths_can_be_rematched(layers, effective):
    """Section 5: looped L / L_eff = 8/12, 10/15, 12/18, 14/21 against the 12-layer baseline."""
    solution = solve(PAPER, replace(AT_390, plan=Plan(layers=layers), lattice=Lattice(8, 2)))
    assert solution.twin.effective_depth == effective
    assert max(map(abs, gaps(solution))) <= Fraction(2, 100)


def test_one_visit_is_the_baseline():
    """Visits 1 is the unlooped model: the search returns it, exactly."""
    solution = solve(PAPER, replace(AT_390, plan=Plan(visits=1)))
    assert solution.twin.replace(loop=None) == PAPER
    assert gaps(solution) == [0, 0, 0]


def test_relaxation_solves_the_budgets():
    """Put back into the ledger's formulas as real numbers, the relaxed twin meets FLOPs and parameters."""
    problem = solve(PAPER, AT_390).problem
    relaxed = relax(problem)
    assert relaxed.first_order_hidden == pytest.approx(1280 / 1.5**0.5)
    assert relaxed.hidden_size == pytest.approx(relaxed.first_order_hidden, rel=0.05)
    assert relaxed.num_experts == pytest.approx(1.5 * 192, rel=0.05)
    assert relaxed.kv_width == pytest.approx(512 / 1.5)
    H, E, F = relaxed.hidden_size, relaxed.num_experts, relaxed.moe_intermediate_size
    q, kv = 1280 * H / 1280, 256 / 1.5
    parameters = 12 * (2 * H * (q + kv) + 2 * H + E * H + 3 * E * H * F) + H
    flops = 18 * (2 * (2 * H * (q + kv) + E * H + 8 * 3 * H * F) + 4 * q * 390)
    ledger = solve(PAPER, AT_390).baseline_ledger
    assert parameters == pytest.approx(ledger.non_embedding, rel=1e-9)
    assert flops == pytest.approx(ledger.forward_flops, rel=1e-9)


@pytest.mark.parametrize(
    ("field", "value", "other", "expected"),
    [("head_dim", 128, "num_key_value_heads", 2), ("num_key_value_heads", 8, "head_dim", 32)],
)
def test_a_pin_frees_its_counterpart(field, value, other, expected):
    """Twice the head size needs half the KV heads: the sectioned cache stays exact."""
    solution = solve(PAPER, replace(AT_390, heads="sectioned", keep={field: value}))
    assert (getattr(solution.twin, field), getattr(solution.twin, other)) == (value, expected)
    assert solution.gaps.kv_cache == 0


def test_very_sparse_models_have_twins_where_the_closed_form_has_none():
    """S 99.5 %: the relaxation has no root with attention's share kept; the lattice has a twin, and both are said."""
    solution = solve(PAPER, replace(AT_390, sparsity=0.995))
    assert not solution.certificate.relaxed.exact
    assert max(map(abs, gaps(solution))) <= Fraction(2, 100)


@pytest.mark.parametrize("length", [Fraction("390.1"), Fraction("100.3"), Fraction("777.77"), Fraction(2049, 2)])
@pytest.mark.parametrize("name", ["smelt-200m-s95", "gpt-oss-20b"])
def test_fractional_positions(name, length):
    """FLOPs of the mean token may be fractions; gaps are made from them before rounding (rules C18, C19)."""
    solution = solve(read(name).spec, Request(attention_length=length))
    exact = solution.twin_ledger.exact_forward_flops / solution.baseline_ledger.exact_forward_flops - 1
    assert solution.gaps.flops == float(exact)


@pytest.mark.parametrize("layers", [2, 3, 4])
@pytest.mark.parametrize("window", [7, 100])
def test_gaps_of_tiny_windowed_models_are_exact(layers, window):
    """Where rounding to whole FLOPs would be a visible gap."""
    kinds = ("sliding_attention", "full_attention") * layers
    base = ModelSpec(
        hidden_size=64, num_hidden_layers=layers, vocab_size=99, num_attention_heads=4, num_key_value_heads=2,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, sliding_window=window,
        layer_types=kinds[:layers],
    )  # fmt: skip
    solution = solve(base, Request(tolerance=Tolerance(0.3, 0.3, 0.3), lattice=Lattice(8, 4, 4)))
    flops = [ledger.exact_forward_flops for ledger in (solution.baseline_ledger, solution.twin_ledger)]
    assert solution.gaps.flops == float(flops[1] / flops[0] - 1)


def test_refusals_of_pins_and_steps_say_what_to_drop():
    """A pin out of reach, steps too wide: the change that was tried and works is named."""
    for request, fix in (
        (Request(keep={"hidden_size": 5000}), "fix: without --keep hidden_size"),
        (Request(lattice=Lattice(experts_multiple=4096)), "fix: --experts-multiple 64"),
        (Request(lattice=Lattice(hidden_multiple=8192)), "fix: --hidden-multiple"),
    ):
        with pytest.raises(Infeasible, match="leave none, whatever the tolerance") as error:
            solve(PAPER, replace(request, attention_length=Fraction(390)))
        assert fix in str(error.value)
    with pytest.raises(BadInput, match="below the 8 experts"):
        solve(PAPER, Request(keep={"num_experts": 2}))
    with pytest.raises(BadInput, match="does not divide"):
        solve(PAPER, Request(keep={"num_key_value_heads": 3, "num_attention_heads": 16}))


def test_at_most_refusals_name_the_budget():
    """Nothing below all budgets: the nearest point above is shown."""
    request = Request(heads="sectioned", policy="at-most", context=131_072)
    with pytest.raises(Infeasible, match="binding: FLOPs") as error:
        solve(read("qwen1.5-moe-a2.7b").spec, request)
    assert "fix: --heads uniform" in str(error.value)


def test_a_sectioned_baseline_is_refused():
    """Its core's widths would be carried into the twin unsolved."""
    loop = {"start": 3, "stop": 9, "visits": 1}
    with pytest.raises(BadInput, match="sectioned"):
        solve(PAPER.replace(loop=loop, core={"num_key_value_heads": 2}))
    assert solve(PAPER.replace(loop=loop), AT_390).twin == solve(PAPER, AT_390).twin


def test_fewer_layers_hold_more_cache_each():
    """DeepSeek-V2-Lite in 20 layers instead of 27, sectioned: the rank grows past the baseline's 512."""
    solution = solve(read("deepseek-v2-lite").spec, Request(heads="sectioned", plan=Plan(layers=20)))
    assert solution.twin.kv_lora_rank > 512
    assert max(map(abs, gaps(solution))) <= Fraction(2, 100)


def test_toys_are_told_to_take_finer_steps():
    """Experts 6 wide do not fit steps of 8; the refusal names a step that works."""
    toy = ModelSpec(
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=24, num_experts=32,
        num_experts_per_tok=4, moe_intermediate_size=6, vocab_size=257,
    )  # fmt: skip
    with pytest.raises(Infeasible, match="fix: --expert-multiple"):
        solve(toy)


def test_one_expert_is_dense_to_the_solver():
    """No choice of experts: S is 0, and a sparsity has to be asked for."""
    one = PAPER.replace(num_experts=1, num_experts_per_tok=1)
    assert Ledger(one, solve(PAPER, AT_390).setting).compute_equivalent_sparsity == 0
    with pytest.raises(BadInput, match="is dense"):
        solve(one)
    assert solve(one, Request(sparsity=0.9)).baseline.moe_intermediate_size == 54


def test_rotary_keys_alone_can_fill_the_cache():
    """A latent of 576 with 64 rotary: ten visits of everything leave no rank, and that is said before searching."""
    with pytest.raises(Infeasible, match="rotary keys alone"):
        solve(read("deepseek-v2-lite").spec, Request(plan=Plan(span=Fraction(26, 27), visits=10, start=1)))
