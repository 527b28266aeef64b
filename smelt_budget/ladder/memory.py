"""What must one GPU hold? Weights, gradients, AdamW's states and what the backward pass needs, for a parallel layout.

Per parameter, as Megatron-LM counts its distributed optimizer (docs: bf16 weights, fp32 gradients, 18 = 6 + 12 bytes):

    weight 2 (bf16)   gradient 4 (fp32)   states 12 (fp32 master weight, two moments)

    shard none        18                        every data-parallel rank has all
    shard optimizer   6 + 12 / d                d ranks share the states (ZeRO 1, arXiv:1910.02054)
    shard full        18 / d + 2 bytes of the largest two layers, gathered (ZeRO 3)

Tensor ranks t share what is not an expert, expert ranks e share the experts; d is data ranks for the former, data x
t / e for the latter. A pipeline stage holds whole layers, the core in one of them.

Kept for the backward pass, bytes per token and *executed* layer, term by term as in arXiv:2205.05198 section 4 (there
34 H for a dense GELU layer with dropout), here in bf16 with RMSNorm, flash attention (arXiv:2205.14135: no scores, one
fp32 log-sum-exp a head) and gated experts, K of which run; q, k and v are widths over all heads:

    attention   2 H (norm in) + 2 H (q, k, v in) + 2 (q + k + v) + 2 v' (out) + 4 n
    experts     2 H (norm in) + 2 H (router in) + 4 E (scores) + K (2 H (in) + 6 F (gate, up, product) + 2 H (out))
    dense MLP   2 H (norm in) + 2 H (in) + 6 D
    lm-head     4 H (norm in, head in) + 4 V (fp32 logits)

all divided by t (sequence parallelism). A looped layer is kept on every visit, so the twin keeps more than its baseline
although its weights are as many. With recomputation a layer keeps its input, 2 H, and one layer at a time the rest. The
first of p stages has p micro-batches in flight (1F1B). Fragmentation and communication buffers are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from smelt_budget.emit.launch import Layout, stages
from smelt_budget.ledger.rows import layer_rows
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import Dense, GroupedQuery, Layer, layer_kinds, layer_of

Shard = Literal["none", "optimizer", "full"]
Recompute = Literal["none", "full"]
WEIGHT, GRADIENT, STATES = 2, 4, 12
"""Bytes a parameter."""


@dataclass(frozen=True)
class Split:
    """How one arm is spread over GPUs, and what of the activations is kept."""

    layout: Layout
    shard: Shard
    recompute: Recompute
    micro_batch: int
    """Sequences that go through together."""
    context: int
    batch_sequences: int

    @property
    def in_flight(self) -> int:
        """Micro-batches of a step on one data-parallel rank, at least one."""
        return max(1, self.batch_sequences // (self.layout.data * self.micro_batch))


def memory(spec: ModelSpec, split: Split) -> dict[str, Any]:
    """Bytes of the fullest GPU by part, and which stage it is in."""
    cut = stages(spec, split.layout.pipeline)
    every = [stage_bytes(spec, split, cut, place) for place in range(len(cut))]
    fullest = max(range(len(every)), key=lambda place: sum(every[place].values()))
    found = every[fullest]
    return {**found, "total": sum(found.values()), "stage": fullest}


def stage_bytes(spec: ModelSpec, split: Split, cut: tuple[range, ...], place: int) -> dict[str, int]:
    """Of a GPU in one stage."""
    layout, H = split.layout, spec.hidden_size
    layers = [layer_of(spec, kind) for kind in layer_kinds(spec)]
    visits = [
        spec.loop.visits if spec.loop and spec.loop.start <= i < spec.loop.stop else 1 for i in range(len(layers))
    ]
    own, last = cut[place], place == len(cut) - 1
    sizes = [parameters(layers[i], H) for i in own]
    outside = (spec.vocab_size * H if place == 0 else 0) + (outer(spec, single=len(cut) == 1) if last else 0)
    plain = (sum(dense for dense, _ in sizes) + outside) / layout.tensor
    routed = sum(experts for _, experts in sizes) / layout.expert
    ranks = layout.data, layout.data * layout.tensor / layout.expert
    parts = {
        "weights": WEIGHT * shared(plain, routed, ranks if split.shard == "full" else (1, 1)),
        "gradients": GRADIENT * shared(plain, routed, ranks if split.shard == "full" else (1, 1)),
        "states": STATES * shared(plain, routed, ranks if split.shard != "none" else (1, 1)),
    }
    if split.shard == "full":
        largest = sorted((dense / layout.tensor + experts / layout.expert for dense, experts in sizes), reverse=True)
        parts["weights"] += WEIGHT * sum(largest[:2])
    tokens = split.micro_batch * split.context
    kept = [activations(layers[i], H) for i in own]
    if split.recompute == "full":
        held = sum(2 * H * visits[i] for i in own) + max(kept)
    else:
        held = sum(size * visits[i] for size, i in zip(kept, own, strict=True))
    flying = min(len(cut) - place, split.in_flight)
    head = 4 * H + 4 * spec.vocab_size if last else 0
    parts["activations"] = (held * flying + head) * tokens / layout.tensor
    return {name: round(value) for name, value in parts.items()}


def shared(plain: float, routed: float, ranks: tuple[float, float]) -> float:
    """Parameters on one rank."""
    return plain / ranks[0] + routed / ranks[1]


def outer(spec: ModelSpec, single: bool) -> int:
    """Final norm and head of the last stage; a tied head is stored again where the embedding is in another stage."""
    head = 0 if spec.tie_word_embeddings and single else spec.vocab_size * spec.hidden_size
    return spec.hidden_size + head


def parameters(layer: Layer, H: int) -> tuple[int, int]:
    """Stored in one layer: all but the experts, and the experts."""
    found = list(layer_rows(layer, H))
    routed = sum(row.params * row.stored for row in found if row.name.startswith("experts"))
    return sum(row.params * row.stored for row in found) - routed, routed


def activations(layer: Layer, H: int) -> int:
    """Bytes per token of one visit of one layer."""
    a = layer.attention
    if isinstance(a, GroupedQuery):
        q = v = a.query_heads * a.head_dim
        widths = q + 2 * a.kv_heads * a.head_dim
    else:
        q, v = a.query_heads * (a.nope + a.rope), a.query_heads * a.value
        widths = 2 * q + v + a.kv_rank + a.rope + (a.q_rank or 0)
    attention = 4 * H + 2 * widths + 2 * v + 4 * a.query_heads
    f = layer.ffn
    if isinstance(f, Dense):
        return attention + 4 * H + 6 * f.width
    shared_expert = 6 * (f.shared or 0)
    return attention + 4 * H + 4 * f.experts + f.top_k * (4 * H + 6 * f.width) + shared_expert
