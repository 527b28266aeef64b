"""`--data` that needs numpy alone: text, JSON lines, token arrays, Megatron pairs; and damaged ones."""

import gzip
import json
import random
import struct

import numpy as np
import pytest

from smelt_budget.errors import BadInput
from smelt_budget.verify.data import load
from smelt_budget.verify.data.sources import found
from smelt_budget.verify.data.store import IN_MEMORY

WORDS = ("the", "loop", "reads", "each", "layer", "twice", "and", "keeps", "what", "it", "costs", "— exactly")


def texts(count, seed=0, words=60):
    r = random.Random(seed)
    return [" ".join(r.choices(WORDS, k=r.randrange(5, words))) for _ in range(count)]


def contents(split):
    """Every document's text, both sides."""
    sides = (split.train, split.held_out)
    return sorted(split.tokeniser.decode(side[i]).decode() for side in sides for i in range(len(side)))


def write_lines(path, rows):
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


def refused(words, *sources, cache, **options):
    with pytest.raises(BadInput, match=words) as caught:
        load([str(source) for source in sources], cache=cache, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "a.json", "a.ndjson"])
@pytest.mark.parametrize("field", ["text", "content", "code", "body"])
def test_json_lines_come_back_as_they_were_written(tmp_path, name, field):
    """json.dumps wrote them; bytes 0-255 are the ids."""
    rows = texts(40)
    path = write_lines(tmp_path / name, [{"id": i, field: row} for i, row in enumerate(rows)])
    split = load([str(path)], text_field="body" if field == "body" else None, cache=tmp_path)
    assert contents(split) == sorted(rows)
    assert split.domains == ("a",)
    assert split.train.tokens + split.held_out.tokens == sum(len(row.encode()) for row in rows)


