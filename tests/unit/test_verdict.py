"""What the runs say: intervals against scipy and published t tables, and what is never said of too few seeds."""

import json
import math
import runpy
from pathlib import Path

import pytest

from smelt_budget.verify.interval import Interval, quantile, rows_error, seeds_for
from smelt_budget.verify.verdict import verdict

FAKE = runpy.run_path(str(Path(__file__).with_name("verify_result.py")))
made = FAKE["made"]

LOOPED = (0.033, 0.108, 0.066, 0.110, 0.018)
"""Measured: five seeds of a 3.3 M-parameter pair, 300 steps; their mean is 0.0671 before rounding."""


def said(found):
    """All sentences as one text."""
    return "\n".join(found["words"])


@pytest.mark.parametrize(("n", "expected"), [(2, 12.706), (3, 4.303), (4, 3.182), (6, 2.571), (11, 2.228), (31, 2.042)])
def test_the_quantile_is_that_of_printed_t_tables(n, expected):
    """97.5 % column of any t table, n - 1 degrees of freedom; three decimals."""
    assert quantile(n) == pytest.approx(expected, abs=5e-4)


def test_the_interval_is_scipys():
    """Exact: scipy.stats.ttest_rel's confidence interval of twin - baseline."""
    from scipy.stats import t, ttest_rel

    baseline = [2.05, 2.07, 2.031, 2.044, 2.062]
    twin = [b + d for b, d in zip(baseline, LOOPED, strict=True)]
    outside = ttest_rel(twin, baseline).confidence_interval(0.95)
    found = verdict(made(baseline, twin))["difference"]["nats_per_token"]
    assert (found["low"], found["high"]) == pytest.approx((outside.low, outside.high), rel=1e-9)
    ours = Interval.over(LOOPED)
    again = t.interval(0.95, 4, loc=ours.mean, scale=ours.sd / math.sqrt(5))
    assert (ours.mean - ours.half_width, ours.mean + ours.half_width) == pytest.approx(again, rel=1e-12)
    assert ours.half_width == pytest.approx(0.052, abs=5e-4)


@pytest.mark.parametrize(
    ("sd", "n", "half_width"), [(0.036, 6, 0.038), (0.038, 5, 0.047), (0.042, 5, 0.052), (0.022, 3, 0.055)]
)
def test_measured_half_widths(sd, n, half_width):
    """Four experiments with 3 to 6 seeds; sd and half-width are rounded to three decimals."""
    assert quantile(n) * sd / math.sqrt(n) == pytest.approx(half_width, abs=1e-3)


@pytest.mark.parametrize(
    ("sd", "half_width", "expected"),
    [
        (0.036, 0.02, 15),  # t(15) = 2.145: 2.145 * .036 / sqrt(15) = .01994; 14: 2.160 * .036 / sqrt(14) = .02078
        (0.036, 0.05, 5),  # t(5) = 2.776: .0447; 4: 3.182 * .018 = .0573
        (1.0, 100.0, 2),  # never fewer than 2
        (0.0, 0.02, 2),
        (1.0, 0.1, 387),  # Cohen's and every other sample-size table: 384 by the normal, 387 by t
        (1.0, 1e-9, None),
        (None, 0.02, None),
        (0.036, 0.0, None),
    ],
)
def test_seeds_for_a_half_width(sd, half_width, expected):
    """By hand from a t table; `None` where nothing is known or no number is enough."""
    assert seeds_for(half_width, sd) == expected


@pytest.mark.parametrize("sd", [0.01, 0.036, 0.5])
@pytest.mark.parametrize("half_width", [0.01, 0.05, 0.3])
def test_seeds_for_is_the_least(sd, half_width):
    """Exact: n is enough and n - 1 is not."""
    n = seeds_for(half_width, sd)
    assert quantile(n) * sd / math.sqrt(n) <= half_width
    assert n == 2 or quantile(n - 1) * sd / math.sqrt(n - 1) > half_width


