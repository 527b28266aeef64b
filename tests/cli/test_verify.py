"""verify, generate and eval as a user meets them: exit codes, one clear line, JSON, what lies in the folder."""

import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from smelt_budget.cli import app
from smelt_budget.model.experts_native import lanes
from smelt_budget.verify import conduct

TOY = """
hidden_size: 64
num_hidden_layers: 4
vocab_size: 257
max_position_embeddings: 64
num_attention_heads: 4
num_key_value_heads: 2
head_dim: 16
num_experts: 8
num_experts_per_tok: 2
moe_intermediate_size: 32
tie_word_embeddings: true
"""
SOLVE = "solve --heads sectioned --hidden-multiple 8 --head-multiple 4 --expert-multiple 4 --tolerance 0.05"
SHORT = "--size full --steps 3 --seeds 1 --rate-factors 1 --dtype fp32 --batch-size 4 --context 32"


def run(*arguments):
    words = [word for part in arguments for word in str(part).split()]
    if "--steps" in words and "--data" not in words:
        words += ["--data", "text"]
    return CliRunner().invoke(app, words)


def said(result):
    """What is on stderr, on one line."""
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A solved pair, some text, and a run of three steps; made once, whichever process of the tests comes first."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return made(tmp_path_factory.mktemp("verify"))
    folder = tmp_path_factory.getbasetemp().parent / "verify"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return folder if (folder / "stdout.json").exists() else made(folder)


def made(folder):
    """Everything the tests read."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "base.yaml").write_text(TOY)
        assert run(SOLVE, "--baseline base.yaml --out smelt.yaml").exit_code == 0
        draw, words = random.Random(0), ["the", "loop", "costs", "what", "baseline", "every", "token"]
        (folder / "text").mkdir()
        for i in range(60):
            (folder / "text" / f"{i}.txt").write_text(" ".join(draw.choices(words, k=120)) + f" {i}")
        done = run("verify", SHORT, "--out done --json")
        assert done.exit_code == 0, done.stderr
        (folder / "stdout.json").write_text(done.stdout)
    return folder


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    """Every command runs where the pair is."""
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def begun(here, tmp_path):
    """A copy of the run."""
    return shutil.copytree(here / "done", tmp_path / "run")


def test_the_json_contract(here):
    """Ledger and measured for each count of each arm, whether all agree; the same on stdout and in verify.json."""
    data = json.loads((here / "stdout.json").read_text())
    for arm in ("baseline", "twin"):
        for count in ("parameters", "flops", "kv_cache"):
            one = data["counts"][arm][count]
            assert one["ledger"] == one["measured"] > 0
            assert type(one["ledger"]) is type(one["measured"]) is int
    assert data["counts"]["agree"] is True
    assert json.loads((here / "done" / "verify.json").read_text()) == data
    assert data["recipe"]["tokens"] == 3 * 4 * 32


def test_what_a_run_leaves(here):
    """Nothing that is unpickled, no checkpoint, no cache; and it is all there again after --resume."""
    files = {path.relative_to(here / "done") for path in (here / "done").rglob("*") if path.is_file()}
    suffixes = {path.suffix for path in files if path.name != ".lock"}
    assert suffixes == {".json", ".jsonl", ".safetensors", ".log", ".png"}
    assert not [path for path in files if "state" in str(path) or "data" in path.parts]
    assert {path.name for path in files} >= {"verify.json", "metrics.jsonl", "request.json", "model.safetensors"}


def test_resuming_what_is_done_changes_nothing(here, begun):
    """No step is taken again: the same losses, rates and words; only the machine's peak and clock are read again."""
    again = run("verify", SHORT, "--json --resume --out", begun)
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout) == json.loads((here / "stdout.json").read_text())