def test_a_directory_of_text_is_one_document_a_file(tmp_path):
    """Hidden, empty and binary files are left out; the last is said."""
    for number, text in enumerate(texts(30)):
        (tmp_path / "d" / f"p{number % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / f"p{number % 3}" / f"{number}.md").write_text(text, encoding="utf-8")
    (tmp_path / "d" / "logo.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "d" / ".hidden").write_text("no")
    (tmp_path / "d" / "package.json").write_text('{"not": "lines"}')
    split = load([str(tmp_path / "d")], cache=tmp_path)
    assert contents(split) == sorted([*texts(30), '{"not": "lines"}'])
    assert split.notes == (f"{tmp_path / 'd'}: 1 binary files left out",)


@pytest.mark.parametrize("newlines", [True, False])
def test_a_lone_text_file_is_cut_without_losing_a_byte(tmp_path, newlines):
    """At line ends, else between characters: the pieces in order are the file; all are UTF-8."""
    text = ("\n" if newlines else " ").join(texts(4000))
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    split = load([str(tmp_path / "t.txt")], cache=tmp_path)
    pieces = contents(split)
    assert len(pieces) > 30
    assert sum(len(piece.encode()) for piece in pieces) == len(text.encode())
    assert all(piece in text for piece in pieces)
    assert all(piece.endswith("\n") for piece in pieces if not text.endswith(piece)) or not newlines


def test_domains_are_named_or_called_as_the_file(tmp_path):
    """name=path, and two sources of one name are one domain."""
    for name in ("a", "b", "c"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts(20, name)])
    sources = [f"code={tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl", f"code={tmp_path}/c.jsonl"]
    split = load(sources, cache=tmp_path)
    assert split.domains == ("code", "b")
    assert split.describe()["domains"]["b"]["train"]["documents"] == 20 - int((split.held_out.domain == 1).sum())
    assert len(split.train) + len(split.held_out) == 60


def test_a_name_with_an_equals_sign_is_a_file_if_it_exists(tmp_path, monkeypatch):
    """Hive writes such directories."""
    write_lines(tmp_path / "lang=en.jsonl", [{"text": text} for text in texts(20)])
    monkeypatch.chdir(tmp_path)
    assert found("lang=en.jsonl").domain == "lang=en"
    assert found("x=lang=en.jsonl").domain == "x"


def test_sides_and_fingerprint_do_not_depend_on_order_or_format(tmp_path):
    """Content decides: shuffled, zipped, in three files; and equal documents are on one side."""
    rows = texts(200)
    shuffled = random.Random(1).sample(rows, 200)
    a = load([str(write_lines(tmp_path / "a.jsonl", [{"text": t} for t in rows]))], cache=tmp_path)
    b = load([f"a={write_lines(tmp_path / 'b.jsonl.gz', [{'code': t} for t in shuffled])}"], cache=tmp_path)
    assert a.fingerprint == b.fingerprint
    assert sorted(a.held_out.key) == sorted(b.held_out.key)
    twice = load([str(write_lines(tmp_path / "a.jsonl", [{"text": t} for t in rows * 2]))], cache=tmp_path)
    assert not set(twice.train.key.tolist()) & set(twice.held_out.key.tolist())
    assert twice.fingerprint != a.fingerprint


# Written by megatron-core 0.16.1's IndexedDatasetBuilder: documents [5 6 7 0], [8 9] + [0], [300 0].
BY_MEGATRON = {
    "uint16": (
        "05000600070000000800090000002c010000",
        "4d4d494449445800000100000000000000080400000000000000040000000000000004000000020000000100000002000000"
        "000000000000000008000000000000000c000000000000000e00000000000000"
        "0000000000000000010000000000000003000000000000000400000000000000",
    ),
    "int32": (
        "050000000600000007000000000000000800000009000000000000002c01000000000000",
        "4d4d494449445800000100000000000000040400000000000000040000000000000004000000020000000100000002000000"
        "0000000000000000100000000000000018000000000000001c00000000000000"
        "0000000000000000010000000000000003000000000000000400000000000000",
    ),
}


@pytest.mark.parametrize("kind", BY_MEGATRON)
@pytest.mark.parametrize("argument", ["p", "p.idx", "p.bin", ""])
def test_megatrons_own_files(tmp_path, kind, argument):
    """Exact, bytes of its own writer; the end-of-document id 0 is what packing puts before each document."""
    data, index = (bytes.fromhex(text) for text in BY_MEGATRON[kind])
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "p.bin").write_bytes(data)
    (tmp_path / "d" / "p.idx").write_bytes(index)
    split = load([str(tmp_path / "d" / argument)], vocab_size=301, bos_id=0, cache=tmp_path)
    documents = [side[i].tolist() for side in (split.train, split.held_out) for i in range(len(side))]
    assert sorted(documents) == [[5, 6, 7], [8, 9], [300]]
    refused(
        "id 7 is 300, not below the vocabulary's 300", tmp_path / "d" / "p", cache=tmp_path, vocab_size=300, bos_id=0
    )


def test_damaged_megatron_pairs(tmp_path):
    """Each says which file, and what is wrong with it."""
    data, index = (bytes.fromhex(text) for text in BY_MEGATRON["uint16"])
    (tmp_path / "p.bin").write_bytes(data)
    options = {"cache": tmp_path, "vocab_size": 301, "bos_id": 0}
    damaged = {
        "no Megatron index": b"MMIDIDY" + index[7:],
        "inside its header": index[:20],
        "has 146 bytes": index + bytes(32),
        "version 2": index[:9] + struct.pack("<Q", 2) + index[17:],
        "kind 7": index[:17] + b"\x07" + index[18:],
        "has 113 bytes": index[:-1],
        "do not lie one after another": index[:34] + struct.pack("<i", -4) + index[38:],
        "do not cover": index[:-8] + struct.pack("<q", 9),
    }
    for words, content in damaged.items():
        (tmp_path / "p.idx").write_bytes(content)
        assert "p.idx" in refused(words, tmp_path / "p", **options)
    (tmp_path / "p.idx").write_bytes(index)
    (tmp_path / "p.bin").write_bytes(data[:-2])
    refused("holds 8 ids, its index says 9", tmp_path / "p", **options)
    (tmp_path / "p.bin").unlink()
    refused("has no p.bin", tmp_path / "p", **options)


