"""How much do tokens look at the first token of their document? The attention sink of arXiv:2609.01343.

    mass(t)  = exp(s q_t k_start - logsumexp over the visible j of s q_t k_j)         start: the BOS of t's document
    floor(t) = 1 / (visible positions)                                               the mass of uniform attention

per head and executed layer, over all t but the starts themselves, whose mass is 1 whatever the weights. Only documents
that begin inside a row count: a piece that goes on from the row before has no start. A window that no longer reaches
the start gives mass 0 and floor 0, and `visible` says how often it did reach. Learned sinks take mass, not floor.
A head is a sink where its mean mass is above 0.3 (the threshold of arXiv:2410.10781, there for each text by itself).

Maps are never whole: 128 queries of one row at a time. n heads, g KV heads, C queries, S keys, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smelt_budget.model import Step, Transformer
from smelt_budget.verify.data import Batch, Documents, HeldOut
from smelt_budget.verify.data.held_out import COLUMNS
from smelt_budget.verify.look import POSITIONS, Autocast, bucket, looking, shown, starts

CHUNK = 128  # queries whose scores exist at once: 17 MB for 8 heads and 4,096 keys
EPS = 0.3


def sink(
    model: Transformer, held_out: HeldOut, bos_id: int, batch_size: int, autocast: Autocast = nullcontext
) -> dict[str, Any]:
    """One entry per executed layer, in order; every mean is `None` where no document begins inside a row.

    Rows without a start are not run. At short rows most have none: `openings` makes rows that do.
    """
    tally, whole = Tally(), held_out.whole
    rows = np.flatnonzero(countable(whole, bos_id).any(1))
    with looking(model):
        for first in range(0, len(rows), batch_size):
            some = rows[first : first + batch_size]
            batch = Batch(*(getattr(whole, name)[some] for name in COLUMNS))
            tally.show(batch, bos_id)
            shown(model, batch, autocast, losses=False, watch=tally.watch)
    return {
        "eps": EPS,
        "rows": len(rows),
        "queries": int(tally.queries.sum()),
        "layers": [tally.layer(step) for step in model.order],
    }


def openings(documents: Documents, length: int) -> Documents:
    """The first tokens of each document, as many as fill a row with its BOS; their bytes are not known any more."""
    shorter = np.minimum(documents.length, length - 1)
    return replace(documents, length=shorter, bytes=np.where(shorter < documents.length, -1, documents.bytes))


def countable(batch: Batch, bos_id: int) -> np.ndarray:
    """[B, T] whether a token's piece has a BOS, other than itself, to look at."""
    start = starts(batch.document[:, :-1])
    return (np.take_along_axis(batch.ids, start, 1) == bos_id) & (start < np.arange(start.shape[1]))


class Tally:
    """Sums over queries, by position: mass [n, P] and (seen, floor) [2, P] of each step; P positions' buckets."""

    def __init__(self) -> None:
        self.queries = np.zeros(len(POSITIONS))
        self.mass: dict[Step, Tensor] = {}
        self.reach: dict[Step, Tensor] = {}
        self.start_BT = torch.zeros(0)
        self.member_BTP = torch.zeros(0)

    def show(self, batch: Batch, bos_id: int) -> None:
        """Note where documents start in the rows that come next, and which queries count."""
        start = starts(batch.document[:, :-1])
        position = bucket(np.arange(start.shape[1]) - start, POSITIONS)
        member = countable(batch, bos_id)[..., None] & (position[..., None] == np.arange(len(POSITIONS)))
        self.queries += member.sum((0, 1))
        self.start_BT, self.member_BTP = torch.from_numpy(start), torch.from_numpy(member).float()

    def watch(self, step: Step, q: Tensor, k: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None) -> None:
        """Called in every executed layer, where queries are about to meet keys."""
        start_BT, member_BTP = self.start_BT.to(q.device), self.member_BTP.to(q.device)
        for row, (start, member) in enumerate(zip(start_BT, member_BTP, strict=True)):
            seen_TS = None if mask is None else mask[row if len(mask) > 1 else 0, 0]
            mass, reach = 0.0, 0.0
            for first in range(0, len(start), CHUNK):
                chunk = slice(first, first + CHUNK)
                keys = slice(0, first + CHUNK)  # nothing later is visible
                seen = causal(start, chunk) if seen_TS is None else seen_TS[chunk, keys]
                looked = start_mass(q[row, :, chunk], k[row, :, keys], scale, seen, start[chunk], sinks)
                reached = seen.gather(-1, start[chunk, None])[:, 0].float()
                mass = mass + looked @ member[chunk]
                reach = reach + torch.stack((reached, reached / seen.sum(-1))) @ member[chunk]
            assert isinstance(mass, Tensor), "a row has tokens"
            assert isinstance(reach, Tensor)
            self.mass[step] = self.mass.get(step, 0) + mass.cpu().double()
            self.reach[step] = self.reach.get(step, 0) + reach.cpu().double()

    def layer(self, step: Step) -> dict[str, Any]:
        """Means of one executed layer."""
        count = float(self.queries.sum())
        mass = self.mass.get(step, torch.zeros(1, len(POSITIONS)))
        visible, floor = self.reach.get(step, torch.zeros(2, len(POSITIONS)))
        heads = (mass.sum(-1) / count).tolist() if count else None
        parts = zip(POSITIONS, self.queries.tolist(), mass.mean(0).tolist(), floor.tolist(), strict=True)
        return {
            "layer": step.layer,
            "visit": step.visit,
            "mass_mean": over(float(mass.mean(0).sum()), count),
            "mass_per_head": heads,
            "sink_rate": None if heads is None else sum(mass > EPS for mass in heads) / len(heads),
            "visible": over(float(visible.sum()), count),
            "floor": over(float(floor.sum()), count),
            "position": {
                name: {"queries": int(n), "mass_mean": over(total, n), "floor": over(even, n)}
                for name, n, total, even in parts
            },
        }


