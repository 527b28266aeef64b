"""Where do a document's tokens lie? Starts and lengths into a few long arrays, in memory or mapped from disk.

D documents. The id that begins a document (BOS) is never stored: packing puts it in, so text and pre-tokenised data
with or without one are the same from here on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

HELD_OUT = 0.05
"""Share of documents never trained on."""


@dataclass(frozen=True)
class Documents:
    """Documents by place; arrays are [D]."""

    parts: tuple[np.ndarray, ...]
    """1-D token arrays of any unsigned or signed integer kind."""
    part: np.ndarray
    """Which of `parts`."""
    start: np.ndarray
    length: np.ndarray
    """Tokens, BOS not counted; at least 1."""
    bytes: np.ndarray
    """Of text behind each document; -1 where it was never seen."""
    key: np.ndarray
    """uint64 hash of name or content: decides the side of the split."""
    domain: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.length)

    @property
    def tokens(self) -> int:
        """Of all documents, BOS not counted."""
        return int(self.length.sum())

    def __getitem__(self, which: int) -> np.ndarray:
        start = int(self.start[which])
        return self.parts[self.part[which]][start : start + int(self.length[which])]

    def where(self, chosen: np.ndarray) -> Documents:
        """Those of a mask or an index; no token is copied."""
        picked = {name: getattr(self, name)[chosen] for name in FIELDS}
        return Documents(self.parts, **picked)


FIELDS = ("part", "start", "length", "bytes", "key", "domain")


def laid_out(tokens: np.ndarray, length: np.ndarray, bytes_: np.ndarray, key: np.ndarray) -> Documents:
    """Documents one after another in one array; empty ones are left out."""
    length = np.asarray(length, np.int64)
    start = np.cumsum(length) - length
    some = length > 0
    zeros = np.zeros(int(some.sum()), np.int64)
    return Documents(
        (np.asarray(tokens),),
        zeros,
        start[some],
        length[some],
        np.asarray(bytes_, np.int64)[some],
        np.asarray(key, np.uint64)[some],
        zeros,
    )


def joined(several: Sequence[Documents], domains: Sequence[int]) -> Documents:
    """One after another; all of `several[i]` belong to `domains[i]`."""
    offsets = np.cumsum([0, *(len(documents.parts) for documents in several)])
    columns = {
        "part": [documents.part + offset for documents, offset in zip(several, offsets, strict=False)],
        "domain": [np.full(len(documents), domain) for documents, domain in zip(several, domains, strict=True)],
    }
    for name in FIELDS:
        if name not in columns:
            columns[name] = [getattr(documents, name) for documents in several]
    parts = tuple(part for documents in several for part in documents.parts)
    return Documents(parts, **{name: np.concatenate(column) for name, column in columns.items()})


def key_of(content: bytes | memoryview) -> int:
    """64 bits of blake2b: the same on every machine, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def held_out(documents: Documents) -> np.ndarray:
    """[D] mask: the documents whose key falls into the lowest 5 %, in every domain at least one and never all.

    Order plays no part, nor what else is there: a document keeps its side as long as it is not the only one.
    """
    mask = documents.key < np.uint64(HELD_OUT * 2**64)
    for domain in np.unique(documents.domain):
        own = np.flatnonzero(documents.domain == domain)
        keys = documents.key[own]
        if not mask[own].any():
            mask[own] = keys == keys.min()
        elif mask[own].all():
            mask[own] = keys != keys.max()
    return mask
