"""Do formula, weights and executed operations agree? Three counts of one arm, each made twice.

    parameters   ledger rows                      = elements of the model built on the meta device, full size
    FLOPs        ledger under `full-square`       = torch's FLOP counter over a forward pass on meta, full size
    KV cache     ledger, windows capped           = bytes the cache allocated in a prefill that was really run

The cache is measured on the arm's own attention with a residual stream and FFN of a few elements, which no cached
number depends on, so that it fits; and once more at full size on meta. T tokens, one sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from smelt_budget.ledger import CONVENTIONS, Ledger, Setting
from smelt_budget.model import Cache, Transformer
from smelt_budget.spec import ModelSpec
from smelt_budget.verify.operations import Seen
from smelt_budget.verify.rows import of_ledger, of_model

KV_BYTES = 4
"""The measured prefill runs in fp32: the number of elements is what is at stake, and every CPU is quick at it."""
MOST_CACHE_BYTES = 2**26
FULL_SQUARE = CONVENTIONS["full-square"]


@dataclass(frozen=True)
class Count:
    """One quantity, counted by the ledger and measured on the model."""

    ledger: int
    measured: int
    rows: tuple[tuple[str, int, int], ...]
    """(row, ledger, measured) of every row that differs."""
    about: Mapping[str, Any]
    """Under which circumstances."""

    @property
    def agree(self) -> bool:
        """Exactly, in total and in every row."""
        return self.ledger == self.measured and not self.rows

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        differ = [{"row": row, "ledger": ledger, "measured": measured} for row, ledger, measured in self.rows]
        return {"ledger": self.ledger, "measured": self.measured, "agree": self.agree, "differ": differ, **self.about}


@dataclass(frozen=True)
class Counts:
    """The three counts of one arm."""

    parameters: Count
    flops: Count
    kv_cache: Count
    operations: tuple[str, ...]
    """What the forward pass ran that torch's counter does not know and our list does not name."""

    @property
    def agree(self) -> bool:
        """All three, and no operation went unseen."""
        return not self.operations and all(count.agree for _, count in self.items())

    def items(self) -> Iterator[tuple[str, Count]]:
        """By name."""
        yield "parameters", self.parameters
        yield "flops", self.flops
        yield "kv_cache", self.kv_cache

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: count.as_dict() for name, count in self.items()} | {"uncounted": list(self.operations)}


def count(spec: ModelSpec, setting: Setting) -> Counts:
    """All three, at the setting's context and cache element.

    Raises:
        BadInput: the spec can be counted but not built.
    """
    with torch.device("meta"):
        model = Transformer(spec).eval()
    flops, uncounted = flops_of(model, setting)
    return Counts(parameters_of(model, setting), flops, kv_cache_of(model, setting), uncounted)


def parameters_of(model: Transformer, setting: Setting) -> Count:
    """Elements of every parameter, each once."""
    measured: Counter[str] = Counter()
    for name, weight in model.named_parameters():
        measured[row_or_name(name)] += weight.numel()
    ledger: Counter[str] = Counter()
    for row in Ledger(model.spec, setting).rows:
        ledger[of_ledger(row.name)] += row.params * row.stored
    return compared(ledger, measured, {"device": "meta"})


def flops_of(model: Transformer, setting: Setting) -> tuple[Count, tuple[str, ...]]:
    """Forward FLOPs of one token, the mean over a sequence at the context; and the operations nobody counted."""
    tokens = setting.context
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.no_grad(), Seen() as seen, FlopCounterMode(display=False) as counter:
        model(ids)
    measured = by_row(model, {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()})
    square = Setting(tokens, Fraction(tokens), FULL_SQUARE)
    ledger: Counter[str] = Counter()
    for row in Ledger(model.spec, square).rows:
        ledger[of_ledger(row.name)] += int(square.flops(row)) * tokens
    counted = compared(ledger, measured, {"device": "meta", "convention": "full-square", "context": tokens})
    return per_token(counted, tokens), seen.uncounted


