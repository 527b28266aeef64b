"""Which points are on the lattice? Geometries of attention, hidden widths, expert widths; as flat arrays.

A point is (hidden size, attention geometry, expert width, expert count). The lattice holds every multiple of the
steps whose proportions lie within `WINDOW` (a natural logarithm) of the baseline's, and nothing else:

    hidden      within e^HIDDEN_WINDOW of the relaxed width (e^UNSOLVED_WINDOW where the closed form has no solution)
    attention   query width / hidden     within e^WINDOW of the baseline's, head sizes in [half, all] of the baseline's;
                                         sectioned at the baseline's depth: head size and KV heads are the baseline's
    experts     expert width / hidden    within e^WINDOW of the baseline's
    count       from top-k to EXPERTS_REACH times the relaxed count

A pinned quantity is on the lattice whatever its step, and pins open the windows to `PINNED_WINDOW`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, floor

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.solver.problem import Problem, least_experts
from smelt_budget.solver.relax import Relaxed, cached

WINDOW = 0.4  # proportions from 2/3 to 3/2: past that the arms differ in more than the loop
HIDDEN_WINDOW = 0.25  # the best hidden size of the paper's cells lies within 0.07 of the relaxed one
UNSOLVED_WINDOW = 0.6
PINNED_WINDOW = 1.2
EXPERTS_REACH = 4
LATENT_HEADS_STEP = 4  # query heads of latent attention, where no KV heads set a step
MOST_GEOMETRIES = 1_000_000
"""A limit on memory, fifty times what the largest built-in model needs at the default steps."""
Array = np.ndarray


@dataclass(frozen=True)
class Axes:
    """The lattice, axis by axis; geometries are rows of equally long arrays."""

    hidden: Array
    geometry: dict[str, Array]
    """Attention fields, one entry per geometry."""
    query_width: Array
    """Value width of all query heads, one entry per geometry."""
    expert_width: Array
    least_experts: int
    most_experts: int
    window: float
    slenderness: float
    """Baseline's expert width / hidden."""
    attention_width: float
    """Baseline's query width / hidden."""

    def width_range(self, hidden: Array) -> tuple[Array, Array]:
        """First and one-past-last index into `expert_width` on the lattice, for hidden widths."""
        middle = self.slenderness * hidden
        return (
            np.searchsorted(self.expert_width, middle * exp(-self.window) - 1e-9),
            np.searchsorted(self.expert_width, middle * exp(self.window) + 1e-9, side="right"),
        )

    def hidden_range(self) -> tuple[Array, Array]:
        """First and one-past-last index into `hidden` on the lattice, for every geometry."""
        middle = self.query_width / self.attention_width
        return (
            np.searchsorted(self.hidden, middle * exp(-self.window) - 1e-9),
            np.searchsorted(self.hidden, middle * exp(self.window) + 1e-9, side="right"),
        )

    def points(self, experts_step: int, core_choices: int) -> int:
        """How many points the lattice holds."""
        first, last = self.width_range(self.hidden)
        below = np.concatenate([[0], np.cumsum(last - first)])
        start, stop = self.hidden_range()
        shapes = int((below[stop] - below[start])[stop > start].sum())
        counts = self.most_experts // experts_step - ceil(self.least_experts / experts_step) + 1
        return shapes * max(0, counts) * core_choices


