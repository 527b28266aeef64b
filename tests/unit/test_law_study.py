"""Runs are checked row by row; a study that is killed goes on, and ends as one that was not."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from smelt_budget.errors import BadInput
from smelt_budget.laws import gains
from smelt_budget.laws.forms import CHINCHILLA, SMELT
from smelt_budget.laws.runs import read_runs
from smelt_budget.laws.study import RESULT, study
from smelt_budget.report.law import coefficient

made = runpy.run_path(str(Path(__file__).with_name("verify_result.py")))["made"]
HEAD = "arm,flops_per_token,sparsity,tokens,loss"
HORIZONS = (2.05e10, 6.24e10, 2.156e11)  # three of the paper's six


def table(arms=("baseline", "looped"), noise=(0.005, 0.005), sparsities=(0.85, 0.95, 0.97), seed=0, horizons=HORIZONS):
    """The paper's grid with losses of its two laws."""
    rng = np.random.default_rng(seed)
    lines = [HEAD + ",cell"]
    for arm, rmse in zip(arms, noise, strict=False):
        for flops in (6.2e8, 1.5e9, 4.1e9, 1.05e10):
            for sparsity in sparsities:
                for tokens in horizons:
                    columns = {"flops_per_token": flops, "sparsity": sparsity, "tokens": tokens}
                    k = SMELT.presets[f"smelt-{arm}"]
                    loss = SMELT.loss(k, {name: np.array([v]) for name, v in columns.items()})[0] + rng.normal(0, rmse)
                    lines.append(f"{arm},{flops},{sparsity},{tokens},{loss},{flops:g} {sparsity}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["baseline,1e9,0.9,1e10,nan"], "row 1: loss is nan"),
        (
            ["baseline,1e9,0.9,1e10,2", "baseline,1e9,0.9,2e10,0"],
            "row 2: loss is 0, and it has a logarithm only above 0",
        ),
        (["baseline,1e9,0.9,1e10,-1"], "row 1: loss is -1"),
        (["baseline,1e9,1.0,1e10,2"], r"row 1: sparsity 1 is not in \[0, 1\)"),
        (["baseline,1e9,,1e10,2"], "row 1: sparsity is '', not a number"),
        (["baseline,inf,0.9,1e10,2"], "row 1: flops_per_token is inf"),
        ([",1e9,0.9,1e10,2"], "row 1: arm is empty"),
        (["baseline,1e9,0.9,1e10,2", "baseline,1e9,0.9,1e10,2.1"], "row 2: the same run as row 1"),
        (["baseline,1e9,0.9,1e10"], "row 1: not as many values"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, rows, said):
    """And the file is refused: nothing is dropped in silence."""
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    with pytest.raises(BadInput, match=said):
        read_runs(path, SMELT)


def test_two_conventions_are_not_mixed(tmp_path):
    """FLOPs with and without attention are other numbers."""
    path = tmp_path / "runs.jsonl"
    row = {"arm": "baseline", "F": 1e9, "S": 0.9, "D": 1e10, "L": 2.0}
    path.write_text(
        "\n".join(json.dumps(row | {"convention": c, "D": d}) for c, d in (("smelt", 1e10), ("megatron", 2e10)))
    )
    with pytest.raises(BadInput, match=r"2 conventions, .* smelt \(row 1\), megatron \(row 2\)"):
        read_runs(path, SMELT)


@pytest.mark.parametrize(
    ("sparsities", "kept", "said"),
    [((0.95,), 99, "all 12 runs have sparsity 0.95"), ((0.85, 0.95), 6, "6 runs for 6 coefficients")],
)
def test_what_no_fit_can_come_from_is_refused(tmp_path, sparsities, kept, said):
    """One sparsity, or as many points as coefficients."""
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(table(("baseline",), sparsities=sparsities).splitlines()[: kept + 1]))
    with pytest.raises(BadInput, match=said):
        study(SMELT, read_runs(path, SMELT), "x", starts=1, draws=0)


def test_formats_give_the_same_runs(tmp_path):
    """CSV, JSONL and Parquet."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "runs.csv").write_text(table())
    head, *lines = table().splitlines()
    rows = [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines]
    typed = [{k: v if k in ("arm", "cell") else float(v) for k, v in row.items()} for row in rows]
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, typed)))
    parquet.write_table(pyarrow.Table.from_pylist(typed), tmp_path / "runs.parquet")
    found = [read_runs(tmp_path / f"runs.{suffix}", SMELT) for suffix in ("csv", "jsonl", "parquet")]
    for arm in ("baseline", "looped"):
        assert found[0][arm].cell == found[1][arm].cell == found[2][arm].cell
        assert (found[0][arm].loss == found[1][arm].loss).all()
        assert (found[0][arm].loss == found[2][arm].loss).all()


def test_results_of_verify_are_runs(tmp_path):
    """One for each arm and seed, at the proxy's FLOPs; a result is a cell."""
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
        result = made()
        for arm in ("baseline", "twin"):
            result["proxy"][arm]["ledger"]["sparsity"] = {"compute_equivalent": 0.86}
        (tmp_path / name / "verify.json").write_text(json.dumps(result))
    found = read_runs(tmp_path, CHINCHILLA)
    assert list(found) == ["baseline", "twin"]
    assert found["baseline"].cells == ("large", "small")
    assert found["twin"].loss.tolist() == [2.12, 2.17, 2.14] * 2
    assert set(found["twin"].columns["tokens"]) == {327_680}


