"""Metrics in other people's trackers: what TensorBoard reads back is what was logged; what is missing is said."""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from smelt_budget.errors import BadInput
from smelt_budget.verify import trackers
from smelt_budget.verify.verdict import verdict

FAKE = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "verify_result.py"))
made, metrics = FAKE["made"], FAKE["metrics"]
FIX = r"pip install 'smelt-budget\[trackers\]'"


def few():
    """One seed, twenty steps."""
    return [row for row in metrics(made((2.0,), (2.1,))) if row["step"] <= 20]


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    """With its own reader: every step's loss, and the lowest entropy of the layers every tenth step; float32."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = few()
    trackers.tensorboard(tmp_path, rows)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*")) == [
        "baseline/rate-0.5", "baseline/seed-0", "twin/rate-0.5", "twin/seed-0",
    ]  # fmt: skip
    events = EventAccumulator(str(tmp_path / "twin" / "seed-0"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("loss")}
    own = [row for row in rows if (row["arm"], row["run"]) == ("twin", "seed-0")]
    assert logged == pytest.approx({row["step"]: row["loss"] for row in own}, rel=1e-6)
    assert [event.step for event in events.Scalars("router/entropy")] == [10, 20]
    assert events.Scalars("router/entropy")[0].value == pytest.approx(min(own[9]["router"]["entropy"]), rel=1e-6)


def test_a_missing_tensorboard_names_the_fix(tmp_path, monkeypatch):
    """torch imports it only when a writer is made or its module loads."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BadInput, match=FIX):
        trackers.tensorboard(tmp_path, few())


def test_a_missing_wandb_names_the_fix(tmp_path, monkeypatch):
    """And nothing is written."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BadInput, match=FIX):
        trackers.wandb(tmp_path / "wandb", few())
    assert not (tmp_path / "wandb").exists()


def test_wandb_is_only_ever_offline(tmp_path, monkeypatch):
    """Against a stand-in that records the calls."""
    begun, logged, finished = [], [], []

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            finished.append(True)

    client = ModuleType("wandb")
    client.init = lambda **options: begun.append(options) or Run()
    monkeypatch.setitem(sys.modules, "wandb", client)
    trackers.wandb(tmp_path / "wandb", few())
    assert {options["mode"] for options in begun} == {"offline"}
    assert [options["name"] for options in begun] == [
        "baseline/seed-0", "baseline/rate-0.5", "twin/seed-0", "twin/rate-0.5",
    ]  # fmt: skip
    assert len(finished) == 4
    assert len(logged) == 80
    assert logged[9][1].keys() == {
        "loss", "rate", "gradient_norm", "seconds", "tokens", "router/entropy", "router/max_share", "router/dead",
    }  # fmt: skip


def test_dense_layers_have_no_load():
    """Their columns are null, and of a dense model all are."""
    row = few()[9]
    row["router"] = {"entropy": [None, 0.9, 0.8], "max_share": [None, 0.1, 0.2], "dead": [None, 0, 3]}
    found = dict(trackers.scalars(row))
    assert (found["router/entropy"], found["router/max_share"], found["router/dead"]) == (0.8, 0.2, 3)
    row["router"] = {"entropy": [None], "max_share": [None], "dead": [None]}
    assert "router/entropy" not in dict(trackers.scalars(row))


def test_metrics_are_read_from_their_file(tmp_path):
    """Line by line; a damaged file is one line of error."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in few()), encoding="utf-8")
    assert trackers.read(path) == few()
    path.write_text('{"arm": ', encoding="utf-8")
    with pytest.raises(BadInput, match="cannot be read"):
        trackers.read(path)


def test_sinks_of_all_seeds_make_one_sentence():
    """Heads of different seeds stand side by side, means are over seeds: by hand 0.6 * 1.05 in the last layer."""
    found = verdict(made(sinks=True))["sink"]
    assert found[0].startswith(
        "baseline: mean mass on the document's start 0.158 in the first layer, 0.630 in the last"
    )
    assert found[1].startswith("twin: core mean 0.263 on visit 1, 0.283 on visit 2")
    result = made(sinks=True)
    for arm, runs in result["runs"].items():
        for run in runs:
            run["sink"] = FAKE["sink"](arm, run["seed"], most=0.02)
    words = "no sink has formed (max head mass 0.029; uniform floor 0.024): "
    words += "visit 1 against visit 2 says nothing at this scale"
    assert verdict(result)["sink"] == [words]