def token_documents(count, seed=0):
    r = np.random.default_rng(seed)
    return [r.integers(1, 50_000, r.integers(1, 90)) for _ in range(count)]


@pytest.mark.parametrize("style", ["begin", "end", "both"])
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_token_arrays_with_and_without_numpys_header(tmp_path, style, raw, kind):
    """OLMo's tofile and numpy's save; BOS before, after or around documents is one BOS before each here."""
    documents = token_documents(50)
    front, back = {"begin": ([0], []), "end": ([], [0]), "both": ([0], [0])}[style]
    flat = np.concatenate([[*front, *document, *back] for document in documents]).astype(kind)
    flat.tofile(tmp_path / "t.npy") if raw else np.save(tmp_path / "t.npy", flat)
    options = {"vocab_size": 50_000, "bos_id": 0, "token_dtype": kind if raw else None}
    split = load([str(tmp_path / "t.npy")], cache=tmp_path, **options)
    read = [side[i].tolist() for side in (split.train, split.held_out) for i in range(len(side))]
    assert sorted(read) == sorted(document.tolist() for document in documents)
    assert split.tokeniser is None
    assert split.judged(4, 2).bytes == {0: None}
    flat = split.packed(1, 0).stream(0, split.packed(1, 0).tokens).ids
    assert (flat == 0).sum() == len(split.train)  # one BOS a document, never two


def test_ids_have_the_same_sides_in_every_format(tmp_path):
    """Content decides, not the width of an id."""
    flat = np.concatenate([[0, *document] for document in token_documents(200)])
    np.save(tmp_path / "a.npy", flat.astype(np.int64))
    flat.astype(np.uint16).tofile(tmp_path / "b.npy")
    options = {"vocab_size": 50_000, "bos_id": 0, "cache": tmp_path}
    a = load([f"x={tmp_path}/a.npy"], **options)
    b = load([f"x={tmp_path}/b.npy"], token_dtype="uint16", **options)
    assert a.fingerprint == b.fingerprint
    assert sorted(a.held_out.key) == sorted(b.held_out.key)


def test_token_arrays_that_cannot_be_read_exactly(tmp_path):
    """Nothing is guessed: width, vocabulary and BOS are asked for; pickles are not opened."""
    flat = np.concatenate([[0, *document] for document in token_documents(20)]).astype(np.uint16)
    raw, objects, floats = (tmp_path / name for name in ("raw.npy", "objects.npy", "floats.npy"))
    flat.tofile(raw)
    np.save(objects, np.array([{"a": 1}], object), allow_pickle=True)
    np.save(floats, np.ones(9))
    asked = {"cache": tmp_path, "vocab_size": 50_000, "bos_id": 0}
    refused("how wide is an id", raw, **asked)
    refused("neither uint16 nor uint32", raw, token_dtype="float32", **asked)
    refused("raw.npy holds ids, which need --vocab-size", raw, cache=tmp_path, token_dtype="uint16", bos_id=0)
    refused("need --bos-id", raw, cache=tmp_path, token_dtype="uint16", vocab_size=50_000)
    refused("--bos-id 50,000 is not below", raw, **{**asked, "bos_id": 50_000}, token_dtype="uint16")
    refused("id 49999 is nowhere among", raw, **{**asked, "bos_id": 49_999}, token_dtype="uint16")
    refused("not below the vocabulary's 40,000", raw, **{**asked, "vocab_size": 40_000}, token_dtype="uint16")
    refused("objects.npy cannot be mapped", objects, **asked)
    refused(r"floats.npy is an array \(9,\) of float64", floats, **asked)
    raw.write_bytes(raw.read_bytes()[:-1])
    refused("no whole number of uint16", raw, token_dtype="uint16", **asked)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "floats.npy").read_bytes()[:40])
    refused("cut.npy cannot be mapped", tmp_path / "cut.npy", **asked)
    (tmp_path / "c.bin").write_bytes(struct.pack("<256i", 20240520, *range(255)))
    refused("llm.c's header", tmp_path / "c.bin", token_dtype="uint16", **asked)
    write_lines(tmp_path / "t.jsonl", [{"text": "a"}])
    refused("holds ids and .*t.jsonl text", raw, tmp_path / "t.jsonl", **asked)


