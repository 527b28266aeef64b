"""The law of looped Mixture-of-Experts of arXiv 2609.40316: printed optima, what its fit finds, what is refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from smelt_budget.cli import app
from smelt_budget.errors import BadInput
from smelt_budget.laws import gains
from smelt_budget.laws.fit import fit, problem
from smelt_budget.laws.looped_moe import LOOPED_MOE
from smelt_budget.laws.looped_moe_shapes import Family, losses, needed
from smelt_budget.laws.runs import read_runs
from smelt_budget.laws.study import study
from smelt_budget.report.law import coefficient

PUBLISHED = LOOPED_MOE.presets["looped-moe"]


def designed(loops=(1, 2, 4), experts=(1, 2, 8, 32, 64)):
    """4 sizes x experts x loops x 4 horizons: 240 runs in 60 cells."""
    points = [
        (n, n * (1 + 2 / 3 * (e - 1)), n / 2, r, e, d)
        for n in (1e8, 2.5e8, 6e8, 1.6e9)
        for e in experts
        for r in loops
        for d in (5e9, 2e10, 8e10, 3e11)
    ]
    return dict(zip(LOOPED_MOE.columns, np.array(points).T, strict=True))


def table(columns, loss, path):
    """A CSV file of runs."""
    lines = [",".join((*LOOPED_MOE.columns, "loss"))]
    lines += [",".join(map(repr, map(float, row))) for row in zip(*columns.values(), loss, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_law_is_the_printed_formula():
    """Written out again from the paper, for one shape."""
    k, (n, total, looped, r, e, d) = PUBLISHED, (1.0, 5.7, 0.5, 3, 8, 200.0)  # billions
    x = (n / total) ** -k["th"]
    size = n + k["k1"] * x * looped * (1 - math.exp(-(r - 1) / (k["k2"] * x)))
    h = math.log(1 / (1 / (e - 1 + 1 / (1 / k["Es"] - 1 / k["Em"])) + 1 / k["Em"]))
    loss = math.exp(k["d"] * h) * k["A"] * size ** (k["al"] + k["g"] * h) + k["c"]
    loss += k["B"] * math.exp(k["w"] * h) * d ** (k["be"] + k["z"] * h)
    values = (n * 1e9, total * 1e9, looped * 1e9, r, e, d * 1e9)
    columns = {name: np.array([value]) for name, value in zip(LOOPED_MOE.columns, values, strict=True)}
    assert LOOPED_MOE.loss(k, columns)[0] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(("memory", "printed"), [("1", (1.0e9, 2, 2)), ("3", (1.0e9, 8, 2)), ("10", (1.6e9, 16, 1))])
def test_the_three_printed_optima(memory, printed):
    """At 5e21 training FLOPs, INT4: active parameters, experts over top-k, loops; exact among the family's sizes."""
    arguments = ["law", "allocate", "--preset", "looped-moe", "--compute", "5e21", "--memory", memory, "--json"]
    (row,) = json.loads(CliRunner().invoke(app, arguments).stdout)["allocations"]
    assert (row["active"], row["experts"], row["loops"]) == printed
    assert row["total"] * 0.5 <= float(memory) * 1e9
    assert row["tokens"] == pytest.approx(5e21 / 6 / (row["active"] + (row["loops"] - 1) * row["looped"]))


def test_the_optimum_at_1_GB_hangs_on_the_family():
    """With E 4 to choose from another shape is best, by more than the law's own RMSE: docs/laws.md says so."""
    theta = LOOPED_MOE.theta(PUBLISHED)
    with_four = Family(experts=(1, 2, 4, 8, 16, 32, 64)).within(1e9, 0.5).columns
    least = losses(theta, with_four, 5e21)
    assert [with_four[name][least.argmin()] for name in ("active", "experts", "loops")] == [0.63e9, 4, 3]
    printed = losses(theta, Family().within(1e9, 0.5).columns, 5e21).min()
    assert printed - least.min() == pytest.approx(0.0145, abs=5e-5)


