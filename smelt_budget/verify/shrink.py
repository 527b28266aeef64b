"""What is a small model of the same kind? A baseline's traits at another width, depth and context.

With s = H' / H the proxy baseline keeps, up to rounding (primes are the small model's):

    query width     n' d' / H' = n d / H                      attention's share of the work
    GQA ratio       n' / g'    = n / g                        a divisor of it where heads would fall below 8
    experts         k' F' / H' = k F / H,  E' / k' = E / k    fewer, wider experts of the same active width and sparsity
    shared, dense   shared' / H' = shared / H,  dense' / H' = dense / H
    sparsity        S' = S                                    E' is moved off k' E / k only as far as this needs

The last line is why E' / k' is not always kept: where some layers are dense, one dense layer of four is a larger share
than three of sixty-one, and norms and routers weigh more in a narrow model. Layers keep their kinds: dense-first layers
are scaled but never vanish, periodic patterns go on, and every kind of a pattern too long for the depth stays once.
Windows shrink with the context. In latent attention the three head sizes keep their ratio and the rotary key is 8 wide
at least; the KV rank cannot keep its share of H (512 of 7168 would be 7 of 96), so a few ranks are offered instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from smelt_budget.errors import BadInput
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.solver.plan import leading_dense, repeated
from smelt_budget.solver.sparsify import sparsified
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import layer_kinds

NARROWEST = 8  # below 8 elements a row is shorter than one 32-byte vector load of float32
SLIM_EXPERT = 16  # an expert narrower than this is widened by a smaller top-k
KEPT = 0.005  # S may be this far off before E is moved from k' E / k
KV_HEADS = (1, 2, 3, 4, 6, 8, 12, 16)
RANKS = (24, 32, 40, 48, 64, 96, 128)
NARROWEST_WINDOW = 16
Fields = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How small the small model is to be."""

    layers: int
    hidden_size: int
    context: int
    full_context: int
    """The context the full pair was matched at; windows keep their share of it."""
    vocab_size: int
    head_multiple: int
    expert_multiple: int
    growth: float
    """Width over the tiny preset's: sqrt of the ratio of sizes. More width carries more experts."""


def shrunk(full: ModelSpec, scale: Scale, attention: Fields) -> ModelSpec:
    """The small baseline before its expert count is moved to the full one's sparsity."""
    multiplier = full.attention_multiplier
    if multiplier is not None and full.head_dim is not None:
        multiplier *= full.head_dim / attention["head_dim"]  # Granite's is 1 / head_dim
    scaling = full.rope_scaling
    if scaling is not None and scaling.original_max_position_embeddings is not None:
        original = min(scaling.original_max_position_embeddings, scale.context)
        scaling = scaling.model_copy(update={"original_max_position_embeddings": original})
    return full.replace(
        **attention,
        **layers_of(full, scale.layers),
        **windows_of(full, scale),
        **experts_of(full, scale),
        hidden_size=scale.hidden_size,
        vocab_size=scale.vocab_size,
        max_position_embeddings=scale.context,
        attention_multiplier=multiplier,
        rope_scaling=scaling and scaling.model_dump(),
        loop=None,
    )


def as_sparse(small: ModelSpec, sparsity: float, setting: Setting) -> ModelSpec | None:
    """The small baseline at a sparsity: its expert count stays where that is near enough, else it moves."""
    if abs(Ledger(small, setting).compute_equivalent_sparsity - sparsity) <= KEPT:
        return small
    try:
        return sparsified(small, sparsity, setting, None, small.n_group or 1)
    except BadInput:  # out of reach, or a count that the expert groups cannot take
        return None


def stepped(width: float, step: int, least: int) -> int:
    """The nearest multiple of `step`, not below `least`."""
    return max(ceil(least / step) * step, int(width / step + 0.5) * step)


def floor_of(width: int | None) -> int:
    """No width falls below NARROWEST, unless it was narrower in the full model."""
    return min(NARROWEST, width or NARROWEST)


def layers_of(full: ModelSpec, layers: int) -> Fields:
    """Kinds of the layers at another depth."""
    kinds = [(window, dense) for _, window, dense in layer_kinds(full)]
    first = leading_dense(full.mlp_only_layers)
    leading = min(layers - 1, max(1, round(first * layers / full.num_hidden_layers))) if first else 0
    dense = [True] * leading + cut([dense for _, dense in kinds[first:]], layers - leading)
    windows = cut([window for window, _ in kinds], layers)
    return {
        "num_hidden_layers": layers,
        "layer_types": full.layer_types and tuple(windows),
        "mlp_only_layers": tuple(i for i, is_dense in enumerate(dense) if is_dense),
    }