def test_what_computes_the_experts_is_said_and_kept(here, begun):
    """Before on stderr, in the view, in verify.json; a run goes on with what it began with; generate and eval too."""
    choice = {"name": "native", "tier": lanes(), "words": f"native ({lanes()} floats at a time)"}
    choice["reasons"] = ["no CUDA device", "the rows are float32, the kernels take bf16"]
    experts = json.loads((here / "done" / "verify.json").read_text())["experts"]
    assert experts == {"baseline": [choice], "twin": [choice]}
    again = run("verify", SHORT, "--resume --out", begun)
    assert f"experts: {choice['words']}" in again.stderr
    assert f"experts: {choice['words']}" in again.stdout
    other = run("verify", SHORT, "--resume --experts torch --out", begun)
    assert other.exit_code == 2
    assert "--experts: auto -> torch" in said(other)
    assert f"experts: {choice['words']}" in run("generate", begun, "--tokens 1").stderr
    assert f"experts: {choice['words']}" in run("eval", begun, "--rows 1").stdout


def test_verify_says_why_there_is_no_kernel(here):
    """-v with every arm and every reason; --experts cuda is exit code 2 before anything is written."""
    verbose = " ".join(run("verify smelt.yaml --counts-only -v --dtype fp32").stdout.split())
    for arm in ("baseline", "twin"):
        words = f"experts of {arm}: native ({lanes()} floats at a time), not cuda: no CUDA device; the rows are float32"
        assert words in verbose
    refused = run("verify --steps 1 --experts cuda --out cuda")
    assert refused.exit_code == 2
    assert "error: the cuda experts were asked for, but no CUDA device" in refused.stderr
    assert not (here / "cuda" / "request.json").exists()


