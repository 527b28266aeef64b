"""What is known about the text? Both sides of the split, and every number of it that a report prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt_budget.verify.data.documents import Documents
from smelt_budget.verify.data.held_out import HeldOut
from smelt_budget.verify.data.packed import Packed
from smelt_budget.verify.data.tokenise import Tokeniser


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
    """[V] bytes of each id, where it gives every held-out document's bytes exactly."""
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