def test_a_resolved_difference_has_a_sign():
    """Six seeds, +0.0975 with sd 0.036: the interval excludes 0, and looped is worse at this scale."""
    shape = (-1.2, -0.7, -0.1, 0.3, 0.6, 1.1)  # mean 0
    scale = 0.036 / Interval.over(shape).sd
    differences = [0.0975 + scale * value for value in shape]
    baseline = [2.04 + 0.01 * i for i in range(6)]
    found = verdict(made(baseline, [b + d for b, d in zip(baseline, differences, strict=True)]))
    nats = found["difference"]["nats_per_token"]
    assert (nats["mean"], nats["sd"], nats["seeds"]) == pytest.approx((0.0975, 0.036, 6))
    assert nats["half_width"] == pytest.approx(0.0378, abs=5e-5)
    assert found["resolved"]
    assert "looped was worse at this scale by 0.098 ± 0.038 nats/token (95 % t-interval, 6 seeds" in said(found)
    assert found["seeds_needed"] == {
        "for_half_width_0.02": 15,
        "for_half_width_0.05": 5,
        "to_resolve_this_difference": 3,  # 4.303 * .036 / sqrt(3) = .0894; 2: 12.706 * .036 / sqrt(2) = .3235
    }
    turned = verdict(made([b + d for b, d in zip(baseline, differences, strict=True)], baseline))
    assert turned["difference"]["nats_per_token"]["mean"] == pytest.approx(-0.0975)
    assert "looped was better at this scale by 0.098" in said(turned)


def test_one_seed_has_no_interval_and_no_sign():
    """n = 1: a difference, and nothing around it."""
    found = verdict(made((2.05,), (2.15,)))
    nats = found["difference"]["nats_per_token"]
    assert (nats["sd"], nats["half_width"], nats["low"], nats["high"]) == (None,) * 4
    assert not found["resolved"]
    assert set(found["seeds_needed"].values()) == {None}
    assert "+0.100 nats/token (twin - baseline, 1 seed): no interval" in said(found)
    assert "worse" not in said(found)
    assert "better" not in said(found).replace("a better one", "")


def test_two_seeds_resolve_nothing():
    """Even where the interval of 2 seeds excludes 0: its quantile is 12.7."""
    found = verdict(made((2.05, 2.06), (2.15, 2.1601)))
    nats = found["difference"]["nats_per_token"]
    assert nats["low"] > 0
    assert not found["resolved"]
    assert "12.7" in said(found)
    assert "nearly empty" in said(found)
    assert "worse" not in said(found)


def test_an_unresolved_difference_says_what_would_resolve_it():
    """Mean 0.0267, sd 0.0404: 12 seeds make the half-width smaller than the mean (2.201 * .0404 / sqrt(12) = .0257)."""
    found = verdict(made((2.05, 2.04, 2.0), (2.12, 2.03, 2.02)))
    assert not found["resolved"]
    assert found["seeds_needed"]["to_resolve_this_difference"] == 12
    assert "includes 0" in said(found)
    assert "about 12 seeds would put this difference at the edge" in said(found)
    assert "worse" not in said(found)


def test_equal_means_are_never_resolved():
    """A mean of 0 takes infinitely many seeds."""
    found = verdict(made((2.0, 2.1, 2.2), (2.1, 2.1, 2.1)))
    assert found["seeds_needed"]["to_resolve_this_difference"] is None
    assert "over 1,000 seeds" in said(found)