def start_mass(
    q_nCd: Tensor, k_gSd: Tensor, scale: float, seen_CS: Tensor, start_C: Tensor, sinks_n: Tensor | None
) -> Tensor:
    """[n, C]: what each query's softmax gives to its start, in fp32 also under autocast; a batch may precede."""
    g, n = k_gSd.shape[-3], q_nCd.shape[-3]
    with torch.autocast(q_nCd.device.type, enabled=False):
        grouped = q_nCd.float().unflatten(-3, (g, n // g)).flatten(-3, -2)  # heads that share keys, under one another
        score = grouped @ k_gSd.float().transpose(-1, -2)
        score = score.unflatten(-2, (n // g, -1)).flatten(-4, -3).mul_(scale).masked_fill_(~seen_CS, -torch.inf)
        total = score.logsumexp(-1)
        if sinks_n is not None:
            total = torch.logaddexp(total, sinks_n.float()[:, None])
        return (score.gather(-1, start_C.expand(total.shape)[..., None])[..., 0] - total).exp()


def causal(start_T: Tensor, queries: slice) -> Tensor:
    """[C, S] visibility of a stretch of queries and the keys up to its end, in a row that is one document."""
    key = torch.arange(len(start_T), device=start_T.device)
    return key[: queries.stop] <= key[queries, None]


def over(total: float, count: float) -> float | None:
    """A sum over so many."""
    return total / count if count else None


def sink_words(baseline: dict[str, Any], twin: dict[str, Any]) -> list[str]:
    """What the two results of `sink` say, and no more than that; one sentence each."""
    if not baseline["queries"] or not twin["queries"]:
        return ["attention sinks were not measured: no document begins inside a held-out row"]
    most = {name: highest(result["layers"]) for name, result in (("baseline", baseline), ("twin", twin))}
    floor = max(layer["floor"] for result in (baseline, twin) for layer in result["layers"])
    if most["baseline"] <= EPS:
        if most["twin"] <= EPS:
            mass = max(most.values())
            return [
                f"no sink has formed (max head mass {mass:.3f}; uniform floor {floor:.3f}): "
                "visit 1 against visit 2 says nothing at this scale"
            ]
        return [
            f"a sink has formed in the twin only (max head mass {most['twin']:.3f}, in the baseline "
            f"{most['baseline']:.3f}; uniform floor {floor:.3f}): there is no baseline to compare visits with"
        ]
    return [depth_words(baseline), *visit_words(twin, most["twin"])]


def highest(layers: Sequence[dict[str, Any]]) -> float:
    """The largest mean mass of any head."""
    return max(mass for layer in layers for mass in layer["mass_per_head"])


def depth_words(baseline: dict[str, Any]) -> str:
    """Where the baseline's sink is."""
    layers = baseline["layers"]
    top = max(layers, key=lambda layer: layer["mass_mean"])
    return (
        f"baseline: mean mass on the document's start {layers[0]['mass_mean']:.3f} in the first layer, "
        f"{layers[-1]['mass_mean']:.3f} in the last, most in layer {top['layer'] + 1} of {len(layers)}: "
        f"{top['mass_mean']:.3f} (uniform floor {top['floor']:.3f})"
    )


def visit_words(twin: dict[str, Any], most: float) -> list[str]:
    """The core's visits, one against the next."""
    if most <= EPS:
        return [f"twin: no sink has formed (max head mass {most:.3f})"]
    mass = {(layer["layer"], layer["visit"]): layer["mass_mean"] for layer in twin["layers"]}
    visits = 1 + max(visit for _, visit in mass)
    core = [layer for layer, visit in mass if visit == 1]
    words = []
    for visit in range(1, visits):
        lower = sum(mass[layer, visit] < mass[layer, visit - 1] for layer in core)
        then, now = (sum(mass[layer, v] for layer in core) / len(core) for v in (visit - 1, visit))
        words.append(
            f"twin: core mean {then:.3f} on visit {visit}, {now:.3f} on visit {visit + 1}; "
            f"visit {visit + 1} is below visit {visit} in {lower} of {len(core)} core layers"
        )
    return words
