"""The commands as a user meets them: contracts, exit codes, files, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from smelt_budget.cli import ConventionName, app
from smelt_budget.ledger import CONVENTIONS
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.text import parse

ROOT = Path(__file__).resolve().parents[2]
BASE = str(ROOT / "examples" / "base.yaml")


def run(*arguments, **kw):
    return CliRunner().invoke(app, [str(a) for a in arguments], **kw)


def program(*arguments, **kw):
    return subprocess.run(
        [sys.executable, "-m", "smelt_budget", *map(str, arguments)], capture_output=True, text=True, check=False, **kw
    )


def as_json(*arguments, **kw):
    result = run(*arguments, "--json", **kw)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


LEDGER = {
    "parameters": {
        "total", "input_embedding", "lm_head", "non_embedding", "active_non_embedding", "active_with_lm_head",
        "active_with_embeddings",
    },
    "flops": {"forward_per_token", "training_per_token", "convention", "attention_length"},
    "kv_cache": {"bytes_per_token", "bytes_at_context", "executed_layers"},
    "layers": {"physical", "effective"},
    "sparsity": {"compute_equivalent", "expert"},
}  # fmt: skip


def holds(data):
    return all(fields <= data[group].keys() for group, fields in LEDGER.items())


def test_the_json_contract_of_ledger():
    """Other programs read these names."""
    data = as_json("ledger", "mixtral-8x7b")
    assert holds(data)
    assert data["parameters"]["total"] == 46_702_792_704
    assert data["flops"]["attention_length"] == 2048.5


def test_the_json_contract_of_solve():
    """baseline, twin, gaps (signed fractions), certificate, alternatives; specs read back to the counted models."""
    data = as_json("solve", "--top", 3)
    assert holds(data["baseline"]["ledger"])
    assert holds(data["twin"]["ledger"])
    assert data["gaps"].keys() == {"flops", "non_embedding_parameters", "kv_cache"}
    assert len(data["alternatives"]) == 3
    assert data["certificate"]["complete"] is True
    assert data["certificate"]["points"] > data["certificate"]["evaluated"] > 0
    ModelSpec.model_validate(data["twin"]["spec"])
    before, after = (data[arm]["ledger"]["parameters"]["non_embedding"] for arm in ("baseline", "twin"))
    assert data["gaps"]["non_embedding_parameters"] == pytest.approx(after / before - 1, abs=1e-12)


def test_solve_without_a_baseline_runs_the_papers_example():
    """200M, S 95 %, attention over 390 positions, as the paper counts it."""
    data = as_json("solve")
    cells = json.loads((ROOT / "tests" / "golden" / "smelt_cells.json").read_text(encoding="utf-8"))
    cell = next(c for c in cells if (c["scale"], c["S_label"]) == ("200M", 95))
    final_norm = 1280
    assert data["baseline"]["ledger"]["parameters"]["non_embedding"] == cell["inferred"]["base"]["total"] + final_norm
    assert data["baseline"]["ledger"]["flops"]["attention_length"] == 390


def test_models_lists_counts_and_sources():
    """At least twelve, as table and as JSON."""
    listed = as_json("models")
    assert len(listed) >= 12
    assert all(m["source"] and m["total"] for m in listed)
    assert "qwen3-30b-a3b" in run("models", env={"COLUMNS": "160"}).stdout


def test_conventions_are_the_ones_the_ledger_knows():
    """The option's choices and the ledger's presets are one list."""
    assert set(ConventionName.__args__) == set(CONVENTIONS)


@pytest.mark.parametrize("command", [[], ["solve"], ["ledger"], ["models"]])
def test_help_has_an_example_that_works(command):
    """Each command's help shows one call; it is run here."""
    text = " ".join(run(*command, "--help").stdout.split())
    example = text.split("Example:")[1].split("smelt-budget ")[1]
    words = example.split(" ╭")[0].split(" │")[0].split(" Usage")[0].replace("`", "").split()
    words = words[: next((i for i, w in enumerate(words) if not w.isascii()), len(words))]
    if "--out" in words:
        words = words[: words.index("--out")]
    assert run(*words).exit_code == 0, words


