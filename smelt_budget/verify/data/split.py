"""What is known about the text? Both sides of the split, and every number of it that a report prints."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.verify.data.documents import Documents, held_out
from smelt_budget.verify.data.held_out import HeldOut
from smelt_budget.verify.data.packed import Packed
from smelt_budget.verify.data.tokenise import Bytes, Tokeniser


@dataclass(frozen=True)
class Split:
    """Documents to train on, documents to judge on; no document is in both."""

    name: str
    """What to call the text: the Python it came with, or the sources as given."""
    fingerprint: str
    """Losses are comparable only where it is equal."""
    domains: tuple[str, ...]
    fingerprints: tuple[str, ...]
    """Of each domain alone."""
    train: Documents
    held_out: Documents
    tokeniser: Tokeniser | None
    """None for pre-tokenised data that came without one."""
    vocab_size: int
    bos_id: int
    token_bytes: np.ndarray | None
    """[V] bytes of text behind each id, where a single id tells."""
    notes: tuple[str, ...] = ()
    """What a user should be told."""

    def packed(self, length: int, seed: int) -> Packed:
        """The training rows."""
        return Packed(self.train, length, seed, self.bos_id)

    def judged(self, length: int, rows_per_domain: int) -> HeldOut:
        """The evaluation rows; the same for every seed and arm."""
        return HeldOut(self.held_out, length, rows_per_domain, self.bos_id, self.token_bytes, self.domains)

    def describe(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "tokens": None if self.tokeniser is None else self.tokeniser.describe(),
            "vocab_size": self.vocab_size,
            "bos_id": self.bos_id,
            "domains": {
                name: {
                    "fingerprint": self.fingerprints[index],
                    "train": counted(self.train, index),
                    "held_out": counted(self.held_out, index),
                }
                for index, name in enumerate(self.domains)
            },
            "notes": list(self.notes),
        }


def counted(documents: Documents, domain: int) -> dict[str, int | None]:
    """Documents, tokens (BOS not counted) and bytes of one domain."""
    own = documents.where(documents.domain == domain)
    known = bool((own.bytes >= 0).all())
    return {"documents": len(own), "tokens": own.tokens, "bytes": int(own.bytes.sum()) if known else None}


def split_up(
    name: str,
    domains: tuple[str, ...],
    documents: Documents,
    tokeniser: Tokeniser | None,
    vocab_size: int,
    bos_id: int,
    *,
    fingerprints: tuple[str, ...] = (),
    notes: Sequence[str] = (),
) -> Split:
    """Both sides of the documents; `fingerprints` of the domains where their keys are not those of their content.

    Raises:
        BadInput: a domain without two different documents.
    """
    for domain, title in enumerate(domains):
        if len(np.unique(documents.key[documents.domain == domain])) < 2:
            raise BadInput(
                f"{title} is one document, or copies of one: nothing can be held out of it",
                "fix: more documents; one a line in .jsonl, one a file in a directory",
            )
    if not fingerprints:
        fingerprints = tuple(digest_of(documents.key[documents.domain == index]) for index in range(len(domains)))
    mask = held_out(documents)
    judged = documents.where(mask)
    table = None if tokeniser is None else tokeniser.token_bytes
    if table is not None:
        table = np.append(table, np.zeros(vocab_size - len(table), np.int64))
    if tokeniser is not None and not isinstance(tokeniser, Bytes):
        judged, unequal = measured(judged, tokeniser, table)
        if unequal:
            notes = [*notes, f"bytes of single tokens are shares in {unequal} of {len(judged)} held-out documents"]
    return Split(
        name,
        hashlib.sha256("".join(sorted(map("{}={}\n".format, domains, fingerprints))).encode()).hexdigest(),
        domains,
        fingerprints,
        documents.where(~mask),
        judged,
        tokeniser,
        vocab_size,
        bos_id,
        table,
        tuple(notes),
    )


def digest_of(keys: np.ndarray) -> str:
    """sha256 over the sorted hashes of documents: the same in any order and any file format."""
    return hashlib.sha256(np.sort(keys).astype("<u8").tobytes()).hexdigest()


def measured(documents: Documents, tokeniser: Tokeniser, table: np.ndarray | None) -> tuple[Documents, int]:
    """The documents with their bytes, and in how many the bytes of the ids do not add up to them.

    They do not where a tokenizer normalises its text, puts a space before it, or does not tell bytes by token.
    """
    sizes, unequal = documents.bytes.copy(), 0
    for which in range(len(documents)):
        added = -1 if table is None else int(table[documents[which]].sum())
        if sizes[which] < 0:
            sizes[which] = added if added >= 0 else len(tokeniser.decode(documents[which]))
        unequal += bool(sizes[which] != added)
    return replace(documents, bytes=sizes), unequal
