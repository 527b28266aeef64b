# SPDX-License-Identifier: Apache-2.0
"""A looped Mixture-of-Experts transformer on OLMo-core (arXiv 2609.01343, section 1).

    layers 0 .. start-1 once,  [start, stop) `visits` times as a block,  stop .. L-1 once
    x = x + s attention(norm(x));  x = x + s ffn(norm(x))        s < 1 in the looped block, on every visit

Blocks are stored once and only the order of `Looped.forward` is new, so FSDP and compilation are OLMo-core's own. The
baseline is the same class with one visit. OLMo-core finds these classes by the `_CLASS_` of the JSON files.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from olmo_core.distributed.utils import distribute_like, get_local_tensor
from olmo_core.nn.attention import Attention
from olmo_core.nn.feed_forward import FeedForward
from olmo_core.nn.moe import DroplessMoE, MoEConfig
from olmo_core.nn.transformer import MoETransformer, TransformerBlockConfig, TransformerConfig
from olmo_core.nn.transformer.block import MoETransformerBlock, TransformerBlock
from olmo_core.ops import attach_auxiliary_loss


@dataclass
class LoopedConfig(TransformerConfig):
    """A transformer of which layers [loop_start, loop_stop) run `loop_visits` times as a block."""

    loop_start: int = 0
    loop_stop: int = 0
    loop_visits: int = 1

    def build(self, *, init_device: str = "cpu") -> "Looped":
        """The model, its weights not yet set."""
        return Looped(self, init_device)

    def order(self) -> list[int]:
        """Every execution of a layer, in order of time."""
        layers = list(range(self.n_layers))
        core = layers[self.loop_start : self.loop_stop] * self.loop_visits
        return [*layers[: self.loop_start], *core, *layers[self.loop_stop :]]


@dataclass
class BlockConfig(TransformerBlockConfig):
    """OLMo-core's block; with experts, too, its branches can be scaled."""

    def build(self, *, d_model, block_idx, n_layers, init_device="cpu", cache=None):
        """Dense blocks are OLMo-core's own."""
        fields = {"d_model": d_model, "block_idx": block_idx, "n_layers": n_layers, "init_device": init_device}
        if self.feed_forward_moe is None:
            return super().build(**fields, cache=cache)
        return Block(self, cache=cache, **fields)


@dataclass
class MixtureConfig(MoEConfig):
    """OLMo-core's dropless experts, with a factor on what the routed ones add."""

    routed_scale: float = 1.0

    def build(self, d_model, *, n_layers=1, init_device="cpu", cache=None):
        """The experts of one layer."""
        fields = self.as_dict(exclude_none=True, recurse=False)
        for name in ("name", "routed_scale", "capacity_factor", "latent_moe"):
            fields.pop(name, None)
        fields["dtype"] = self.dtype.as_pt()
        mixture = Mixture(d_model=d_model, n_layers=n_layers, init_device=init_device, cache=cache, **fields)
        mixture.routed_scale = self.routed_scale
        return mixture


class Mixture(DroplessMoE):
    """Routed experts plus the shared one; OLMo-core's own class averages the two."""

    routed_scale: float = 1.0

    def forward(self, x, *, loss_div_factor=None):
        weight, chosen, load, auxiliary = self.router(x, loss_div_factor=loss_div_factor)
        routed = x if auxiliary is None else attach_auxiliary_loss(x, auxiliary)
        out = self.experts(routed, weight * self.routed_scale, chosen, load)
        return out if self.shared_mlp is None else out + self.shared_mlp(x)


class Block(MoETransformerBlock):
    """A layer with experts, both branches scaled."""

    def __init__(self, config: BlockConfig, **fields):
        super().__init__(
            sequence_mixer=config.sequence_mixer,
            feed_forward_moe=config.feed_forward_moe,
            layer_norm=config.layer_norm,
            dropout=config.dropout or 0.0,
            **fields,
        )
        self.attention_scale = 1.0 if config.attention_residual_alpha is None else config.attention_residual_alpha
        self.experts_scale = 1.0 if config.feed_forward_residual_alpha is None else config.feed_forward_residual_alpha

    def forward(self, x, *, loss_div_factor=None, **kwargs):
        y = self.dropout(self.attention(self.attention_norm(x), **kwargs))
        x = torch.add(x, y, alpha=self.attention_scale)
        y = self.dropout(self.feed_forward_moe(self.feed_forward_norm(x), loss_div_factor=loss_div_factor))
        return torch.add(x, y, alpha=self.experts_scale)


