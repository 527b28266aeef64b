"""The paper's second half: nine printed gains, six printed allocations, its coefficients from noiseless points."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smelt_budget.laws.fit import FORMS, fit, problem
from smelt_budget.laws.forms import CHINCHILLA, SMELT
from smelt_budget.laws.frontier import chinchilla_frontier, frontier, gain
from smelt_budget.laws.gains import preset

BASELINE, LOOPED = SMELT.presets["smelt-baseline"], SMELT.presets["smelt-looped"]
SPARSITIES = (0.85, 0.95, 0.97)
STEPS = np.array([10_000, 20_000, 50_000, 100_000, 150_000, 196_075])  # arXiv 2609.01343, section 7
HORIZONS = STEPS * 256 * 4096 + 10e9  # tokens, the decay's 10e9 with them: 20.5e9 ... 215.6e9
CELLS = json.loads((Path(__file__).parents[1] / "golden" / "smelt_cells.json").read_text(encoding="utf-8"))


def grid(arm="base"):
    """12 cells x 6 horizons of one arm, as the paper fitted: S as printed, F of the widths that give its tables."""
    points = [
        (cell["inferred"][arm]["F_train"], cell["published"][arm]["S_pct"] / 100, d) for cell in CELLS for d in HORIZONS
    ]
    return dict(zip(("flops_per_token", "sparsity", "tokens"), np.array(points).T, strict=True))


@pytest.mark.parametrize(
    ("compute", "printed"),
    [(1e20, (10.0, 7.8, 6.8)), (1e21, (18.0, 15.8, 14.7)), (1e22, (23.5, 20.9, 19.6))],
)
def test_the_nine_printed_gains(compute, printed):
    """arXiv 2609.01343, section 6, rounded there to 0.1; its coefficients are rounded too, hence 0.2 points."""
    found = [100 * gain(frontier(BASELINE, s), frontier(LOOPED, s), compute) for s in SPARSITIES]
    assert found == pytest.approx(printed, abs=0.2)


@pytest.mark.parametrize(("arm", "printed"), [(BASELINE, (56, 78, 91)), (LOOPED, (56, 75, 86))])
def test_the_six_printed_tokens_per_parameter(arm, printed):
    """At 1e21 FLOPs; exact as printed."""
    assert tuple(int(frontier(arm, s).tokens_per_parameter(1e21)) for s in SPARSITIES) == printed


@pytest.mark.parametrize(("arm", "printed"), [(BASELINE, 0.237), (LOOPED, 0.250)])
def test_the_two_printed_gammas(arm, printed):
    """Three decimals."""
    assert round(frontier(arm, 0.9).gamma, 3) == printed


@given(compute=st.floats(1e17, 1e25), sparsity=st.floats(0, 0.99), shift=st.floats(-0.5, 0.5), looped=st.booleans())
def test_no_other_split_of_a_budget_is_better(compute, sparsity, shift, looped):
    """F* against any F at the same compute; and the frontier's loss is E + G C^-gamma, inverted exactly."""
    arm = LOOPED if looped else BASELINE
    best = frontier(arm, sparsity)
    flops = best.flops(compute) * 10**shift
    columns = {"flops_per_token": flops, "sparsity": sparsity, "tokens": compute / flops}
    other = SMELT.loss(arm, {name: np.array([value]) for name, value in columns.items()})[0]
    assert other >= best.loss(compute) - 1e-12
    assert best.loss(compute) == pytest.approx(best.E + best.scale * compute**-best.gamma, rel=1e-9)
    assert best.compute(best.loss(compute)) == pytest.approx(compute, rel=1e-6)


def test_the_window_of_the_preset_is_the_paper_s_grid():
    """Least and most F D of its 144 runs, two digits: 1.3e19 to 2.2e21 as printed."""
    computes = [SMELT.training_flops(grid(arm)) for arm in ("base", "smelt")]
    assert tuple(float(f"{c:.1e}") for c in (np.min(computes), np.max(computes))) == preset("smelt").window


@pytest.mark.parametrize(("arm", "law"), [("base", BASELINE), ("smelt", LOOPED)])
def test_noiseless_points_give_back_all_six_coefficients(arm, law):
    """72 points, to 1e-3 relative (found: 1e-11)."""
    found = fit(SMELT, grid(arm), SMELT.loss(law, grid(arm)), starts=12)
    assert found.coefficients == pytest.approx(law, rel=1e-3)
    assert found.agreeing >= 6