def test_a_budget_reaches_the_loss_it_is_needed_for():
    """`needed` inverts `losses`, shape by shape; below a shape's capacity no budget is enough."""
    theta, columns = LOOPED_MOE.theta(PUBLISHED), Family().columns
    for shape, loss in enumerate(losses(theta, columns, 3e21)):
        assert needed(theta, columns, loss)[shape] == pytest.approx(3e21, rel=1e-6)
    assert np.isinf(needed(theta, columns, 1.36)).all()


def test_loops_save_nothing_without_a_limit_of_memory_and_much_with_one():
    """Equal loss by definition: the budget that R = 1 needs, put in, gives the loss of the best R > 1."""
    arguments = ["law", "gain", "--preset", "looped-moe", "--compute", "1e20,1e22", "--json"]
    free = json.loads(CliRunner().invoke(app, arguments).stdout)["gains"]
    assert all(row["gain"] < 0 for row in free)
    tight = json.loads(CliRunner().invoke(app, [*arguments, "--memory", "3"]).stdout)["gains"]
    assert tight[1]["gain"] == pytest.approx(0.244, abs=5e-4)
    unlooped = replace(Family().within(3e9, 0.5), loops=(1,)).columns
    least = losses(LOOPED_MOE.theta(PUBLISHED), unlooped, 1e22 / (1 - tight[1]["gain"])).min()
    assert least == pytest.approx(tight[1]["loss"], abs=1e-9)


def test_the_gradient_is_the_objective_s():
    """Central differences of all fourteen, at a start and where Huber is quadratic."""
    points = problem(LOOPED_MOE, designed(), LOOPED_MOE.loss(PUBLISHED, designed()) * 1.0005)
    for place in (points.starts(3, 5)[2], LOOPED_MOE.theta(PUBLISHED)):
        gradient = points.value(place)[1]
        for i, direction in enumerate(np.eye(len(place)) * 1e-6):
            difference = points.value(place + direction)[0] - points.value(place - direction)[0]
            assert gradient[i] == pytest.approx(difference / 2e-6, rel=1e-4, abs=1e-5)


def test_noiseless_points_give_back_all_fourteen_coefficients():
    """240 points: coefficients to 1e-3 (found: 1e-13), the loss to 1e-4 also where no point was."""
    found = fit(LOOPED_MOE, designed(), LOOPED_MOE.loss(PUBLISHED, designed()), starts=8)
    assert found.coefficients == pytest.approx(PUBLISHED, rel=1e-3)
    elsewhere = designed(loops=(3, 6), experts=(4, 16, 128))
    expected = LOOPED_MOE.loss(PUBLISHED, elsewhere)
    assert LOOPED_MOE.loss(found.coefficients, elsewhere) == pytest.approx(expected, abs=1e-4)
    assert found.agreeing >= 3


def test_noise_of_the_published_size_leaves_losses_known(tmp_path):
    """RMSE .0037: to .004; negative coefficients are judged as positive ones; later commands carry the intervals on."""
    rng, columns = np.random.default_rng(0), designed()
    true = LOOPED_MOE.loss(PUBLISHED, columns)
    runs = read_runs(table(columns, true + rng.normal(0, 0.0037, 240), tmp_path / "runs.csv"), LOOPED_MOE)
    result = study(LOOPED_MOE, runs, "x", starts=8, draws=40, folder=tmp_path / "law")
    found = result["arms"]["all"]["coefficients"]
    assert {name for name in found if found[name]["identified"]} >= {"c", "A", "B", "al", "be", "d", "w"}
    fitted = {name: k["value"] for name, k in found.items()}
    assert np.abs(LOOPED_MOE.loss(fitted, columns) - true).max() < 0.004
    for command in ("allocate", "gain"):
        arguments = ["law", command, str(tmp_path / "law"), "--compute", "1e20", "--memory", "3", "--json"]
        (row,) = json.loads(CliRunner().invoke(app, arguments).stdout)[f"{command}s".replace("es", "ions")]
        value = row["loss" if command == "allocate" else "gain"]
        assert row["low"] < value < row["high"]
    assert CliRunner().invoke(app, ["report", str(tmp_path / "law"), "--out", str(tmp_path / "x.html")]).exit_code == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loops": 1.5}, "row 2: loops 1.5 is not 1, 2, 3"),
        ({"loops": 2, "looped": 0}, "row 2: looped is 0, and loops 2"),
        ({"looped": -1}, "row 2: looped is -1, below 0"),
        ({"active": 2e9}, "row 2: active 2e.09 is more than total"),
        ({"looped": 9e8}, "row 2: looped 9e.08 is more than active"),
        ({"experts": 0.5}, "row 2: experts 0.5 is below 1"),
        ({"loss": math.nan}, "row 2: loss is nan"),
        ({"tokens": 0}, "row 2: tokens is 0"),
    ],
)
def test_an_impossible_run_is_named(tmp_path, change, said):
    """With its row."""
    good = {"active": 1e8, "total": 1e9, "looped": 5e7, "loops": 2, "experts": 8, "tokens": 1e10, "loss": 2.5}
    rows = (good, good | {"seed": 2} | change)
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(BadInput, match=said):
        read_runs(tmp_path / "runs.jsonl", LOOPED_MOE)