def test_killed_and_resumed_ends_the_same(tmp_path):
    """SIGKILL while refits are drawn, a line cut in half: bit for bit what an undisturbed study gives."""
    (tmp_path / "runs.csv").write_text(table())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "smelt_budget", "law", "fit", str(tmp_path / "runs.csv"), "--starts", "4"]
    command += ["--bootstrap", "150", "--json", "--out"]
    whole = subprocess.run([*command, str(tmp_path / "a")], check=True, capture_output=True, env=environment)
    killed = subprocess.Popen(
        [*command, str(tmp_path / "b")], stdout=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    draws = tmp_path / "b" / "refits.jsonl"
    while not draws.is_file() or draws.read_bytes().count(b"\n") < 20:
        assert killed.poll() is None, "finished before it could be killed"
        time.sleep(0.005)
    os.killpg(killed.pid, 9)
    killed.wait()
    before = draws.read_bytes().count(b"\n") - 1
    assert not (tmp_path / "b" / RESULT).exists()
    with draws.open("ab") as file:
        file.write(b'{"baseline": {"E": 1.4')
    again = subprocess.run([*command, str(tmp_path / "b")], check=True, capture_output=True, env=environment)
    assert 0 < before < 150
    assert again.stdout == whole.stdout
    assert (tmp_path / "a" / RESULT).read_bytes() == (tmp_path / "b" / RESULT).read_bytes()
    (tmp_path / "runs.csv").write_text(table(seed=1))
    other = subprocess.run(
        [*command, str(tmp_path / "b")], check=False, capture_output=True, text=True, env=environment
    )
    assert other.returncode == 2
    assert "of another study: runs differ" in other.stderr


def test_what_no_point_can_tell_is_not_identified(tmp_path):
    """Sparsity that follows from size: A, a and b trade with no run noticing, with and without refits."""
    lines = [HEAD]
    for flops in (6e8, 1.5e9, 4e9, 1e10):
        density = 0.1 * (flops / 1e9) ** -0.5
        lines += [f"baseline,{flops},{1 - density},{d},{1.5 + 1 / (flops / 1e9) ** 0.4 + 4e10 / d}" for d in HORIZONS]
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    runs = read_runs(tmp_path / "runs.csv", SMELT)
    for draws in (0, 10):
        found = study(SMELT, runs, "x", starts=4, draws=draws)["arms"]["baseline"]["coefficients"]
        assert {name for name in found if found[name]["identified"] is False} == {"A", "a", "b"}
        assert ("not identified" if draws == 0 else "..") in coefficient(found["b"])


def test_the_interval_of_the_gain_covers_it(tmp_path):
    """Noise of the published sizes: the true 15.7 % at 1e21 and S 95 % lies in the 95 % interval of 100 refits."""
    horizons = (2.05e10, 3.1e10, 6.24e10, 1.149e11, 1.673e11, 2.156e11)
    (tmp_path / "runs.csv").write_text(table(noise=(0.00554, 0.00952), horizons=horizons))
    study(SMELT, read_runs(tmp_path / "runs.csv", SMELT), "x", starts=4, draws=100, folder=tmp_path / "law")
    law = gains.load(tmp_path / "law")
    (row,) = gains.gains(law, [1e21], [0.95])
    true = gains.gains(gains.preset("smelt"), [1e21], [0.95])[0]["gain"]
    assert row["low"] < true < row["high"]
    assert row["high"] - row["low"] < 0.3
    assert [r["extrapolated"] for r in gains.gains(law, [1e18, 1e20, 1e23], [0.95])] == [True, False, True]


def test_what_runs_cannot_identify_is_not_printed_with_digits(tmp_path):
    """Two budgets close together leave E, A and a to trade: a range stands in the place of the value."""
    lines = table(("baseline",), noise=(0.02,)).splitlines()
    (tmp_path / "runs.csv").write_text("\n".join(lines[:1] + lines[1:22]))
    arm = study(SMELT, read_runs(tmp_path / "runs.csv", SMELT), "x", starts=4, draws=60)["arms"]["baseline"]
    loose = {name for name, found in arm["coefficients"].items() if not found["identified"]}
    assert "A" in loose
    assert ".." in coefficient(arm["coefficients"]["A"])
    assert coefficient({"value": 1.44391, "low": 1.41, "high": 1.47, "identified": True}) == "1.444 [1.41, 1.47]"


@pytest.mark.parametrize("kind", ["loss", "gain", "residuals"])
def test_pictures(tmp_path, kind):
    """PNG and SVG of a fitted law; a preset has no residuals."""
    from smelt_budget.laws.pictures import draw

    (tmp_path / "runs.csv").write_text(table())
    study(SMELT, read_runs(tmp_path / "runs.csv", SMELT), "x", starts=2, draws=5, folder=tmp_path / "law")
    law, runs = gains.load(tmp_path / "law"), gains.residuals(tmp_path / "law")
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        draw(law, kind, [0.85, 0.95], tmp_path / f"x{suffix}", runs)
        assert (tmp_path / f"x{suffix}").read_bytes().startswith(magic)
    with pytest.raises(BadInput, match=r"neither \.png nor \.svg"):
        draw(law, kind, [0.95], Path("x.pdf"), runs)