BAD = {
    "no such model": (["solve", "--baseline", "nope"], "no file and no built-in model"),
    "a directory": (["ledger", "/"], "holds no config.json"),
    "span": (["solve", "--span", "0"], "--span 0"),
    "span text": (["solve", "--span", "half"], "is not a number"),
    "span by zero": (["solve", "--span", "1/0"], "is not a number"),
    "visits": (["solve", "--visits", "0"], "visits"),
    "start": (["solve", "--start", "9"], "--start 9"),
    "layers": (["solve", "--layers", "0"], "layers"),
    "multiple": (["solve", "--hidden-multiple", "0"], "hidden-multiple"),
    "huge multiple": (["solve", "--head-multiple", "99999999"], "--head-multiple"),
    "tolerance": (["solve", "--tolerance", "2"], "tolerance"),
    "negative tolerance": (["solve", "--tolerance-kv=-0.1"], "tolerance"),
    "nan": (["solve", "--tolerance", "nan"], "is not a number"),
    "infinite": (["ledger", BASE, "--attention-length", "inf"], "is not a number"),
    "no positions": (["ledger", BASE, "--attention-length", "0"], "attends to itself"),
    "no bytes": (["ledger", BASE, "--kv-bytes", "0"], "--kv-bytes"),
    "no context": (["ledger", BASE, "--context", "0"], "context"),
    "convention": (["ledger", BASE, "--convention", "mine"], "mine"),
    "keep": (["solve", "--keep", "hidden_size"], "FIELD=VALUE"),
    "keep twice": (["solve", "--keep", "head_dim=8", "--keep", "head_dim=9"], "twice"),
    "keep negative": (["solve", "--keep", "head_dim=-8"], "FIELD=VALUE"),
    "keep unknown": (["solve", "--keep", "color=3"], "not a free quantity"),
    "sparsity": (["solve", "--sparsity", "95"], "fix: --sparsity 0.95"),
    "top-k alone": (["solve", "--top-k", "4"], "goes with --sparsity"),
    "dense": (["solve", "--baseline", "llama-3.1-8b"], "--sparsity 0.95"),
    "looped": (["solve", "--baseline", "ouro-1.4b"], "looped already"),
    "sectioned heads": (["solve", "--visits", "3", "--heads", "sectioned"], "divide by the visits"),
    "unwritable": (["solve", "--out", "/proc/smelt.yaml"], "cannot write"),
    "no folder": (["solve", "--out", "/nowhere/at/all.yaml"], "mkdir -p"),
    "out is a folder": (["solve", "--out", str(ROOT / "docs")], "is a directory"),
    "no command": (["dance"], "dance"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_exit_two_and_a_sentence(case):
    """Never a traceback; the message names what was wrong."""
    arguments, words = BAD[case]
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_infeasible_is_exit_three():
    """What binds, the nearest point, flags that were tried."""
    result = run("solve", "--heads", "uniform", "--tolerance", "1%")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "binding: KV cache, nearest is -1.56 %" in result.stderr
    assert "fix: --heads sectioned" in result.stderr


def test_json_is_alone_on_stdout(tmp_path):
    """Notes go to stderr."""
    result = program("solve", "--baseline", "deepseek-v2-lite", "--json", "-v", "--out", tmp_path / "o.yaml")
    assert json.loads(result.stdout)["twin"]
    assert "these keys change no count" in result.stderr
    assert "wrote" in result.stderr


def test_out_is_read_back_and_never_overwritten_unasked(tmp_path):
    """smelt.yaml holds the JSON contract; its arms can be counted again; --force replaces it."""
    out = tmp_path / "smelt.yaml"
    data = as_json("solve", "--out", out)
    written = parse(out.read_text(encoding="utf-8"), "out")
    assert written == data
    for arm in ("baseline", "twin"):
        again = as_json("ledger", f"{out}#{arm}")
        assert {k: again[k] for k in LEDGER} == {k: data[arm]["ledger"][k] for k in LEDGER}
    out.write_text("mine")
    refused = run("solve", "--out", out)
    assert (refused.exit_code, out.read_text()) == (2, "mine")
    assert run("solve", "--out", out, "--force").exit_code == 0
    assert parse(out.read_text(encoding="utf-8"), "out") == data
    assert [p.name for p in tmp_path.iterdir()] == ["smelt.yaml"]


def test_odd_places_are_refused_and_survive(tmp_path):
    """A pipe, a link to itself, a name too long, a file for a folder: exit 2, --force or not, nothing replaced."""
    pipe, loop, file = tmp_path / "pipe", tmp_path / "loop", tmp_path / "file"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    file.write_text("mine")
    for place in (pipe, loop, tmp_path / ("x" * 300), file / "smelt.yaml"):
        for force in ([], ["--force"]):
            assert run("solve", "--out", place, *force).exit_code == 2
    assert pipe.is_fifo()
    assert file.read_text() == "mine"


def test_a_taken_place_is_refused_before_the_search(tmp_path, monkeypatch):
    """Nobody waits for a result that cannot be kept."""

    def never(*_):
        raise AssertionError("searched")

    monkeypatch.setattr("smelt_budget.solver.solve", never)
    (tmp_path / "smelt.yaml").write_text("mine")
    assert run("solve", "--out", tmp_path / "smelt.yaml").exit_code == 2


def test_a_link_is_followed_not_replaced(tmp_path):
    """--force writes what the link points to."""
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text("old")
    link.symlink_to(real)
    assert run("solve", "--out", link, "--force").exit_code == 0
    assert link.is_symlink()
    assert real.read_text().startswith("#")


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-bytes", "1/3", "--attention-length", "100/3"],
        ["--convention", "megatron", "--context", "8192", "--kv-bytes", "1"],
        ["--convention", "full-square", "--context", "512", "--attention-length", "77.5"],
    ],
)
def test_a_pair_is_counted_as_it_was_solved(tmp_path, flags):
    """Its setting travels with it, exactly."""
    out = tmp_path / "pair.yaml"
    data = as_json("solve", "--baseline", "gpt-oss-20b", "--out", out, *flags)
    for arm in ("baseline", "twin"):
        again = as_json("ledger", f"{out}#{arm}")
        assert {k: again[k] for k in LEDGER} == {k: data[arm]["ledger"][k] for k in LEDGER}