class Looped(MoETransformer):
    """Walks the blocks in the order of their visits."""

    def __init__(self, config: LoopedConfig, init_device: str):
        super().__init__(
            d_model=config.d_model,
            vocab_size=config.vocab_size,
            n_layers=config.n_layers,
            block=config.block,
            lm_head=config.lm_head,
            embedding_norm=config.embedding_norm,
            dtype=config.dtype.as_pt(),
            init_method=config.init_method,
            init_device=init_device,
            init_seed=config.init_seed,
            init_std=config.init_std,
            embedding_init_std=config.embedding_init_std,
            block_overrides=config.block_overrides,
            block_pattern=config.block_pattern,
            embed_scale=config.embed_scale,
            tie_word_embeddings=config.tie_word_embeddings,
        )
        self.order = config.order()

    @property
    def is_moe(self) -> bool:
        """Whether there is anything to balance or to spread over ranks."""
        return any(block.is_moe for block in self.blocks.values())

    def forward(self, input_ids, *, labels=None, **kwargs):
        """Ids to logits, or with labels to losses, as OLMo-core's own."""
        input_ids, labels, of_all, of_each, of_head = self._prepare_inputs(input_ids, labels, **kwargs)
        h = self.embeddings(input_ids)
        if self.embed_scale is not None:
            h = h * self.embed_scale
        if self.embedding_norm is not None:
            h = self.embedding_norm(h)
        for i in self.order:
            h = self.blocks[str(i)](h, **of_all, **of_each.get(i, {}))
        return self.lm_head(h, **of_head, **({} if labels is None else {"labels": labels}))

    def num_flops_per_token(self, seq_len: int) -> int:
        """OLMo-core's own count, over the blocks that are executed."""
        visits = Counter(self.order)
        blocks = sum(visits[int(i)] * block.num_flops_per_token(seq_len) for i, block in self.blocks.items())
        return blocks + self.lm_head.num_flops_per_token(seq_len)

    @torch.no_grad()
    def init_weights(self, **kwargs) -> torch.Generator:
        """Normal by fan-in, matrices back into the stream / sqrt(2 x executed layers).

        The embedding has deviation 1, tied ones 1/sqrt(d_model); gains are 1, biases and sinks 0.
        """
        generator = super().init_weights(**kwargs)
        back = (2 * len(self.order)) ** -0.5
        draw(self.embeddings.weight, self.d_model**-0.5 if self.tie_word_embeddings else 1.0, generator)
        if not self.tie_word_embeddings:
            draw(self.lm_head.w_out.weight, self.d_model**-0.5, generator)
        for block in self.blocks.values():
            attention: Attention = block.attention
            for projection in (attention.w_q, attention.w_k, attention.w_v):
                draw(projection.weight, self.d_model**-0.5, generator)
            draw(attention.w_out.weight, back * attention.w_out.in_features**-0.5, generator)
            if attention.sinks is not None:
                attention.sinks.zero_()
            if isinstance(block, TransformerBlock):
                draw_ffn(block.feed_forward, back, generator)
                continue
            draw(block.router.weight, self.d_model**-0.5, generator)
            experts = block.experts.mlp
            for weight, std in (
                (experts.w1, experts.d_model**-0.5),
                (experts.w2, back * experts.hidden_size**-0.5),
                (experts.w3, experts.d_model**-0.5),
            ):
                draw(weight, std, generator)
            draw_ffn(block.shared_mlp, back, generator)
        return generator


def draw_ffn(ffn: FeedForward | None, back: float, generator: torch.Generator) -> None:
    """Gate, down and up; OLMo-core itself leaves a shared expert as torch made it. There may be none."""
    if ffn is None:
        return
    for matrix, factor in ((ffn.w1, 1.0), (ffn.w2, back), (ffn.w3, 1.0)):
        draw(matrix.weight, factor * matrix.in_features**-0.5, generator)
        if matrix.bias is not None:
            matrix.bias.zero_()


def draw(weight: nn.Parameter, std: float, generator: torch.Generator) -> None:
    """Each rank draws the whole and keeps its shard, so that no layout changes a number."""
    if not isinstance(weight, DTensor):
        weight.normal_(0.0, std, generator=generator)
        return
    whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device).normal_(0.0, std, generator=generator)
    get_local_tensor(weight).copy_(get_local_tensor(distribute_like(weight, whole)))