def test_a_seed_missing_or_broken_is_left_out_and_said():
    """Only seeds that both arms finished are paired, by seed and not by place."""
    result = made((2.0, 2.1, 2.2, 2.3), (2.1, 2.2, 2.3, math.nan))
    del result["runs"]["baseline"][0]
    result["runs"]["twin"].reverse()
    found = verdict(result)
    assert found["difference"]["seeds"] == [1, 2]
    assert found["difference"]["nats_per_token"]["mean"] == pytest.approx(0.1)
    assert found["difference"]["excluded"] == [
        {"seed": 0, "arm": "baseline", "why": "missing"},
        {"seed": 3, "arm": "twin", "why": "its held-out loss is not a number"},
    ]
    assert "seed 0 is left out of the comparison: baseline: missing" in said(found)
    assert found["loss_fell"] == {"baseline": True, "twin": False}
    assert "not verified: an arm did not train" in said(found)
    json.dumps(found, allow_nan=False)


def test_no_pair_of_seeds_compares_nothing():
    """Nothing is divided by nothing."""
    result = made((2.0,), (2.1,))
    result["runs"]["twin"] = []
    found = verdict(result)
    assert found["difference"]["nats_per_token"] is None
    assert not found["resolved"]
    assert "nothing is compared" in said(found)
    assert "the twin was not trained" in said(found)


@pytest.mark.parametrize(("last", "trains"), [(2.0, True), (5.25, False), (5.4, False), (math.nan, False)])
def test_an_arm_trains_where_its_loss_falls(last, trains):
    """From 5.31: by more than 0.1 nats, on every seed."""
    result = made()
    result["runs"]["twin"][1]["last_loss"] = last
    found = verdict(result)
    assert found["loss_fell"] == {"baseline": True, "twin": trains}
    json.dumps(found, allow_nan=False)


def test_bits_per_byte_may_be_unknown():
    """Ids without a tokenizer: nats per token only, and no yardsticks."""
    found = verdict(made(bytes_known=False))
    assert found["difference"]["bits_per_byte"] is None
    assert found["difference"]["by_domain"]["code"]["bits_per_byte"] is None
    assert found["below"]["twin"] == {"unigram": None, "bigram": None}
    known = verdict(made())["difference"]
    assert known["bits_per_byte"]["mean"] == pytest.approx(known["nats_per_token"]["mean"] / math.log(2))


def test_a_loss_above_letter_statistics_is_said():
    """Yardsticks 3.33 and 2.46; domains lie 0.1 below and above the mean, so 3.25 is above one of them."""
    assert "pairs of letters" in said(verdict(made((2.8,) * 3, (2.1,) * 3)))
    found = verdict(made((3.25,) * 3, (2.1,) * 3))
    assert found["below"]["baseline"] == {"unigram": False, "bigram": False}
    assert "baseline is not below what letter frequencies give" in said(found)


def test_rows_of_one_seed_are_never_called_the_error():
    """By hand: differences 1, 3 | 2, 2 in two domains: sqrt(2 * 2 + 2 * 0) / 4 = 0.5."""
    before = {"nats_per_token": [0.0, 0.0, 1.0, 1.0], "domain": ["a", "a", "b", "b"]}
    after = {"nats_per_token": [1.0, 3.0, 3.0, 3.0], "domain": ["a", "a", "b", "b"]}
    assert rows_error(before, after) == 0.5
    assert rows_error(before, {**after, "domain": ["b", "a", "a", "b"]}) is None
    alone = [{"nats_per_token": part["nats_per_token"][:3], "domain": ["a", "a", "b"]} for part in (before, after)]
    assert rows_error(*alone) is None
    assert "only that is the error of the comparison" in said(verdict(made()))
    assert "so it is not the error of the comparison" in said(verdict(made((2.05,), (2.15,))))


def test_the_scale_is_named_and_predicts_nothing():
    """327,680 tokens of 1.89 M parameters are 0.17 each; 3 * 1.08e6 * 327,680 = 1.06e12 FLOPs."""
    found = verdict(made())
    assert found["scale"]["tokens_per_parameter"] == pytest.approx(0.1734, abs=5e-5)
    assert found["scale"]["training_flops"] == 3 * 1_080_000 * 327_680
    scope = next(line for line in found["words"] if line.startswith("verified"))
    assert scope == (
        "verified: both arms build, match the ledger and train. A proxy of 1.89 M parameters at 0.17 tokens each "
        "(1.1e+12 training FLOPs an arm) does not predict the results published for 1e19 FLOPs and above, in either "
        "direction"
    )