def test_damaged_text(tmp_path):
    """File, line and byte are named; never a traceback."""
    good = [{"text": text} for text in texts(30)]
    lines = write_lines(tmp_path / "a.jsonl", good).read_text(encoding="utf-8").splitlines(keepends=True)

    def damaged(name, content):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path / name

    def lines_with(line):
        return damaged("a.jsonl", "".join([*lines[:4], line, *lines[4:]]))

    options = {"cache": tmp_path}
    refused("a.jsonl:5 is not JSON", lines_with('{"text": "cut\n'), **options)
    refused("a.jsonl:5 is not JSON", lines_with("[" * 100_000 + "\n"), **options)
    refused("a.jsonl:5 is list, not an object", lines_with("[1]\n"), **options)
    refused("a.jsonl:5 has no 'text'; it has 'body'", lines_with('{"body": "x"}\n'), **options)
    refused("a.jsonl:5: text is int, not text", lines_with('{"text": 3}\n'), **options)
    refused("a.jsonl:5: text holds half a surrogate", lines_with('{"text": "\\ud800"}\n'), **options)
    refused("a.jsonl:1: which field is the text", damaged("a.jsonl", '{"body": "x"}\n'), **options)
    refused("a.jsonl:1 has no 'body'", damaged("a.jsonl", lines[0]), text_field="body", **options)
    refused("holds no document", damaged("a.jsonl", '{"text": ""}\n{"text": null}\n\n'), **options)
    refused("is one document", damaged("a.jsonl", lines[0]), **options)
    refused("or copies of one", damaged("a.jsonl", lines[0] * 9), **options)
    zipped = gzip.compress("".join(lines).encode())
    refused("b.jsonl.gz is broken gzip", damaged("b.jsonl.gz", zipped[:-9]), **options)
    refused("b.jsonl.gz is broken gzip", damaged("b.jsonl.gz", b"not gzip"), **options)
    refused("b.jsonl.gz is broken gzip", damaged("b.jsonl.gz", zipped[:40] + b"\xff" * 40 + zipped[80:]), **options)
    refused("c.txt is empty", damaged("c.txt", b""), **options)
    refused("c.txt is not UTF-8: byte 6,000 is 0xff", damaged("c.txt", b"a\n" * 3000 + b"\xff" * 3000), **options)
    refused("c.txt has a zero byte", damaged("c.txt", "text".encode("utf-16-le")), **options)
    refused("d.csv: .csv is not read here", damaged("d.csv", b"a,b"), **options)
    refused("e.pkl: .pkl is not read here", damaged("e.pkl", b"."), **options)


def test_sources_that_are_not_there(tmp_path):
    """A file, a dataset on the hub, an empty directory, two kinds in one."""
    options = {"cache": tmp_path}
    refused("there is no .*none.txt", tmp_path / "none.txt", **options)
    assert "hf download allenai/c4" in refused("there is no allenai/c4", "allenai/c4", **options)
    (tmp_path / "d").mkdir()
    refused("holds no file that can be read", tmp_path / "d", **options)
    write_lines(tmp_path / "d" / "a.jsonl", [{"text": "x"}])
    np.save(tmp_path / "d" / "a.npy", np.arange(9))
    refused("holds 1 of jsonl and 1 of tokens files", tmp_path / "d", **options)
    refused("--data", "x" * 5000, **options)
    refused("--data", "a\0b", **options)
    (tmp_path / "d" / "a.npy").unlink()
    (tmp_path / "d" / "book.txt").write_text("word " * 100)
    refused("1 files of jsonl, and 1 others that are larger", tmp_path / "d", **options)


