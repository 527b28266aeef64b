"""Which text does this run use? `--data` sources, or what is on the machine; to one `Split`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.verify.data import corpus
from smelt_budget.verify.data.documents import held_out, joined, key_of, laid_out
from smelt_budget.verify.data.split import Split
from smelt_budget.verify.data.tokenise import Tokeniser, chosen

Advanced = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while long work goes on."""


def load(
    sources: Sequence[str] | None,
    tokenizer: Path | None = None,
    *,
    text_field: str | None = None,
    token_dtype: str | None = None,
    vocab_size: int | None = None,
    bos_id: int | None = None,
    cache: Path,
    advanced: Advanced | None = None,
) -> Split:
    """The split of `sources`; of the text on this machine where there are none."""
    tokeniser = chosen(tokenizer, bos_id)
    if sources:
        raise BadInput("--data is not read yet")
    return builtin(tokeniser, vocab_size)


def builtin(tokeniser: Tokeniser, vocab_size: int | None) -> Split:
    """The text on this machine."""
    by_domain = corpus.documents()
    several = []
    for texts in by_domain.values():
        ids = tokeniser.encode([text.content for text in texts])
        several.append(
            laid_out(
                np.concatenate(ids),
                np.array([len(each) for each in ids]),
                np.array([len(text.content) for text in texts]),
                np.array([key_of(text.name.encode()) for text in texts], np.uint64),
            )
        )
    documents = joined(several, range(len(several)))
    mask = held_out(documents)
    return Split(
        f"builtin text of {corpus.origin()}",
        corpus.fingerprint(text for texts in by_domain.values() for text in texts),
        tuple(by_domain),
        tuple(corpus.fingerprint(texts) for texts in by_domain.values()),
        documents.where(~mask),
        documents.where(mask),
        tokeniser,
        vocab_size or tokeniser.vocab_size,
        tokeniser.bos_id,
        tokeniser.token_bytes,
    )
