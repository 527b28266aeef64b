"""A run that is killed anywhere and resumed ends with the bits of one that was not.

The other side is the uninterrupted run, on one thread. Losses, every line of the metrics, weights and results are
compared exactly; only times and peak memory may differ.
"""

import fcntl
import hashlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TOY = runpy.run_path(str(Path(__file__).with_name("toy_run.py")))
TIMES = {"seconds", "step_seconds", "tokens_per_second", "peak_memory_bytes"}
ALLOWED = {".safetensors", ".json", ".jsonl", ".log", ""}


class Runs:
    """A process that forks runs."""

    def __init__(self):
        command = [sys.executable, str(Path(__file__).with_name("killable.py"))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def start(self, folder, arms=("twin",), **kw):
        """A run begins; returns its process id."""
        asked = {"folder": str(folder), **({} if arms is None else {"arms": list(arms)}), **kw}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self.until("pid")["pid"]

    def until(self, kind, **fields):
        """The next event of a kind with these fields; None where the run ends before."""
        for line in self.process.stdout:
            *_, one = line.rpartition('{"event"')  # half a line of a killed run may stand before
            event = json.loads('{"event"' + one) if one.startswith(":") else {"event": ""}
            if event["event"] == "status":
                self.status = event["status"]
            if event["event"] == kind and fields.items() <= event.items():
                return event
            if event["event"] == "status":
                return None
        raise AssertionError("the forking process is gone")

    def ended(self):
        """The exit code; minus the signal where it was killed."""
        return self.until("status")["status"]

    def whole(self, folder, arms=("twin",), **kw):
        """A run that nobody disturbs."""
        self.start(folder, arms, **kw)
        return self.ended()


@pytest.fixture(scope="module")
def runs():
    """One for the module."""
    made = Runs()
    with made.process:
        yield made
        made.process.stdin.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sixty short documents."""
    return TOY["documents"](tmp_path_factory.mktemp("text") / "text")


@pytest.fixture
def begun(text, tmp_path):
    """Makes a folder in which a run with this recipe may begin."""

    def made(name, fields=(), **recipe):
        TOY["begun"](tmp_path / name, text, fields, **recipe)
        return tmp_path / name

    return made


def left(folder):
    """Everything a run leaves but times: results, metrics, rates and the bits of the weights."""
    found = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        elif file.suffix == ".json" and file.name != "request.json":
            found[name] = timeless(json.loads(file.read_text()))
        elif file.suffix == ".jsonl":
            found[name] = [timeless(json.loads(line)) for line in file.read_text().splitlines()]
    return found


def timeless(data):
    """Without what the clock decides."""
    return {key: value for key, value in data.items() if key not in TIMES}


def test_killed_before_every_change_of_the_disk(runs, begun):
    """Half-written checkpoints, pointers, results and what was not yet removed: each harmless, to the bit."""
    whole = begun("whole", steps=2, factors=(1.0,))
    runs.start(whole)
    count = runs.until("changes")["count"]
    assert runs.ended() == 0
    expected = left(whole)
    assert {"twin/seed-0/metrics.jsonl", "twin/seed-0/result.json", "twin/seed-0/model.safetensors"} <= expected.keys()
    assert count > 20
    for die in range(1, count + 1):
        folder = begun(f"killed-{die}", steps=2, factors=(1.0,))
        assert runs.whole(folder, die=die) == -signal.SIGKILL
        assert runs.whole(folder) == 0
        assert left(folder) == expected, die
        shutil.rmtree(folder)


def test_killed_again_and_again_at_random_steps(runs, begun):
    """SIGKILL, SIGINT or SIGTERM after any step of the choice of rate or of a seed, checkpoints every third step."""
    recipe = {"steps": 8, "seeds": 2, "factors": (0.5, 1.0), "checkpoint_every": 3}
    whole, folder, draw = begun("whole", **recipe), begun("killed", **recipe), random.Random(0)
    assert runs.whole(whole) == 0
    last, kills = {"step": 0}, 0
    while last is not None:
        pid = runs.start(folder)
        for _ in range(draw.randrange(1, 7)):
            last = runs.until("step")
            if last is None:
                break
        if last is not None:
            number = draw.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
            os.kill(pid, number)
            kills += 1
            assert runs.ended() == (-9 if number == signal.SIGKILL else 130)
        assert kills < 60
    assert runs.status == 0
    assert kills > 2  # how far a run gets before the signal arrives is the machine's
    assert left(folder) == left(whole)


def test_killed_while_judged(runs, begun):
    """Training is done and kept by then: the resumed run takes no step again."""
    whole, folder = begun("whole", steps=4, factors=(1.0,)), begun("killed", steps=4, factors=(1.0,))
    assert runs.whole(whole) == 0
    pid = runs.start(folder)
    runs.until("look")
    os.kill(pid, signal.SIGKILL)
    assert runs.ended() == -signal.SIGKILL
    runs.start(folder)
    assert runs.until("begin")["done"] == 4
    assert runs.until("step") is None
    assert runs.status == 0
    assert left(folder) == left(whole)


def test_a_disk_that_is_full(runs, begun):
    """A limit on the size of files stands for it: one line, exit 1, and the run goes on once there is room."""
    whole, folder = begun("whole", steps=4, factors=(1.0,)), begun("full", steps=4, factors=(1.0,))
    assert runs.whole(whole) == 0
    runs.start(folder, limit=20_000)  # bytes: the metrics fit, a checkpoint does not
    said = runs.until("error")["message"].splitlines()
    assert said[0] == f"cannot write into {folder / 'twin' / 'seed-0'}: File too large"
    assert said[-1].strip() == "fix: make room, then --resume"
    assert runs.ended() == 1
    runs.start(folder, limit=10)
    assert "File too large" in runs.until("error")["message"]
    assert runs.ended() == 1
    assert runs.whole(folder) == 0
    assert left(folder) == left(whole)


KINDS = {
    "balanced by bias": ({"scoring_func": "sigmoid", "router_correction_bias": True}, {"balance": "bias"}),
    "accumulating": ({"tie_word_embeddings": True}, {"accumulate": 2}),
    "biases and sinks": ({"attention_sinks": True, "attention_bias": True, "expert_bias": True}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_the_state_is_kept(runs, begun, kind):
    """Corrections of routers are buffers, tied weights are one, biases have moments too."""
    fields, recipe = KINDS[kind]
    recipe = {"steps": 6, "factors": (1.0,), **recipe}
    whole, folder = begun("whole", fields, **recipe), begun("killed", fields, **recipe)
    assert runs.whole(whole) == 0
    pid = runs.start(folder)
    runs.until("step", step=3)
    os.kill(pid, signal.SIGKILL)
    assert runs.ended() == -signal.SIGKILL
    assert runs.whole(folder) == 0
    assert left(folder) == left(whole)


def test_two_processes_stopped_in_three_ways(runs, begun):
    """The program killed: no worker stays. A worker killed: named, with what to do. SIGINT: 130. Then the same bits."""
    recipe = {"steps": 12, "factors": (1.0,)}
    whole, folder = begun("whole", **recipe), begun("stopped", **recipe)
    assert runs.whole(whole, ("baseline", "twin"), few=False) == 0

    pid = runs.start(folder, None)
    runs.until("step")
    os.kill(pid, signal.SIGKILL)
    assert runs.ended() == -signal.SIGKILL
    wait_for_workers(folder)

    runs.start(folder, None)
    runs.until("step", arm="twin")
    os.kill(worker(folder, "twin"), signal.SIGKILL)
    said = runs.until("error")["message"]
    assert "training twin was killed by signal 9" in said
    assert f"{folder / 'twin.log'}" in said
    assert "--resume goes on" in said
    assert runs.ended() == 1

    pid = runs.start(folder, None)
    runs.until("step")
    os.kill(pid, signal.SIGINT)
    assert "Ctrl-C again quits at once" in runs.until("note")["words"]
    assert runs.ended() == 130
    assert workers(folder) == []

    assert runs.whole(folder, ("baseline", "twin"), few=False) == 0
    assert left(folder) == left(whole)
    assert {path.suffix for path in folder.rglob("*") if path.is_file() and path.name != ".lock"} <= ALLOWED


def workers(folder):
    """(process id, command line) of everything at work in a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "smelt_budget.verify.worker" in words and str(folder) in words:
            found.append((int(place.parent.name), words))
    return found


def worker(folder, arm):
    """The process that trains an arm."""
    return next(pid for pid, words in workers(folder) if arm in words)


def wait_for_workers(folder):
    """Until they let the folder's lock go; by then they are gone."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert workers(folder) == []