def by_row(model: nn.Module, flops: Mapping[str, int]) -> Counter[str]:
    """Each module's FLOPs without those of the modules inside it, under the rows they belong to."""
    root = type(model).__name__
    own = {name.removeprefix(f"{root}."): value for name, value in flops.items() if name not in ("Global", root)}
    inside: Counter[str] = Counter()
    for name, value in own.items():
        parent = name.rpartition(".")[0]
        while parent and parent not in own:
            parent = parent.rpartition(".")[0]
        inside[parent] += value
    left: Counter[str] = Counter({"outside every module": flops.get("Global", 0) - inside[""]})
    for name, value in own.items():
        left[row_or_name(name, of_module=True)] += value - inside[name]
    return Counter({row: value for row, value in left.items() if value})


def per_token(count: Count, tokens: int) -> Count:
    """A count over `tokens` tokens as one of the mean token; kept whole where it does not divide."""
    totals = (count.ledger, count.measured, *(x for row in count.rows for x in row[1:]))
    if any(value % tokens for value in totals):
        return Count(count.ledger, count.measured, count.rows, {**count.about, "unit": f"{tokens} tokens"})
    rows = tuple((row, ledger // tokens, measured // tokens) for row, ledger, measured in count.rows)
    return Count(count.ledger // tokens, count.measured // tokens, rows, {**count.about, "unit": "token"})


def kv_cache_of(model: Transformer, setting: Setting) -> Count:
    """Bytes of one sequence's cache after a prefill that fits in memory, and at the whole context on meta."""
    spec = model.spec
    per_token = Ledger(spec, setting).kv_elements_per_token * KV_BYTES
    tokens = max(1, min(setting.context, MOST_CACHE_BYTES // max(1, per_token)))
    small, whole = prefilled(Transformer(narrowed(spec)), tokens), prefilled(model, setting.context)
    ledger = [cached(spec, length, setting) * KV_BYTES for length in (tokens, setting.context)]
    rows = [("attention.kv_cache", ledger[0], small), (f"attention.kv_cache at {setting.context}", ledger[1], whole)]
    about = {
        "tokens": tokens,
        "bytes_per_element": KV_BYTES,
        "slots": spec.effective_depth,
        "at_context": {"context": setting.context, "ledger": ledger[1], "measured": whole, "device": "meta"},
    }
    return Count(ledger[0], small, tuple(row for row in rows if row[1] != row[2]), about)


def cached(spec: ModelSpec, tokens: int, setting: Setting) -> int:
    """The ledger's cached elements of a sequence of `tokens`."""
    return Ledger(spec, Setting.of(spec, setting.convention, tokens)).kv_elements_at_context


def prefilled(model: Transformer, tokens: int) -> int:
    """Bytes the cache holds after one prefill."""
    cache = Cache(tokens)
    with torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long, device=model.embed_tokens.weight.device), cache=cache)
    return cache.bytes


def narrowed(spec: ModelSpec) -> ModelSpec:
    """The same cache in a model a few elements wide: KV heads, head sizes, ranks, windows, layers and visits stay."""
    core = spec.core and spec.core.model_copy(update={"num_experts": None})
    heads = spec.num_key_value_heads or 1
    if spec.core is not None and spec.core.num_key_value_heads is not None:
        heads = lcm(heads, spec.core.num_key_value_heads)
    latent = spec.kv_lora_rank is not None
    return spec.replace(
        hidden_size=8,
        vocab_size=8,
        num_attention_heads=1 if latent else heads,
        num_key_value_heads=1 if latent else spec.num_key_value_heads,
        q_lora_rank=None,
        **({"qk_nope_head_dim": 2, "v_head_dim": 2} if latent else {}),
        intermediate_size=8,
        mlp_only_layers=(),
        **dict.fromkeys(FFN_FIELDS),
        shared_expert_gate=False,
        core=core and core.model_dump(),
    )


FFN_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "n_group",
    "topk_group",
)


def row_or_name(name: str, *, of_module: bool = False) -> str:
    """The row, or the model's own name where the ledger has none: that then differs, and is shown."""
    for candidate in (f"{name}.weight", name) if of_module else (name,):
        try:
            return of_model(candidate)
        except KeyError:
            continue
    return f"no row for {name}"


def compared(ledger: Counter[str], measured: Counter[str], about: Mapping[str, Any]) -> Count:
    """Totals, and the rows where the two differ, largest first."""
    rows = [(row, ledger[row], measured[row]) for row in {*ledger, *measured} if ledger[row] != measured[row]]
    rows.sort(key=lambda row: (-abs(row[1] - row[2]), row[0]))
    return Count(sum(ledger.values()), sum(measured.values()), tuple(rows), about)