@pytest.mark.parametrize(
    ("design", "said"),
    [
        ({"loops": (1, 2)}, r"all 160 runs have loops 1 or 2, [^$]*at 3 or more values of loops"),
        ({"experts": (8, 32, 64)}, r"all 144 runs have experts 8 or 32 or 64, [^$]*at 4 or more values of experts"),
    ],
)
def test_too_few_values_are_refused(tmp_path, design, said):
    """k1 and k2 trade along one R - 1; three Eh up to a + b ln Eh are one number, and Es and Em are two."""
    columns = designed(**design)
    runs = read_runs(table(columns, LOOPED_MOE.loss(PUBLISHED, columns), tmp_path / "runs.csv"), LOOPED_MOE)
    with pytest.raises(BadInput, match=said):
        study(LOOPED_MOE, runs, "x", starts=1, draws=0)


def test_what_no_point_can_tell_is_not_identified(tmp_path):
    """One ratio of active to total: th only scales k1 and k2. Found with no refits too, and no digit is printed."""
    columns = designed() | {"total": 5 * designed()["active"]}
    runs = read_runs(table(columns, LOOPED_MOE.loss(PUBLISHED, columns), tmp_path / "runs.csv"), LOOPED_MOE)
    result = study(LOOPED_MOE, runs, "x", starts=8, draws=0)["arms"]["all"]
    found = result["coefficients"]
    assert {name for name in found if found[name]["identified"] is False} == {"k1", "k2", "th"}
    assert coefficient(found["th"]) == "not identified"
    assert result["rmse"] < 1e-6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gain", "--preset", "smelt", "--memory", "3"], "--memory chooses among shapes; the form smelt has none"),
        (["allocate", "--preset", "chinchilla", "--sparsity", "0.9"], "--sparsity says nothing to the form chinchilla"),
        (["gain", "--preset", "looped-moe", "--sparsity", "0.9"], "--sparsity says nothing to the form looped-moe"),
        (["allocate", "--preset", "looped-moe", "--bytes-per-parameter", "2"], "without --memory"),
        (["allocate", "--preset", "looped-moe", "--memory", "0.001"], "no shape fits"),
        (["allocate", "--preset", "looped-moe", "--memory", "0"], "--memory 0 is not above 0"),
        (["plot", "--preset", "looped-moe", "--out", "x.png"], "no frontier to draw"),
        (["plot", "--preset", "smelt", "--kind", "residuals", "--sparsity", "0.9"], "residuals have none"),
        (["gain", "--preset", "chinchilla"], "a gain needs the form smelt or looped-moe"),
    ],
)
def test_an_option_that_says_nothing_is_refused(arguments, said, tmp_path, monkeypatch):
    """By its name, exit code 2, and no file is written."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["law", *arguments])
    assert done.exit_code == 2
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_preset_is_a_law_without_runs():
    """No window, no draws, one surface."""
    law = gains.preset("looped-moe")
    assert (list(law.arms), law.window, law.draws) == (["all"], None, [])
