"""The looped Mixture-of-Experts transformer: prelude, core x visits, coda (arXiv 2609.01343, section 1).

    layers 0 .. start-1 once,  [start, stop) `visits` times as a block,  stop .. L-1 once

The baseline is the same class with one visit. Weights, norms and routers are shared between visits; keys and values
are not. B batch, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smelt_budget.errors import BadInput
from smelt_budget.model.cache import Cache
from smelt_budget.model.layer import DecoderLayer
from smelt_budget.model.loss import token_losses
from smelt_budget.model.norms import norm
from smelt_budget.model.rotary import angles, rotary_size
from smelt_budget.model.router import Routed
from smelt_budget.model.sight import places, visible
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import Window, layer_kinds, layer_of


class Step(NamedTuple):
    """One execution of a physical layer."""

    layer: int
    visit: int


class Output(NamedTuple):
    """What a forward pass returns; what was not asked for is `None`."""

    logits: Tensor | None
    """[B, T, V]; with `logits_to_keep` the last T of them."""
    losses: Tensor | None
    """[B, T], nats: -log p(target), where targets were given."""
    routed: tuple[Routed | None, ...]
    """One per executed layer, `None` for a dense one; `Transformer.order` names layer and visit."""


class Transformer(nn.Module):
    """A decoder built from a spec, weights not yet set (`smelt_budget.model.initialise`).

    Raises:
        BadInput: the ledger can count this spec, but it cannot be computed (`check_buildable`).
    """

    def __init__(self, spec: ModelSpec):
        super().__init__()
        check_buildable(spec)
        self.spec = spec
        self.order = execution_order(spec)
        self.checkpointing = False
        """Recompute each layer in the backward pass instead of keeping its insides."""
        core = range(spec.loop.start, spec.loop.stop) if spec.loop else range(0)
        scale = spec.loop.residual_scale if spec.loop else 1.0
        table = torch.empty(spec.vocab_size, spec.hidden_size)  # the default start loads torch._dynamo on meta: 2 s
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer_of(spec, kind), scale if i in core else 1.0)
            for i, kind in enumerate(layer_kinds(spec))
        )
        self.windows: set[Window | None] = {layer_of(spec, kind).window for kind in layer_kinds(spec)}
        self.norm = norm(spec)
        self.early_exit_gate = nn.Linear(spec.hidden_size, 1) if spec.early_exit_gate else None
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=spec.lm_head_bias)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        document_BT: Tensor | None = None,
        padding_BT: Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int = 0,
        watch: Callable[..., None] | None = None,
    ) -> Output:
        """Ids to logits, or with targets to one loss per token.

        Tokens see their own document only; `padding_BT` is true where a row holds no token, with a cache on the left
        only. Blocks of chunked attention begin where the row does, not where documents do. `watch(step, q, k,
        scale, mask, sinks)` is called in every executed layer just before queries meet keys.

        Raises:
            BadInput: there are no tokens, or the cache cannot take them.
        """
        if ids_BT.numel() == 0:
            raise BadInput(f"there are no tokens: the ids are {list(ids_BT.shape)}")
        place = places(ids_BT, 0 if cache is None else cache.position, document_BT, padding_BT)
        plain = document_BT is None and padding_BT is None
        if cache is not None:
            place = place.expand(ids_BT.shape[0], -1, -1, -1)
            cache.grow(place, document_BT is not None, padding_BT is not None)
            plain = cache.plain
        masks = {window: self.mask(place, window, cache, plain) for window in self.windows}
        turn = angles(self.spec, place[:, 0, :, 0])
        x = scaled(self.embed_tokens(ids_BT), self.spec.embedding_multiplier)
        routed: list[Routed | None] = []
        for executed, step in enumerate(self.order):
            layer: Any = self.layers[step.layer]
            slot = None if cache is None else cache.slot(executed, layer.window)
            looking = None if watch is None else bound(watch, step)
            x, decided = self.run(layer, x, turn, masks[layer.window], slot, looking)
            routed.append(decided)
            if self.early_exit_gate is not None and step.layer == len(self.layers) - 1:
                x = self.norm(x)  # Ouro norms, and may exit, after every visit of its stack
                self.early_exit_gate(x)
        if self.early_exit_gate is None:
            x = self.norm(x)
        x = scaled(x[:, -logits_to_keep:], 1 / self.spec.logits_scaling)
        if targets_BT is None:
            return Output(self.lm_head(x), None, tuple(routed))
        return Output(None, token_losses(x, self.lm_head, targets_BT), tuple(routed))

    def run(self, layer: Any, *inputs: Any) -> tuple[Tensor, Routed | None]:
        """A layer, recomputed in the backward pass where that was asked for."""
        if self.checkpointing and self.training:
            return checkpoint(layer, *inputs, use_reentrant=False)  # pyright: ignore[reportReturnType]
        return layer(*inputs)

    def mask(self, place: Tensor, window: Window | None, cache: Cache | None, plain: bool) -> Tensor | None:
        """What the layers with this window see; `None` where plain causal attention says the same."""
        before = 0 if cache is None else cache.seen - place.shape[2]
        keys = place if cache is None else cache.seen_from(place, window)
        new, total = place.shape[2], before + place.shape[2]
        inside = window is None or total <= window.size or (new == 1 and not window.chunked)
        if plain and inside and (before == 0 or new == 1):
            return None
        return visible(place, keys, window)


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a factor that is nearly always 1."""
    return x if factor == 1 else x * factor


def bound(watch: Callable[..., None], step: Step) -> Callable[..., None]:
    """`watch` told which execution it sees."""
    return lambda *seen: watch(step, *seen)


def execution_order(spec: ModelSpec) -> tuple[Step, ...]:
    """Every execution in order of time; visits count from 0."""
    once = [Step(i, 0) for i in range(spec.num_hidden_layers)]
    if spec.loop is None:
        return tuple(once)
    start, stop = spec.loop.start, spec.loop.stop
    core = [Step(i, visit) for visit in range(spec.loop.visits) for i in range(start, stop)]
    return (*once[:start], *core, *once[stop:])


def check_buildable(spec: ModelSpec) -> None:
    """Refuse what can be counted but not computed."""
    size = rotary_size(spec)
    if size < 2 or size % 2:
        raise BadInput(
            f"this model can be counted but not built: {size} elements of each head rotate, and rotation takes pairs",
            "fix: an even head_dim (or qk_rope_head_dim) times partial_rotary_factor",
        )
    if spec.lm_head_bias and spec.logits_scaling != 1:  # the division is made before the head, on H instead of V
        raise BadInput("this model can be counted but not built: logits_scaling together with lm_head_bias")
