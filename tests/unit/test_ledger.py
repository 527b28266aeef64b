"""The ledger is closed and exact: totals are sums of rows, formulas are the counts, looping is the gap read to run."""

from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt_budget.ledger import CONVENTIONS, Ledger, Setting, rows
from smelt_budget.ledger.symbols import LETTERS, core_letter, equations
from smelt_budget.solver import Request, solve
from smelt_budget.spec import ModelSpec, builtin, read

MOE = {
    "hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def counted(context=64, convention="smelt", **fields):
    spec = ModelSpec(**(MOE | fields))
    return Ledger(spec, Setting.of(spec, CONVENTIONS[convention], context))


def test_a_model_counted_by_hand():
    """hidden 64, 4/2 heads of 16, 8 experts 32 wide, top-2, 6 layers, 100 words; every product written out."""
    ledger = counted()
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 64 + 64 * 8 + 8 * 3 * 64 * 32
    active = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 64 + 64 * 8 + 2 * 3 * 64 * 32
    assert ledger.non_embedding == 6 * layer + 64
    assert ledger.total == 6 * layer + 64 + 2 * 6400
    assert ledger.active_non_embedding == 6 * active + 64
    per_token = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 64 * 8 + 2 * 3 * 64 * 32) + 2 * 2 * 64 * Fraction(65, 2)
    assert ledger.forward_flops == 6 * per_token
    assert ledger.training_flops == 3 * ledger.forward_flops
    assert ledger.kv_elements_per_token == 6 * 2 * 32


def test_looping_runs_without_storing():
    """Two visits of three layers: parameters stay, FLOPs and cache grow by half."""
    plain, looped = counted(), counted(loop={"start": 1, "stop": 4, "visits": 2, "residual_scale": 0.5})
    assert looped.total == plain.total
    assert looped.active_non_embedding == plain.active_non_embedding
    assert looped.forward_flops * 2 == plain.forward_flops * 3
    assert looped.kv_elements_per_token * 2 == plain.kv_elements_per_token * 3
    assert looped.as_dict()["layers"] == {"physical": 6, "effective": 9}


def test_sectioned_core_halves_the_cache_back():
    """KV heads halved in a core visited twice: the cache is exactly the unlooped model's (design, section 4)."""
    core = counted(loop={"start": 1, "stop": 4, "visits": 2}, core={"num_key_value_heads": 1})
    assert core.kv_elements_per_token == counted().kv_elements_per_token


@pytest.mark.parametrize("name", builtin.names())
def test_rows_add_up(name):
    """Sums are closed: merged rows, raw rows and named totals agree; every row cites a rule."""
    spec = read(name).spec
    ledger = Ledger(spec, Setting.of(spec))
    assert ledger.total == sum(r.params * r.stored for r in rows(spec))
    assert ledger.total == ledger.non_embedding + ledger.input_embedding + ledger.lm_head
    assert all(r.source.startswith("C") for r in ledger.rows)
    assert all(type(v) is int for group in ("parameters", "kv_cache") for v in ledger.as_dict()[group].values())


@pytest.mark.parametrize("name", builtin.names())
def test_printed_equations_are_the_counts(name):
    """Each printed formula, with the model's numbers put in, is the row's number; in the sectioned twin too."""
    spec = read(name).spec
    check_equations(spec)
    if spec.is_moe:
        check_equations(solve(spec, Request(heads="sectioned")).twin)


def check_equations(spec):
    values = {letter: getattr(spec, field) for field, (letter, _) in LETTERS.items() if getattr(spec, field)}
    if spec.core is not None:
        values |= {core_letter(field): value for field, value in dict(spec.core).items() if value}
    formulas = equations(spec)
    for row in rows(spec):
        formula_of_row = formulas[row.name, "".join(row.sections)]
        for formula, number in zip(formula_of_row, (row.params, row.macs, row.cache), strict=True):
            put_in = sympy.sympify(formula).subs(values)
            assert not put_in.free_symbols
            assert put_in == number


