"""One run of one arm: equal tokens in equal order, accumulation, divergence, and what its damaged files lead to."""

import errno
import json
import math
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smelt_budget.errors import BadInput, SmeltError
from smelt_budget.verify import state
from smelt_budget.verify.place import Place
from smelt_budget.verify.study import Study
from smelt_budget.verify.train import Diverged, Job, Trainer

TOY = runpy.run_path(str(Path(__file__).with_name("toy_run.py")))
ARMS = ("baseline", "twin")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Sink and recall are tested elsewhere."""
    monkeypatch.setattr("smelt_budget.verify.study.SINK_ROWS", 4)
    monkeypatch.setattr("smelt_budget.verify.study.RECALL_ROWS", 4)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sixty short documents."""
    return TOY["documents"](tmp_path_factory.mktemp("text") / "text")


@pytest.fixture
def asked(tmp_path, text):
    """Asks for a run in `tmp_path`."""
    return lambda fields=(), **recipe: TOY["begun"](tmp_path, text, fields, **recipe)


def trainer(asked, folder, arm="twin", rate=0.02):
    """A run of an arm, not yet begun."""
    job = Job(arm, "seed-0", asked.spec(arm), 0, rate, folder / arm / "seed-0")
    return Trainer(job, asked.recipe, asked.split(folder), Place())


def trained(run):
    """To its last step."""
    run.resume()
    run.train(lambda event: None, lambda: False)
    return run


def study(asked, folder, arm="twin"):
    """An arm's choice of rate and its seeds."""
    return Study(arm, asked, asked.split(folder), Place(), folder)


def quietly(study):
    """All of it."""
    study.run(lambda event: None, lambda: False)


def test_both_arms_see_equal_tokens_in_equal_order(asked, tmp_path):
    """Every id that enters a model while it trains, step by step; as many as the recipe says."""
    asked = asked(steps=5, accumulate=2)
    seen = {arm: [] for arm in ARMS}
    for arm in ARMS:
        run = trainer(asked, tmp_path, arm)
        run.model.register_forward_pre_hook(lambda _, given, arm=arm: seen[arm].append(torch.stack(given)))
        trained(run)
    inputs = {arm: torch.cat(seen[arm], 1) for arm in ARMS}
    assert inputs["baseline"][0].numel() == asked.recipe.tokens == 5 * 4 * 32
    assert torch.equal(inputs["baseline"], inputs["twin"])
    x, targets = inputs["twin"]
    assert torch.equal(x[:, 1:], targets[:, :-1])
    assert len({tuple(row) for row in x.tolist()}) == 20  # no row came twice


@pytest.mark.parametrize("arm", ARMS)
def test_accumulating_changes_nothing_but_rounding(asked, tmp_path, arm):
    """Micro-batches of a half and a quarter: the losses of the whole batch, on the same tokens."""
    runs = {}
    for parts in (1, 2, 4):
        whole = asked(steps=6, accumulate=parts, balance="none")
        folder = tmp_path / str(parts)
        folder.mkdir()
        runs[parts] = trained(trainer(whole, folder, arm)).rows
    for parts in (2, 4):
        assert [row["tokens"] for row in runs[parts]] == [row["tokens"] for row in runs[1]]
        for one, other in zip(runs[1], runs[parts], strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=2e-5)  # fp32, six steps of AdamW
            assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=2e-3)


def test_no_number_in_the_loss_stops_before_the_weights_change(asked, tmp_path):
    """Arm, run and step are named; neither weights nor moments hold the broken number."""
    run = trainer(asked(steps=4), tmp_path)
    run.resume()
    run.step()
    with torch.no_grad():
        run.model.embed_tokens.weight[:] = math.nan
    before = [x.clone() for x in run.model.layers.parameters()]
    with pytest.raises(Diverged, match="twin, seed-0: diverged at step 2 of 4: the loss is nan"):
        run.step()
    assert all(torch.equal(x, y) for x, y in zip(before, run.model.layers.parameters(), strict=True))
    assert all(bool(s["exp_avg"].isfinite().all()) for s in run.optimiser.state.values())


def test_a_rate_far_too_large_stops_the_run(asked, tmp_path):
    """A single factor is taken untried, so its divergence is the end; the first steps warm up."""
    with pytest.raises(Diverged, match=r"^twin, seed-0: diverged at step \d of 8: the loss is ") as stopped:
        quietly(study(asked(steps=8, factors=(1e6,)), tmp_path))
    assert "smaller --rate-factors" in str(stopped.value)
    assert "rate 46875" in str(stopped.value)  # 1e6 x 0.75 / 16


def test_a_rate_that_diverges_is_not_taken(asked, tmp_path):
    """The others are compared; a run resumed after that does not try it again."""
    asked = asked(steps=16, factors=(1.0, 1e9))
    one = study(asked, tmp_path)
    assert one.rate(lambda event: None, lambda: False)["factor"] == 1.0
    rates = json.loads((tmp_path / "twin" / "rates.json").read_text())
    losses = {entry["factor"]: entry["loss"] for entry in rates["tried"]}
    assert losses[1e9] is None
    assert losses[1.0] < math.log(257)
    told = []
    one.rate(told.append, lambda: False)
    assert {event["event"] for event in told} <= {"had", "more"}


