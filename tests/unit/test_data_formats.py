"""`--data` that other libraries wrote: Parquet, saved datasets, Zstandard; read back word for word, and damaged."""

import json
import random

import numpy as np
import pytest

from smelt_budget.errors import BadInput
from smelt_budget.verify.data import load

ROWS = [f"{number} " + "naïve – looped\n" * (number % 7) for number in range(120)]


def contents(split):
    sides = (split.train, split.held_out)
    return sorted(split.tokeniser.decode(side[i]).decode() for side in sides for i in range(len(side)))


def refused(words, source, cache, **options):
    with pytest.raises(BadInput, match=words) as caught:
        load([str(source)], cache=cache, **options)
    return str(caught.value)


def parquet(path, columns, **options):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_parquet_by_pyarrow(tmp_path, compression):
    """Several row groups, a null, a dictionary-encoded column; the text column is found."""
    columns = {"id": list(range(121)), "text": [*ROWS, None]}
    path = parquet(tmp_path / "p.parquet", columns, row_group_size=50, compression=compression)
    assert contents(load([str(path)], cache=tmp_path)) == sorted(ROWS)


def test_parquet_shards_as_hub_repositories_lay_them_out(tmp_path):
    """data/train-*.parquet beside data/test-*.parquet and a README: the training rows."""
    (tmp_path / "r" / "data").mkdir(parents=True)
    (tmp_path / "r" / "README.md").write_text("# about")
    for name, rows in {"train-00000-of-2": ROWS[:70], "train-00001-of-2": ROWS[70:], "test-00000-of-1": ["no"]}.items():
        parquet(tmp_path / "r" / "data" / f"{name}.parquet", {"content": rows})
    split = load([str(tmp_path / "r")], cache=tmp_path)
    assert contents(split) == sorted(ROWS)
    assert split.domains == ("r",)
    assert any("read 2 of 3 files" in note for note in split.notes)


def test_damaged_parquet(tmp_path):
    """Named, with the columns there are."""
    path = parquet(tmp_path / "p.parquet", {"body": ROWS, "ids": [[1, 2]] * 120})
    refused("which field is the text.*'body', 'ids'", path, tmp_path)
    refused("p.parquet has no 'x'; it has 'body', 'ids'", path, tmp_path, text_field="x")
    refused("p.parquet row 1: ids is list, not text", path, tmp_path, text_field="ids")
    assert contents(load([str(path)], text_field="body", cache=tmp_path)) == sorted(ROWS)
    whole = path.read_bytes()
    for content in (whole[:-20], b"PAR1" + b"\0" * 90 + b"PAR1", b"no parquet at all", whole[:30] + whole[60:]):
        path.write_bytes(content)
        refused("p.parquet", path, tmp_path, text_field="body")


def test_datasets_saved_to_disk(tmp_path):
    """By `datasets` itself: one split, a dictionary of splits, and one saved with a numpy format."""
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"id": list(range(120)), "text": ROWS})
    one.save_to_disk(tmp_path / "one")
    one.with_format("numpy").save_to_disk(tmp_path / "formatted")
    datasets.DatasetDict({"test": one.select(range(3)), "train": one}).save_to_disk(tmp_path / "two")
    told = []
    for name in ("one", "formatted", "two"):
        split = load([str(tmp_path / name)], cache=tmp_path / "c", advanced=lambda *now: told.append(now))
        assert contents(split) == sorted(ROWS)
        assert split.domains == (name,)
    assert all(done == total > 0 for done, total in told)
    datasets.DatasetDict({"a": one, "b": one}).save_to_disk(tmp_path / "three")
    assert "--data" in refused("has the splits a, b and no train", tmp_path / "three", tmp_path)
    refused("one has no 'body'; it has 'id', 'text'", tmp_path / "one", tmp_path, text_field="body")


def test_damaged_saved_datasets(tmp_path):
    """A cut file, a broken state, a dictionary that names nothing."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(tmp_path / "d")
    (arrow,) = (tmp_path / "d").glob("*.arrow")
    whole = arrow.read_bytes()
    for content in (whole[:100], b"", whole[: len(whole) // 2]):
        arrow.write_bytes(content)
        refused("/d( |:)", tmp_path / "d", tmp_path)
    arrow.write_bytes(whole)
    (tmp_path / "d" / "state.json").write_text("{")
    refused("/d is no dataset", tmp_path / "d", tmp_path)
    (tmp_path / "d" / "dataset_dict.json").write_text("[]")
    refused("dataset_dict.json names no splits", tmp_path / "d", tmp_path)


@pytest.mark.parametrize("frames", [1, 3])
def test_json_lines_under_zstandard(tmp_path, frames):
    """One frame, and several one after another as `cat` makes them."""
    zstandard = pytest.importorskip("zstandard")
    size = len(ROWS) // frames
    parts = [ROWS[i * size : (i + 1) * size] for i in range(frames)]
    lines = ["".join(json.dumps({"text": row}) + "\n" for row in part).encode() for part in parts]
    path = tmp_path / "z.jsonl.zst"
    path.write_bytes(b"".join(map(zstandard.compress, lines)))
    assert contents(load([str(path)], cache=tmp_path)) == sorted(ROWS)


def test_zstandard_larger_than_a_block(tmp_path):
    """Lines across the reader's blocks; letters at random, so that it does not shrink below them."""
    zstandard = pytest.importorskip("zstandard")
    r = random.Random(0)
    rows = ["".join(r.choices("abcdefghijklmnopqrstuvwxyz", k=5000)) for _ in range(100)]
    path = tmp_path / "z.jsonl.zst"
    path.write_bytes(zstandard.compress("\n".join(json.dumps({"text": row}) for row in rows).encode()))
    assert path.stat().st_size > 4 << 16
    assert contents(load([str(path)], cache=tmp_path)) == sorted(rows)


def test_damaged_zstandard(tmp_path):
    """A file cut in a frame is not taken for a shorter one, though `zstandard`'s own reader does."""
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "z.jsonl.zst"
    whole = zstandard.compress("".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode())
    for content in (whole[:-3], whole[: len(whole) // 2], b"no zstd", whole[:20] + b"\xff" * 20 + whole[40:]):
        path.write_bytes(content)
        refused("z.jsonl.zst is broken zstd", path, tmp_path)


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst"), ("datasets", "d")]
)
def test_a_missing_library_is_named_with_what_installs_it(tmp_path, monkeypatch, package, name):
    """Not a traceback."""
    if name == "d":
        (tmp_path / "d").mkdir()
        for inner in ("state.json", "dataset_info.json"):
            (tmp_path / "d" / inner).write_text("{}")
    else:
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    assert "fix: pip install 'smelt-budget[data]'" in refused(f"{name} needs {package}", tmp_path / name, tmp_path)


def test_mixed_formats_make_one_split(tmp_path):
    """Domains from Parquet and from text; every row of both."""
    path = parquet(tmp_path / "p.parquet", {"text": ROWS})
    (tmp_path / "t.txt").write_text("line of prose\n" * 2000)
    split = load([f"web={path}", f"{tmp_path}/t.txt"], cache=tmp_path)
    assert split.domains == ("web", "t")
    tokens = [int((side.length[side.domain == 1]).sum()) for side in (split.train, split.held_out)]
    assert sum(tokens) == 2000 * 14
    assert np.array(tokens).all()