GROWING = (
    "hidden_size",
    "num_experts",
    "moe_intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "num_hidden_layers",
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(field=st.sampled_from(GROWING), convention=st.sampled_from(sorted(CONVENTIONS)), factor=st.integers(2, 5))
def test_more_of_anything_costs_no_less(field, convention, factor):
    """Monotonicity: parameters, FLOPs and cache never fall when a width, a count or the depth grows."""
    fixed = {"head_dim": 16}
    small = counted(convention=convention, **fixed)
    large = counted(convention=convention, **(fixed | {field: MOE[field] * factor}))
    for total in ("total", "non_embedding", "active_non_embedding", "forward_flops", "kv_elements_per_token"):
        assert getattr(large, total) >= getattr(small, total)
    assert large.total > small.total


@given(length=st.fractions(1, 5000, max_denominator=2), extra=st.fractions(0, 500, max_denominator=2))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_longer_attention_costs_no_less(length, extra):
    """With and without windows."""
    for fields in ({}, {"sliding_window": 40}):
        spec = ModelSpec(**(MOE | fields))
        short, long = (Ledger(spec, Setting(64, x)).forward_flops for x in (length, length + extra))
        assert short <= long


def test_windows_cap_cache_and_attention():
    """Window 16 at context 64: the cache keeps 16 tokens of a layer, a token sees (16*17/2 + 48*16)/64 on average."""
    full, windowed = counted(), counted(sliding_window=16)
    assert windowed.kv_elements_at_context * 4 == full.kv_elements_at_context
    assert windowed.kv_elements_per_token == full.kv_elements_per_token
    saved = 6 * 4 * 64 * (Fraction(65, 2) - Fraction(16 * 17 // 2 + 48 * 16, 64))
    assert full.forward_flops - windowed.forward_flops == saved


def test_chunks_restart_at_one_position():
    """Chunks of 16 at context 64: 8.5 positions on average; the cache keeps one chunk."""
    chunked = counted(attention_chunk_size=16, layer_types=("chunked_attention",) * 6)
    assert counted().forward_flops - chunked.forward_flops == 6 * 4 * 64 * (Fraction(65, 2) - Fraction(17, 2))
    assert chunked.kv_elements_at_context * 4 == counted().kv_elements_at_context


def test_default_attention_length_and_context():
    """min(max_position_embeddings, 4096), and (context + 1) / 2 under smelt; the others say their own (C8, C12)."""
    spec = ModelSpec(**MOE, max_position_embeddings=100)
    lengths = {name: Setting.of(spec, c).attention_length for name, c in CONVENTIONS.items()}
    assert lengths == {"smelt": Fraction(101, 2), "megatron": 50, "torchtitan": 100, "full-square": 100}
    assert Setting.of(ModelSpec(**MOE, max_position_embeddings=10**6)).context == 4096
    assert Setting.of(ModelSpec(**MOE)).context == 4096


def test_sparsity_of_the_control_is_zero():
    """All experts active: S = 0; the expert sparsity of 2 in 8 is 0.75; a dense model has none."""
    assert counted(num_experts=2).compute_equivalent_sparsity == 0
    assert counted().expert_sparsity == 0.75
    dense = ModelSpec(
        hidden_size=64, num_hidden_layers=2, vocab_size=9, num_attention_heads=4, intermediate_size=99
    )  # fmt: skip
    assert Ledger(dense, Setting.of(dense)).as_dict()["sparsity"] == {"compute_equivalent": 0.0, "expert": 0.0}


def test_bytes_per_element():
    """fp8 halves, four bits quarter; the count stays whole."""
    spec = ModelSpec(**MOE)
    sizes = [
        Ledger(spec, Setting.of(spec, bytes_per_element=size)).as_dict()["kv_cache"]["bytes_per_token"]
        for size in (Fraction(2), Fraction(1), Fraction(1, 2))
    ]
    assert sizes == [768, 384, 192]
