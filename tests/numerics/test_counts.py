"""Ledger and model agree on solved pairs; whatever one of them has and the other has not is found, by name.

The two sides are written without seeing each other. Here one of them is changed on purpose, and the numbers of the
difference are worked out by hand. H 16, V 257, E 6, F 8, 3 layers of which 2 have experts.
"""

import runpy
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from smelt_budget.ledger import Setting
from smelt_budget.ledger import ledger as ledger_module
from smelt_budget.model import Transformer
from smelt_budget.model.ffn import MixtureOfExperts
from smelt_budget.report.verify import counts_difference
from smelt_budget.solver import Request, Tolerance, solve
from smelt_budget.spec import read
from smelt_budget.spec.model import checked
from smelt_budget.verify import counts
from smelt_budget.verify.verify import as_dict

TOY = runpy.run_path(str(Path(__file__).with_name("toy_run.py")))
SPEC = checked(TOY["TOY"] | TOY["LOOP"], "toy")
T = 64
SETTING = Setting.of(SPEC, context=T)


def count():
    """All three counts of the toy."""
    return counts.count(SPEC, SETTING)


def test_the_toy_agrees():
    """What the tests below change agrees before."""
    found = count()
    assert found.agree
    assert [one.rows for _, one in found.items()] == [(), (), ()]
    experts = 2 * 6 * 3 * 16 * 8  # layers, E, matrices, H, F
    assert found.parameters.measured > experts + 2 * 257 * 16


# latent attention with a dense first layer; windows, sinks and biases; multipliers and tied weights
PAIRS = {
    "deepseek-v2-lite": {"heads": "sectioned"},
    "gpt-oss-20b": {"heads": "sectioned"},
    "granite-3.1-3b-a800m": {"heads": "sectioned"},
}


@pytest.mark.parametrize("name", PAIRS)
def test_solved_pairs_agree(name):
    """Both arms, in all three counts, at full size; the twin has the baseline's kind of attention and experts."""
    pair = solve(read(name).spec, Request(context=256, top=0, tolerance=Tolerance(0.05, 0.05, 0.05), **PAIRS[name]))
    for spec in (pair.baseline, pair.twin):
        found = counts.count(spec, Setting.of(spec, context=256))
        assert found.agree, (found.as_dict(), spec)
        assert found.flops.about["convention"] == "full-square"


def changed_rows(monkeypatch, name, **fields):
    """The ledger with another row."""
    whole = ledger_module.rows

    def rows(spec):
        return [
            replace(row, **{key: change(getattr(row, key)) for key, change in fields.items()})
            if row.name == name
            else row
            for row in whole(spec)
        ]

    monkeypatch.setattr(ledger_module, "rows", rows)


def test_a_row_of_the_ledger_is_wrong(monkeypatch):
    """One weight of each router too many: two layers store it, and it is named with both numbers."""
    changed_rows(monkeypatch, "router", params=lambda params: params + 1)
    found = count()
    assert found.parameters.rows == (("router", 2 * (6 * 16 + 1), 2 * 6 * 16),)
    assert found.parameters.ledger - found.parameters.measured == 2
    assert not found.parameters.agree
    assert (found.flops.agree, found.kv_cache.agree, found.agree) == (True, True, False)


def test_errors_that_cancel_in_the_total_are_found(monkeypatch):
    """Equal totals with unequal rows do not agree."""
    changed_rows(monkeypatch, "attention.k", params=lambda params: params + 5)
    changed_rows(monkeypatch, "attention.v", params=lambda params: params - 5)
    found = count().parameters
    assert found.ledger == found.measured
    assert not found.agree
    assert found.rows == (("attention.k", 3 * (16 * 8 + 5), 3 * 16 * 8), ("attention.v", 3 * (16 * 8 - 5), 3 * 16 * 8))


def test_a_visit_is_not_counted(monkeypatch):
    """4 executed layers counted as 3 stored ones: o_proj is short of one run of H x H multiply-adds."""
    changed_rows(monkeypatch, "attention.o", run=lambda run: min(run, 1))
    assert count().flops.rows == (("attention.o", 2 * 3 * 16 * 16, 2 * 4 * 16 * 16),)


