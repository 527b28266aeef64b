"""What does generation remember? One slot per *executed* layer: every visit has keys and values of its own.

A layer with a window keeps the window only, as a ring. Slots are allocated on first use, whole, so the bytes a
cache takes are known after the prefill and do not grow. Ledger row: attention.kv_cache (rule C10).
B batch, S positions kept, the position axis is the third of every tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smelt_budget.errors import BadInput
from smelt_budget.model.sight import EMPTY
from smelt_budget.spec.runs import Window


class Slot:
    """What one executed layer keeps, for at most `capacity` positions."""

    def __init__(self, capacity: int, empty: int = 0):
        self.capacity, self.empty = capacity, empty
        self.seen = 0
        self.kept: tuple[Tensor, ...] = ()

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Keep `new` (each [B, g, T, ...]); return all that its queries may look at, oldest order not promised."""
        tokens, seen = new[0].shape[2], self.seen
        if not self.kept:
            self.kept = tuple(x.new_full((*x.shape[:2], self.capacity, *x.shape[3:]), self.empty) for x in new)
        self.seen += tokens
        if self.seen <= self.capacity:
            for kept, x in zip(self.kept, new, strict=True):
                kept[:, :, seen : self.seen] = x
            return tuple(kept[:, :, : self.seen] for kept in self.kept)
        before = tuple(kept[:, :, :seen] for kept in self.kept)  # slicing past the end is all of it
        looked_at = tuple(torch.cat(pair, 2) for pair in zip(before, new, strict=True)) if tokens > 1 else self.kept
        last = min(tokens, self.capacity)
        ring = torch.arange(self.seen - last, self.seen, device=new[0].device) % self.capacity
        for kept, x in zip(self.kept, new, strict=True):
            kept[:, :, ring] = x[:, :, tokens - last :]
        return looked_at


class Cache:
    """The slots of all executed layers, for sequences of at most `length` tokens."""

    def __init__(self, length: int):
        self.length = length
        self.seen = 0
        self.position: Tensor | int = 0
        """Position [B, 1] of the next token in each row; rows padded differently stand at different ones."""
        self.plain = True
        """No padding and no second document so far: a token sees everything kept."""
        self.documents = False
        """Whether documents were told apart."""
        self.slots: dict[int, Slot] = {}
        self.places: dict[Window | None, Slot] = {}

    def slot(self, executed: int, window: Window | None) -> Slot:
        """The slot of an executed layer, counted over all visits."""
        return self.slots.setdefault(executed, Slot(self.capacity(window)))

    def capacity(self, window: Window | None) -> int:
        """Positions a layer keeps."""
        return self.length if window is None else min(self.length, window.size)

    def grow(self, place: Tensor, documents: bool, padding: bool) -> None:
        """Make room for tokens at `place` [B, 1, T, 2], and note whether documents and padding were given with them.

        Raises:
            BadInput: the sequence would be longer than the cache, or nothing says which document goes on.
        """
        seen = self.seen + place.shape[2]
        if seen > self.length:
            raise BadInput(f"{seen} tokens do not fit into a cache of {self.length} positions")
        if self.documents and not documents:
            raise BadInput("the cache holds documents: give document_BT, to say which of them the new tokens belong to")
        self.seen, self.documents = seen, documents
        self.plain = self.plain and not documents and not padding
        self.position = place[:, 0, :, 0].max(-1, keepdim=True).values + 1

    def seen_from(self, new: Tensor, window: Window | None) -> Tensor:
        """Places [B, 1, S, 2] of the keys that the layers with this window are about to return."""
        (kept,) = self.places.setdefault(window, Slot(self.capacity(window), EMPTY)).extend(new)
        return kept

    @property
    def bytes(self) -> int:
        """Bytes allocated for keys, values and latents."""
        return sum(kept.untyped_storage().nbytes() for slot in self.slots.values() for kept in slot.kept)
