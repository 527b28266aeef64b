"""How are the two expert ops computed on a CPU? Rows sorted by expert, one matrix product an expert, chunk by chunk.

N tokens, K choices each, S = N K sorted rows, P slots: the routed rows, expert after expert, C the slots at hand.
H hidden, F expert width, E experts.

Why this form, in ms for up, dx and dw (float32, N 2048, one thread):

    H 96, F 48, E 32, K 4      mm by expert 1.67, 1.59, 1.53   grouped_mm 1.72, 1.62, 1.57   padded bmm 1.84, 1.75, 1.79
    H 768, F 384, E 128, K 8   mm by expert 184, 150, 180      grouped_mm 203, 170, 292      padded bmm 231, 186, 214

The rest is passes over memory: gathers, an activation in few and contiguous passes (swiglu.py), and an embedding bag as
the sum over K, one pass where gather and sum are three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from smelt_budget.model import swiglu
from smelt_budget.model.swiglu import wide

CHUNK = 2**20  # bytes of the widest temporary, for each thread: half of its 2 MiB L2 cache
HALF_MULTIPLE = 32
"""Rows of an expert come in multiples of this in half precision: oneDNN compiles a kernel for every new shape."""


class Chunk(NamedTuple):
    """Experts that are computed together; those without rows are in none."""

    experts: list[int]
    slots: slice
    rows: slice
    """Of the saved pre-activations, which have no spare rows."""
    sizes: list[int]
    """Slots of each."""


@dataclass(frozen=True)
class Slots:
    """Where each of the N K choices stands once sorted by expert."""

    counts: list[int]
    """Rows of each expert."""
    capacities: list[int]
    """The same, rounded up."""
    choice_P: Tensor
    """Which choice n K + k fills a slot; the spare slots of an expert repeat its last."""
    token_P: Tensor
    """The row of x it reads."""
    row_P: Tensor
    """Its place among the routed, in sorted order."""
    slot_S: Tensor
    """The slot of each routed row."""
    spare_P: Tensor | None
    """Which slots are spare; None if none can be."""
    slot_NK: Tensor
    """The slot of a choice; P if it is not routed."""
    routed: int
    """How many choices name an expert."""

    @property
    def number(self) -> int:
        """P."""
        return len(self.row_P)

    def chunks(self, most: int) -> Iterator[Chunk]:
        """As many experts at a time as have at most so many slots, or one."""
        busy = [expert for expert, count in enumerate(self.counts) if count]
        first = slot = row = 0
        while first < len(busy):
            stop, size = first + 1, self.capacities[busy[first]]
            while stop < len(busy) and size + self.capacities[busy[stop]] <= most:
                size += self.capacities[busy[stop]]
                stop += 1
            experts = busy[first:stop]
            rows = sum(self.counts[e] for e in experts)
            sizes = [self.capacities[e] for e in experts]
            yield Chunk(experts, slice(slot, slot + size), slice(row, row + rows), sizes)
            first, slot, row = stop, slot + size, row + rows


def sort(idx_NK: Tensor, experts: int, dtype: torch.dtype) -> Slots:
    """Stable order by expert; ids outside [0, E) go nowhere."""
    ids = idx_NK.reshape(-1).long().numpy().view(np.uint64)  # -1 becomes huge
    # numpy has a radix sort for 8 and 16 bits: 0.05 ms for 8192 ids, torch.argsort 0.4 ms
    keys = np.minimum(ids, experts).astype(np.uint8 if experts < 2**8 else np.uint16 if experts < 2**16 else np.int64)
    order = np.argsort(keys, kind="stable")
    counts = capacities = np.bincount(keys, minlength=experts + 1)[:experts]
    routed = number = int(counts.sum())
    row_P = slot_S = np.arange(routed)
    spare_P = None
    if dtype.itemsize == 2:
        capacities = -(-counts // HALF_MULTIPLE) * HALF_MULTIPLE
        number = int(capacities.sum())
        shift = (capacities - counts).cumsum() - (capacities - counts)
        slot_S = row_P + np.repeat(shift, counts)
        free_P = np.arange(number) - np.repeat(shift, capacities)
        row_P = np.minimum(free_P, np.repeat(counts.cumsum() - 1, capacities))
        spare_P = torch.from_numpy(free_P > row_P)
    slot_NK = np.full(len(ids), number)
    slot_NK[order[:routed]] = slot_S
    choice_P = torch.from_numpy(order[row_P])
    return Slots(
        counts=counts.tolist(),
        capacities=capacities.tolist(),
        choice_P=choice_P,
        token_P=choice_P // max(idx_NK.shape[1], 1),
        row_P=torch.from_numpy(row_P),
        slot_S=torch.from_numpy(slot_S),
        spare_P=spare_P,
        slot_NK=torch.from_numpy(slot_NK).view(idx_NK.shape),
        routed=routed,
    )


def forward(
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    b_gate_up_E2F: Tensor | None,
    b_down_EH: Tensor | None,
    limit: float | None,
) -> tuple[Tensor, Tensor]:
    """The rows y_NH and the sorted pre-activations pre_S2F, zero past the routed ones."""
    experts, width, hidden = w_gate_up_E2FH.shape
    slots = sort(idx_NK, experts, x_NH.dtype)
    weight_P1 = by_slot(weight_NK, slots, x_NH.dtype)
    pre_S2F = x_NH.new_empty(idx_NK.numel(), width)
    pre_S2F[slots.routed :].zero_()
    out_PH = x_NH.new_empty(slots.number + 1, hidden)
    up, down = w_gate_up_E2FH.mT.unbind(), w_down_EHF.mT.unbind()
    for chunk, at, rows, sizes in slots.chunks(chunk_rows(x_NH, width)):
        pre = pre_S2F[rows] if slots.spare_P is None else x_NH.new_empty(sum(sizes), width)
        products(
            x_NH.index_select(0, slots.token_P[at]).split_with_sizes(sizes),
            part(up, chunk),
            pre.split_with_sizes(sizes),
        )
        if b_gate_up_E2F is not None:
            pre += repeated(b_gate_up_E2F[chunk], sizes)
        if slots.spare_P is not None:
            torch.index_select(pre, 0, slots.slot_S[rows] - at.start, out=pre_S2F[rows])
        h = swiglu.weighted(pre, weight_P1[at], limit)
        out = out_PH[at]
        products(h.split_with_sizes(sizes), part(down, chunk), out.split_with_sizes(sizes))
        if b_down_EH is not None:
            out += repeated(b_down_EH[chunk], sizes) * weight_P1[at]
    return summed(out_PH, slots), pre_S2F


def backward(
    grad_NH: Tensor,
    x_NH: Tensor,
    w_gate_up_E2FH: Tensor,
    w_down_EHF: Tensor,
    idx_NK: Tensor,
    weight_NK: Tensor,
    _b_gate_up_E2F: Tensor | None,
    b_down_EH: Tensor | None,
    limit: float | None,
    pre_S2F: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Gradients of x, w_gate_up, w_down, weight, b_gate_up and b_down; one that is not needed has no elements."""
    experts, width, hidden = w_gate_up_E2FH.shape
    need_x, need_up, need_down, need_weight, need_b_up, need_b_down = needs
    slots = sort(idx_NK, experts, x_NH.dtype)
    weight_P1 = by_slot(weight_NK, slots, x_NH.dtype)
    dx_PH = x_NH.new_empty((slots.number + 1, hidden) if need_x else 0)
    dweight_P = weight_P1.new_zeros(slots.number + 1)
    dw_up = x_NH.new_empty(w_gate_up_E2FH.shape if need_up else 0)
    dw_down = x_NH.new_empty(w_down_EHF.shape if need_down else 0)
    db_up = x_NH.new_empty((experts, width) if need_b_up else 0)
    db_down = x_NH.new_empty((experts, hidden) if need_b_down else 0)
    idle = [expert for expert, count in enumerate(slots.counts) if not count]
    for each in (dw_up, dw_down, db_up, db_down):
        if idle and each.numel():
            each[idle] = 0
    up, down = w_gate_up_E2FH.unbind(), w_down_EHF.unbind()
    d_up, d_down = dw_up.unbind(), dw_down.unbind()
    for chunk, at, rows, sizes in slots.chunks(chunk_rows(x_NH, width)):
        grad = grad_NH.index_select(0, slots.token_P[at])
        pre = pre_S2F[rows] if slots.spare_P is None else pre_S2F.index_select(0, slots.row_P[at])
        dh = x_NH.new_empty(len(grad), width // 2)
        products(grad.split_with_sizes(sizes), part(down, chunk), dh.split_with_sizes(sizes))
        h, dweight, dpre = swiglu.backward(dh, pre, weight_P1[at], limit)
        if need_down:
            products(grad.t().split_with_sizes(sizes, 1), h.split_with_sizes(sizes), part(d_down, chunk))
        if need_up:
            x = x_NH.index_select(0, slots.token_P[at])
            products(dpre.t().split_with_sizes(sizes, 1), x.split_with_sizes(sizes), part(d_up, chunk))
        if need_x:
            products(dpre.split_with_sizes(sizes), part(up, chunk), dx_PH[at].split_with_sizes(sizes))
        if need_b_up:
            totals(dpre.split_with_sizes(sizes), part(db_up.unbind(), chunk))
        if need_b_down:
            totals((grad * weight_P1[at]).split_with_sizes(sizes), part(db_down.unbind(), chunk))
        if b_down_EH is not None:
            dweight += (grad * repeated(b_down_EH[chunk], sizes)).sum(1)
        dweight_P[at] = dweight
    dx = summed(dx_PH, slots) if need_x else dx_PH
    dweight = dweight_P[slots.slot_NK].to(weight_NK.dtype) if need_weight else weight_NK.new_empty(0)
    return dx, dw_up, dw_down, dweight, db_up, db_down


def part(each: Sequence[Tensor], experts: list[int]) -> list[Tensor]:
    """What belongs to these experts."""
    return [each[e] for e in experts]


def products(lefts: Iterable[Tensor], rights: Iterable[Tensor], outs: Iterable[Tensor]) -> None:
    """One matrix product an expert."""
    for left, right, out in zip(lefts, rights, outs, strict=True):
        torch.mm(left, right, out=out)


def totals(parts: Iterable[Tensor], outs: Iterable[Tensor]) -> None:
    """The sum of each expert's rows."""
    for part, out in zip(parts, outs, strict=True):
        out.copy_(part.sum(0, dtype=wide(part.dtype)))


def repeated(bias_EX: Tensor, sizes: Sequence[int]) -> Tensor:
    """Each expert's bias once a slot, ready to be multiplied."""
    return bias_EX.to(wide(bias_EX.dtype)).repeat_interleave(torch.tensor(sizes), 0)


def summed(out_PH: Tensor, slots: Slots) -> Tensor:
    """Each token's K slots added up in float32 or better, in order of k; one pass, no atomics."""
    out_PH[slots.number :].zero_()
    if not slots.slot_NK.numel():
        return out_PH.new_zeros(len(slots.slot_NK), out_PH.shape[1])
    return torch.nn.functional.embedding_bag(slots.slot_NK, out_PH, mode="sum")


def by_slot(weight_NK: Tensor, slots: Slots, dtype: torch.dtype) -> Tensor:
    """The routing weights weight_P1; 0 where a slot is spare, so that it adds nothing to any gradient."""
    weight_P = weight_NK.reshape(-1).to(wide(dtype)).index_select(0, slots.choice_P)
    if slots.spare_P is not None:
        weight_P.masked_fill_(slots.spare_P, 0)
    return weight_P[:, None]


def chunk_rows(x_NH: Tensor, width: int) -> int:
    """How many rows of the widest temporary fit."""
    return CHUNK * torch.get_num_threads() // (max(width, x_NH.shape[1]) * wide(x_NH.dtype).itemsize)
