"""How is a trained model shown the held-out rows? No gradients, eval mode, each token seeing its own document only.

A piece is the part of a document that lies in one row; a position counts from the piece's first token, 0. Where the
document begins in the row that token is its BOS; a piece that goes on from the row before has none, and what the
model sees of it starts there all the same. B rows, T inputs of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from smelt_budget.model import Output, Transformer
from smelt_budget.verify.data import Batch

Autocast = Callable[[], AbstractContextManager[Any]]
"""Makes the context a forward pass runs in: `contextlib.nullcontext`, or one that sets a lower precision."""

LENGTHS = {"1-64": 64, "65-256": 256, "257-1024": 1024, "1025+": math.inf}
"""Tokens of a whole document, BOS counted: name of the bucket, last value in it."""
POSITIONS = {"0-15": 15, "16-63": 63, "64-255": 255, "256+": math.inf}
"""Position in the piece of the token that looks back or predicts."""


@contextmanager
def looking(model: Transformer) -> Iterator[None]:
    """Nothing learns in here, layers run uncompiled, and afterwards the model is in the mode it was in."""
    training = model.training
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    model.eval()
    try:
        # a watch is another function for every layer: compiled, each would be compiled again
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        model.train(training)


def shown(
    model: Transformer,
    batch: Batch,
    autocast: Autocast,
    *,
    losses: bool = True,
    watch: Callable[..., None] | None = None,
) -> Output:
    """One forward pass over the rows' inputs; without `losses` the head is spared."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(batch.ids).to(device)
    document = torch.from_numpy(batch.document).to(device)[:, :-1]
    with autocast():
        if losses:
            return model(ids[:, :-1], ids[:, 1:], document_BT=document, watch=watch)
        return model(ids[:, :-1], document_BT=document, logits_to_keep=1, watch=watch)


def starts(document_BT: np.ndarray) -> np.ndarray:
    """[B, T] column of the first token of each token's piece."""
    begins = np.ones(document_BT.shape, bool)
    begins[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    return np.maximum.accumulate(np.where(begins, np.arange(document_BT.shape[1]), 0), 1)


def bucket(values: np.ndarray, buckets: dict[str, float]) -> np.ndarray:
    """Number of the bucket each value falls into."""
    return np.searchsorted(list(buckets.values()), values, "left")
