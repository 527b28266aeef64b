"""Which text does this run use? `--data` sources, or what is on the machine; to one `Split`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.verify.data import corpus, read, store, tokens
from smelt_budget.verify.data.documents import Documents, joined, key_of
from smelt_budget.verify.data.sources import Source, found, walked
from smelt_budget.verify.data.split import Split, split_up
from smelt_budget.verify.data.store import Advanced, Piece
from smelt_budget.verify.data.tokenise import Bytes, Subwords, Tokeniser


def load(
    sources: Sequence[str] | None,
    tokenizer: Path | None = None,
    *,
    text_field: str | None = None,
    token_dtype: str | None = None,
    vocab_size: int | None = None,
    bos_id: int | None = None,
    most: int | None = None,
    cache: Path,
    advanced: Advanced | None = None,
) -> Split:
    """The split of `sources`; of the text on this machine where there are none.

    Each source is read up to about `most` tokens. `cache` is where large texts are kept as ids; `advanced` is told
    (bytes done, bytes in all) of the source at work.

    Raises:
        BadInput: a source that is not there, damaged, of an unknown kind, or too small to hold some of it out.
    """
    named = [found(argument) for argument in sources or ()]
    tokeniser = tokeniser_of(named, tokenizer, vocab_size, bos_id)
    vocab = vocab_size or (tokeniser.vocab_size if tokeniser else 0)
    bos = tokeniser.bos_id if tokeniser else bos_id
    assert bos is not None
    if tokeniser is not None and vocab < tokeniser.vocab_size:
        raise BadInput(f"--vocab-size {vocab:,} is less than the {tokeniser.vocab_size:,} ids of the tokenizer")
    if bos >= vocab:
        raise BadInput(f"--bos-id {bos:,} is not below the vocabulary's {vocab:,}")
    if not named:
        assert tokeniser is not None
        return builtin(tokeniser, vocab, cache, advanced)
    notes, several = [note for source in named for note in source.notes], []
    domains = tuple(dict.fromkeys(source.domain for source in named))
    for source in named:
        if source.tokenised:
            documents = tokens.documents(source, token_dtype, vocab, bos, most)
        else:
            assert tokeniser is not None
            documents = read_text(source, tokeniser, text_field, most, cache, advanced)
        if not len(documents):
            raise BadInput(f"{source.path} holds no document that is not empty")
        if most is not None and documents.tokens >= most:
            notes.append(f"{source.path}: only its first {documents.tokens:,} tokens are used")
        several.append(documents)
    documents = joined(several, [domains.index(source.domain) for source in named])
    return split_up(", ".join(sources or ()), domains, documents, tokeniser, vocab, bos, notes=notes)


def tokeniser_of(
    named: Sequence[Source], tokenizer: Path | None, vocab_size: int | None, bos_id: int | None
) -> Tokeniser | None:
    """Bytes for text, a tokenizer.json for text and ids, none for ids alone."""
    if tokenizer is not None:
        return Subwords(tokenizer, bos_id)
    ids = [source for source in named if source.tokenised]
    if not ids:
        if bos_id not in (None, Bytes.bos_id):
            raise BadInput(f"--bos-id {bos_id}: text without a tokenizer is bytes, whose BOS is {Bytes.bos_id}")
        return Bytes()
    if len(ids) < len(named):
        raise BadInput(
            f"{ids[0].path} holds ids and {next(s for s in named if not s.tokenised).path} text",
            "fix: --tokenizer with the tokenizer.json that made the ids",
        )
    for flag, value in (("--vocab-size", vocab_size), ("--bos-id", bos_id)):
        if value is None:
            raise BadInput(f"{ids[0].path} holds ids, which need {flag}", f"fix: {flag}, or --tokenizer")
    return None


def builtin(tokeniser: Tokeniser, vocab: int, cache: Path, advanced: Advanced | None) -> Split:
    """The text on this machine; its documents are split by name."""
    several, by_domain = [], corpus.documents()
    fingerprints = tuple(corpus.fingerprint(texts) for texts in by_domain.values())
    for domain, texts, fingerprint in zip(by_domain, by_domain.values(), fingerprints, strict=True):
        ends = np.cumsum([len(text.content) for text in texts]).tolist()
        pieces = (Piece(t.content, key_of(t.name.encode()), end) for t, end in zip(texts, ends, strict=True))
        at = store.place(cache, "builtin", domain, fingerprint, tokeniser.digest)
        several.append(store.tokenised(pieces, ends[-1], tokeniser, at, None, advanced))
    name, documents = f"text that came with {corpus.origin()}", joined(several, range(len(several)))
    return split_up(name, tuple(by_domain), documents, tokeniser, vocab, tokeniser.bos_id, fingerprints=fingerprints)


def read_text(
    source: Source,
    tokeniser: Tokeniser,
    text_field: str | None,
    most: int | None,
    cache: Path,
    advanced: Advanced | None,
) -> Documents:
    """A text source; its documents are split by content, so that equal ones are on one side."""
    files = [file for path in source.files for file in (walked(path) if path.is_dir() else [path])]
    at = store.place(cache, source.kind, store.file_facts(files), text_field, most, tokeniser.digest)

    def pieces() -> Iterator[Piece]:
        for content, done in read.documents(source, text_field):
            yield Piece(content, key_of(content), done)

    return store.tokenised(pieces(), source.bytes, tokeniser, at, most, advanced)
