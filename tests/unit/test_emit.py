"""A pair becomes a folder whole or not at all, and a layout that cannot run is refused before anything is written."""

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smelt_budget.emit import TARGETS, folder, template
from smelt_budget.emit.features import PLAIN, features
from smelt_budget.emit.launch import Layout, check, script, stages
from smelt_budget.emit.target import ARMS, Job, lines
from smelt_budget.emit.training import training
from smelt_budget.emit.whole import emitted
from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec, read
from smelt_budget.spec.model import checked
from smelt_budget.verify.pair import read_pair

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smelt.yaml"


@pytest.fixture(scope="module")
def pair():
    return read_pair(EXAMPLE)


def job(pair, **fields):
    return Job("pair", pair.baseline, pair.twin, training(pair.baseline, pair.twin, 4096), **fields)


def cost(spec, stage):
    core = range(spec.loop.start, spec.loop.stop)
    return sum(spec.loop.visits if layer in core else 1 for layer in stage)


@given(before=st.integers(0, 4), core=st.integers(1, 5), after=st.integers(0, 4), visits=st.integers(1, 4))
def test_pipeline_stages_are_as_even_as_a_whole_core_allows(before, core, after, visits):
    """Beside every possible cut: the slowest stage is never slower than the best cut's, the core never split."""
    layers = before + core + after
    loop = {"start": before, "stop": before + core, "visits": visits, "residual_scale": 0.5}
    spec = checked(
        {
            "hidden_size": 8,
            "num_hidden_layers": layers,
            "vocab_size": 8,
            "num_attention_heads": 1,
            "intermediate_size": 8,
        }
        | {"loop": loop}
    )
    places = [i for i in range(1, layers) if not before < i < before + core]
    for number in range(1, len(places) + 2):
        found = stages(spec, number)
        assert [i for stage in found for i in stage] == list(range(layers))
        assert len(found) == number
        assert all(stage.start not in range(before + 1, before + core) for stage in found)
        best = min(
            max(cost(spec, range(a, b)) for a, b in zip((0, *cut), (*cut, layers), strict=True))
            for cut in combinations(places, number - 1)
        )
        assert max(cost(spec, stage) for stage in found) == best
    with pytest.raises(BadInput, match="leaves"):
        stages(spec, len(places) + 2)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (Layout("torchrun", 1, 8, tensor=4), "baseline: vocab_size|num_key_value_heads 3 does not divide by tensor 4"),
        (Layout("torchrun", 1, 8, expert=8), "twin: num_experts 294 does not divide by expert 8"),
        (Layout("torchrun", 1, 6, tensor=4), "6 GPUs do not divide by tensor 4 x pipeline 1"),
        (Layout("torchrun", 1, 8, expert=3), "expert 3 does not divide data 8 x tensor 1"),
        (Layout("torchrun", 3, 8), "256 sequences of a step do not divide by 24"),
        (Layout("local", 2, 8), "--launch local is one node"),
        (Layout("torchrun", 2, 8, pipeline=8), "8 pipeline stages, and the core in one leaves 7 pieces"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_with_the_number(pair, layout, problem):
    """The bundled pair: twin of 18 heads, 3 KV heads, 294 experts, layers 3 to 8 the core."""
    ways = frozenset({"data", "tensor", "expert", "pipeline"})
    with pytest.raises(BadInput, match=problem):
        check(layout, {arm: job(pair).spec(arm) for arm in ARMS}, 256, ways)


def test_a_way_of_splitting_that_a_target_does_not_set_up_is_refused(pair):
    """Rather than written into a file that ignores it."""
    with pytest.raises(BadInput, match="no pipeline parallelism: --pipeline-parallel 2"):
        check(Layout("torchrun", pipeline=2), {"twin": pair.twin}, 256, frozenset({"data"}))


@pytest.mark.parametrize("kind", ["local", "torchrun", "slurm"])
def test_launch_files_are_shell_and_arguments_survive_them(kind, tmp_path):
    """bash reads them, and a stand-in for torchrun gets each word as it was, spaces, quotes and dollars too."""
    words = ("train.py", "--data", "a b", "it's $HOME", "--n=1")
    path = tmp_path / "launch.sh"
    path.write_text(script(Layout(kind, 2 if kind != "local" else 1, 4), "pair-twin", words))
    heard = tmp_path / "heard.json"
    for name in ("torchrun", "srun", "scontrol"):
        told = f"import json, sys; json.dump(sys.argv[1:], open({str(heard)!r}, 'w'))"
        body = {"torchrun": told, "srun": told, "scontrol": "print('node0')"}[name]
        (tmp_path / name).write_text(f"#!{sys.executable}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER": "node0:1234", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_SUBMIT_DIR": str(tmp_path)}
    subprocess.run(["bash", str(path)], check=True, env=environment, cwd="/")
    assert tuple(json.loads(heard.read_text())[-len(words) :]) == words
    assert "--nproc-per-node" in json.loads(heard.read_text())


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_answers_for_every_feature(pair, target):
    """Or refuses the pair by name; a feature that nobody answers for would be dropped in silence."""
    for balance in ("aux", "bias", "none"):
        asked = Job("pair", pair.baseline, pair.twin, training(pair.baseline, pair.twin, 64, balance=balance))
        names = [feature.name for feature in features(asked.baseline, asked.twin, asked.training)]
        try:
            told = [line.feature for line in lines(TARGETS[target], asked)]
        except BadInput as refused:
            told = [name for name in names if f"{name}: " in str(refused)]
            assert told
        assert set(told) <= set(names)
        assert len(told) == len(names) or target not in ("yaml", "json", "hf")


def test_every_field_of_a_spec_is_a_width_or_a_feature():
    """A new field has to be put in one of the two lists, or targets would never be asked about it."""
    shapes = {"hidden_size", "num_hidden_layers", "max_position_embeddings", "num_attention_heads"}
    shapes |= {"num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size"}
    shapes |= {"q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "topk_group"}
    shapes |= {"rms_norm_eps", "rope_theta"}
    named = {field for field, _, _ in PLAIN} | {"vocab_size", "qk_norm", "loop", "core"}
    assert shapes | named == set(ModelSpec.model_fields)


def test_specs_come_back(pair, tmp_path):
    """Out as YAML and JSON, in through the reader that solve has."""
    for name in ("yaml", "json"):
        emitted(TARGETS[name], job(pair), tmp_path / name, False, False, "x")
        for arm in ARMS:
            assert read(str(tmp_path / name / f"{arm}.{name}")).spec == job(pair).spec(arm)


def test_strict_refuses_what_is_dropped_and_writes_nothing(pair, tmp_path):
    """A spec holds no balancing."""
    with pytest.raises(BadInput, match=r"balancing: asked auxiliary loss 0\.01, by visit; dropped"):
        emitted(TARGETS["yaml"], job(pair), tmp_path / "out", True, False, "x")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_ours_is_replaced_with_force_only(pair, tmp_path):
    """And then holds the new files only."""
    out = tmp_path / "out"
    emitted(TARGETS["yaml"], job(pair), out, False, False, "x")
    with pytest.raises(BadInput, match="not overwritten"):
        emitted(TARGETS["json"], job(pair), out, False, False, "x")
    emitted(TARGETS["json"], job(pair), out, False, True, "x")
    assert sorted(path.name for path in out.iterdir()) == ["baseline.json", "emitted.json", "twin.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_others_wrote_stays(pair, tmp_path):
    """A checkpoint in an emitted folder, a manifest that claims too little, a file, a link: --force changes nothing."""
    out = tmp_path / "out"
    emitted(TARGETS["yaml"], job(pair), out, False, False, "x")
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "step-10").write_text("mine")
    with pytest.raises(BadInput, match="left alone: checkpoints/step-10"):
        emitted(TARGETS["yaml"], job(pair), out, False, True, "x")
    assert (out / "checkpoints" / "step-10").read_text() == "mine"
    for place in (tmp_path / "file", tmp_path / "link"):
        place.write_text("mine") if place.name == "file" else place.symlink_to(out)
        with pytest.raises(BadInput, match="not a directory"):
            emitted(TARGETS["yaml"], job(pair), place, False, True, "x")


def test_all_files_or_none(tmp_path):
    """The last of three cannot be written: nothing appears, and what stood there stands."""

    def full(_path):
        raise OSError(28, "No space left on device")

    with pytest.raises(BadInput, match="No space left"):
        folder.write(tmp_path / "out", {"a": "1", "b/c": b"2", "d": full}, False)
    assert not list(tmp_path.iterdir())
    folder.write(tmp_path / "out", {"a": "1", folder.MANIFEST: '{"files": ["a"]}'}, False)
    with pytest.raises(BadInput, match="No space left"):
        folder.write(tmp_path / "out", {"a": "2", "d": full}, True)
    assert (tmp_path / "out" / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_between_two_renames_the_folder_comes_back(tmp_path, monkeypatch):
    """SIGKILL where the old folder is aside and the new one not yet in place: the next command restores it."""
    out = tmp_path / "out"
    folder.write(out, {"a": "1", folder.MANIFEST: '{"files": ["a"]}'}, False)
    code = f"""
import os, pathlib
from smelt_budget.emit import folder
real = pathlib.Path.rename
def rename(self, target):
    if pathlib.Path(target) == pathlib.Path({str(out)!r}):
        os.kill(os.getpid(), 9)
    return real(self, target)
pathlib.Path.rename = rename
folder.write(pathlib.Path({str(out)!r}), {{"a": "2"}}, True)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert not out.exists()
    folder.check_place(out, True)
    assert (out / "a").read_text() == "1"


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", ""])
def test_nothing_leaves_the_folder(tmp_path, name):
    """Whatever a target names its files."""
    with pytest.raises(ValueError, match="leaves the folder"):
        folder.write(tmp_path / "out", {name: "1"}, False)


@pytest.mark.parametrize("name", ["a b", "1a", "a-b", "x;rm -rf /", "import os\n", ""])
def test_a_name_is_an_identifier(pair, name):
    """It becomes a module and a shell word."""
    with pytest.raises(BadInput, match="cannot name a module"):
        Job(name, pair.baseline, pair.twin, training(pair.baseline, pair.twin, 64))


def test_templates_replace_every_name_or_fail(tmp_path, monkeypatch):
    """A value too many or too few is a mistake of ours."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "x").write_text("a = @@a  # $HOME stays\n")
    monkeypatch.setattr(template.resources, "files", lambda _package: tmp_path)
    assert template.text("x", a="'1'") == "a = '1'  # $HOME stays\n"
    with pytest.raises(KeyError):
        template.text("x")
    with pytest.raises(ValueError, match="has no b"):
        template.text("x", a="1", b="2")


def test_a_budget_left_out_is_twenty_tokens_a_parameter(pair):
    """209,419,520 active parameters of the bundled baseline (its ledger), 256 sequences of 4096 a step."""
    made = training(pair.baseline, pair.twin, 4096)
    assert made.tokens == 20 * 209_419_520
    assert made.steps == -(-made.tokens // (256 * 4096)) == 3995
    assert made.rates == (0.75 / 1280, 0.75 / 1056)
