"""How surprised is the model? -log p(target) for each token, without keeping all logits when they are many.

N tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MOST_LOGITS = 2**26
"""Above this many (256 MB in fp32) the tokens go through the head in slices, recomputed in the backward pass."""


def token_losses(x_BTH: Tensor, head: nn.Module, targets_BT: Tensor) -> Tensor:
    """Cross-entropy in nats, [B, T], in fp32."""
    x_NH, targets_N = x_BTH.flatten(0, 1), targets_BT.flatten()
    vocabulary = head.out_features
    tokens = max(1, MOST_LOGITS // int(vocabulary))  # pyright: ignore[reportArgumentType]
    if x_NH.shape[0] <= tokens:
        losses = surprise(x_NH, targets_N, head)
    else:
        slices = zip(x_NH.split(tokens), targets_N.split(tokens), strict=True)
        losses = torch.cat([checkpoint(surprise, x, t, head, use_reentrant=False) for x, t in slices])  # pyright: ignore[reportArgumentType, reportCallIssue]
    return losses.view_as(targets_BT).clone()  # FSDP2 warns of outputs that are views


def surprise(x_NH: Tensor, targets_N: Tensor, head: nn.Module) -> Tensor:
    """-log softmax(head(x))[target]."""
    return F.cross_entropy(head(x_NH).float(), targets_N, reduction="none")
