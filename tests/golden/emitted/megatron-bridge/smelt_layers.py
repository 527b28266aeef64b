# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of a compute-matched pair for Megatron-Core: the core runs several times, with one set of weights.

    --spec smelt_layers baseline        --spec smelt_layers twin

Both arms are this code; the baseline's core is empty. `smelt_pair.json` beside this file says which layers the core
has, how often they run, and what is added to the residual stream: x + scale * branch(norm(x)), on both branches.

Every stored layer is an entry of its own in decoder.layers, so checkpoint names, layer numbers, pipeline layouts and
converters see a plain model of that many layers. The first layer of the core runs the whole core, its others return
what they are given: one call holds all visits, so recomputation and gradient hooks see each weight once a step.

Weights start at a standard deviation of 1/sqrt(fan-in), the two that lead back into the residual stream at
1/sqrt(fan-in) / sqrt(2 x executed layers), the embedding at 1 (tied: 1/sqrt(hidden_size)). Written for
megatron-core 0.19; `--init-method-std` has no effect.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

PAIR = Path(__file__).with_name("smelt_pair.json")
ALONE = {
    "cuda_graph_impl": "none",
    "fine_grained_activation_offloading": False,
    "heterogeneous_block_specs": False,
    "inference_fuse_tp_communication": False,
    "init_model_with_meta_device": False,
    "moe_paged_stash": False,
    "mtp_num_layers": None,
    "overlap_moe_expert_parallel_comm": False,
}
"""Settings under which Megatron walks the layers on its own, each once, or fills the weights later."""


@dataclass(frozen=True)
class Arm:
    """Which layers [start, stop), counted from 0, run `visits` times, and how they differ from the others."""

    start: int
    stop: int
    visits: int
    residual_scale: float
    tied: bool = False
    """Whether the embedding is the lm-head."""
    core: dict[str, int] = field(default_factory=dict)
    """Fields of TransformerConfig that are the core's own."""

    @staticmethod
    def named(name: str) -> Arm:
        """One of the two in `smelt_pair.json`."""
        return Arm(**json.loads(PAIR.read_text(encoding="utf-8"))[name])

    def holds(self, layer: int) -> bool:
        """Whether a layer, counted from 0, is of the core."""
        return self.start <= layer < self.stop

    def order(self, layers: int) -> list[int]:
        """Every execution in order of time, by stored layer."""
        once = list(range(layers))
        return once[: self.start] + once[self.start : self.stop] * self.visits + once[self.stop :]

    def slot(self, layer: int, visit: int) -> int:
        """Where an execution stands in that order, counted from 0."""
        length = self.stop - self.start
        return layer + visit * length + (length * (self.visits - 1) if layer >= self.stop else 0)

    def config(self, config: TransformerConfig, layer: int) -> TransformerConfig:
        """The configuration of one layer."""
        if not self.core or not self.holds(layer):
            return config
        own = copy.copy(config)
        for name, value in self.core.items():
            setattr(own, name, value)
        return own