def test_the_gradient_is_the_objective_s():
    """Central differences at a random place, in both branches of Huber."""
    points = problem(SMELT, grid(), SMELT.loss(BASELINE, grid()) * 1.0005)
    start = points.starts(3, 5)[2]
    for place in (start, points.place(SMELT.theta(BASELINE))):
        gradient = points.value(place)[1]
        for i, direction in enumerate(np.eye(len(start)) * 1e-6):
            difference = points.value(place + direction)[0] - points.value(place - direction)[0]
            assert gradient[i] == pytest.approx(difference / 2e-6, rel=1e-4, abs=1e-5)


def test_noise_of_the_published_size_leaves_the_gain_unbiased():
    """Coefficients move by a tenth (a over .34-.43), the gain at 1e21 by points: 16 draws of both arms, S 95 %."""
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(16):
        arms = []
        for arm, law, rmse in (("base", BASELINE, 0.00554), ("smelt", LOOPED, 0.00952)):
            loss = SMELT.loss(law, grid(arm)) + rng.normal(0, rmse, 72)
            arms.append(frontier(fit(SMELT, grid(arm), loss, starts=3).coefficients, 0.95))
        gains.append(100 * gain(*arms, 1e21))
    error = np.std(gains, ddof=1) / 4
    assert abs(np.mean(gains) - 15.7) < 3 * error
    assert error < 1


def chinchilla_points():
    """245 points read off a figure; the refit drops those not strictly below the fifth highest loss."""
    path = Path(__file__).resolve().parents[3] / "shared" / "data" / "chinchilla_points.csv"
    if not path.is_file():
        pytest.skip(f"{path.name} of arXiv:2404.10102 is not there")
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    size, compute, loss = (
        np.array([float(row[key]) for row in rows]) for key in ("Model Size", "Training FLOP", "loss")
    )
    kept = loss < np.sort(loss)[-5]
    return {"parameters": size[kept], "tokens": (compute / 6 / size)[kept]}, loss[kept]


def test_the_public_chinchilla_points():
    """arXiv:2404.10102: A 477.8 +- 2 %, B 2143 +- 4 %, E 1.817, alpha .347, beta .367, objective 1.018e-3."""
    columns, loss = chinchilla_points()
    assert len(loss) == 240
    found = fit(CHINCHILLA, columns, loss, starts=20)
    k = found.coefficients
    assert k["A"] == pytest.approx(477.8, rel=0.02)
    assert k["B"] == pytest.approx(2143, rel=0.04)
    assert [round(k[name], 3) for name in ("E", "alpha", "beta")] == [1.817, 0.347, 0.367]
    assert found.objective == pytest.approx(1.018e-3, abs=5e-7)


def test_the_mean_in_the_place_of_the_sum_stops_early():
    """The known pitfall: the same descent on objective / 240 with scipy's default tolerances ends elsewhere."""
    from scipy.optimize import minimize

    columns, loss = chinchilla_points()
    points = problem(CHINCHILLA, columns, loss)
    ends = []
    for start in points.starts(20, 0):

        def mean(theta):
            value, gradient = points.value(theta)
            return value * 1e-3 / len(loss), gradient * 1e-3 / len(loss)

        ends.append(minimize(mean, start, jac=True, method="L-BFGS-B"))
    early = min(ends, key=lambda end: end.fun)
    k = CHINCHILLA.coefficients(points.theta(early.x))
    assert points.value(early.x)[0] * 1e-3 > 1.02e-3
    assert abs(k["alpha"] - 0.3473) > 0.01 or abs(k["beta"] - 0.3672) > 0.01


def test_the_chinchilla_frontier_is_hoffmann_s():
    """C = 6 N D: N* = G (C/6)^(beta/(alpha+beta)), G = (alpha A / (beta B))^(1/(alpha+beta)) (its eq. 4)."""
    k = CHINCHILLA.presets["chinchilla"]
    parameters = (k["alpha"] * k["A"] / (k["beta"] * k["B"])) ** (1 / (k["alpha"] + k["beta"])) * (5.76e23 / 6) ** (
        k["beta"] / (k["alpha"] + k["beta"])
    )
    assert chinchilla_frontier(k).flops(5.76e23) / 6 == pytest.approx(parameters, rel=1e-9)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_presets_name_every_coefficient(form):
    """And theta is their one-to-one image."""
    for published in form.presets.values():
        assert set(published) == set(form.names)
        assert form.coefficients(form.theta(published)) == pytest.approx(published)
