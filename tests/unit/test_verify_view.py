"""What the tables show: the numbers of the result and no others, and the rows that differ for exit code 4."""

import runpy
from pathlib import Path

import pytest
from rich.console import Console

from smelt_budget.errors import CountsDisagree
from smelt_budget.report.verify import counts_difference, verify_view
from smelt_budget.verify.verdict import verdict

FAKE = runpy.run_path(str(Path(__file__).with_name("verify_result.py")))
made = FAKE["made"]


def printed(result):
    """The view as text, wide enough that nothing wraps."""
    console = Console(width=400, record=True, file=None, highlight=False, quiet=False)
    with console.capture() as capture:
        console.print(verify_view(result))
    return capture.get()


def judged(**fields):
    """A result with its verdict."""
    result = made(**fields)
    return result | {"verdict": verdict(result)}


def row(text, beginning):
    """The cells of a line, by how it begins."""
    return next(line for line in text.splitlines() if line.strip().startswith(beginning)).split()


def cells(text, beginning, holding):
    """Of the one line that has both."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [beginning] and holding in line)


def test_counts_stand_beside_each_other():
    """Exact digits of both arms, ledger and measured."""
    text = printed(judged())
    assert "3,872,245,760   3,872,245,760" in text
    assert row(text, "KV bytes")[-10:] == [
        "of",
        "a",
        "prefill",
        "of",
        "1,024",
        "tokens,",
        "4",
        "bytes",
        "an",
        "element",
    ]
    assert "gaps are under convention smelt, measured FLOPs under full-square" in text
    assert row(text, "non-embedding parameters")[-4:] == ["-0.020", "%", "-0.600", "%"]


def test_losses_with_their_spread():
    """By hand: 2.05, 2.07, 2.06: mean 2.06, sd 0.01; differences .07, .10, .08: mean .0833, sd .01528, ± .0379."""
    text = printed(judged())
    assert row(text, "held-out nats / token")[4:] == [
        "2.0600",
        "±",
        "0.0100",
        "2.1433",
        "±",
        "0.0252",
        "+0.0833",
        "±",
        "0.0379",
    ]
    assert row(text, "overlap of visits")[-3:] == ["0.310", "/", "0.100"]
    assert row(text, "recall after 8 examples")[-3:] == ["0.100", "/", "0.212"]
    assert cells(text, "twin", "2.5400*") == ["twin", "2.5900", "2.5400*", "2.5700", "0.009375"]
    assert all(line in text for line in judged()["verdict"]["words"])


def test_a_rate_that_diverged_and_one_never_tried():
    """Arms may have tried different factors."""
    result = judged()
    result["rates"]["twin"]["tried"][0]["loss"] = None
    result["rates"]["twin"]["tried"].append({"factor": 4.0, "rate": 0.0375, "loss": 2.9})
    text = printed(result)
    assert "diverged" in text
    assert row(text, "loss by rate")[-6:] == ["x0.5", "x1", "x2", "x4", "rate", "taken"]
    assert cells(text, "baseline", "2.4400*") == ["baseline", "2.4900", "2.4400*", "2.4700", "-", "0.007812"]


def test_what_is_unknown_is_a_dash():
    """One seed, no bytes, no experts."""
    text = printed(judged(baseline=(2.05,), twin=(2.12,), bytes_known=False, moe=False))
    assert row(text, "held-out nats / token")[4:] == ["2.0500", "2.1200", "+0.0700", "(1", "seed)"]
    assert row(text, "held-out bits / byte")[4:] == ["-", "-", "-"]
    assert row(text, "load entropy")[-2:] == ["-", "-"]


def test_counts_alone_have_no_training():
    """With --counts-only, with or without a verdict."""
    result = {key: made()[key] for key in ("version", "origin", "pair", "counts")}
    text = printed(result)
    assert "held-out" not in text
    assert "exact" in row(text, "KV cache")
    assert "agree exactly" in printed(result | {"verdict": verdict(result)})


def test_the_full_pair_has_one_column_of_gaps():
    """No proxy was made."""
    result = made()
    result["proxy"] = None
    text = printed(result | {"verdict": verdict(result)})
    assert row(text, "gap, twin to baseline")[-1] == "pair"
    assert "the pair itself" in text


def test_a_difference_names_its_row():
    """-200 of 1,200 is -16.667 %; a row the ledger lacks has no share; beyond six rows they are counted."""
    counts = made()["counts"]
    assert counts_difference(counts) == []
    counts["twin"]["parameters"] |= {
        "agree": False,
        "differ": [
            {"row": "experts", "ledger": 1_200, "measured": 1_000},
            {"row": "no row for mlp.extra", "ledger": 0, "measured": 64},
            *({"row": f"norm {i}", "ledger": 1, "measured": 2} for i in range(5)),
        ],
    }
    counts["baseline"]["uncounted"] = ["aten.convolution"]
    lines = counts_difference(counts)
    assert lines[:3] == [
        "baseline, FLOPs: no count is known for aten.convolution",
        "twin, parameters: experts: ledger 1,200, measured 1,000, -200 (-16.667 %)",
        "twin, parameters: no row for mlp.extra: ledger 0, measured 64, +64",
    ]
    assert lines[-1] == "twin, parameters: and 1 more rows"
    error = CountsDisagree("formula and model disagree", *lines)
    assert error.exit_code == 4
    assert "\n  twin, parameters: experts: ledger 1,200" in str(error)


def test_the_table_marks_what_disagrees():
    """Only the arm and the count that do."""
    result = judged()
    result["counts"]["twin"]["flops"] |= {"measured": 1, "agree": False}
    lines = [line.split() for line in printed(result).splitlines() if "forward" in line]
    assert [(line[2], line[5]) for line in lines] == [("baseline", "yes"), ("twin", "no")]


@pytest.mark.parametrize("fields", [{}, {"baseline": (2.0, 2.1), "twin": (2.1, 2.3)}])
def test_no_line_of_words_is_lost(fields):
    """Sink sentences stand before the rest."""
    result = judged(**fields)
    result["verdict"]["sink"] = ["no sink has formed"]
    text = printed(result)
    assert text.index("no sink has formed") < text.index(result["verdict"]["words"][0])
