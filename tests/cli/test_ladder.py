"""The ladder as a user meets it: files, what is kept and what is never overwritten, exit codes, signals."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from smelt_budget.cli import app
from smelt_budget.spec import read
from smelt_budget.spec.text import parse
from smelt_budget.verify.pair import read_pair

GRID = """name: two
scales: {one: smelt-200m-s95}
experts: {S85: 64, S95: 192}
horizons: {stable_steps: [3000, 7000], decay_tokens: 1e10}
"""


def run(*arguments):
    return CliRunner().invoke(app, ["ladder", *map(str, arguments)])


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(GRID, encoding="utf-8")
    return path


@pytest.fixture
def out(grid, tmp_path):
    assert run(grid, "--out", tmp_path / "out").exit_code == 0
    return tmp_path / "out"


def stamps(folder):
    return {
        path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()
    }


def test_json_and_nothing_else(grid):
    """And the same numbers in ladder.json."""
    result = run(grid, "--json", "--price", 2)
    data = json.loads(result.stdout)
    assert [cell["name"] for cell in data["cells"]] == ["one-S85", "one-S95"]
    assert data["totals"]["both"]["shared"]["cost"] == pytest.approx(2 * data["totals"]["both"]["shared"]["gpu_hours"])


def test_the_command_in_the_result_gives_it_again(grid):
    """Every flag that is not its default, and no other."""
    first = json.loads(run(grid, "--heads", "sectioned", "--gpu-tflops", 500, "--shard", "none", "--json").stdout)
    words = shlex.split(first["command"])
    assert words == [
        "smelt-budget",
        "ladder",
        str(grid),
        "--heads",
        "sectioned",
        "--gpu-tflops",
        "500.0",
        "--shard",
        "none",
    ]
    assert json.loads(run(*words[2:], "--json").stdout) == first
    assert json.loads(run(grid, "--json").stdout)["command"] == f"smelt-budget ladder {grid}"


def test_a_cell_is_what_solve_writes(out, tmp_path):
    """The same request of the same baseline, byte for byte below the heading."""
    solved = CliRunner().invoke(app, ["solve", "--out", str(tmp_path / "smelt.yaml")])
    assert solved.exit_code == 0
    ours, theirs = (p.read_text(encoding="utf-8") for p in (out / "one-S95" / "smelt.yaml", tmp_path / "smelt.yaml"))
    assert ours.split("\n", 1)[1] == theirs.split("\n", 1)[1]
    pair = read_pair(out / "one-S95" / "smelt.yaml")
    assert [pair.baseline, pair.twin] == [
        read(str(out / "one-S95" / f"{arm}.yaml")).spec for arm in ("baseline", "twin")
    ]


def test_the_grid_that_was_written_plans_it_again(out, tmp_path):
    """Self-contained, defaults written out."""
    before = json.loads((out / "ladder.json").read_text(encoding="utf-8"))
    assert run(out / "grid.yaml", "--out", tmp_path / "again").exit_code == 0
    after = json.loads((tmp_path / "again" / "ladder.json").read_text(encoding="utf-8"))
    assert after["cells"] == before["cells"]


def test_the_same_command_solves_nothing_again(out, grid, monkeypatch):
    """Cells of the same request are kept."""
    before = stamps(out)
    monkeypatch.setattr("smelt_budget.ladder.solved.solve", None)
    assert run(grid, "--out", out).exit_code == 0
    changed = {name for name, stamp in stamps(out).items() if before[name] != stamp}
    assert changed <= {"grid.yaml", "ladder.json", "runs.csv"}


def test_a_grown_grid_keeps_what_it_had(out, grid):
    """A third sparsity is solved, the others are kept."""
    before = stamps(out)
    grid.write_text(GRID.replace("S95: 192", "S95: 192, S97: 336"), encoding="utf-8")
    assert run(grid, "--out", out).exit_code == 0
    after = stamps(out)
    assert after["one-S95/smelt.yaml"] == before["one-S95/smelt.yaml"]
    assert "one-S97/smelt.yaml" in after


def test_another_request_is_not_written_over(out, grid):
    """Named cell by cell; --force does it."""
    before = stamps(out)
    result = run(grid, "--out", out, "--heads", "sectioned")
    assert result.exit_code == 2
    assert "one-S85: its request.heads is 'auto', not 'sectioned'" in result.stderr
    assert stamps(out) == before
    assert run(grid, "--out", out, "--heads", "sectioned", "--force").exit_code == 0
    assert read_pair(out / "one-S85" / "smelt.yaml").request.heads == "sectioned"


def test_another_grid_is_not_written_over(out, tmp_path):
    """Its cells would be lost from the plan."""
    other = tmp_path / "other.yaml"
    other.write_text(GRID.replace("one:", "two:"), encoding="utf-8")
    result = run(other, "--out", out)
    assert result.exit_code == 2
    assert "the ladder of another grid" in result.stderr


def test_a_pair_changed_by_hand_is_noticed(out, grid):
    """Its gaps are recounted."""
    path = out / "one-S85" / "smelt.yaml"
    twin = parse(path.read_text(encoding="utf-8"), "pair")["twin"]["spec"]["hidden_size"]
    path.write_text(path.read_text(encoding="utf-8").replace(f"hidden_size: {twin}\n", f"hidden_size: {twin + 8}\n"))
    result = run(grid, "--out", out)
    assert result.exit_code == 2
    assert "it was changed by hand" in result.stderr


def test_a_foreign_folder_is_left_alone(grid, tmp_path):
    """Files and folders."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "holds no ladder" in run(grid, "--out", tmp_path / "mine").stderr
    assert "is not a directory" in run(grid, "--out", grid).stderr


