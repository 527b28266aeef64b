"""The small pair keeps what makes the full one what it is, counted again here; and is small, matched and repeatable."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt_budget.errors import BadInput, Infeasible
from smelt_budget.flags import setting_asked
from smelt_budget.ledger import CONVENTIONS, Ledger, Setting
from smelt_budget.solver import Plan, Request, Tolerance, solve
from smelt_budget.spec import ModelSpec, builtin, read
from smelt_budget.verify.pair import Pair
from smelt_budget.verify.proxy import proxy
from smelt_budget.verify.shrink import cut, layers_of

MOE = [name for name in builtin.names() if read(name).spec.is_moe]
TINY = 340_000
WIDE = Tolerance(0.1, 0.1, 0.2)
WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size", "head_dim", "kv_lora_rank")


def pair_of(name, request=None):
    """A pair as the file would give it, solved for a built-in baseline."""
    reading = read(name)
    request = request or Request(**setting_asked(reading, None, None, None, None))
    solution = solve(reading.spec, replace(request, top=0))
    return Pair(solution.baseline, solution.twin, solution.setting, replace(request, sparsity=None), name)


def loop(spec):
    """(share of the layers, visits) of the core."""
    return Fraction(spec.loop.stop - spec.loop.start, spec.num_hidden_layers), spec.loop.visits


def ratio(spec):
    """Query heads per KV head."""
    return Fraction(spec.num_attention_heads, spec.num_key_value_heads)


def check_matched(pair, made, context=256):
    """Gaps and S counted from the two specs, under the training setting."""
    setting = Setting.of(made.baseline, pair.request.convention, context)
    before, after = Ledger(made.baseline, setting), Ledger(made.twin, setting)
    flops = after.exact_forward_flops / before.exact_forward_flops - 1
    params = Fraction(after.non_embedding, before.non_embedding) - 1
    kv = Fraction(after.kv_elements_at_context, before.kv_elements_at_context) - 1
    most = (Fraction(1, 100), Fraction(1, 100), Fraction(2, 100))
    assert all(abs(gap) <= bound for gap, bound in zip((flops, params, kv), most, strict=True))
    assert list(made.gaps.values()) == pytest.approx([float(g) for g in (flops, params, kv)], abs=1e-12)
    full = [Ledger(spec, pair.setting).compute_equivalent_sparsity for spec in (pair.baseline, pair.twin)]
    assert before.compute_equivalent_sparsity == pytest.approx(full[0], abs=0.01)
    assert min(full) - 0.01 <= after.compute_equivalent_sparsity <= max(full) + 0.01
    return before, after


@pytest.mark.parametrize("name", MOE)
def test_every_built_in_model_has_a_tiny_pair_of_its_kind(name):
    """Budgets within 1 %, S within a point, active size within a factor of 2, and the traits below."""
    pair = pair_of(name)
    made = proxy(pair)
    before, _ = check_matched(pair, made)
    assert TINY / 2 <= before.active_non_embedding <= 2 * TINY
    assert made.baseline.hidden_size % 8 == made.twin.hidden_size % 8 == 0
    for spec in (made.baseline, made.twin):
        assert all(getattr(spec, field) is None or getattr(spec, field) >= 8 for field in WIDTHS)
        assert spec.num_experts <= 300
        assert (spec.vocab_size, spec.max_position_embeddings) == (257, 256)
    check_shape(pair, made)
    check_kept(pair.baseline, made)


def check_shape(pair, made):
    """Core, GQA ratio, active expert width, experts per chosen one, kinds of layers.

    Where one layer of four is dense for three of sixty-one, S needs more experts than E / k.
    """
    full, small = pair.baseline, made.baseline
    assert loop(made.twin) == (Fraction(1, 2), 2)
    assert (made.twin.core is None) == (pair.twin.core is None)
    if full.kv_lora_rank is None:
        assert ratio(small) == ratio(full)
    active = [s.num_experts_per_tok * s.moe_intermediate_size / s.hidden_size for s in (full, small)]
    assert active[1] == pytest.approx(active[0], rel=0.15)
    per_token = [s.num_experts / s.num_experts_per_tok for s in (full, small)]
    dense_first = 0 < len(full.mlp_only_layers) < full.num_hidden_layers / 4
    assert per_token[1] == pytest.approx(per_token[0], rel=0.7 if dense_first else 0.1)
    assert bool(small.mlp_only_layers) == bool(full.mlp_only_layers)
    assert set(small.layer_types or ()) == set(full.layer_types or ())


def check_kept(full, made):
    """Every field that is a switch, a word or a multiplier, in both arms."""
    names = ("_multiplier", "_factor", "_func", "_limit", "_scaling", "_theta", "_eps")
    kept = {f for f in ModelSpec.model_fields if isinstance(getattr(full, f), (bool, str)) or f.endswith(names)}
    kept -= {"attention_multiplier", "rope_scaling"}
    assert len(kept) > 15
    for spec in (made.baseline, made.twin):
        assert {f: getattr(spec, f) for f in kept} == {f: getattr(full, f) for f in kept}


REQUESTS = {
    "a third": Request(plan=Plan(Fraction(1, 3))),
    "three visits": Request(plan=Plan(visits=3), tolerance=WIDE),
    "from layer 2": Request(plan=Plan(start=2)),
    "the whole stack": Request(plan=Plan(Fraction(1), start=0), tolerance=WIDE),
    "sectioned": Request(heads="sectioned", tolerance=WIDE),
    "at most": Request(policy="at-most"),
    "S 85": Request(sparsity=0.85),
    "S 97": Request(sparsity=0.97),
    "as Megatron counts": Request(convention=CONVENTIONS["megatron"]),
}


@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.parametrize("name", ["smelt-200m-s95", "deepseek-v3", "gpt-oss-120b"])
def test_a_request_holds_for_the_small_pair(name, asked):
    """Same span, visits, heads, policy and convention; S is the re-sparsified baseline's."""
    pair = pair_of(name, REQUESTS[asked])
    made = proxy(pair)
    check_matched(pair, made)
    full, small = loop(pair.twin), loop(made.twin)
    assert small[1] == full[1]
    assert abs(small[0] - full[0]) <= Fraction(1, 20)
    assert (made.twin.core is None) == (pair.twin.core is None)
    assert made.twin.loop.residual_scale == pair.twin.loop.residual_scale
    if pair.request.policy == "at-most":
        assert max(made.gaps.values()) <= 0


