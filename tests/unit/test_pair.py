"""The file of a solved pair read back: the same twin again, older files, edits by hand, and what is refused."""

import re
from fractions import Fraction

import pytest
from typer.testing import CliRunner

from smelt_budget.cli import app
from smelt_budget.errors import BadInput
from smelt_budget.ledger import Ledger
from smelt_budget.solver import Lattice, Plan, Request, Tolerance, solve
from smelt_budget.spec import ModelSpec, read
from smelt_budget.spec.text import as_yaml
from smelt_budget.verify.pair import read_pair

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
BASE = ModelSpec.model_validate(SMALL)
FINE = Lattice(8, 4, 8, 1)


@pytest.fixture(scope="module")
def solved():
    return solve(BASE, Request(lattice=FINE, top=0)).as_dict()


def written(folder, data):
    path = folder / "smelt.yaml"
    path.write_text(as_yaml(data, "A pair."), encoding="utf-8")
    return path


def edited(data, **arms):
    """The file's data with fields of an arm's spec changed."""
    out = dict(data)
    for arm, fields in arms.items():
        spec = {k: v for k, v in (out[arm]["spec"] | fields).items() if v is not ...}
        out[arm] = {**out[arm], "spec": spec}
    return out


REQUESTS = {
    "the default": Request(lattice=FINE),
    "a third, three visits, at a place": Request(plan=Plan(Fraction(1, 3), 3, 5), lattice=Lattice(4, 2, 4, 1)),
    "sectioned": Request(heads="sectioned", lattice=Lattice(4, 2, 4, 1), tolerance=Tolerance(0.2, 0.05, 0)),
    "at most": Request(policy="at-most", lattice=FINE),
    "fewer layers": Request(plan=Plan(layers=10), lattice=Lattice(4, 2, 4, 1), tolerance=Tolerance(0.05, 0.05, 0.05)),
    "a pin and a sparsity": Request(sparsity=0.9, keep={"head_dim": 16}, lattice=FINE),
    "another setting": Request(lattice=FINE, context=777, attention_length=Fraction(1000, 3)),
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
def test_a_file_gives_its_twin_again(tmp_path, request_):
    """Baseline and request read from the file solve to the twin in the file, under the same setting."""
    solution = solve(BASE, request_)
    pair = read_pair(written(tmp_path, solution.as_dict()))
    assert (pair.baseline, pair.twin) == (solution.baseline, solution.twin)
    assert pair.setting == solution.setting
    assert pair.request.plan == request_.plan
    assert solve(pair.baseline, pair.request).twin == pair.twin
    assert pair.notes == ()


@pytest.mark.parametrize("plan", [Plan(), Plan(Fraction(1, 3), 3, 5), Plan(Fraction(1, 4), 2, 0)])
def test_an_older_file_gives_its_plan_through_the_loop(tmp_path, plan):
    """Version 0.1 wrote no request: span, visits and start are exact in the twin's loop."""
    solution = solve(BASE, Request(plan=plan, lattice=Lattice(4, 2, 4, 1), top=0))
    data = {key: value for key, value in solution.as_dict().items() if key != "request"}
    pair = read_pair(written(tmp_path, data))
    assert pair.request.plan == plan
    assert pair.request.heads == solution.problem.heads
    assert any("derived from the twin's loop" in note for note in pair.notes)
    assert solve(pair.baseline, pair.request).twin == pair.twin


def test_a_twin_edited_by_hand_is_read_as_it_stands(tmp_path, solved):
    """Twice the experts no longer match; that is for the counts to say, not for the reader."""
    more = 2 * solved["twin"]["spec"]["num_experts"]
    pair = read_pair(written(tmp_path, edited(solved, twin={"num_experts": more})))
    assert pair.twin.num_experts == more
    before, after = (Ledger(spec, pair.setting).non_embedding for spec in (pair.baseline, pair.twin))
    assert after > 1.5 * before


def test_a_loop_moved_by_hand_is_the_plan(tmp_path, solved):
    """The plan follows the twin that stands in the file, and a note says so."""
    loop = {"start": 0, "stop": 4, "visits": 3, "residual_scale": 0.5}
    pair = read_pair(written(tmp_path, edited(solved, twin={"loop": loop})))
    assert pair.request.plan == Plan(Fraction(1, 3), 3, 0)
    assert any("the twin's own is taken" in note for note in pair.notes)


def broken(solved):
    spec = solved["twin"]["spec"]
    return {
        "twin missing": ({k: v for k, v in solved.items() if k != "twin"}, "twin missing"),
        "neither arm": (spec, "baseline and twin missing"),
        "twin is text": ({**solved, "twin": "gone"}, "twin has no spec"),
        "twin without spec": ({**solved, "twin": {}}, "twin has no spec"),
        "twin not looped": (edited(solved, twin={"loop": ...}), "not looped"),
        "baseline looped": (edited(solved, baseline={"loop": spec["loop"]}), "baseline is looped"),
        "a width left out": (edited(solved, twin={"moe_intermediate_size": ...}), "moe_intermediate_size"),
        "a width as text": (edited(solved, twin={"hidden_size": "wide"}), "hidden_size"),
        "an unknown key": (edited(solved, twin={"surprise": 3}), "surprise"),
        "a loop past the end": (edited(solved, twin={"loop": {"start": 3, "stop": 99, "visits": 2}}), "past the last"),
        "another convention": ({**solved, "setting": solved["setting"] | {"convention": "mine"}}, "setting"),
        "a span as text": ({**solved, "request": {"plan": {"span": "half", "visits": 2}}}, "plan"),
        "a plan of text": ({**solved, "request": {"plan": "paper"}}, "plan"),
        "a request of text": ({**solved, "request": "paper"}, "request"),
        "heads unheard of": ({**solved, "request": {"heads": "many"}}, "heads"),
        "a policy unheard of": ({**solved, "policy": "above"}, "policy"),
        "a lattice of fractions": ({**solved, "lattice": {"hidden_multiple": 1.5}}, "lattice"),
        "a lattice with more": ({**solved, "lattice": {"depth_multiple": 2}}, "lattice"),
        "a tolerance of text": ({**solved, "tolerance": {"flops": "tight"}}, "tolerance"),
        "a tolerance above one": ({**solved, "tolerance": {"flops": 2.0}}, "tolerance"),
        "pins of text": ({**solved, "keep": {"head_dim": "wide"}}, "keep"),
    }


CASES = list(broken({"twin": {"spec": {"loop": {}}}, "baseline": {"spec": {}}, "setting": {}}))


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_pair_is_refused(tmp_path, solved, case):
    """One line that names the part, exit code 2, no traceback."""
    data, named = broken(solved)[case]
    with pytest.raises(BadInput, match=re.escape(named)):
        read_pair(written(tmp_path, data))


def test_text_that_is_no_yaml_and_files_that_are_not_there(tmp_path):
    """Broken text, a directory, nothing, standard input."""
    (tmp_path / "torn.yaml").write_text("baseline: {spec: {", encoding="utf-8")
    for path in (tmp_path / "torn.yaml", tmp_path, tmp_path / "none.yaml", "-", "qwen3-30b-a3b"):
        with pytest.raises(BadInput):
            read_pair(path)


def test_without_a_path_it_is_smelt_yaml_here(tmp_path, monkeypatch, solved):
    """`solve --out smelt.yaml` and then `verify`, in one directory; the refusal names the first."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"fix: smelt-budget solve --out smelt\.yaml"):
        read_pair()
    written(tmp_path, solved)
    assert read_pair().origin == "smelt.yaml"


def test_defaults_are_told(tmp_path, solved):
    """What a file does not say is taken from the defaults, each with a note."""
    kept = {arm: {"spec": solved[arm]["spec"]} for arm in ("baseline", "twin")}
    pair = read_pair(written(tmp_path, kept))
    text = " ".join(pair.notes)
    for word in ("setting", "plan", "heads", "policy", "lattice", "tolerance"):
        assert word in text
    assert (pair.request.lattice, pair.request.tolerance) == (Lattice(), Tolerance())


def test_built_in_pairs_read_back(tmp_path):
    """Latent attention and sectioned cores keep every field on the way through the file."""
    solution = solve(read("deepseek-v2-lite").spec, Request(heads="sectioned", top=0))
    pair = read_pair(written(tmp_path, solution.as_dict()))
    assert (pair.baseline, pair.twin, pair.request.heads) == (solution.baseline, solution.twin, "sectioned")


def test_what_is_built_otherwise_travels_with_the_pair(tmp_path):
    """phimoe routes by sparsemixer, the model here by softmax: said at solve -v, and again by whoever builds it."""
    path = tmp_path / "smelt.yaml"
    result = CliRunner().invoke(app, ["solve", "--baseline", "phi-3.5-moe", "--out", str(path)])
    assert result.exit_code == 0, result.stderr
    assert any("sparsemixer" in note for note in read_pair(path).notes)
