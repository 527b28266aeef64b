"""What does each weight cost? One row per weight, three counts: stored, read, run.

H hidden, V vocabulary, E experts, K top-k, F expert width, n query heads, g KV heads, d head size, R KV rank.

    parameters = sum(params * stored)        the whole model
    active     = sum(params * read)          one token, one pass through the physical layers
    flops      = 2 * sum(macs * run)         one token, every visit; attention rows times positions attended
    kv cache   = sum(cache * run)            elements per token, one slot per executed layer

MoE is the gap between stored and read; looping is the gap between read and run. Every formula is written once,
below, over whatever numbers the spec holds: Python integers (exact), numpy arrays (the search) or sympy symbols
(the printed equation and the relaxation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from smelt_budget.spec.runs import (
    Dense,
    GroupedQuery,
    Latent,
    Layer,
    MoE,
    Run,
    Section,
    Window,
    merged,
    unfold,
)

Kind = Literal["embedding", "lm_head", "matrix", "router", "gate", "vector", "latent_norm", "attention", "cache"]


@dataclass(frozen=True)
class Row:
    """One weight (or one weightless operation), with what one instance of it costs and how many there are."""

    name: str
    kind: Kind
    """What a convention decides on: a counted matmul, a vector, attention's own work, the cache."""
    source: str
    params: Any = 0
    macs: Any = 0
    """Multiply-adds for one token and one run; for `attention` rows per position attended."""
    cache: Any = 0
    """Elements kept per token and executed layer."""
    stored: Any = 0
    read: Any = 0
    run: Any = 0
    window: Window | None = None
    sections: tuple[Section, ...] = ()


def rows(spec: Any) -> list[Row]:
    """Every row of a spec: embedding, the layers kind by kind, the final norm, the head."""
    H, V = spec.hidden_size, spec.vocab_size
    out = [Row("embedding", "embedding", "C2", params=V * H, stored=1, read=1, run=1)]
    for run in merged(unfold(spec)):
        out += [placed(row, run) for row in layer_rows(run.layer, H)]
    # A model that may exit after any visit normalises after each (Ouro); any other ends in one final norm.
    passes = spec.loop.visits if spec.early_exit_gate and spec.loop else 1
    out.append(norm("final_norm", H, spec.norm, passes))
    if spec.early_exit_gate:
        out.append(Row("early_exit_gate", "gate", "C14", params=H, macs=H, stored=1, read=1, run=passes))
        out.append(Row("early_exit_gate.bias", "vector", "C14", params=1, macs=1, stored=1, read=1, run=passes))
    tied = spec.tie_word_embeddings
    out.append(Row("lm_head", "lm_head", "C2", params=0 if tied else V * H, macs=V * H, stored=1, read=1, run=1))
    if spec.lm_head_bias:
        out.append(Row("lm_head.bias", "lm_head", "C2", params=V, stored=1, read=1, run=1))
    return out


def placed(row: Row, run: Run) -> Row:
    """A row of one layer, multiplied out over the layers and visits of its run."""
    depth = run.layers * run.visits
    return replace(
        row,
        stored=run.layers * row.stored,
        read=run.layers * row.read,
        run=depth * row.run,
        sections=(run.section,),
    )


def layer_rows(layer: Layer, H: Any) -> Iterator[Row]:
    """The rows of one layer, with stored/read/run per layer."""
    for i in range(layer.norms):
        yield norm(f"norm.{i + 1}", H, layer.norm_kind, 1)
    if isinstance(layer.attention, Latent):
        yield from latent_rows(layer.attention, H, layer.window)
    else:
        yield from grouped_query_rows(layer.attention, H, layer.window)
    if isinstance(layer.ffn, Dense):
        yield from mlp_rows("dense", layer.ffn.width, H, layer.ffn.bias)
    else:
        yield from moe_rows(layer.ffn, H)


def one(name: str, kind: Kind, source: str, params: Any, *, macs: Any = None, window: Window | None = None) -> Row:
    """A weight every token runs once per layer; a matrix (or vector) of n weights costs n multiply-adds."""
    return Row(name, kind, source, params, params if macs is None else macs, 0, 1, 1, 1, window)


