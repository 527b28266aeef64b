"""Which layers run, how often? A spec unfolds into runs: (layer, how many alike in a row, visits).

Every count and the model itself walk the runs, so looping is never a special case. `unfold` reads attributes
only: it takes a `ModelSpec`, or anything with the same fields holding numpy arrays or sympy symbols, so that
one definition serves exact integers, the vectorised search and the printed equations. Nothing here branches
on a value that the solver varies; the integer `num_experts` 1 (dense, rule C7) is not among those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Section = Literal["prelude", "core", "coda"]


@dataclass(frozen=True)
class GroupedQuery:
    """Grouped-query attention: heads, and which vectors stand beside the four matrices."""

    query_heads: Any
    kv_heads: Any
    head_dim: Any
    bias: bool
    output_bias: bool
    qk_norm: str
    sinks: bool


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434): what is cached is one latent and one rotary key."""

    query_heads: Any
    q_rank: Any | None
    kv_rank: Any
    nope: Any
    rope: Any
    value: Any
    bias: bool
    output_bias: bool


@dataclass(frozen=True)
class Dense:
    """A gated MLP."""

    width: Any
    bias: bool


@dataclass(frozen=True)
class MoE:
    """Routed experts, and perhaps one shared expert."""

    experts: Any
    top_k: int
    width: Any
    shared: Any | None
    shared_gate: bool
    shared_bias: bool
    has_router: bool
    router_bias: bool
    bias: bool


@dataclass(frozen=True)
class Window:
    """How far back a layer sees. `chunked`: within its own block; otherwise the last `size` positions."""

    size: int
    chunked: bool


@dataclass(frozen=True)
class Layer:
    """One layer's attention, window, FFN and norms."""

    attention: GroupedQuery | Latent
    window: Window | None
    ffn: Dense | MoE
    norms: int
    norm_kind: str


@dataclass(frozen=True)
class Run:
    """`layers` equal layers in a row, executed `visits` times each."""

    layer: Layer
    kind: tuple[Section, str, bool]
    """Section, window kind, whether the FFN is dense: layers of one kind are alike in everything."""
    layers: int
    visits: int

    @property
    def section(self) -> Section:
        """Where the run stands; an unlooped model is all prelude."""
        return self.kind[0]


class Varied:
    """A spec's fields, some of them swapped for arrays, symbols or fractions; nothing is validated."""

    def __init__(self, spec: Any, **fields: Any):
        for name in type(spec).model_fields:
            setattr(self, name, fields[name] if name in fields else getattr(spec, name))


def unfold(spec: Any) -> tuple[Run, ...]:
    """The runs of a spec in order of depth. Concatenated they are the physical layers, each once."""
    runs: list[Run] = []
    for kind in layer_kinds(spec):
        if runs and runs[-1].kind == kind:
            last = runs[-1]
            runs[-1] = Run(last.layer, kind, last.layers + 1, last.visits)
        else:
            visits = spec.loop.visits if kind[0] == "core" else 1
            runs.append(Run(layer_of(spec, kind), kind, 1, visits))
    return tuple(runs)


def merged(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Runs of one kind put together, for counting; the order of depth is lost."""
    together: dict[tuple[Section, str, bool], Run] = {}
    for run in runs:
        before = together.get(run.kind)
        together[run.kind] = Run(run.layer, run.kind, run.layers + (before.layers if before else 0), run.visits)
    return tuple(together.values())


def layer_kinds(spec: Any) -> list[tuple[Section, str, bool]]:
    """(section, window kind, dense?) of each physical layer."""
    dense = set(spec.mlp_only_layers)
    default = "full_attention" if spec.sliding_window is None else "sliding_attention"
    windows = spec.layer_types or (default,) * spec.num_hidden_layers
    return [
        (section_of(spec, i), windows[i], spec.num_experts is None or i in dense) for i in range(spec.num_hidden_layers)
    ]


def section_of(spec: Any, layer: int) -> Section:
    """Prelude, core or coda; in an unlooped model every layer is prelude."""
    if spec.loop is None or layer < spec.loop.start:
        return "prelude"
    return "core" if layer < spec.loop.stop else "coda"


def layer_of(spec: Any, kind: tuple[Section, str, bool]) -> Layer:
    """The layer of one kind; in a sectioned model the core's own heads, experts or rank apply."""
    section, window_kind, dense = kind
    windows = {
        "full_attention": None,
        "sliding_attention": spec.sliding_window and Window(spec.sliding_window, chunked=False),
        "chunked_attention": spec.attention_chunk_size and Window(spec.attention_chunk_size, chunked=True),
    }
    return Layer(
        attention=attention_of(spec, section),
        window=windows[window_kind],
        ffn=Dense(spec.intermediate_size, spec.mlp_bias) if dense else moe_of(spec, section),
        norms=spec.norms_per_layer,
        norm_kind=spec.norm,
    )


def own(spec: Any, section: Section, field: str) -> Any:
    """A field's value in a section: the core's own where the model is sectioned, else the spec's."""
    value = getattr(spec.core, field) if section == "core" and spec.core is not None else None
    return getattr(spec, field) if value is None else value


def attention_of(spec: Any, section: Section) -> GroupedQuery | Latent:
    """The attention of a section."""
    if spec.kv_lora_rank is not None:
        return Latent(
            query_heads=spec.num_attention_heads,
            q_rank=spec.q_lora_rank,
            kv_rank=own(spec, section, "kv_lora_rank"),
            nope=spec.qk_nope_head_dim,
            rope=spec.qk_rope_head_dim,
            value=spec.v_head_dim,
            bias=spec.attention_bias,
            output_bias=spec.attention_output_bias,
        )
    return GroupedQuery(
        query_heads=spec.num_attention_heads,
        kv_heads=own(spec, section, "num_key_value_heads"),
        head_dim=spec.head_dim,
        bias=spec.attention_bias,
        output_bias=spec.attention_output_bias,
        qk_norm=spec.qk_norm,
        sinks=spec.attention_sinks,
    )


def moe_of(spec: Any, section: Section) -> MoE:
    """The experts of a section."""
    experts = own(spec, section, "num_experts")
    return MoE(
        experts=experts,
        top_k=spec.num_experts_per_tok,
        width=spec.moe_intermediate_size,
        shared=spec.shared_expert_intermediate_size,
        shared_gate=spec.shared_expert_gate,
        shared_bias=spec.mlp_bias,
        has_router=not (type(experts) is int and experts == 1),
        router_bias=spec.router_bias,
        bias=spec.expert_bias,
    )