def axes(problem: Problem, relaxed: Relaxed) -> Axes | None:
    """The lattice of a problem around its relaxed point; `None` where steps or pins leave no point.

    Raises:
        BadInput: sectioned heads were asked for and the KV heads (or the latent) do not divide by the visits, or the
            lattice is too large to hold.
    """
    b, step, keep = problem.baseline, problem.lattice, problem.keep
    window = PINNED_WINDOW if keep else WINDOW
    reach = PINNED_WINDOW if keep else HIDDEN_WINDOW if relaxed.exact else UNSOLVED_WINDOW
    hidden = multiples(relaxed.hidden_size * exp(-reach), relaxed.hidden_size * exp(reach), step.hidden_multiple)
    hidden = pinned(hidden, keep.get("hidden_size"))
    if not len(hidden):
        return None
    expert_width = multiples(
        b.moe_intermediate_size * hidden[0] / b.hidden_size * exp(-window),
        b.moe_intermediate_size * hidden[-1] / b.hidden_size * exp(window),
        step.expert_multiple,
    )
    geometry = latent_geometry(problem) if problem.latent else grouped_geometry(problem, window)
    if not all(len(values) for values in (hidden, expert_width, *geometry.values())):
        return None
    head = geometry["v_head_dim" if problem.latent else "head_dim"]
    base_width = b.num_attention_heads * (b.v_head_dim if problem.latent else b.head_dim)  # pyright: ignore
    least = least_experts(b)
    most = max(least, floor(EXPERTS_REACH * relaxed.num_experts))
    if "num_experts" in keep:
        least = most = keep["num_experts"]
    elif most // problem.experts_step * problem.experts_step < least:
        return None
    return Axes(
        hidden=hidden,
        geometry=geometry,
        query_width=geometry["num_attention_heads"] * head,
        expert_width=pinned(expert_width, keep.get("moe_intermediate_size")),
        least_experts=least,
        most_experts=most,
        window=window,
        slenderness=b.moe_intermediate_size / b.hidden_size,  # pyright: ignore[reportOptionalOperand]
        attention_width=base_width / b.hidden_size,
    )


def multiples(low: float, high: float, step: int) -> Array:
    """Multiples of `step` in [low, high], at least one step."""
    first = max(1, ceil(low / step - 1e-9))
    return np.arange(first, floor(high / step + 1e-9) + 1, dtype=float) * step


def check_size(words: str, count: int, most: int) -> None:
    """Refuse a lattice that would not fit into memory, before it is made."""
    if count > most:
        raise BadInput(
            f"the lattice holds {count:,} {words}, more than the {most:,} that are searched",
            "fix: larger --head-multiple or --hidden-multiple, or --keep a quantity",
        )


def pinned(values: Array, pin: int | None) -> Array:
    """The pin alone where there is one."""
    return values if pin is None else np.array([float(pin)])


def shallower(problem: Problem) -> float:
    """How many times more cache each layer of a twin with fewer layers may hold; 1 at the baseline's depth or more."""
    return max(1.0, problem.baseline.num_hidden_layers / problem.frame.num_hidden_layers)


def keeps_heads(problem: Problem) -> bool:
    """Sectioned at the baseline's depth, head size and KV heads stay; a pin on either frees the other."""
    freed = {"head_dim", "num_key_value_heads"} & problem.keep.keys()
    return problem.heads == "sectioned" and problem.depth_kept and not freed


def head_sizes(problem: Problem, field: str) -> Array:
    """Head sizes on the lattice: even (rotary pairs), never above the baseline's, at least half of it."""
    size = getattr(problem.baseline, field)
    if field in problem.keep:
        return np.array([float(problem.keep[field])])
    if keeps_heads(problem):
        return np.array([float(size)])
    values = multiples(size / 2, size, problem.lattice.head_multiple)
    return values[values % 2 == 0]