def test_all_rates_diverge(asked, tmp_path):
    """Each is named with its step."""
    with pytest.raises(SmeltError, match="twin: every rate diverged") as stopped:
        quietly(study(asked(steps=16, factors=(1e8, 1e9)), tmp_path))
    assert "twin, rate-1e+08: diverged at step" in str(stopped.value)
    assert "twin, rate-1e+09: diverged at step" in str(stopped.value)


def test_a_checkpoint_is_safetensors_and_plain_json(asked, tmp_path):
    """Nothing that is unpickled: every file is one of the two, and holds no pickled opcodes."""
    run = trainer(asked(steps=2), tmp_path)
    trained(run)
    files = [path for path in run.job.folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".jsonl", ".safetensors"}
    for path in files:
        content = path.read_bytes()
        assert not content.startswith((b"\x80", b"PK"))  # pickle protocol 2 and up; torch.save's archive
        if path.suffix == ".safetensors":
            size = int.from_bytes(content[:8], "little")
            json.loads(content[8 : 8 + size])


def test_a_full_disk_keeps_the_checkpoint_before(asked, tmp_path, monkeypatch):
    """errno 28 while tensors are written at step 2; the run goes on from step 1, to the bits of one undisturbed."""
    asked = asked(steps=3)
    whole = [row["loss"] for row in trained(trainer(asked, tmp_path, "baseline")).rows]

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    run, kept = trainer(asked, tmp_path, "baseline"), state.save_shards
    run.job = replace(run.job, folder=tmp_path / "full")
    run.resume()
    with pytest.raises(SmeltError, match=r"cannot write into .*: No space left on device") as stopped:
        run.train(
            lambda event: monkeypatch.setattr(state, "save_shards", full if run.done == 2 else kept), lambda: False
        )
    assert "make room, then --resume" in str(stopped.value)
    monkeypatch.setattr(state, "save_shards", kept)
    again = trainer(asked, tmp_path, "baseline")
    again.job = run.job
    again.resume()
    assert again.done == 1
    again.train(lambda event: None, lambda: False)
    assert [row["loss"] for row in again.rows] == whole


DAMAGE = {
    "no JSON": ("state.json", "{"),
    "no step": ("state.json", '{"folder": "state-2"}'),
    "a list": ("state.json", "[1]"),
    "no such folder": ("state.json", '{"step": 2, "folder": "state-9"}'),
    "metrics lost": ("metrics.jsonl", ""),
    "metrics damaged": ("metrics.jsonl", "{\n{\n"),
    "metrics of other steps": ("metrics.jsonl", '{"step": 2}\n{"step": 1}\n'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_one_line_and_a_way_out(asked, tmp_path, damage):
    """Never a traceback, never a run that silently starts again."""
    name, content = DAMAGE[damage]
    asked = asked(steps=2)
    run = trained(trainer(asked, tmp_path))
    (run.job.folder / name).write_text(content)
    with pytest.raises(BadInput) as refused:
        trainer(asked, tmp_path).resume()
    first, *rest = str(refused.value).splitlines()
    assert str(run.job.folder) in first
    assert rest == [f"  fix: rm -r {run.job.folder}, which starts this run again"]


def test_a_damaged_checkpoint_is_one_line_and_a_way_out(asked, tmp_path):
    """Cut short, a tensor missing, nothing there."""
    asked = asked(steps=2)
    run = trained(trainer(asked, tmp_path))
    (file,) = run.job.folder.glob("state-2/*.safetensors")
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], whole.replace(b"exp_avg_sq.norm", b"exp_avg_sq.gone"), b"", None):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(BadInput, match=r"the checkpoint .*state-2 cannot be read") as refused:
            trainer(asked, tmp_path).resume()
        assert str(refused.value).splitlines()[1:] == [f"  fix: rm -r {run.job.folder}, which starts this run again"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\x00"])
def test_a_damaged_result_is_one_line_and_a_way_out(asked, tmp_path, content):
    """It is neither taken for a divergence nor trained again unasked."""
    asked = asked(steps=1, factors=(1.0,))
    quietly(study(asked, tmp_path))
    (tmp_path / "twin" / "seed-0" / "result.json").write_text(content)
    with pytest.raises(BadInput, match=r"result.json cannot be read.*\n.*fix: rm -r"):
        quietly(study(asked, tmp_path))


def test_other_text_is_another_run(asked, tmp_path, text):
    """The fingerprint tells."""
    asked = asked()
    extra = text / "extra.txt"
    extra.write_text("one document more " * 9)
    try:
        with pytest.raises(BadInput, match=r"the text is not the one .* began with: fingerprint \w{12}, not \w{12}"):
            asked.split(tmp_path)
    finally:
        extra.unlink()


def test_of_rates_that_cannot_be_told_apart_the_smallest_is_taken():
    """The losses of a real choice of 40 steps (docs/log.md); one that diverged is never taken."""
    from smelt_budget.verify.study import taken

    assert taken({0.5: 2.9408, 1.0: 2.9407, 2.0: 2.9527}) == 0.5
    assert taken({0.25: 2.9949, 0.5: 2.8935, 1.0: 2.8939, 2.0: 2.8974}) == 0.5
    assert taken({0.5: 3.1, 1.0: 2.9, 2.0: None}) == 1.0
    assert taken({0.5: None, 1.0: None}) is None