def norm(name: str, H: Any, kind: str, runs: int) -> Row:
    """A normalisation's gain, and its bias where it has one."""
    weights = 2 * H if kind == "layer_norm" else H
    return Row(name, "vector", "C5", params=weights, macs=weights, stored=1, read=1, run=runs)


def grouped_query_rows(a: GroupedQuery, H: Any, window: Window | None) -> Iterator[Row]:
    """arXiv:2305.13245. The cache holds g heads; scores and values are computed for all n (rule C8)."""
    q, kv = a.query_heads * a.head_dim, a.kv_heads * a.head_dim
    yield one("attention.q", "matrix", "C3", H * q)
    yield one("attention.k", "matrix", "C3", H * kv)
    yield one("attention.v", "matrix", "C3", H * kv)
    yield one("attention.o", "matrix", "C3", H * q)
    if a.bias:
        yield one("attention.qkv_bias", "vector", "C5", q + 2 * kv)
    if a.output_bias:
        yield one("attention.o_bias", "vector", "C5", H)
    if a.qk_norm != "none":
        yield one("attention.qk_norm", "vector", "C5", q + kv if a.qk_norm == "full" else 2 * a.head_dim)
    if a.sinks:
        yield one("attention.sinks", "vector", "C5", a.query_heads)
    yield Row("attention.scores", "attention", "C8", macs=q, run=1, window=window)
    yield Row("attention.values", "attention", "C8", macs=q, run=1, window=window)
    yield Row("attention.kv_cache", "cache", "C10", cache=2 * kv, run=1, window=window)


def latent_rows(a: Latent, H: Any, window: Window | None) -> Iterator[Row]:
    """arXiv:2405.04434 eq. 9-19, in the unabsorbed form that training runs (rule C9)."""
    n, qk = a.query_heads, a.nope + a.rope
    if a.q_rank is None:
        yield one("attention.q", "matrix", "C9", H * n * qk)
    else:
        yield one("attention.q_down", "matrix", "C9", H * a.q_rank)
        yield one("attention.q_norm", "latent_norm", "C5", a.q_rank)
        yield one("attention.q_up", "matrix", "C9", a.q_rank * n * qk)
    yield one("attention.kv_down", "matrix", "C9", H * (a.kv_rank + a.rope))
    yield one("attention.kv_norm", "latent_norm", "C5", a.kv_rank)
    yield one("attention.kv_up", "matrix", "C9", a.kv_rank * n * (a.nope + a.value))
    yield one("attention.o", "matrix", "C9", n * a.value * H)
    if a.bias:
        q_bias = 0 if a.q_rank is None else a.q_rank
        yield one("attention.down_bias", "vector", "C5", q_bias + a.kv_rank + a.rope)
    if a.output_bias:
        yield one("attention.o_bias", "vector", "C5", H)
    yield Row("attention.scores", "attention", "C9", macs=n * qk, run=1, window=window)
    yield Row("attention.values", "attention", "C9", macs=n * a.value, run=1, window=window)
    yield Row("attention.kv_cache", "cache", "C10", cache=a.kv_rank + a.rope, run=1, window=window)


def mlp_rows(name: str, width: Any, H: Any, bias: bool) -> Iterator[Row]:
    """A gated MLP: gate, up, down (arXiv:2002.05202 eq. 6)."""
    yield one(name, "matrix", "C4", 3 * H * width)
    if bias:
        yield one(f"{name}.bias", "vector", "C5", 2 * width + H)


def moe_rows(m: MoE, H: Any) -> Iterator[Row]:
    """E experts stored, K read and run; the router and a shared expert run for every token (rule C6)."""
    E, K = m.experts, m.top_k
    if m.has_router:
        yield one("router", "router", "C6", H * E)
        if m.router_bias:
            yield one("router.bias", "vector", "C5", E)
    yield Row("experts", "matrix", "C4", 3 * H * m.width, 3 * H * m.width, 0, E, K, K)
    if m.bias:
        yield Row("experts.bias", "vector", "C5", 2 * m.width + H, 2 * m.width + H, 0, E, K, K)
    if m.shared is not None:
        yield from mlp_rows("shared_expert", m.shared, H, m.shared_bias)
        if m.shared_gate:
            yield one("shared_expert.gate", "gate", "C6", H)
