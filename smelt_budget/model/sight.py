"""What may a token see? Itself and what lies before it, in its own document, within the layer's window.

A place is (position, document) of a token. Padding is a document of its own, number -1, so it is seen by padding
only and every softmax stays finite; a cache slot not yet filled is document -2, which nothing sees.
B batch, T queries, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt_budget.spec.runs import Window

PADDING, EMPTY = -1, -2


def places(new_BT: Tensor, start: Tensor | int, document_BT: Tensor | None, padding_BT: Tensor | None) -> Tensor:
    """[B or 1, 1, T, 2]: position and document of new tokens, of which `start` (a number, or [B, 1]) came before.

    `padding_BT` is true where there is no token; positions count real tokens only, so padding before all of them is
    at -1. `new_BT` gives the shape.
    Without documents, padding or a `start` by row every row is alike, and there is one.
    """
    position = torch.arange(new_BT.shape[1], device=new_BT.device)[None] + start
    document = torch.zeros_like(position) if document_BT is None else document_BT.long()
    if padding_BT is not None:
        position = (~padding_BT).long().cumsum(-1) - 1 + start
        document = document.expand(padding_BT.shape).masked_fill(padding_BT, PADDING)
    return torch.stack(torch.broadcast_tensors(position, document), -1)[:, None]


def visible(query: Tensor, key: Tensor, window: Window | None) -> Tensor:
    """Boolean mask [B, 1, T, S] from places [B, 1, T, 2] and [B, 1, S, 2]; true where the key is seen."""
    q_position, k_position = query[..., :, None, 0], key[..., None, :, 0]
    seen = (k_position <= q_position) & (query[..., :, None, 1] == key[..., None, :, 1])
    if window is None:
        return seen
    if window.chunked:
        return seen & (q_position // window.size == k_position // window.size)
    return seen & (q_position - k_position < window.size)