def test_the_train_split_of_a_hub_repository(tmp_path):
    """Splits lie side by side; what was left is said."""
    for name in ("train-00000", "train-00001", "test-00000"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts(20, name)])
    split = load([f"x={tmp_path}"], cache=tmp_path / "cache")
    assert contents(split) == sorted(texts(20, "train-00000") + texts(20, "train-00001"))
    assert "read 2 of 3 files" in split.notes[0]


def test_reading_stops_after_enough(tmp_path, monkeypatch):
    """And says so; for ids exactly, for text after the batch that reached it."""
    np.save(tmp_path / "t.npy", np.concatenate([[0, *document] for document in token_documents(500)]))
    split = load([str(tmp_path / "t.npy")], vocab_size=50_000, bos_id=0, most=5000, cache=tmp_path)
    assert 4800 < split.train.tokens + split.held_out.tokens <= 5000
    monkeypatch.setattr("smelt_budget.verify.data.store.BATCH", 500)
    write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts(100)])
    split = load([str(tmp_path / "a.jsonl")], most=3000, cache=tmp_path)
    assert 3000 <= split.train.tokens + split.held_out.tokens < 4000
    assert "only its first" in split.notes[0]


def test_much_text_is_kept_on_disk_and_found_again(tmp_path, monkeypatch):
    """The same split from memory, from the file, and from the file again without reading the text."""
    monkeypatch.setattr("smelt_budget.verify.data.store.IN_MEMORY", 1000)
    monkeypatch.setattr("smelt_budget.verify.data.store.BATCH", 500)
    path, cache = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts(100)]), tmp_path / "cache"
    told = []
    first = load([str(path)], cache=cache, advanced=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (path.stat().st_size,) * 2
    assert len(told) > 10
    (place,) = cache.iterdir()
    assert sorted(file.name for file in place.iterdir()) == ["documents.npz", "tokens.npy"]
    assert len(np.load(place / "tokens.npy")) == first.train.tokens + first.held_out.tokens
    again = load([str(path)], cache=cache, advanced=lambda done, total: pytest.fail("read again"))
    monkeypatch.setattr("smelt_budget.verify.data.store.IN_MEMORY", IN_MEMORY)
    in_memory = load([str(path)], cache=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    for split in (again, in_memory):
        assert split.fingerprint == first.fingerprint
        assert (split.packed(16, 0).rows(3, 4)[0] == first.packed(16, 0).rows(3, 4)[0]).all()
    write_lines(path, [{"text": text} for text in texts(100, seed=5)])
    assert contents(load([str(path)], cache=cache)) == sorted(texts(100, seed=5))
    (place / "tokens.npy").write_bytes(b"damaged")
    write_lines(path, [{"text": text} for text in texts(100)])
    assert contents(load([str(path)], cache=cache)) == sorted(texts(100))


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    """Neither half a place nor a temporary one."""
    monkeypatch.setattr("smelt_budget.verify.data.store.IN_MEMORY", 1000)
    monkeypatch.setattr("smelt_budget.verify.data.store.BATCH", 500)
    path, cache = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts(100)]), tmp_path / "cache"

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load([str(path)], cache=cache, advanced=interrupt)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    """A file where the directory should be."""
    monkeypatch.setattr("smelt_budget.verify.data.store.IN_MEMORY", 0)
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts(100)])
    (tmp_path / "cache").write_text("")
    refused("cannot write .*cache", path, cache=tmp_path / "cache")