def test_the_full_pair_is_no_proxy():
    """Without a proxy the counts tell its size; beyond 1e19 FLOPs it is a point of its own."""
    result = made()
    result["proxy"], result["arm_gaps"] = None, {"flops": 0.003}
    for run in (run for runs in result["runs"].values() for run in runs):
        run["tokens"] = 20_000_000_000
    found = verdict(result)
    assert found["scale"]["parameters"] == 3_872_245_760
    assert found["scale"]["training_flops"] == 20_000_000_000 * 3 * 830_472_192
    assert found["equal"]["flops_gap"] == 0.003
    assert "one point of one pair, and no scaling law" in said(found)


def test_rates_of_each_arm_are_told():
    """Each arm's own; the edge of what was tried, and a rate that was not tried, are said."""
    result = made()
    result["rates"]["twin"]["at_edge"] = True
    found = verdict(result)
    assert "baseline 0.007812 (x1), twin 0.009375 (x1)" in said(found)
    assert "the twin's best rate is at the edge" in said(found)
    assert "the baseline's best rate" not in said(found)
    for arm in ("baseline", "twin"):
        result["rates"][arm]["tried"] = []
    assert "rates were not tried" in said(verdict(result))


def test_what_was_not_equal_is_said():
    """Other tokens in one arm are no comparison at equal cost."""
    result = made()
    assert verdict(result)["equal"]["sparsity"]["points"] == pytest.approx(0.7)
    result["runs"]["twin"][0]["tokens"] //= 2
    found = verdict(result)
    assert not found["equal"]["tokens"]
    assert "not at equal cost" in said(found)
    assert "1.19 times the baseline's" in said(found)


def test_uneven_and_idle_experts_are_said():
    """47^0.7 = 14.8 experts' worth; 10 of 47 idle is more than a tenth."""
    result = made()
    result["runs"]["twin"][2]["routing"]["load"][3] |= {"entropy": 0.7, "dead": 10}
    found = verdict(result)
    assert found["health"]["twin"]["entropy_min"] == 0.7
    assert found["health"]["twin"]["dead_share"] == 10 / 47
    assert "as if 15 of 47 experts shared it evenly" in said(found)
    assert "10 experts got none of 32,768 tokens" in said(found)
    assert "load in the baseline" not in said(found)


def test_without_experts_there_is_no_load():
    """A dense pair's health has no entropy, and nothing is said of it."""
    found = verdict(made(moe=False))
    assert found["health"]["twin"]["entropy_min"] is None
    assert "load" not in said(found)


def test_counts_alone():
    """`--counts-only`: one sentence if all agree, else the arm and the count that do not."""
    result = {key: made()[key] for key in ("version", "origin", "pair", "counts")}
    assert verdict(result) == {
        "counts_agree": True,
        "words": ["parameters, FLOPs and KV cache: ledger and model agree exactly, in both arms"],
    }
    result["counts"]["twin"]["kv_cache"] |= {"agree": False}
    result["counts"]["agree"] = False
    found = verdict(result)
    assert not found["counts_agree"]
    assert found["words"] == ["counts of the twin disagree: kv cache; what follows is not matched"]


def test_a_sink_that_was_not_measured_is_said():
    """The reason the run gives, once."""
    result = made()
    for run in (run for runs in result["runs"].values() for run in runs):
        run["sink"] = {"layers": [], "why": "code: 90 held-out tokens are less than one row of 257"}
        run["recall"] = {"examples": [], "why": "in-context recall needs 8 different ids"}
    found = verdict(result)
    assert found["sink"] == ["attention sinks were not measured: code: 90 held-out tokens are less than one row of 257"]
    assert found["recall"] == {"baseline": [], "twin": []}
