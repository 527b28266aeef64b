"""The text on this machine: the same twice, nothing heavy imported, nothing on both sides."""

import hashlib
import math
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from smelt_budget.verify.data import corpus, load, yardsticks

HEAVY = ("torch", "pyarrow", "datasets", "zstandard", "tokenizers", "scipy")


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return load(None, cache=tmp_path_factory.mktemp("cache"))


def test_reading_text_imports_numpy_and_nothing_heavier():
    """Seconds of torch are paid where a model is trained."""
    program = f"import sys, smelt_budget.verify.data; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_document_is_a_file_of_the_standard_library():
    """Read again here, by name; held-out ones too."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = [text for text in corpus.documents()["code"] if text.name.startswith("stdlib/")]
    assert len(texts) > 500
    for text in texts[::50]:
        assert (stdlib / text.name.removeprefix("stdlib/")).read_bytes() == text.content


def test_pydocs_topics_are_one_document_each():
    """Word for word; `if`, `while` and others share a page, which is there once."""
    from pydoc_data.topics import topics

    texts = [text.content for text in corpus.documents()["docs"] if text.name.startswith("topics/")]
    assert sorted(texts) == sorted({page.encode() for page in topics.values() if len(page.encode()) >= 200})


def test_no_content_twice_and_utf8_only():
    """The filters of the module's docstring, over both domains."""
    texts = [text for domain in corpus.documents().values() for text in domain]
    assert len({text.content for text in texts}) == len(texts)
    assert all(200 <= len(text.content) <= 200_000 and text.content.decode() for text in texts)


def test_the_fingerprint_is_sha256_of_sorted_names_and_digests():
    """By hand; order plays no part, a changed byte does."""
    texts = [corpus.Text("b", b"two"), corpus.Text("a", b"one")]
    lines = "".join(f"{t.name}\0{hashlib.sha256(t.content).hexdigest()}\n" for t in sorted(texts, key=lambda t: t.name))
    assert corpus.fingerprint(texts) == corpus.fingerprint(texts[::-1]) == hashlib.sha256(lines.encode()).hexdigest()
    assert corpus.fingerprint([texts[0], corpus.Text("a", b"onf")]) != corpus.fingerprint(texts)


def test_two_loads_are_the_same(split, tmp_path):
    """Fingerprint, sides and tokens."""
    again = load(None, cache=tmp_path)
    assert again.fingerprint == split.fingerprint
    assert again.describe() == split.describe()
    assert (again.packed(64, 3).rows(5, 4)[0] == split.packed(64, 3).rows(5, 4)[0]).all()


def test_both_domains_are_held_out_and_no_document_is_on_both_sides(split):
    """About 5 %: 79 of 1,618 and 11 of 170 on CPython 3.11.7."""
    assert split.domains == ("code", "docs")
    assert set(split.held_out.domain) == {0, 1}
    assert not set(split.train.key.tolist()) & set(split.held_out.key.tolist())
    assert len(split.held_out) / (len(split.held_out) + len(split.train)) == pytest.approx(0.05, abs=0.02)


def test_a_side_is_decided_by_blake2b_of_the_name(split):
    """By hand, for every file."""
    by_domain = corpus.documents()
    below = {
        text.name
        for text in by_domain["code"]
        if int.from_bytes(hashlib.blake2b(text.name.encode(), digest_size=8).digest(), "little") < 0.05 * 2**64
    }
    contents = {text.content for text in by_domain["code"] if text.name in below}
    own = np.flatnonzero(split.held_out.domain == 0)
    assert {split.held_out[i].tobytes() for i in own} == contents


def test_small_standard_libraries_fall_back_on_packages(tmp_path, monkeypatch):
    """A zipped Python has no .py on disk."""
    site = tmp_path / "site-packages"
    (site / "one").mkdir(parents=True)
    for number in range(3):
        (site / "one" / f"m{number}.py").write_text(f"x = {number}\n" * 100)
    paths = {"stdlib": str(tmp_path / "none"), "purelib": str(site)}
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: paths)
    assert [text.name for text in corpus.documents()["code"]] == [f"packages/one/m{n}.py" for n in range(3)]


def test_yardsticks_are_ordered_as_information_is(split):
    """Pairs know more than letters, letters more than nothing: ln 257; xz more than zlib. 1 MB of text, no bound."""
    sticks = yardsticks(split)
    for domain in ("code", "docs"):
        stick = sticks[domain]
        assert stick.bigram < stick.unigram < math.log(257)
        assert stick.xz < stick.zlib < 8
    assert sticks["code"].bigram == pytest.approx(2.46, abs=0.1)  # measured apart, with other code, on 3.11.7