def test_the_cache_of_a_visit_is_not_counted(monkeypatch):
    """Keys and values of every executed layer: 4 slots, not 3; measured in a real prefill and at the context."""
    kept = [row.name for row in ledger_module.rows(SPEC) if row.cache]
    for name in kept:
        changed_rows(monkeypatch, name, run=lambda run: min(run, 1))
    found = count().kv_cache
    assert (found.ledger, found.measured) == (3 * 2 * 8 * T * 4, 4 * 2 * 8 * T * 4)
    assert [row[0] for row in found.rows] == ["attention.kv_cache", f"attention.kv_cache at {T}"]


def model_changed(monkeypatch, change):
    """The model with something that the ledger does not know."""

    def built(spec):
        model = Transformer(spec)
        if model.spec.hidden_size == SPEC.hidden_size:  # the narrow one of the cache stays
            change(model)
        return model

    monkeypatch.setattr(counts, "Transformer", built)


def test_a_weight_without_a_row(monkeypatch):
    """It is named as the model names it, against 0."""
    model_changed(monkeypatch, lambda model: model.register_parameter("extra", nn.Parameter(torch.empty(7))))
    found = count()
    assert found.parameters.rows == (("no row for extra", 0, 7),)
    assert found.flops.agree


def test_a_weight_of_another_size(monkeypatch):
    """A bias that no bias was asked for belongs to a row the ledger leaves out."""

    def biased(model):
        model.layers[0].self_attn.o_proj.bias = nn.Parameter(torch.empty(16, device="meta"))

    model_changed(monkeypatch, biased)
    assert count().parameters.rows == (("attention.o_bias", 0, 16),)


def test_a_matrix_product_more(monkeypatch):
    """x @ x^T in each MoE layer, one of which runs twice: 2 T H more of each token each time, in no row."""
    forward = MixtureOfExperts.forward

    def more(self, x, *arguments, **keywords):
        x @ x.transpose(-1, -2)
        return forward(self, x, *arguments, **keywords)

    monkeypatch.setattr(MixtureOfExperts, "forward", more)
    found = count()
    assert found.flops.measured - found.flops.ledger == 3 * 2 * T * 16
    executions = {"no row for layers.1.mlp": 2, "no row for layers.2.mlp": 1}
    assert found.flops.rows == tuple((name, 0, runs * 2 * T * 16) for name, runs in executions.items())
    assert found.parameters.agree


UNLISTED = {
    "aten.linalg_vector_norm": torch.linalg.norm,
    "aten._fft_r2c": torch.fft.fft,
    "aten.linalg_cross": lambda x: torch.linalg.cross(x[..., :3], x[..., :3]),
}


@pytest.mark.parametrize("name", UNLISTED)
def test_an_operation_nobody_counts(monkeypatch, name):
    """Equal numbers are not enough: what ran must be counted or be on the list."""
    forward = MixtureOfExperts.forward

    def more(self, x, *arguments, **keywords):
        UNLISTED[name](x)
        return forward(self, x, *arguments, **keywords)

    monkeypatch.setattr(MixtureOfExperts, "forward", more)
    found = count()
    assert found.operations == (name,)
    assert found.flops.agree
    assert not found.agree
    assert f"twin, FLOPs: no count is known for {name}" in counts_difference(
        as_dict({"baseline": found, "twin": found})
    )


def test_what_is_said_of_a_difference(monkeypatch):
    """Arm, quantity, row, both numbers, by how much."""
    changed_rows(monkeypatch, "router", params=lambda params: params * 2)
    found = count()
    said = counts_difference(as_dict({"baseline": found, "twin": found}))
    assert said[0] == "baseline, parameters: router: ledger 384, measured 192, -192 (-50.000 %)"
    assert len(said) == 2


def test_windows_and_fractions_of_tokens():
    """A context that the windows cut and an odd one, where FLOPs of a mean token are no whole number."""
    spec = SPEC.replace(sliding_window=5)
    for context in (7, 64):
        assert counts.count(spec, Setting(context, Fraction(context + 1, 2))).agree