def test_losses_are_never_lost(out, grid):
    """runs.csv with a loss in it is the user's, even under --force."""
    path = out / "runs.csv"
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 2 * 2 * 2
    rows[0]["loss"] = "2.5"
    with path.open("w", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    before = path.read_text(encoding="utf-8")
    result = run(grid, "--out", out, "--force")
    assert result.exit_code == 0
    assert "which holds losses" in result.stderr
    assert path.read_text(encoding="utf-8") == before


def test_every_cell_and_horizon_is_emitted(out, grid):
    """Whole runs: stable steps and a decay, one warmup; launch files of both arms; kept when asked again."""
    asked = (grid, "--out", out, "--to", "megatron", "--launch", "slurm", "--nodes", 2)
    assert run(*asked).exit_code == 0
    for cell in ("one-S85", "one-S95"):
        for steps in (3000, 7000):
            folder = out / cell / "megatron" / f"stable-{steps}"
            told = json.loads((folder / "emitted.json").read_text(encoding="utf-8"))
            assert told["training"]["tokens"] == steps * 2**20 + 10**10
            assert told["training"]["steps"] == steps + 9537
            assert told["pair"] == f"{cell}/smelt.yaml"
            words = (folder / "twin" / "arguments.txt").read_text(encoding="utf-8").split()
            decay, warm = (words[words.index(flag) + 1] for flag in ("--lr-wsd-decay-iters", "--lr-warmup-iters"))
            assert (decay, warm) == ("9537", "2000")
            assert "--nodes=2" in (folder / "launch-baseline.sbatch").read_text(encoding="utf-8")
    listed = json.loads((out / "ladder.json").read_text(encoding="utf-8"))["emitted"]["megatron"]["folders"]
    assert len(listed) == 4
    before = stamps(out)
    mine = out / "one-S85" / "megatron" / "stable-3000" / "launch-twin.sbatch"
    mine.write_text("mine", encoding="utf-8")
    assert run(*asked).exit_code == 0
    assert mine.read_text(encoding="utf-8") == "mine"
    assert {n for n, t in stamps(out).items() if before[n] != t} <= {
        "grid.yaml", "ladder.json", "runs.csv", mine.relative_to(out).as_posix(),
    }  # fmt: skip
    assert "is not overwritten" in run(*asked[:-1], 4).stderr
    assert mine.read_text(encoding="utf-8") == "mine"
    assert run(*asked[:-1], 4, "--force").exit_code == 0
    assert "--nodes=4" in mine.read_text(encoding="utf-8")


def test_a_bare_spec_is_emitted_once(out, grid):
    """Nothing in it depends on how long it is trained."""
    assert run(grid, "--out", out, "--to", "yaml").exit_code == 0
    assert (out / "one-S85" / "yaml" / "twin.yaml").is_file()


def test_a_cell_without_a_twin_does_not_stop_the_others(grid, tmp_path):
    """Exit 3, with the cell and what binds; the rest is written."""
    grid.write_text(
        "name: x\nscales:\n  bad: smelt-200m-s95\n  good:\n    {hidden_size: 1536, num_hidden_layers: 12,"
        " num_attention_heads: 24, num_key_value_heads: 12, head_dim: 64, num_experts: 64, num_experts_per_tok: 8,"
        " moe_intermediate_size: 512, vocab_size: 50304}\nattention_length: 390\n"
        "solve: {heads: uniform, tolerance_kv: 0.01}\n",
        encoding="utf-8",
    )
    result = run(grid, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 3
    assert "1 of 2 cells have no twin" in result.stderr
    assert "bad: " in result.stderr
    assert [cell["name"] for cell in json.loads(result.stdout)["cells"]] == ["good"]
    assert (tmp_path / "out" / "good" / "smelt.yaml").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mfu", "0"], "--mfu 0"),
        (["--mfu", "1.5"], "--mfu 1.5"),
        (["--to", "hf"], "--out is missing"),
        (["--launch", "slurm"], "--launch goes with --to"),
        (["--to", "deepspeed", "--out", "x"], "there is no target"),
        (["--gpu", "tpu"], "there is no GPU"),
        (["--price", "inf"], "--price inf"),
        (["--micro-batch", "3"], "256 sequences of a step do not divide by 8 data-parallel ranks x micro-batch 3"),
        (["--tensor-parallel", "16"], "8 GPUs do not divide by tensor 16"),
        (["--pipeline-parallel", "8"], "8 pipeline stages, and the core in one leaves"),
        (["no-such.yaml"], "there is no file"),
    ],
)
def test_flags_that_do_not_go_together(arguments, said):
    """Exit 2, before any work."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("later", [0.0, 1.0])
def test_stopped_by_ctrl_c_it_goes_on(later, tmp_path):
    """Exit 130, as a terminal stops it, while processes start or work; what stands is whole, and is not made again."""
    grid = tmp_path / "many.yaml"
    experts = ", ".join(f"E{count}: {count}" for count in range(64, 464, 8))
    many = "name: many\nscales: {one: smelt-200m-s95}\nsolve: {head_multiple: 2}\n"
    grid.write_text(f"{many}experts: {{{experts}}}\n", encoding="utf-8")
    command = [sys.executable, "-m", "smelt_budget", "ladder", str(grid), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    started = time.monotonic()
    while not list((tmp_path / "out").glob("*/smelt.yaml")) and time.monotonic() - started < 120:
        time.sleep(0.05)
    time.sleep(later)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command goes on" in said
    assert "Traceback" not in said
    whole = list((tmp_path / "out").glob("*/smelt.yaml"))
    assert 0 < len(whole) < 50
    assert not list((tmp_path / "out").rglob(".smelt-*"))
    for path in whole:
        read_pair(path)
    stamp = {path: Path(path).stat().st_mtime_ns for path in whole}
    assert run(grid, "--out", tmp_path / "out").exit_code == 0
    assert len(list((tmp_path / "out").glob("*/smelt.yaml"))) == 50
    assert all(path.stat().st_mtime_ns == before for path, before in stamp.items())


@pytest.mark.slow
def test_twelve_cells_in_ten_seconds():
    """The default grid, cold start included, on two cores (processor time, which a busy machine does not change)."""
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "smelt_budget", "ladder"], capture_output=True, check=True)
    after = os.times()
    assert b"1.6B-S97" in done.stdout
    assert after.children_user + after.children_system - before.children_user - before.children_system < 10
