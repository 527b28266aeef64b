"""How well does a model predict text it never saw? Overall, by domain, by document length, by position.

    nats per token = mean of -ln p(target)
    bits per byte  = sum of -log2 p(target) / sum of target_bytes            over the same targets

A target that begins the next document says "this one ends here": it counts with the document it ends, as a token of
0 bytes. So bits per byte is the length of a code for text and boundaries. Sums are float64; R rows, T inputs of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from smelt_budget.model import Output, Transformer
from smelt_budget.verify.data import HeldOut
from smelt_budget.verify.look import LENGTHS, POSITIONS, Autocast, bucket, looking, shown, starts


def evaluate(
    model: Transformer,
    held_out: HeldOut,
    domains: tuple[str, ...],
    batch_size: int,
    autocast: Autocast = nullcontext,
    also: Callable[[Output], None] | None = None,
) -> dict[str, Any]:
    """The loss on all rows, and on parts of them, each with the tokens it is over; `also` sees every output.

    `rows.standard_error` is how much another draw of rows would move this one loss. It is not the error of a
    comparison: two models on the same rows move together, and seeds move what rows do not.
    """
    losses = []
    with looking(model):
        for batch in held_out.batches(batch_size):
            output = shown(model, batch, autocast)
            assert output.losses is not None
            losses.append(output.losses.float().cpu().double().numpy())
            if also is not None:
                also(output)
    nats, whole = np.concatenate(losses), held_out.whole
    ends = whole.document[:, 1:] != whole.document[:, :-1]
    length = bucket(whole.document_length[:, :-1], LENGTHS)
    position = bucket((np.arange(nats.shape[1] + 1) - starts(whole.document))[:, :-1], POSITIONS)
    domain = np.broadcast_to(whole.domain[:, None], nats.shape)

    def part(mask: np.ndarray) -> dict[str, Any]:
        return loss(nats[mask], whole.target_bytes[mask])

    return {
        **part(np.ones_like(ends)),
        "domains": {name: part(domain == i) for i, name in enumerate(domains)},
        "document_length": {name: part(length == i) for i, name in enumerate(LENGTHS)},
        "position": {name: part(position == i) for i, name in enumerate(POSITIONS)},
        "end_of_document": part(ends),
        "rows": by_row(nats, whole.domain, domains),
    }


def loss(nats: np.ndarray, target_bytes: np.ndarray) -> dict[str, Any]:
    """Of some targets; `None` where there are none, or their bytes are unknown or 0."""
    tokens, total, text = int(nats.size), float(nats.sum()), float(target_bytes.sum())
    known = not math.isnan(text)
    return {
        "tokens": tokens,
        "bytes": text if known else None,
        "nats_per_token": total / tokens if tokens else None,
        "bits_per_byte": total / math.log(2) / text if known and text else None,
    }


def by_row(nats: np.ndarray, domain: np.ndarray, domains: tuple[str, ...]) -> dict[str, Any]:
    """Mean nats of each row, and their standard error over rows; within domains, whose shares are fixed."""
    mean = nats.mean(1)
    own = [mean[domain == i] for i in range(len(domains))]
    measurable = len(mean) > 1 and all(len(rows) != 1 for rows in own)
    variance = sum(len(rows) * rows.var(ddof=1) for rows in own if len(rows)) / len(mean) ** 2 if measurable else 0.0
    return {
        "nats_per_token": mean.tolist(),
        "domain": [domains[i] for i in domain],
        "standard_error": math.sqrt(variance) if measurable else None,
    }
