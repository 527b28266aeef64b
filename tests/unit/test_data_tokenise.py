"""Ids are those of `tokenizers`, and bytes per token are exact where they are said to be."""

import json

import numpy as np
import pytest

from smelt_budget.errors import BadInput
from smelt_budget.verify.data import Bytes, Subwords, load, yardsticks

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [f"def f{n}(x):\n    return x * {n}  # naïve – 日本 {'🙂' * (n % 3)}\n" * (1 + n % 4) for n in range(200)]


def byte_level(path, specials=("<|endoftext|>",), **options):
    """A byte-level BPE as GPT-2's, trained here."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    for option, value in options.items():
        getattr(made, option)(**value)
    made.save(str(path))
    return made


def sentencepiece_like(path):
    """BPE with byte fallback and "▁" for a space, as Llama 2's."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"defrtunx():*#\n0123456789",
        "ï",
    ]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    d = tokenizers.decoders
    made.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(path))
    return made


def write_lines(path, rows=TEXTS):
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def all_documents(split):
    return [side[i] for side in (split.train, split.held_out) for i in range(len(side))]


def test_bytes_come_back_exactly():
    """All 256, and any UTF-8; BOS is nothing."""
    tokeniser = Bytes()
    for content in (bytes(range(256)), *(text.encode() for text in TEXTS[:5])):
        (ids,) = tokeniser.encode([content])
        assert ids.tolist() == list(content)
        assert tokeniser.decode(np.append(256, ids)) == content
        assert tokeniser.token_bytes[ids].sum() == len(content)
    assert tokeniser.token_bytes[tokeniser.bos_id] == 0


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_ids_are_those_of_tokenizers(tmp_path, make):
    """Encoded there one by one; and the bytes of a document's ids add up to its bytes, exactly."""
    theirs = make(tmp_path / "tokenizer.json")
    split = load([str(write_lines(tmp_path / "a.jsonl"))], tmp_path, cache=tmp_path / "c")
    read = sorted(document.tolist() for document in all_documents(split))
    assert read == sorted(theirs.encode(text, add_special_tokens=False).ids for text in TEXTS)
    assert split.vocab_size == theirs.get_vocab_size()
    for document in all_documents(split):
        text = theirs.decode(document.tolist())
        assert split.token_bytes[document].sum() == len(text.encode())
    assert split.notes == ()
    held = split.judged(64, 5)
    (bytes_,) = held.bytes.values()
    assert bytes_ == sum(split.token_bytes[row].sum() for row in held.whole.ids[:, 1:])


def test_cached_ids_are_found_again_and_belong_to_one_tokenizer(tmp_path):
    """Another tokenizer.json is another place."""
    byte_level(tmp_path / "a.json")
    byte_level(tmp_path / "b.json", ("<s>", "<|endoftext|>"))
    path = write_lines(tmp_path / "a.jsonl")
    first = load([str(path)], tmp_path / "a.json", cache=tmp_path / "c")
    again = load([str(path)], tmp_path / "a.json", cache=tmp_path / "c", advanced=lambda *now: pytest.fail("again"))
    assert again.fingerprint == first.fingerprint
    assert len(list((tmp_path / "c").iterdir())) == 1
    other = load([str(path)], tmp_path / "b.json", cache=tmp_path / "c")
    assert len(list((tmp_path / "c").iterdir())) == 2
    assert other.fingerprint == first.fingerprint  # it is the text's


@pytest.mark.parametrize(
    ("specials", "bos"),
    [
        (("<|pad|>", "<|endoftext|>"), "<|endoftext|>"),
        (("<|endoftext|>", "<s>", "</s>"), "<s>"),
        (("<|begin_of_text|>", "<|end_of_text|>"), "<|begin_of_text|>"),
        (("<pad>", "<eos>", "<bos>"), "<bos>"),
    ],
)
def test_the_token_that_begins_a_document(tmp_path, specials, bos):
    """GPT-2, Llama 2, Llama 3 and Gemma, by their special tokens."""
    theirs = byte_level(tmp_path / "t.json", specials)
    assert Subwords(tmp_path / "t.json").bos_id == theirs.token_to_id(bos)
    assert Subwords(tmp_path / "t.json", bos_id=1).bos_id == 1


def test_no_beginning_is_asked_for(tmp_path):
    """A token called <s> that is not special is three letters."""
    byte_level(tmp_path / "t.json", ("<|pad|>",))
    with pytest.raises(BadInput, match=r"which token begins a document.*<\|pad\|> 0") as caught:
        Subwords(tmp_path / "t.json")
    assert "--bos-id" in str(caught.value)
    with pytest.raises(BadInput, match="--bos-id 400 is not among the 400 ids"):
        Subwords(tmp_path / "t.json", 400)


def test_a_special_tokens_name_in_a_text_is_text(tmp_path):
    """A file about GPT-2 must not begin a document in its middle."""
    byte_level(tmp_path / "t.json")
    tokeniser = Subwords(tmp_path / "t.json")
    (ids,) = tokeniser.encode([b"a <|endoftext|> b"])
    assert tokeniser.bos_id not in ids
    assert tokeniser.decode(ids) == b"a <|endoftext|> b"
    assert tokeniser.token_bytes[ids].sum() == 17


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path):
    """Some published tokenizer.json cut at 512 tokens."""
    byte_level(tmp_path / "t.json", enable_truncation={"max_length": 8}, enable_padding={"length": 2000})
    tokeniser = Subwords(tmp_path / "t.json")
    assert tokeniser.decode(tokeniser.encode([TEXTS[3].encode()])[0]) == TEXTS[3].encode()
    assert len(tokeniser.encode([b"x"])[0]) == 1


