"""Which tokens make up step s? Documents packed end to end, cut into rows; a pure function of (seed, step).

    stream   epoch 0, epoch 1, ... ; epoch e is BOS document BOS document ... in the order
             default_rng([seed, e]).permutation(D), so every document comes once per epoch
    row r    stream[r T .. r T + T], both ends included: T inputs and T targets, one token shared with row r + 1
    block e  the R = floor(epoch / T) rows from e R on, in the order default_rng([seed, e, 1]).permutation(R): rows of
             one long document stand far apart, for a batch of neighbours is hardly more than one sample
             (0.4 nats worse after 160 steps of 8 rows: docs/log.md)
    step s   places [s B, (s + 1) B) of that order; rank k of W has the k-th contiguous share of them

Nothing is materialised and nothing is remembered: resuming, other ranks and other machines see the same rows.
B rows of a batch, T inputs of a row, D documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.verify.data.documents import Documents


@dataclass(frozen=True)
class Stream:
    """A stretch of the packed stream; arrays are [tokens]."""

    ids: np.ndarray
    sequence: np.ndarray
    """Number of the document in the stream, counted through all epochs; equal means same document."""
    document: np.ndarray
    """Index into the `Documents`."""


class Packed:
    """Rows of `length` inputs and their targets. A longer document goes on in the next row, there without a BOS."""

    def __init__(self, documents: Documents, length: int, seed: int, bos_id: int):
        """`bos_id` stands before each document.

        Raises:
            BadInput: not one row's worth of tokens.
        """
        self.documents = documents
        self.length = length
        self.seed = seed
        self.bos_id = bos_id
        self.tokens = documents.tokens + len(documents)
        """Of one epoch, with BOS."""
        if self.tokens < length + 1:
            raise BadInput(
                f"{self.tokens:,} tokens are less than one row of {length + 1:,}", "fix: more --data, or shorter rows"
            )
        self.orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.shuffles: dict[int, np.ndarray] = {}

    def rows(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(ids [B, T+1] int64, document [B, T+1] int32) of one rank's share of the step's batch of `batch_size` rows.

        `document` counts from 0 in each row: equal numbers may attend to each other. A document that began in the
        row before has no BOS; one that begins here has it as its first id.

        Raises:
            BadInput: the batch does not divide among the ranks, or is more than there is text.
        """
        if batch_size % world:
            raise BadInput(f"a batch of {batch_size} rows does not divide among {world} ranks")
        if batch_size * self.length + 1 > self.tokens:
            raise BadInput(
                f"a batch of {batch_size} rows of {self.length:,} tokens is more than the {self.tokens:,} there are",
                "fix: more --data, or a smaller batch",
            )
        share = batch_size // world
        first = step * batch_size + rank * share
        streams = [self.stream(self.row(place) * self.length, self.length + 1) for place in range(first, first + share)]
        sequence = np.stack([stream.sequence for stream in streams])
        return np.stack([stream.ids for stream in streams]), (sequence - sequence[:, :1]).astype(np.int32)

    def row(self, place: int) -> int:
        """Which row of the stream stands at a place of the shuffled order."""
        whole = self.tokens // self.length
        block, at = divmod(place, whole)
        if block not in self.shuffles:
            while len(self.shuffles) > 1:  # a batch touches two blocks at most
                del self.shuffles[next(iter(self.shuffles))]
            self.shuffles[block] = np.random.default_rng([self.seed, block, 1]).permutation(whole)
        return block * whole + int(self.shuffles[block][at])

    def epochs(self, steps: int, batch_size: int) -> float:
        """How often the text has been read after so many steps; over 1 means that documents came again."""
        return steps * batch_size * self.length / self.tokens

    def stream(self, first: int, count: int) -> Stream:
        """`count` tokens of the endless stream from position `first`."""
        pieces = []
        while count > 0:
            epoch, offset = divmod(first, self.tokens)
            here = min(count, self.tokens - offset)
            pieces.append(self.within(epoch, offset, here))
            first, count = first + here, count - here
        if len(pieces) == 1:
            return pieces[0]
        return Stream(*(np.concatenate([getattr(p, name) for p in pieces]) for name in ("ids", "sequence", "document")))

    def within(self, epoch: int, offset: int, count: int) -> Stream:
        """A stretch inside one epoch."""
        order, ends = self.order(epoch)
        places = np.arange(np.searchsorted(ends, offset, "right"), np.searchsorted(ends, offset + count, "left") + 1)
        which = order[places]
        sizes = self.documents.length[which] + 1
        begins = ends[places] - sizes
        shown = np.minimum(ends[places], offset + count) - np.maximum(begins, offset)
        position = np.arange(offset, offset + count) - np.repeat(begins, shown)  # 0 is BOS
        index = np.repeat(self.documents.start[which] - 1, shown) + position
        ids = self.gathered(index, which, shown)
        ids[position == 0] = self.bos_id
        return Stream(ids, np.repeat(epoch * len(order) + places, shown), np.repeat(which, shown))

    def gathered(self, index: np.ndarray, which: np.ndarray, shown: np.ndarray) -> np.ndarray:
        """Tokens by their index into their part; an index before the part's beginning is a BOS, set later."""
        index = np.maximum(index, 0)
        part = self.documents.part[which]
        if (part == part[0]).all():
            return self.documents.parts[part[0]][index].astype(np.int64)
        ids = np.empty(len(index), np.int64)
        part = np.repeat(part, shown)
        for one in np.unique(part):
            ids[part == one] = self.documents.parts[one][index[part == one]]
        return ids

    def order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's permutation [D], and where each of its documents ends in the epoch [D]."""
        if epoch not in self.orders:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.documents))
            while len(self.orders) > 2:  # two blocks touch three epochs at most
                del self.orders[next(iter(self.orders))]
            self.orders[epoch] = order, np.cumsum(self.documents.length[order] + 1)
        return self.orders[epoch]