def test_counts_only_trains_nothing(here):
    """No folder is made."""
    result = run("verify --counts-only --json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["counts"]["agree"] is True
    assert "runs" not in data
    assert not (here / "smelt-verify").exists()


def test_a_twin_edited_by_hand_agrees_and_its_gaps_are_shown(here, tmp_path):
    """Whether the arms match each other is another question than whether formula and model agree."""
    text = (here / "smelt.yaml").read_text()
    head, twin = text.split("\ntwin:", 1)
    width = re.search(r"moe_intermediate_size: (\d+)", twin).group(1)
    edited = twin.replace(f"moe_intermediate_size: {width}", f"moe_intermediate_size: {2 * int(width)}", 1)
    (tmp_path / "edited.yaml").write_text(f"{head}\ntwin:{edited}")
    data = json.loads(run("verify --counts-only --json", tmp_path / "edited.yaml").stdout)
    assert data["counts"]["agree"] is True
    assert data["pair"]["gaps"]["non_embedding_parameters"] > 0.5


@pytest.mark.parametrize("options", ["--counts-only", "--size tiny --out UNUSED"])
def test_counts_that_disagree_exit_four(here, tmp_path, monkeypatch, options):
    """The row, both numbers and by how much on stderr; the whole JSON on stdout; nothing is trained."""
    from smelt_budget.ledger import ledger

    whole = ledger.rows
    wrong = lambda spec: [  # noqa: E731
        replace(row, params=row.params + 1) if row.name == "router" else row for row in whole(spec)
    ]
    monkeypatch.setattr(ledger, "rows", wrong)
    result = run("verify --json", options.replace("UNUSED", str(tmp_path / "unused")))
    assert result.exit_code == 4
    assert "error: formula and model disagree" in said(result)
    assert "baseline, parameters: router: ledger 2,052, measured 2,048, -4 (-0.195 %)" in said(result)  # 4 x 64 x 8
    data = json.loads(result.stdout)
    assert data["counts"]["agree"] is False
    differ = data["counts"]["baseline"]["parameters"]["differ"]
    assert differ == [{"row": "router", "ledger": 2052, "measured": 2048}]
    assert "runs" not in data
    assert not list((tmp_path / "unused").glob("*"))


BAD = {
    "no pair": ("nope.yaml", "there is no file", "fix: smelt-budget solve"),
    "no run": ("--resume --out none", "none holds no run of verify", "fix: leave out --resume"),
    "a run": ("--out done", "done holds a run already", "fix: --resume"),
    "other things": ("--out text", "text is not empty, and holds no run", "fix: another --out"),
    "a file": ("--out base.yaml", "base.yaml is not a directory", "fix: another --out"),
    "in a file": ("--out base.yaml/x", "base.yaml/x is not a directory", "fix: another --out"),
    "not writable": ("--out /proc/x", "cannot write into /proc/x", "fix: another --out"),
    "batch": ("--accumulate 3", "--batch-size 4 does not divide by --accumulate 3", ""),
    "factor 0": ("--rate-factors 0,1", "not a list of different positive numbers", "fix: 0.5,1,2"),
    "factor twice": ("--rate-factors 1,1.0", "not a list of different positive numbers", ""),
    "factor text": ("--rate-factors fast", "'fast' is not a number", "fix: see"),
    "context": ("--context 4", "--context", ""),
    "huge context": ("--context 99999999", "--context", ""),
    "no text": ("--data nowhere", "nowhere", ""),
    "empty text": ("--data TMP/empty.txt", "empty.txt", ""),
    "little text": ("--data text/1.txt", "", ""),
    "too little for a step": ("--batch-size 4096", "one step needs 131,073", "fix: more --data"),
    "no rows": ("--context 65536 --batch-size 1", "", ""),
    "too many ids": (
        "--data TMP/ids.npy --vocab-size 60000 --bos-id 0 --token-dtype uint16",
        "vocabulary ends at",
        "fix:",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_exit_two_and_a_sentence(here, case, tmp_path):
    """What was wrong and what to do; never a traceback, nothing on stdout, nothing left in the way."""
    import numpy as np

    (tmp_path / "empty.txt").write_text("")
    ids = np.arange(20_000, dtype=np.uint16)
    ids[::100] = 0  # where documents begin
    np.save(tmp_path / "ids.npy", ids)
    options, words, fix = BAD[case]
    options = options.replace("TMP", str(tmp_path))
    out = () if "--out" in options else ("--out", tmp_path / "out")
    result = run("verify", SHORT, *out, options)
    assert result.exit_code == 2, result.output
    assert "error: " in said(result)
    assert words in said(result)
    assert fix in said(result)
    assert (result.stdout, "Traceback" in result.stderr) == ("", False)
    assert not list((tmp_path / "out").glob("*"))


OTHERWISE = {
    "--steps 4": "--steps: 3 -> 4",
    "--rate-factors 1,2": "--rate-factors: [1.0] -> [1.0, 2.0]",
    "--size tiny": "--size: full -> tiny",
    "--dtype bf16": "--dtype: fp32 -> bf16",
    "--activation-checkpointing": "--activation-checkpointing: False -> True",
    "--data base.yaml": "--data: ['text'] -> ['base.yaml']",
}


@pytest.mark.parametrize("option", OTHERWISE)
def test_resuming_otherwise_names_the_option(option):
    """Both values, before any text is read."""
    result = run("verify", SHORT, "--resume --out done", option)
    assert result.exit_code == 2
    assert OTHERWISE[option] in said(result)
    assert "fix: the same options, or another --out" in said(result)


def test_resuming_with_other_text(begun):
    """The fingerprints."""
    changed = json.loads((begun / "request.json").read_text()) | {"fingerprint": "0" * 64}
    (begun / "request.json").write_text(json.dumps(changed))
    result = run("verify", SHORT, "--resume --out", begun)
    assert result.exit_code == 2
    assert re.search(r"fingerprint of the text: \w+ -> \w+", said(result))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"steps": 1}'])
def test_a_damaged_request(begun, content):
    """One line."""
    (begun / "request.json").write_text(content)
    result = run("verify", SHORT, "--resume --out", begun)
    assert result.exit_code == 2
    assert "request.json cannot be read" in said(result)
    assert "Traceback" not in result.stderr


WORKERS = {
    "error": ("""print('{"event": "error", "message": "twin, seed-0: why\\\\n  fix: how", "exit_code": 1}')""", 1),
    "half a line": ("""print('{"event": "st', end='')""", 7),
}


@pytest.fixture
def worker(monkeypatch):
    """Puts a program of one line in the place of the two that train; the second only waits to be stopped."""

    def put(kind):
        line, code = WORKERS[kind]

        def start(folder, arms, threads, events, lock):
            does = f"import sys; {line}; sys.exit({code})"
            waits = "import signal, sys; signal.signal(15, lambda *_: sys.exit(130)); print(); signal.pause()"
            program = subprocess.Popen(
                [sys.executable, "-uc", waits if arms == ("baseline",) else does], stdout=subprocess.PIPE, text=True
            )
            if arms == ("baseline",):
                program.stdout.readline()
            (folder / f"{arms[0]}.log").write_text("warning\nthe last line\n")
            threading.Thread(target=conduct.listen, args=(program, program.stdout, arms, events), daemon=True).start()
            return program

        monkeypatch.setattr(conduct, "start", start)
        monkeypatch.setattr(conduct, "crews", lambda *_: [(("baseline",), 1), (("twin",), 1)])

    return put


def test_an_error_of_a_worker_is_the_programs(worker, tmp_path):
    """Its line and its fix, its exit code; the other arm is stopped, not left."""
    worker("error")
    result = run("verify", SHORT, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.endswith("error: twin, seed-0: why\n  fix: how\n")


def test_a_worker_that_ends_without_a_word(worker, tmp_path):
    """Arm, exit code, the end of its log, where all of it is, what to do."""
    worker("half a line")
    result = run("verify", SHORT, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-4:] == [
        "error: the process training twin was ended with exit code 7",
        "  the last line",
        f"  all of it: {tmp_path / 'out' / 'twin.log'}",
        "  fix: --resume goes on",
    ]


def test_ctrl_c_while_counting(monkeypatch):
    """One line, nothing on stdout."""
    from smelt_budget.verify import verify

    monkeypatch.setattr(verify, "counted", interrupted)
    result = run("verify --counts-only")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "stopped\n")


def interrupted(*_):
    """What Ctrl-C does to the main thread."""
    raise KeyboardInterrupt


def test_ctrl_c_while_reading_says_that_nothing_is_lost(tmp_path, monkeypatch):
    """The folder is free for the same command."""
    from smelt_budget.verify import verify

    monkeypatch.setattr(verify, "proxy", interrupted)
    result = run("verify", SHORT, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert said(result).endswith("stopped; nothing was trained yet")
    monkeypatch.undo()
    assert "holds a run" not in said(run("verify --batch-size 4096", "--data /nowhere --out", tmp_path / "out"))


def test_a_trained_pair_generates_and_is_judged(here):
    """Text goes on from the prompt, the same with the same seed; eval gives the losses that verify kept."""
    once, again = (run("generate done --prompt loop --tokens 12 --seed 3 --json").stdout for _ in range(2))
    assert json.loads(once)[0]["prompt"] == "loop" == json.loads(again)[0]["prompt"]
    assert once == again
    judged = json.loads(run("eval done --json").stdout)
    kept = json.loads((here / "stdout.json").read_text())["runs"]
    for arm in ("baseline", "twin"):
        held_out = kept[arm][0]["held_out"]["nats_per_token"]
        assert judged["arms"][arm]["nats_per_token"] == pytest.approx(held_out, rel=1e-6)


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_models_that_are_not_there(command, begun):
    """No run, no such seed, a damaged file: exit 2."""
    for arguments in ("nowhere", "done --run-seed 7"):
        result = run(command, arguments)
        assert (result.exit_code, "fix: " in result.stderr) == (2, True)
    for name in ("spec.json", "model.safetensors"):
        (begun / "twin" / "seed-0" / name).write_text("{")
        result = run(command, begun, "--arm twin")
        assert result.exit_code == 2
        assert "cannot be read" in said(result)


def test_a_missing_tracker_is_missed_before_anything_is_trained(monkeypatch, tmp_path):
    """Exit 2 at once; nothing is written."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    pair = Path(__file__).resolve().parents[2] / "examples" / "smelt.yaml"
    result = CliRunner().invoke(app, ["verify", str(pair), "--wandb", "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "--wandb needs the package wandb" in result.stderr
    assert not (tmp_path / "run").exists()