def cut(pattern: list[Any], length: int) -> list[Any]:
    """A pattern of kinds at another length: its period if that keeps all kinds, else samples, each kind kept."""
    out = repeated(pattern, 0, length)
    if out is not None and set(out) == set(pattern):
        return out
    out = [pattern[(2 * i + 1) * len(pattern) // (2 * length)] for i in range(length)]
    for kind in dict.fromkeys(pattern):
        if kind not in out:
            places = sorted(range(length), key=lambda i: abs(i - pattern.index(kind) * length / len(pattern)))
            spare = [i for i in places if out.count(out[i]) > 1]
            if spare:
                out[spare[0]] = kind
    return out


def windows_of(full: ModelSpec, scale: Scale) -> Fields:
    """Windows by the ratio of contexts, at most half the context so that they bind; one that never did stays so."""
    out: Fields = {}
    for name in ("sliding_window", "attention_chunk_size"):
        size = getattr(full, name)
        if size is None:
            continue
        longest = full.max_position_embeddings or scale.full_context
        if size >= longest:
            out[name] = scale.context
        else:
            scaled = round(size * scale.context / scale.full_context)
            out[name] = max(1, min(max(scaled, NARROWEST_WINDOW), scale.context // 2))
    return out


def experts_of(full: ModelSpec, scale: Scale) -> Fields:
    """Top-k, expert count and the FFN widths; groups of experts where the count still divides into them."""
    assert full.num_experts is not None
    assert full.moe_intermediate_size is not None
    ratio, step = scale.hidden_size / full.hidden_size, scale.expert_multiple
    k = full.num_experts_per_tok or 1
    small_k = k if ratio >= 1 else top_k(full, ratio, scale.growth)
    experts = max(2, round(small_k * full.num_experts / k))
    groups = groups_of(full, experts, small_k)
    if groups["n_group"]:
        experts = stepped(experts, groups["n_group"], groups["n_group"])
    width = full.moe_intermediate_size
    out = groups | {
        "num_experts": experts,
        "num_experts_per_tok": small_k,
        "moe_intermediate_size": stepped(width * ratio * k / small_k, step, floor_of(width)),
    }
    for name in ("shared_expert_intermediate_size", "intermediate_size"):
        old = getattr(full, name)
        if old is not None:
            out[name] = stepped(old * ratio, step, floor_of(old))
    return out


def top_k(full: ModelSpec, ratio: float, growth: float) -> int:
    """The largest divisor of K with at most 4 experts run, 64 stored (times growth), each 16 wide or more; 2 at least.

    4 of 32 is the pair the training of small twins was measured on; past 64 experts a step on a CPU is mostly overhead.
    """
    k, experts, width = full.num_experts_per_tok or 1, full.num_experts or 1, full.moe_intermediate_size or 1
    least = min(k, 2)
    choices = sorted({least, *(d for d in range(least, k + 1) if k % d == 0)}, reverse=True)
    for small in choices:
        slim = width * ratio * k / small < SLIM_EXPERT
        if small <= 4 * growth and small * experts / k <= 64 * growth and not slim:
            return small
    return choices[-1]


def groups_of(full: ModelSpec, experts: int, k: int) -> Fields:
    """Expert groups of 16 or more, the same share of them chosen; none where that leaves fewer than two."""
    groups, chosen = full.n_group, full.topk_group
    if groups is None or groups == 1 or chosen is None:
        return {"n_group": groups, "topk_group": chosen}
    for small in sorted((d for d in range(2, groups + 1) if groups % d == 0), reverse=True):
        some = max(1, int(chosen * small / groups + 0.5))
        if small * 16 <= experts and some * (experts // small) >= k:
            return {"n_group": small, "topk_group": some}
    return {"n_group": None, "topk_group": None}


def attentions(full: ModelSpec, scale: Scale, visits: int, sectioned: bool) -> Iterator[Fields]:
    """The attention shapes offered at a width; all keep the query width's share of it."""
    if full.kv_lora_rank is None:
        yield from grouped(full, scale, visits if sectioned else 1)
    else:
        yield from latent(full, scale, visits, sectioned)


def grouped(full: ModelSpec, scale: Scale, divisor: int) -> Iterator[Fields]:
    """(query heads, KV heads, head size): the GQA ratio, and its largest divisor that leaves wider heads."""
    assert full.head_dim is not None
    assert full.num_key_value_heads is not None
    query = full.num_attention_heads * full.head_dim * scale.hidden_size / full.hidden_size
    ratio = full.num_attention_heads // full.num_key_value_heads
    narrow, most = floor_of(full.head_dim), max(full.num_key_value_heads, divisor)
    for kv in (g for g in KV_HEADS if g <= most and g % divisor == 0):
        offered = 0
        for group in (d for d in range(ratio, 0, -1) if ratio % d == 0):
            head = stepped(query / (kv * group), scale.head_multiple, narrow)
            if query / (kv * group) < narrow or head > full.head_dim:
                continue
            yield {"num_attention_heads": kv * group, "num_key_value_heads": kv, "head_dim": head}
            offered += 1
            if offered == 2:
                break


def latent(full: ModelSpec, scale: Scale, visits: int, sectioned: bool) -> Iterator[Fields]:
    """(query heads, head sizes, ranks) of latent attention."""
    nope, rope, value, rank = full.qk_nope_head_dim, full.qk_rope_head_dim, full.v_head_dim, full.kv_lora_rank
    assert nope is not None
    assert rope is not None
    assert value is not None
    assert rank is not None
    ratio = scale.hidden_size / full.hidden_size
    small_rope = min(rope, stepped(rope * ratio, 2, floor_of(rope)))
    small_nope = min(nope, stepped(nope * small_rope / rope, scale.head_multiple, floor_of(nope)))
    small_value = stepped(value * small_nope / nope, scale.head_multiple, floor_of(value))
    heads = max(1, round(full.num_attention_heads * value * ratio / small_value))
    query_rank = full.q_lora_rank and stepped(full.q_lora_rank * ratio, 8, floor_of(full.q_lora_rank))
    for small_rank in sorted({*RANKS, stepped(rank * ratio, 8, NARROWEST)}):
        cached = small_rank + small_rope
        if small_rank > rank or (sectioned and (cached % visits or cached // visits - small_rope < floor_of(rank))):
            continue
        yield {
            "num_attention_heads": heads,
            "num_key_value_heads": None,
            "qk_nope_head_dim": small_nope,
            "qk_rope_head_dim": small_rope,
            "v_head_dim": small_value,
            "q_lora_rank": query_rank,
            "kv_lora_rank": small_rank,
        }