def test_bytes_are_exact_where_a_tokenizer_changes_its_text(tmp_path):
    """NFKC shortens ligatures: tokens do not add up, so a document's true bytes are shared out over them."""
    made = byte_level(tmp_path / "t.json")
    made.normalizer = tokenizers.normalizers.NFKC()
    made.save(str(tmp_path / "t.json"))
    rows = [f"ﬁ ﬃ ½ {text}" for text in TEXTS]
    split = load([str(write_lines(tmp_path / "a.jsonl", rows))], tmp_path / "t.json", cache=tmp_path)
    count = len(split.held_out)
    assert split.notes == (f"bytes of single tokens are shares in {count} of {count} held-out documents",)
    assert set(split.held_out.bytes.tolist()) <= {len(row.encode()) for row in rows}
    (bytes_,) = split.judged(1, 10**6).bytes.values()
    assert bytes_ == pytest.approx(split.held_out.bytes.sum(), rel=1e-12)


def test_bytes_without_a_byte_level_vocabulary(tmp_path):
    """Whole words, no decoder: text's bytes are known and shared out; ids are decoded."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "[UNK]": 1, "aa": 2, "b": 3}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>"])
    made.save(str(tmp_path / "t.json"))
    rows = ["aa b " * n for n in range(1, 60)]
    split = load([str(write_lines(tmp_path / "a.jsonl", rows))], tmp_path / "t.json", cache=tmp_path)
    held = split.judged(1, 10**6)
    assert held.bytes[0] == pytest.approx(split.held_out.bytes.sum(), rel=1e-12)
    assert set(np.unique(held.whole.target_bytes).round(9).tolist()) == {0, 2.5}
    np.save(tmp_path / "a.npy", np.concatenate([[0, *made.encode(row).ids] for row in rows]))
    split = load([str(tmp_path / "a.npy")], tmp_path / "t.json", vocab_size=9, cache=tmp_path)
    decoded = [len(made.decode(split.held_out[i].tolist())) for i in range(len(split.held_out))]
    assert split.held_out.bytes.tolist() == decoded


def test_ids_with_their_tokenizer_have_bytes(tmp_path):
    """Pre-tokenised by `tokenizers`: held-out bytes are those of the text; yardsticks decode it."""
    theirs = byte_level(tmp_path / "t.json")
    ids = [[0, *theirs.encode(text).ids] for text in TEXTS]
    np.concatenate(ids).astype(np.uint16).tofile(tmp_path / "a.npy")
    split = load([str(tmp_path / "a.npy")], tmp_path / "t.json", token_dtype="uint16", cache=tmp_path)
    for which in range(len(split.held_out)):
        text = theirs.decode(split.held_out[which].tolist())
        assert text in TEXTS
        assert split.held_out.bytes[which] == len(text.encode())
    assert split.describe()["domains"]["a"]["train"]["bytes"] is None
    sticks = yardsticks(split)["a"]
    assert 0 < sticks.xz < 8
    assert sticks.bigram is None


def test_the_text_on_the_machine_through_a_tokenizer(tmp_path, monkeypatch):
    """Same documents on the same sides as with bytes."""
    from smelt_budget.verify.data import corpus

    whole = corpus.documents()
    monkeypatch.setattr(corpus, "documents", lambda: {name: texts[:60] for name, texts in whole.items()})
    byte_level(tmp_path / "t.json")
    split = load(None, tmp_path / "t.json", cache=tmp_path / "c")
    plain = load(None, cache=tmp_path / "c")
    assert split.fingerprint == plain.fingerprint
    assert split.held_out.key.tolist() == plain.held_out.key.tolist()
    assert split.held_out.bytes.tolist() == plain.held_out.length.tolist()


def test_files_that_are_no_tokenizer(tmp_path):
    """Missing, not JSON, JSON of something else; a vocabulary larger than the model's."""
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text('{"model_type": "llama"}')
    (tmp_path / "d").mkdir()
    for name, words in (
        ("a.json", "is no tokenizer.json"),
        ("b.json", "is no"),
        ("c.json", "cannot read"),
        ("d", "read"),
    ):
        with pytest.raises(BadInput, match=words):
            Subwords(tmp_path / name)
    byte_level(tmp_path / "t.json")
    with pytest.raises(BadInput, match="--vocab-size 300 is less than the 400"):
        load([str(write_lines(tmp_path / "a.jsonl"))], tmp_path / "t.json", vocab_size=300, cache=tmp_path)
    assert load([str(tmp_path / "a.jsonl")], tmp_path / "t.json", vocab_size=512, cache=tmp_path).vocab_size == 512
    with pytest.raises(BadInput, match="--bos-id 3: text without a tokenizer is bytes"):
        load(None, bos_id=3, cache=tmp_path)