def baseline(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """For `--spec smelt_layers baseline`."""
    return block(config, Arm.named("baseline"), vp_stage)


def twin(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """For `--spec smelt_layers twin`."""
    return block(config, Arm.named("twin"), vp_stage)


def block(model: Any, arm: Arm, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage; `model` is a GPTModelConfig or the TransformerConfig inside."""
    config: TransformerConfig = getattr(model, "transformer", model)
    stray = [name for name, value in ALONE.items() if getattr(config, name, value) not in (value, None)]
    if stray:
        raise ValueError(f"a looped core cannot be trained with {', '.join(stray)}")
    set_initial(config, arm)
    if arm.core:
        config.hetereogenous_dist_checkpoint = True  # checkpoints keep each layer under its own name
    engine = config.transformer_impl == "transformer_engine"
    made = get_gpt_decoder_block_spec(config, engine, normalization=config.normalization, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage)
    numbers = range(first, first + len(made.layer_specs))
    here = sum(arm.holds(number) for number in numbers)
    if here not in (0, arm.stop - arm.start):
        raise ValueError(f"layers {arm.start} to {arm.stop - 1} have to be in one pipeline stage: see the layout flag")
    core: list[SmeltLayer] = []
    specs = [layer(spec, number, arm, core) for spec, number in zip(made.layer_specs, numbers, strict=True)]
    return replace(made, layer_specs=specs)


def layer(spec: ModuleSpec, number: int, arm: Arm, core: list[SmeltLayer]) -> ModuleSpec:
    """Megatron's own layer as one of ours; `core` collects the layers of the core once they are built."""
    parts = spec.submodules
    if arm.holds(number) and arm.residual_scale != 1:
        add = scaled_bias_dropout_add(arm.residual_scale)
        parts = replace(parts, self_attn_bda=add, mlp_bda=add)
    return ModuleSpec(SmeltLayer, params={"arm": arm, "number": number, "core": core}, submodules=parts)


def scaled_bias_dropout_add(scale: float) -> Any:
    """Megatron's bias-dropout-add with a factor on what is added."""

    def build(training: bool, fused: bool) -> Any:
        add = get_bias_dropout_add(training, fused)

        def scaled(branch: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float) -> Any:
            x, bias = branch
            return add((x * scale, None if bias is None else bias * scale), residual, dropout)

        return scaled

    return build


class SmeltLayer(TransformerLayer):
    """A decoder layer; in the core it is run by the core's first layer, once for each visit."""

    def __init__(
        self, config: TransformerConfig, *args: Any, arm: Arm, number: int, core: list[SmeltLayer], **given: Any
    ):
        super().__init__(arm.config(config, number), *args, **given)
        self.arm, self.number = arm, number
        self.core = core  # a plain list: these layers are modules of the block, not of each other
        if arm.holds(number):
            core.append(self)
        if config.perform_initialization:
            self.divide_by_fan_in()

    def forward(
        self, hidden_states: torch.Tensor, context: torch.Tensor | None = None, visit: int | None = None, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, batch, hidden_size] as any layer; the block leaves `visit` out."""
        if visit is None and self.arm.holds(self.number):
            return self.run_core(hidden_states, context, given)
        cache = given.get("inference_context")
        if cache is not None:
            if not cache.is_static_batching():
                raise RuntimeError("dynamic batching has a slot for each stored layer; use static batching")
            self.self_attention.layer_number = self.arm.slot(self.number, visit or 0) + 1  # one slot per execution
        return super().forward(hidden_states=hidden_states, context=context, **given)

    def run_core(
        self, hidden_states: torch.Tensor, context: torch.Tensor | None, given: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All visits of all layers of the core, by the first of them."""
        if self is not self.core[0]:
            return hidden_states, context
        for visit in range(self.arm.visits):
            for each in self.core:
                hidden_states, context = each(hidden_states=hidden_states, context=context, visit=visit, **given)
        return hidden_states, context

    @torch.no_grad()
    def divide_by_fan_in(self) -> None:
        """Finish the weights that lead back: their rows are split over ranks, which hides the fan-in from a shard."""
        c = self.config
        heads = c.num_attention_heads * (c.v_head_dim if c.multi_latent_attention else c.kv_channels)
        for name, weight in self.named_parameters():
            if weight.ndim < 2 or not ("linear_proj." in name or "linear_fc2." in name):
                continue
            if name.startswith("self_attention."):
                width = heads
            elif ".shared_experts." in name:
                width = c.moe_shared_expert_intermediate_size
            else:
                width = c.moe_ffn_hidden_size if ".experts." in name else c.ffn_hidden_size
            weight.mul_(width**-0.5)


def set_initial(config: TransformerConfig, arm: Arm) -> None:
    """How weights are drawn; see `SmeltLayer.divide_by_fan_in` for the rest."""
    depth = len(arm.order(config.num_layers))
    config.init_method = by_fan_in
    config.output_layer_init_method = partial(torch.nn.init.normal_, std=(2 * depth) ** -0.5)
    config.embedding_init_method = partial(torch.nn.init.normal_, std=config.hidden_size**-0.5 if arm.tied else 1.0)


def by_fan_in(weight: torch.Tensor) -> torch.Tensor:
    """For weights whose input is not split: projections in, routers, gates, the lm-head."""
    return torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
