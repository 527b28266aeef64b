"""What does the model say next? Greedy or sampled continuation of a batch of prompts, with the cache.

B batch, T prompt tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smelt_budget.errors import BadInput
from smelt_budget.model.cache import Cache
from smelt_budget.model.transformer import Transformer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; the default takes the likeliest."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Only the k likeliest; 0 is all."""
    top_p: float = 1.0
    """Only the likeliest that together have this probability (arXiv:1904.09751)."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise BadInput(f"temperature {self.temperature:g} is negative")
        if self.top_k < 0:
            raise BadInput(f"top-k {self.top_k} is negative")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top-p {self.top_p:g} is not above 0 and at most 1")


@torch.no_grad()
def generate(
    model: Transformer,
    ids_BT: Tensor,
    new_tokens: int,
    sampling: Sampling | None = None,
    *,
    padding_BT: Tensor | None = None,
    stop: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Up to `new_tokens` more ids, [B, new]; a row that said `stop` goes on with `stop` until all have.

    Prompts of different lengths are padded on the left, with `padding_BT` true there.

    Raises:
        BadInput: no prompt tokens, or padding on the right.
    """
    B, T = ids_BT.shape
    if T == 0:
        raise BadInput("the prompt is empty", "fix: begin with the token that begins a document")
    if padding_BT is not None and bool(padding_BT[:, -1].any()):
        raise BadInput("prompts are padded on the right", "fix: pad on the left, so that each ends in its last token")
    sampling = sampling or Sampling()
    draws = torch.Generator(ids_BT.device).manual_seed(seed)
    cache, training = Cache(T + new_tokens), model.training
    model.eval()
    said, done = [], torch.zeros(B, dtype=torch.bool, device=ids_BT.device)
    new, padding = ids_BT, padding_BT
    try:
        for _ in range(new_tokens):
            logits = model(new, padding_BT=padding, cache=cache, logits_to_keep=1).logits
            token = drawn(logits[:, -1].float(), sampling, draws)
            if stop is not None:
                token = token.masked_fill(done, stop)
                done |= token == stop
            said.append(token)
            if stop is not None and bool(done.all()):
                break
            new, padding = token[:, None], None
    finally:
        model.train(training)
    return torch.stack(said, 1) if said else ids_BT[:, :0]


def drawn(logits_BV: Tensor, how: Sampling, draws: torch.Generator) -> Tensor:
    """One id per row."""
    if how.temperature == 0:
        return logits_BV.argmax(-1)
    likely, order = (logits_BV / how.temperature).sort(-1, descending=True)
    probability = likely.softmax(-1)
    out = probability.cumsum(-1) - probability >= how.top_p  # the first to reach top_p is kept
    if how.top_k:
        out[:, how.top_k :] = True
    kept = probability.masked_fill(out, 0)
    return order.gather(-1, torch.multinomial(kept, 1, generator=draws))[:, 0]