def test_small_is_larger_and_deeper():
    """About 2.5 M active parameters in 8 layers; more width carries more experts per token."""
    pair = pair_of("qwen3-30b-a3b")
    made = proxy(pair, "small")
    before, _ = check_matched(pair, made)
    assert made.baseline.num_hidden_layers == 8
    assert 1_250_000 <= before.active_non_embedding <= 5_000_000
    assert made.baseline.num_experts_per_tok > proxy(pair).baseline.num_experts_per_tok


def test_any_size_context_and_vocabulary():
    """What was asked is what is counted."""
    pair = pair_of("olmoe-1b-7b")
    made = proxy(pair, "tiny", active_parameters=1_000_000, vocab_size=4096, context=512)
    before, _ = check_matched(pair, made, context=512)
    assert 500_000 <= before.active_non_embedding <= 2_000_000
    assert (made.setting.context, made.setting.attention_length) == (512, Fraction(513, 2))
    assert made.baseline.vocab_size == made.twin.vocab_size == 4096


def test_full_is_the_pair_itself():
    """No proxy: same specs, same setting, same gaps as solved."""
    pair = pair_of("smelt-200m-s95")
    made = proxy(pair, "full")
    assert (made.baseline, made.twin, made.setting) == (pair.baseline, pair.twin, pair.setting)
    with pytest.raises(BadInput, match="size"):
        proxy(pair, "full", active_parameters=1_000_000)


def test_the_same_pair_gives_the_same_proxy():
    """Two runs agree in every field, notes included."""
    pair = pair_of("olmoe-1b-7b")
    assert proxy(pair) == proxy(pair)


def test_plain_data_reads_back():
    """`as_dict` holds two specs that count what it says."""
    made = proxy(pair_of("gpt-oss-20b"))
    data = made.as_dict()
    assert ModelSpec.model_validate(data["twin"]["spec"]) == made.twin
    assert data["baseline"]["ledger"]["sparsity"]["compute_equivalent"] == made.sparsity["baseline"]


