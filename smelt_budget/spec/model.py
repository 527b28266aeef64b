"""What is this model? One frozen, strict description of a decoder, under Hugging Face's field names.

Widths are numbers of elements, counts are numbers of things; nothing here knows a cost. A field that is
`None` means "this model does not have it". No width has a default: a missing one is an error (rule C1).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from smelt_budget.errors import BadInput
from smelt_budget.spec.blocks import MOST_WIDE, Core, Count, Frozen, Heads, Layers, Loop, Positive, RopeScaling, Width
from smelt_budget.spec.text import kind_of

LayerKind = Literal["full_attention", "sliding_attention", "chunked_attention"]


class ModelSpec(Frozen):
    """A decoder-only transformer, looped or not, dense or Mixture-of-Experts."""

    hidden_size: Width
    """H, the width of the residual stream."""
    num_hidden_layers: Layers
    """L, the physical depth: layers stored, not layers executed."""
    vocab_size: Width
    """V, rows of the embedding."""
    max_position_embeddings: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """The longest context the model is made for, in tokens."""
    tie_word_embeddings: bool = False
    """Whether the lm-head is the input embedding."""
    lm_head_bias: bool = False

    num_attention_heads: Heads
    """Query heads."""
    num_key_value_heads: Heads | None = None
    """Key/value heads; left out it equals the query heads, as in every Hugging Face family."""
    head_dim: Width | None = None
    """Left out or null it is hidden_size / num_attention_heads, which must then be whole."""
    attention_bias: bool = False
    """Biases on the q, k and v projections (latent attention: on the two down-projections)."""
    attention_output_bias: bool = False
    """A bias on the output projection."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm gains on queries and keys: one head wide (Qwen3), or all heads wide (OLMoE)."""
    attention_sinks: bool = False
    """One learned sink logit per query head (gpt-oss)."""
    sliding_window: Width | None = None
    """Positions a `sliding_attention` layer attends to, itself included."""
    attention_chunk_size: Width | None = None
    """Positions in the block a `chunked_attention` layer attends within (Llama 4)."""
    layer_types: tuple[LayerKind, ...] | None = None
    """One kind per physical layer; left out, every layer is windowed if there is a window, else full."""

    kv_lora_rank: Width | None = None
    """Set for multi-head latent attention (DeepSeek): the width of the cached latent."""
    q_lora_rank: Width | None = None
    qk_nope_head_dim: Width | None = None
    qk_rope_head_dim: Width | None = None
    v_head_dim: Width | None = None

    intermediate_size: Width | None = None
    """Width of the gated MLP in dense layers."""
    mlp_bias: bool = False
    """Biases in the dense (and shared) gated MLPs."""
    num_experts: Count | None = None
    """E, routed experts in each MoE layer; 1 means a dense layer without a router."""
    num_experts_per_tok: Count | None = None
    """K, experts each token runs."""
    moe_intermediate_size: Width | None = None
    """F, the width of one routed expert."""
    shared_expert_intermediate_size: Width | None = None
    """Total width of the always-on expert beside the routed ones."""
    shared_expert_gate: bool = False
    """A hidden_size x 1 sigmoid gate on the shared expert (Qwen2-MoE)."""
    router_bias: bool = False
    expert_bias: bool = False
    """Biases on the experts' matrices: 2F + H each (gpt-oss)."""
    mlp_only_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Layers, 0-based, whose FFN is dense although the model has experts."""

    norm: Literal["rms_norm", "layer_norm", "layer_norm_no_bias"] = "rms_norm"
    """Which normalisation stands before each branch; layer_norm has a bias beside its gain."""
    norms_per_layer: Literal[2, 4] = 2
    """4 where each branch is normalised before and after (Ouro)."""
    early_exit_gate: bool = False
    """A hidden_size -> 1 linear with bias, run after every visit of the stack (Ouro)."""

    rms_norm_eps: Positive = 1e-6
    """Epsilon of every normalisation, LayerNorms included, but the two inside latent attention: theirs is 1e-6."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Absent: the frequencies are not stretched."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of head_dim that rotates, from its front (latent attention: of qk_rope_head_dim)."""
    rope_interleave: bool = False
    """Whether neighbours (2i, 2i + 1) rotate together (DeepSeek), not (i, i + d/2)."""
    swiglu_limit: Positive | None = None
    """Where the experts' two branches are clamped; set, they meet as (up + 1) gate sigmoid(1.702 gate) (gpt-oss)."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """What turns router logits into expert scores."""
    norm_topk_prob: bool = True
    """Whether the scores of the chosen K are divided by their sum."""
    routed_scaling_factor: Positive = 1.0
    """Factor on the routed experts' scores, after norm_topk_prob."""
    n_group: Count | None = None
    """Equal groups of experts (DeepSeek); absent or 1: none. A group counts by its best expert's score, or with
    `router_correction_bias` by the sum of its two best."""
    topk_group: Count | None = None
    """How many of the groups a token may choose experts from."""
    router_correction_bias: bool = False
    """A buffer per expert added to its score for choosing only (DeepSeek-V3); no parameter (rule C6)."""
    embedding_multiplier: Positive = 1.0
    """Factor on the embedding's output (Granite, as the next three)."""
    residual_multiplier: Positive = 1.0
    """Factor on both branch outputs of every layer."""
    attention_multiplier: Positive | None = None
    """Replaces 1 / sqrt(head_dim) as the factor on attention scores."""
    logits_scaling: Positive = 1.0
    """The lm-head's output is divided by it."""

    loop: Loop | None = None
    """Absent: every layer runs once."""
    core: Core | None = None
    """Present in a sectioned model only; needs `loop`."""

    @property
    def is_moe(self) -> bool:
        """Whether any layer chooses among experts; one expert is none to choose from (rule C7)."""
        return (self.num_experts or 1) > 1 and len(self.mlp_only_layers) < self.num_hidden_layers

    @property
    def effective_depth(self) -> int:
        """Layers executed for one token, over all visits."""
        if self.loop is None:
            return self.num_hidden_layers
        return self.num_hidden_layers + (self.loop.visits - 1) * (self.loop.stop - self.loop.start)

    def replace(self, **fields: Any) -> ModelSpec:
        """A changed copy, validated again (pydantic's `model_copy(update=)` is not)."""
        return checked(self.model_dump() | fields)

    def compact(self) -> dict[str, Any]:
        """Only what differs from the defaults: what a person would write down. Reading it back gives self."""
        return self.model_dump(exclude_defaults=True, mode="json")

    @field_validator("layer_types", "mlp_only_layers", mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="before")
    @classmethod
    def _fill_heads(cls, data: Any) -> Any:
        """Null KV heads and head size follow from their neighbours; that is a definition, not a guess."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
        if data.get("num_key_value_heads") is None:
            data["num_key_value_heads"] = heads
        whole = type(heads) is int and type(hidden) is int and heads > 0 and 0 < hidden <= MOST_WIDE
        if data.get("head_dim") is None and data.get("kv_lora_rank") is None and whole:
            if hidden % heads:
                raise ValueError(
                    f"head_dim is missing and hidden_size {hidden} does not divide by num_attention_heads {heads}"
                    f" ({hidden / heads:.2f}); give head_dim"
                )
            data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _attention_is_whole(self) -> ModelSpec:
        latent = {
            name: getattr(self, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
        }
        if self.kv_lora_rank is None:
            stray = [name for name, value in latent.items() if value is not None]
            if stray:
                raise ValueError(f"{', '.join(stray)} set without kv_lora_rank: is this latent attention or not?")
            if self.num_attention_heads % self.num_key_value_heads:  # pyright: ignore[reportOperatorIssue]
                raise ValueError(
                    f"num_attention_heads {self.num_attention_heads} does not divide by num_key_value_heads "
                    f"{self.num_key_value_heads}"
                )
        else:
            missing = [name for name, value in latent.items() if value is None and name != "q_lora_rank"]
            if missing:
                raise ValueError(f"latent attention (kv_lora_rank is set) needs {', '.join(missing)}")
            if self.qk_norm != "none" or self.attention_sinks:
                raise ValueError("qk_norm and attention_sinks are not defined here for latent attention")
        return self

    @model_validator(mode="after")
    def _windows_are_whole(self) -> ModelSpec:
        kinds = self.layer_types
        if kinds is None:
            if self.attention_chunk_size is not None:
                raise ValueError("attention_chunk_size needs layer_types to say which layers are chunked")
            return self
        if len(kinds) != self.num_hidden_layers:
            raise ValueError(f"layer_types lists {len(kinds)} layers, num_hidden_layers is {self.num_hidden_layers}")
        if "sliding_attention" in kinds and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention but sliding_window is missing")
        if "chunked_attention" in kinds and self.attention_chunk_size is None:
            raise ValueError("layer_types has chunked_attention but attention_chunk_size is missing")
        return self

    @model_validator(mode="after")
    def _ffn_is_whole(self) -> ModelSpec:
        experts, k = self.num_experts, self.num_experts_per_tok
        if any(layer >= self.num_hidden_layers for layer in self.mlp_only_layers):
            raise ValueError(
                f"mlp_only_layers names layer {max(self.mlp_only_layers)}; the last is {self.num_hidden_layers - 1}"
            )
        if len(set(self.mlp_only_layers)) != len(self.mlp_only_layers):
            raise ValueError("mlp_only_layers names a layer twice")
        if experts is None:
            extra = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
            stray = [name for name in extra if getattr(self, name) is not None]
            if stray or self.mlp_only_layers:
                raise ValueError(f"{', '.join(stray) or 'mlp_only_layers'} set without num_experts")
        else:
            if k is None:
                raise ValueError(f"num_experts_per_tok is missing (num_experts is {experts})")
            if k > experts:
                raise ValueError(f"num_experts_per_tok {k} is more than num_experts {experts}")
            if self.moe_intermediate_size is None:
                raise ValueError("moe_intermediate_size is missing: the width of one expert is never guessed")
        if self.shared_expert_gate and self.shared_expert_intermediate_size is None:
            raise ValueError("shared_expert_gate without shared_expert_intermediate_size")
        if (experts is None or self.mlp_only_layers) and self.intermediate_size is None:
            raise ValueError("intermediate_size is missing: the width of the dense layers is never guessed")
        return self

    @model_validator(mode="after")
    def _groups_are_whole(self) -> ModelSpec:
        groups, chosen = self.n_group, self.topk_group
        if groups is None or groups == 1:
            if chosen not in (None, 1):
                raise ValueError(f"topk_group {chosen} without n_group to choose from")
            return self
        if self.num_experts is None:
            raise ValueError("n_group set without num_experts")
        if chosen is None:
            raise ValueError(f"topk_group is missing (n_group is {groups})")
        if chosen > groups:
            raise ValueError(f"topk_group {chosen} is more than n_group {groups}")
        for name, experts in (("", self.num_experts), ("core.", self.core.num_experts if self.core else None)):
            if experts is not None and experts % groups:
                raise ValueError(f"{name}num_experts {experts} does not divide by n_group {groups}")
            if experts is not None and chosen * experts // groups < (self.num_experts_per_tok or 0):
                raise ValueError(
                    f"topk_group {chosen} of n_group {groups} leaves {chosen * experts // groups} experts of "
                    f"{name}num_experts {experts}, fewer than num_experts_per_tok {self.num_experts_per_tok}"
                )
        return self

    @model_validator(mode="after")
    def _core_is_whole(self) -> ModelSpec:
        if self.loop is not None and self.loop.stop > self.num_hidden_layers:
            raise ValueError(f"loop.stop {self.loop.stop} is past the last of {self.num_hidden_layers} layers")
        core = self.core
        if core is None:
            return self
        if self.loop is None:
            raise ValueError("core needs loop: a sectioned model is a looped one")
        if core.kv_lora_rank is not None and self.kv_lora_rank is None:
            raise ValueError("core.kv_lora_rank in a model without latent attention")
        if core.num_key_value_heads is not None and (
            self.kv_lora_rank is not None or self.num_attention_heads % core.num_key_value_heads
        ):
            raise ValueError(
                f"core.num_key_value_heads {core.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}, or attention is latent"
            )
        if core.num_experts is not None and (
            self.num_experts is None or core.num_experts < (self.num_experts_per_tok or 0)
        ):
            raise ValueError(
                f"core.num_experts {core.num_experts} is below num_experts_per_tok {self.num_experts_per_tok}"
            )
        return self


def checked(fields: dict[str, Any], origin: str = "spec") -> ModelSpec:
    """A `ModelSpec` from plain fields, with pydantic's findings turned into one readable `BadInput`."""
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError as error:
        raise BadInput(f"{origin} is not a model that can be counted", *explained(error)) from None


