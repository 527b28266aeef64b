# SPDX-License-Identifier: Apache-2.0
"""What is this model? A decoder whose layers [loop_start, loop_end), the core, run `loop_visits` times as one block.

`num_hidden_layers` counts the layers that are stored, `config.order` lists the ones that are executed. Each execution
has keys and values of its own, so a cache has `len(config.order)` slots. Field names are those of transformers where it
has the thing; a field that is None means that the model does not have it.
"""

from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class SmeltConfig(PreTrainedConfig):
    """A looped (or, with one visit, a plain) Mixture-of-Experts or dense decoder."""

    model_type = "smelt_moe"
    keys_to_ignore_at_inference = ("past_key_values", "cache", "router_logits")
    attribute_map = {"num_local_experts": "num_experts"}

    vocab_size: int = 50304
    hidden_size: int = 64
    num_hidden_layers: int = 2
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    lm_head_bias: bool = False

    # The core: layers [loop_start, loop_end), counted from 0, the end excluded.
    loop_start: int = 0
    loop_end: int = 0
    loop_visits: int = 1
    loop_residual_scale: float = 1.0
    """Factor on both branch outputs of every core layer, on every visit."""
    core_num_key_value_heads: int | None = None
    """Where the core's layers have another number than the rest; likewise the next two."""
    core_num_experts: int | None = None
    core_kv_lora_rank: int | None = None

    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    attention_dropout: float | int = 0.0
    attention_sinks: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    layer_types: list[str] | None = None
    """Of each stored layer: full_attention, sliding_attention or chunked_attention."""

    # Multi-head latent attention, if kv_lora_rank is set.
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    rope_parameters: dict | None = None
    rope_interleave: bool = False
    """Whether neighbours (2i, 2i + 1) rotate together, not (i, i + d/2)."""

    hidden_act: str = "silu"
    intermediate_size: int | None = None
    """Width of the dense layers."""
    mlp_bias: bool = False
    num_experts: int | None = None
    """None: all layers are dense; 1: one expert and no router."""
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    expert_bias: bool = False
    swiglu_limit: float | None = None
    """Clamps both branches of the experts, which then meet as (up + 1) gate sigmoid(1.702 gate)."""
    mlp_only_layers: list[int] | None = None
    """Layers whose FFN is dense although the model has experts."""

    router_bias: bool = False
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int | None = None
    topk_group: int | None = None
    group_scored_by: int = 1
    """How many of a group's best experts are added up to rank it."""
    router_correction_bias: bool = False
    """Whether routers have a buffer that is added to the scores for choosing only."""

    norm: Literal["rms_norm", "layer_norm", "layer_norm_no_bias"] = "rms_norm"
    rms_norm_eps: float = 1e-6
    norms_per_layer: Literal[2, 4] = 2
    early_exit_gate: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0

    # Training. The losses are means over executed MoE layers: each visit counts.
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0

    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        """Fill in what follows from the rest."""
        if self.layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [kind] * self.num_hidden_layers
        if self.head_dim is None and self.kv_lora_rank is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.mlp_only_layers = list(self.mlp_only_layers or ())
        if self.hidden_size % 8 or (self.moe_intermediate_size or 0) % 8:
            kwargs.setdefault("experts_implementation", "eager")  # grouped_mm wants rows of 16 bytes, also in bfloat16
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Refuse a core that is not inside the model."""
        if not 0 <= self.loop_start <= self.loop_end <= self.num_hidden_layers or self.loop_visits < 1:
            raise ValueError(
                f"layers [{self.loop_start}, {self.loop_end}) x {self.loop_visits} "
                f"do not lie in a model of {self.num_hidden_layers} layers"
            )

    @property
    def core(self) -> range:
        """The layers that run `loop_visits` times."""
        return range(self.loop_start, self.loop_end)

    @property
    def order(self) -> list[tuple[int, int]]:
        """(layer, visit) of every execution, in order of time; the place in this list is the cache slot."""
        visits = [(layer, visit) for visit in range(self.loop_visits) for layer in self.core]
        before, after = range(self.loop_start), range(self.loop_end, self.num_hidden_layers)
        return [(layer, 0) for layer in before] + visits + [(layer, 0) for layer in after]