def test_expert_groups_divide_both_arms():
    """8 groups of 256 experts, 4 chosen (DeepSeek-V3), become fewer groups of 16 or more, half of them chosen."""
    pair = pair_of("deepseek-v3")
    grouped = {"n_group": 8, "topk_group": 4}
    pair = replace(pair, baseline=pair.baseline.replace(**grouped), twin=pair.twin.replace(**grouped, num_experts=400))
    made = proxy(pair)
    check_matched(pair, made)
    groups = made.baseline.n_group
    assert groups is not None
    assert 2 * made.baseline.topk_group == groups
    for spec in (made.baseline, made.twin):
        assert spec.num_experts % groups == 0
        assert spec.num_experts // groups >= 2


def test_a_twin_edited_by_hand_still_has_a_proxy():
    """The proxy is solved from the baseline; the residual scale, which costs nothing, is the twin's own."""
    pair = pair_of("qwen3-30b-a3b")
    odd = pair.twin.replace(num_experts=64, loop=pair.twin.loop.model_dump() | {"residual_scale": 1.0})
    made = proxy(replace(pair, twin=odd))
    assert made.twin.loop.residual_scale == 1.0
    assert abs(made.gaps["non_embedding_parameters"]) <= 0.01


def test_a_dense_pair_has_no_proxy():
    """Without experts the solver finds no twin, and neither does a proxy."""
    dense = read("qwen3-0.6b").spec
    twin = dense.replace(loop={"start": 7, "stop": 21, "visits": 2})
    with pytest.raises(BadInput, match="dense"):
        proxy(Pair(dense, twin, Setting.of(dense), Request(), "pair"))


def test_a_refusal_names_what_was_tried():
    """Twelve visits of one KV head's cache leave heads below 8; the message says so instead of a traceback."""
    base = read("olmoe-1b-7b").spec
    twin = base.replace(loop={"start": 4, "stop": 12, "visits": 40})
    pair = Pair(base, twin, Setting.of(base), Request(plan=Plan(visits=40)), "pair")
    with pytest.raises(Infeasible, match="40 visits"):
        proxy(pair)


def test_every_kind_of_layer_stays():
    """Patterns longer than the small depth (Gemma's five to one) keep each kind; periods that fit go on."""
    s, f = "sliding_attention", "full_attention"
    assert cut([s, s, s, s, s, f] * 8, 4).count(f) == 1
    assert cut([s, f] * 18, 4) == [s, f, s, f]
    assert cut([False] * 30 + [True], 4) == [False, False, False, True]
    assert cut([False, True] * 12, 5) == [False, True, False, True, False]


@pytest.mark.parametrize(("name", "dense"), [("deepseek-v3", (0,)), ("llama-4-maverick", (0, 2)), ("olmoe-1b-7b", ())])
def test_dense_layers_stay_where_they_were(name, dense):
    """Three dense-first layers of 61 become one of four; every second one stays every second."""
    assert layers_of(read(name).spec, 4)["mlp_only_layers"] == dense


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    hidden=st.integers(3, 40).map(lambda n: 16 * n),
    layers=st.integers(2, 30),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    group=st.sampled_from([1, 2, 5]),
    head=st.sampled_from([16, 32, 80]),
    k=st.integers(1, 8),
    more=st.integers(2, 40),
    width=st.integers(8, 600),
    shared=st.sampled_from([None, 24, 300]),
    dense=st.integers(0, 1),
    window=st.sampled_from([None, 64]),
)
def test_no_baseline_breaks_it(hidden, layers, kv_heads, group, head, k, more, width, shared, dense, window):
    """Any small MoE has a matched proxy or is refused in words, even where its twin was never solved."""
    base = ModelSpec.model_validate(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "vocab_size": 1000,
            "num_attention_heads": kv_heads * group,
            "num_key_value_heads": kv_heads,
            "head_dim": head,
            "num_experts": k * more,
            "num_experts_per_tok": k,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": shared,
            "intermediate_size": 4 * hidden,
            "mlp_only_layers": list(range(dense)),
            "sliding_window": window,
        }
    )
    start, core = max(dense, (layers - layers // 2) // 2), max(1, (layers - 1) // 2)
    twin = base.replace(loop={"start": start, "stop": start + core, "visits": 2, "residual_scale": 0.5})
    pair = Pair(base, twin, Setting.of(base), Request(plan=Plan(Fraction(core, layers))), "random")
    try:
        made = proxy(pair)
    except Infeasible:
        return
    check_matched(pair, made)