MOST_SHOWN = 8
WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a mapping",
}


def explained(error: ValidationError) -> list[str]:
    """One line per finding: the key, what is wrong, what was given."""
    lines = []
    for finding in error.errors(include_url=False):
        key = ".".join(map(str, finding["loc"]))
        given = finding.get("input")
        message = finding["msg"].removeprefix("Value error, ")
        if finding["type"] == "extra_forbidden":
            message = "unknown key; it could change a count, so it is not skipped"
        elif finding["type"] == "missing" or given is None:
            message = "missing, and never guessed"
        elif finding["type"] == "int_type" and type(given) is float and given.is_integer() and abs(given) < 1e15:
            message = f"is a number with a point or an exponent; write it as {int(given)}"
        elif finding["type"] == "literal_error":
            message = f"is not one of {finding.get('ctx', {}).get('expected')}"
        elif finding["type"] in WANTED:
            message = f"is {kind_of(given)}, not {WANTED[finding['type']]}"
        shown = (
            ""
            if not key or given is None or finding["type"] in ("missing", "extra_forbidden")
            else f" (got {given!r:.60})"
        )
        lines.append(f"{key + ': ' if key else ''}{message}{shown}")
    more = len(lines) - MOST_SHOWN
    return lines[:MOST_SHOWN] + ([f"and {more} more"] if more > 0 else [])
