"""What loss would something simple reach on the held-out text? Compressors and letter statistics.

    zlib, xz    bits per byte of up to 1 MB of held-out text, compressed alone
    unigram     - mean ln p(b),       p(b) = (c(b) + 1) / (n + V)                       counts c from training text
    bigram      - mean ln p(b | a),   p(b | a) = (c(a, b) + p(b)) / (c(a) + 1)          falling back on p(b)

N-grams are over the packed stream, BOS included, as the models are judged, and for bytes only: a table of pairs of
subwords would be as large as the text. They are in nats per token, which here is nats per byte.
"""

from __future__ import annotations

import lzma
import zlib
from typing import NamedTuple

import numpy as np

from smelt_budget.verify.data.documents import Documents
from smelt_budget.verify.data.packed import Packed
from smelt_budget.verify.data.split import Split
from smelt_budget.verify.data.tokenise import Bytes

SAMPLE = 1_000_000  # bytes compressed: xz takes 0.4 s
COUNTED = 1 << 23  # training tokens: bigram 2.463 instead of 2.455 of all 27 MB, in a third of the time
JUDGED = 1 << 20
CHUNK = 1 << 20


class Yardsticks(NamedTuple):
    """Of one domain, or of all together; None where it does not apply."""

    zlib: float | None
    """Bits per byte."""
    xz: float | None
    unigram: float | None
    """Nats per token."""
    bigram: float | None


def yardsticks(split: Split) -> dict[str, Yardsticks]:
    """By domain; training counts are those of all domains, as for the models."""
    counts = pairs(split.packed(1, 0), COUNTED) if isinstance(split.tokeniser, Bytes) else None
    result = {}
    for index, name in enumerate(split.domains):
        own = split.held_out.where(split.held_out.domain == index)
        sample = text_of(own, split)
        grams = (None, None) if counts is None else n_grams(counts, pairs(Packed(own, 1, 0, split.bos_id), JUDGED))
        result[name] = Yardsticks(*compressed(sample), *grams)
    return result


def text_of(documents: Documents, split: Split) -> bytes:
    """Up to `SAMPLE` bytes of text; none where ids cannot be turned back."""
    text = bytearray()
    for which in range(len(documents) if split.tokeniser is not None else 0):
        assert split.tokeniser is not None
        text += split.tokeniser.decode(documents[which][:SAMPLE])
        if len(text) >= SAMPLE:
            break
    return bytes(text[:SAMPLE])


def compressed(text: bytes) -> tuple[float | None, float | None]:
    """Bits per byte under zlib and xz."""
    if not text:
        return None, None
    small = len(zlib.compress(text, 9)), len(lzma.compress(text, preset=6))
    return small[0] * 8 / len(text), small[1] * 8 / len(text)


def pairs(packed: Packed, most: int) -> np.ndarray:
    """[V, V] counts of neighbours in the packed stream."""
    V = Bytes.vocab_size
    counts = np.zeros(V * V, np.int64)
    end = min(packed.tokens, most)
    for at in range(0, end - 1, CHUNK):
        ids = packed.stream(at, min(CHUNK, end - 1 - at) + 1).ids
        counts += np.bincount(ids[:-1] * V + ids[1:], minlength=V * V)
    return counts.reshape(V, V)


def n_grams(train: np.ndarray, judged: np.ndarray) -> tuple[float, float]:
    """Cross-entropy of `judged` under `train`, as single tokens and as pairs."""
    single = train.sum(0)
    p_V = (single + 1) / (single.sum() + len(single))
    p_VV = (train + p_V) / (train.sum(1, keepdims=True) + 1)
    total = judged.sum()
    return float(-(judged.sum(0) * np.log(p_V)).sum() / total), float(-(judged * np.log(p_VV)).sum() / total)
