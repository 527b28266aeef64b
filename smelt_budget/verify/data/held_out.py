"""On which tokens are both arms judged? The same rows of held-out documents, per domain, in the same order, always.

Rows are those of `Packed` with seed 0 over one domain's held-out documents, first epoch only, so no target counts
twice; they are spread evenly over that epoch, because neighbouring rows are mostly one document.
Every target token knows how many bytes of text it stands for, so nats per token and bits per byte are both exact:

    bits per byte = sum of -log2 p(target) / sum of target_bytes        over the same targets
    target_bytes  = w(token) * bytes(document) / sum of w over the document,     w the bytes behind a token

so a document's bytes are exact even where a tokenizer normalises its text or w is not known (then w = 1).
B rows, T inputs of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.verify.data.documents import Documents
from smelt_budget.verify.data.packed import Packed


@dataclass(frozen=True)
class Batch:
    """Rows of one or more domains."""

    ids: np.ndarray
    """[B, T+1] int64."""
    document: np.ndarray
    """[B, T+1] int32, from 0 in each row."""
    domain: np.ndarray
    """[B] index into the split's domains."""
    document_length: np.ndarray
    """[B, T+1] tokens of the whole document that each token belongs to, BOS counted."""
    target_bytes: np.ndarray
    """[B, T] float64 of `ids[:, 1:]`; a BOS is 0. NaN where the text was never seen."""


COLUMNS = ("ids", "document", "domain", "document_length", "target_bytes")


class HeldOut:
    """A fixed evaluation set; iterate with `batches`."""

    def __init__(
        self,
        documents: Documents,
        length: int,
        rows_per_domain: int,
        bos_id: int,
        token_bytes: np.ndarray | None = None,
        domains: tuple[str, ...] = (),
    ):
        """At most `rows_per_domain` rows of each domain, fewer where the text ends.

        `token_bytes` [V] are the bytes behind each id, if known. `domains` are names, for errors.

        Raises:
            BadInput: a domain whose held-out documents do not fill one row.
        """
        pieces = []
        for domain in np.unique(documents.domain):
            own = documents.where(documents.domain == domain)
            tokens = own.tokens + len(own)
            if tokens < length + 1:
                name = domains[domain] if domain < len(domains) else f"domain {domain}"
                raise BadInput(
                    f"{name}: {tokens:,} held-out tokens are less than one row of {length + 1:,}",
                    "fix: more --data of this kind, or shorter rows",
                )
            packed = Packed(own, length, 0, bos_id)
            rows = min(rows_per_domain, (tokens - 1) // length)
            pieces.append(rows_of(packed, rows, int(domain), token_bytes))
        self.whole = Batch(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in COLUMNS))
        self.rows = {int(d): int(n) for d, n in zip(*np.unique(self.whole.domain, return_counts=True), strict=True)}
        """Domain to rows."""
        self.bytes = {d: known(self.whole.target_bytes[self.whole.domain == d].sum()) for d in self.rows}
        """Domain to bytes of text behind all its targets; None where unknown."""

    def __len__(self) -> int:
        return len(self.whole.domain)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """All rows in order; the last batch may be smaller."""
        for first in range(0, len(self), batch_size):
            yield Batch(*(getattr(self.whole, name)[first : first + batch_size] for name in COLUMNS))


def known(total: float) -> float | None:
    """None instead of NaN."""
    return None if np.isnan(total) else float(total)


def rows_of(packed: Packed, rows: int, domain: int, token_bytes: np.ndarray | None) -> Batch:
    """`rows` rows of one domain, spread over its epoch."""
    whole = (packed.tokens - 1) // packed.length
    streams = [packed.stream(row * whole // rows * packed.length, packed.length + 1) for row in range(rows)]
    ids = np.stack([stream.ids for stream in streams])
    sequence = np.stack([stream.sequence for stream in streams])
    which = np.stack([stream.document for stream in streams])
    documents = packed.documents
    share = np.full(len(documents), np.nan)  # bytes per unit of w
    for one in np.unique(which):
        tokens = documents[one]
        weight = len(tokens) if token_bytes is None else token_bytes[tokens].sum()
        if documents.bytes[one] >= 0:
            share[one] = documents.bytes[one] / max(weight, 1)
    weights = 1 if token_bytes is None else token_bytes[ids[:, 1:]]
    target_bytes = np.where(ids[:, 1:] == packed.bos_id, 0.0, weights * share[which[:, 1:]])
    return Batch(
        ids,
        (sequence - sequence[:, :1]).astype(np.int32),
        np.full(rows, domain, np.int32),
        (documents.length[which] + 1).astype(np.int32),
        target_bytes,
    )