def test_counts_are_integers():
    """Not floats that look like them."""
    data = as_json("solve")
    for arm in ("baseline", "twin"):
        ledger = data[arm]["ledger"]
        counts = [ledger["flops"]["forward_per_token"], ledger["flops"]["training_per_token"]]
        for group in ("parameters", "kv_cache", "layers"):
            counts += ledger[group].values()
        assert {type(count) for count in counts} == {int}


def test_a_failing_solve_writes_nothing(tmp_path):
    """Infeasible leaves no file, and an existing one is untouched even with --force."""
    out = tmp_path / "smelt.yaml"
    assert run("solve", "--heads", "uniform", "--tolerance", "0.1%", "--out", out).exit_code == 3
    assert not list(tmp_path.iterdir())
    out.write_text("mine")
    assert run("solve", "--heads", "uniform", "--tolerance", "0.1%", "--out", out, "--force").exit_code == 3
    assert out.read_text() == "mine"


def test_stdin(tmp_path):
    """- reads YAML or JSON from standard input."""
    text = Path(BASE).read_text(encoding="utf-8")
    assert as_json("ledger", "-", input=text)["layers"]["physical"] == 12
    spec = as_json("ledger", BASE)["spec"]
    assert as_json("ledger", "-", input=json.dumps(spec))["spec"] == spec
    assert run("ledger", "-", input="").exit_code == 2


def test_a_closed_pipe_is_no_traceback():
    """head leaves after one line of far more than a pipe holds."""
    done = subprocess.run(
        f"{sys.executable} -m smelt_budget solve --json --top 300 | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


def test_interrupt_is_exit_130():
    """Ctrl-C while searching; nothing is printed on stdout."""
    code = (
        "import smelt_budget.solver as s, time, sys\n"
        "def slow(*a): print('go', file=sys.stderr, flush=True); time.sleep(60)\n"
        "s.solve = slow\n"
        "from smelt_budget.cli import main; sys.argv = ['smelt-budget', 'solve']; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "go\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (out, "Traceback" in err) == ("", False)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_built_in_names(shell):
    """What the installed completion script asks the program."""
    line = "smelt-budget solve --baseline qwen3-3"
    environment = os.environ | {
        "_SMELT_BUDGET_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": "3",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    code = "from smelt_budget.cli import app; app(prog_name='smelt-budget')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "qwen3-30b-a3b" in done.stdout
    assert "mixtral" not in done.stdout


def test_equations_are_printed():
    """Formula of one weight, and the legend of its letters."""
    result = run("ledger", BASE, "--equations", env={"COLUMNS": "200"})
    assert "3*F*H" in result.stdout
    assert "E experts 192" in result.stdout


def test_verbose_lists_harmless_keys():
    """A config.json's other keys are named, not swallowed."""
    result = run("ledger", ROOT / "examples" / "qwen3-30b-a3b", "-v")
    assert "initializer_range" in result.stderr
    assert "initializer_range" not in run("ledger", ROOT / "examples" / "qwen3-30b-a3b").stderr


def test_version():
    """The package's."""
    assert run("--version").stdout.startswith("smelt-budget 0.")