def grouped_geometry(problem: Problem, window: float) -> dict[str, Array]:
    """(query heads, KV heads, head size): every GQA ratio whose query width can be on the lattice."""
    b, keep = problem.baseline, problem.keep
    kv0, visits = b.num_key_value_heads, problem.placed.loop.visits
    assert kv0 is not None
    assert b.head_dim is not None
    widest = b.num_attention_heads * b.head_dim * exp(window)
    if "num_attention_heads" in keep:
        widest = max(widest, keep["num_attention_heads"] * keep.get("head_dim", b.head_dim))
    most = ceil(2 * kv0 * shallower(problem))
    default = [kv0] if keeps_heads(problem) else range(1, most + 1)
    kv_heads = [keep["num_key_value_heads"]] if "num_key_value_heads" in keep else default
    if problem.heads == "sectioned":
        divisible = [kv for kv in kv_heads if kv % visits == 0]
        if not divisible:
            raise BadInput(
                f"--heads sectioned needs KV heads that divide by the visits: {kv_heads[0]} by {visits} does not",
                "fix: --heads uniform",
            )
        kv_heads = divisible
    sizes, kv = (a.ravel() for a in np.meshgrid(head_sizes(problem, "head_dim"), np.array(kv_heads, dtype=float)))
    ratios = np.floor(widest / (kv * sizes)).astype(int)
    check_size("attention shapes", int(ratios.sum()), MOST_GEOMETRIES)
    ratio = np.arange(ratios.sum()) - np.repeat(np.cumsum(ratios) - ratios, ratios) + 1.0
    kv, sizes = np.repeat(kv, ratios), np.repeat(sizes, ratios)
    chosen = kv * ratio == keep.get("num_attention_heads", kv * ratio)
    table = (kv * ratio, kv, sizes)
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return {name: values[chosen] for name, values in zip(names, table, strict=True)}


def latent_geometry(problem: Problem) -> dict[str, Array]:
    """(query heads, KV rank, head sizes): the rank carries the cache, the value head keeps its ratio."""
    b, keep, step = problem.baseline, problem.keep, problem.lattice.head_multiple
    assert b.kv_lora_rank is not None
    assert b.qk_nope_head_dim is not None
    assert b.v_head_dim is not None
    kept = problem.heads == "sectioned" and problem.depth_kept
    room = 1.25 if shallower(problem) > 1 else 1.0  # a rank above the baseline's is for fewer layers only
    most = cached(b) * room * shallower(problem) - (cached(b) - b.kv_lora_rank)
    ranks = np.array([float(b.kv_lora_rank)]) if kept else multiples(1, most, step)
    ranks = pinned(ranks, keep.get("kv_lora_rank"))
    if problem.heads == "sectioned":
        latent, visits = ranks + (cached(b) - b.kv_lora_rank), problem.placed.loop.visits
        divisible = ranks[(latent % visits == 0) & (problem.core_kv_rank(ranks) >= 1)]
        if not len(divisible):
            raise BadInput(
                f"--heads sectioned needs a latent that divides by the visits; {latent[-1]:.0f} by {visits} does not",
                "fix: --heads uniform",
            )
        ranks = divisible
    heads_step = LATENT_HEADS_STEP if b.num_attention_heads % LATENT_HEADS_STEP == 0 else 1
    heads = pinned(multiples(1, b.num_attention_heads * exp(WINDOW), heads_step), keep.get("num_attention_heads"))
    nope = head_sizes(problem, "qk_nope_head_dim")
    value = np.full_like(nope, keep["v_head_dim"]) if "v_head_dim" in keep else nope * b.v_head_dim / b.qk_nope_head_dim
    whole = (value % step == 0) | ("v_head_dim" in keep)
    check_size("attention shapes", len(heads) * len(ranks) * len(nope), MOST_GEOMETRIES)
    place, n, rank = (a.ravel() for a in np.meshgrid(np.flatnonzero(whole), heads, ranks, indexing="ij"))
    return {
        "num_attention_heads": n,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": nope[place],
        "v_head_dim": value[place],
    }


def query_rank(problem: Problem, hidden: Array) -> Array | None:
    """The query rank keeps its share of the hidden width, in steps of the hidden multiple."""
    rank = problem.baseline.q_lora_rank
    if rank is None:
        return None
    if "q_lora_rank" in problem.keep:
        return np.full_like(hidden, problem.keep["q_lora_rank"])
    step = problem.lattice.hidden_multiple
    return np.maximum(np.floor(rank * hidden / problem.baseline.hidden_size / step + 0.5), 1) * step
