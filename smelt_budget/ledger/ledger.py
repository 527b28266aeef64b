"""What does one token cost? Totals of a spec under one setting: parameters, FLOPs, KV cache, sparsity.

Counts are exact integers. A mean over positions can be a fraction (rule C8); then the FLOPs of the mean token
are rounded to the nearest integer once, at the total (rule C19).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Any

from smelt_budget.errors import BadInput
from smelt_budget.ledger.conventions import SMELT, Convention
from smelt_budget.ledger.rows import Row, rows
from smelt_budget.spec.model import ModelSpec
from smelt_budget.spec.runs import Varied

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class Setting:
    """Under which convention, at which context, with how many bytes per cached element."""

    context: int
    attention_length: Fraction
    """Mean positions a token attends to in a full-attention layer."""
    convention: Convention = SMELT
    bytes_per_element: Fraction = Fraction(2)
    number: Callable[[Any], Any] = field(default=Fraction, repr=False)
    """How a fraction enters the sums: `Fraction` is exact, `float` is for arrays."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        convention: Convention = SMELT,
        context: int | None = None,
        attention_length: Fraction | None = None,
        bytes_per_element: Fraction = Fraction(2),
    ) -> Setting:
        """The setting for a spec; what is left out follows rule C12."""
        if context is None:
            context = min(spec.max_position_embeddings or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
        length = convention.attention_length(context) if attention_length is None else attention_length
        if length > context:
            raise BadInput(
                f"an attention length of {float(length):g} is more than the context of {context} tokens",
                f"fix: --context {2 * ceil(length)}",
            )
        return cls(context, length, convention, bytes_per_element)

    def as_dict(self) -> dict[str, Any]:
        """The setting as plain data."""
        return {
            "convention": self.convention.name,
            "context": self.context,
            "attention_length": written(self.attention_length),
            "bytes_per_element": written(self.bytes_per_element),
        }

    def flops(self, row: Row) -> Any:
        """Forward FLOPs per token of one row, over all visits; 0 where the convention leaves it out."""
        if not self.convention.counts(row):
            return 0
        once = 2 * row.macs * row.run
        if row.kind != "attention":
            return once
        return once * self.number(self.convention.positions(row.window, self.attention_length))

    def kept(self, row: Row) -> int:
        """Tokens of a sequence at `context` that a layer's cache holds: windows are capped (rule C10)."""
        return self.context if row.window is None else min(self.context, row.window.size)


def plain(value: Fraction) -> int | float:
    """A fraction as JSON has it: an integer where it is one."""
    return int(value) if value.denominator == 1 else float(value)


def written(value: Fraction) -> int | float | str:
    """A fraction so that reading it back is exact: 2, 2048.5, "1/3"."""
    short = plain(value)
    return short if Fraction(str(short)) == value else str(value)


@dataclass(frozen=True)
class Totals:
    """The three budgets of a spec; integers, floats, arrays or expressions, as the spec holds."""

    non_embedding: Any
    forward_flops: Any
    kv_elements: Any
    """Cached elements of one sequence at the setting's context."""


def totals(spec: Any, setting: Setting) -> Totals:
    """The three budgets alone; what the solver evaluates over arrays."""
    return totalled(rows(spec), setting)


def totalled(table: list[Row], setting: Setting) -> Totals:
    """The three budgets of rows already made."""
    layers = [row for row in table if row.kind not in ("embedding", "lm_head")]
    return Totals(
        non_embedding=sum(row.params * row.stored for row in layers),
        forward_flops=sum(setting.flops(row) for row in table),
        kv_elements=sum(row.cache * row.run * setting.kept(row) for row in table if row.kind == "cache"),
    )


@dataclass(frozen=True)
class Ledger:
    """The rows of one spec and every total made from them."""

    spec: ModelSpec
    setting: Setting

    @cached_property
    def rows(self) -> list[Row]:
        """One row per weight, in the order of the model; equal rows of several sections stand as one."""
        together: dict[tuple[Any, ...], Row] = {}
        for row in rows(self.spec):
            key = (row.name, row.params, row.macs, row.cache, row.window)
            before = together.get(key)
            if before is not None:
                row = replace(  # noqa: PLW2901
                    row,
                    stored=before.stored + row.stored,
                    read=before.read + row.read,
                    run=before.run + row.run,
                    sections=before.sections + row.sections,
                )
            together[key] = row
        return list(together.values())

    def parameters_of(self, *kinds: str, active: bool = False) -> int:
        """Parameters of the given row kinds (all, if none is given): stored, or read by one token in one pass."""
        chosen = [row for row in self.rows if not kinds or row.kind in kinds]
        return sum(row.params * (row.read if active else row.stored) for row in chosen)

    @cached_property
    def total(self) -> int:
        """Unique parameters; tied embeddings once."""
        return self.parameters_of()

    @cached_property
    def input_embedding(self) -> int:
        """Parameters of the input embedding."""
        return self.parameters_of("embedding")

    @cached_property
    def lm_head(self) -> int:
        """Parameters of the output projection; 0 where it is the input embedding."""
        return self.parameters_of("lm_head")

    @cached_property
    def non_embedding(self) -> int:
        """Everything but the input embedding and the lm-head: the budget the paper matches."""
        return self.total - self.input_embedding - self.lm_head

    @cached_property
    def active_non_embedding(self) -> int:
        """Parameters one token reads in one pass through the physical layers, without embeddings."""
        return self.parameters_of(active=True) - self.input_embedding - self.lm_head

    @cached_property
    def exact_forward_flops(self) -> Fraction:
        """Forward FLOPs of the mean token over all visits; a fraction only where a windowed mean is one."""
        return Fraction(sum(self.setting.flops(row) for row in self.rows))

    @property
    def forward_flops(self) -> int:
        """Forward FLOPs of the mean token, rounded once (rule C19)."""
        return round(self.exact_forward_flops)

    @property
    def training_flops(self) -> int:
        """Forward and backward: three times forward (rule C13)."""
        return round(3 * self.exact_forward_flops)

    @cached_property
    def kv_elements_per_token(self) -> int:
        """Cached elements one more token adds, over all executed layers, windows not yet full."""
        return sum(row.cache * row.run for row in self.rows)

    @cached_property
    def kv_elements_at_context(self) -> int:
        """Cached elements of one sequence at the setting's context, windows capped."""
        return sum(row.cache * row.run * self.setting.kept(row) for row in self.rows)

    def bytes_of(self, elements: int) -> int | float:
        """Elements in bytes; whole unless the element itself is less than a byte."""
        return plain(elements * self.setting.bytes_per_element)

    @cached_property
    def compute_equivalent_sparsity(self) -> float:
        """S = 1 - (F/F0) N0 / N; the control has the same shape, unlooped, with the top-k experts only (rule C15)."""
        spec = self.spec
        if not spec.is_moe:
            return 0.0
        # A Fraction, not an int: the control of a top-1 model has one expert and keeps its router (rule C7).
        experts = Fraction(spec.num_experts_per_tok or 0)
        control = Varied(spec, num_experts=experts, loop=None, core=None, early_exit_gate=False)
        exact = totals(control, self.setting)
        return float(1 - self.exact_forward_flops / exact.forward_flops * exact.non_embedding / self.non_embedding)

    @cached_property
    def expert_sparsity(self) -> float:
        """1 - experts run / experts stored, over all layers; 0 for a dense model."""
        experts = [row for row in self.rows if row.name == "experts"]
        stored = sum(row.stored for row in experts)
        return float(1 - Fraction(sum(row.read for row in experts), stored)) if stored else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The `--json` contract that other programs read; counts are exact integers."""
        head = self.input_embedding if self.spec.tie_word_embeddings else 0
        return {
            "parameters": {
                "total": self.total,
                "input_embedding": self.input_embedding,
                "lm_head": self.lm_head,
                "non_embedding": self.non_embedding,
                "active_non_embedding": self.active_non_embedding,
                "active_with_lm_head": self.active_non_embedding + self.lm_head + head,
                "active_with_embeddings": self.active_non_embedding + self.lm_head + self.input_embedding,
            },
            "flops": {
                "forward_per_token": self.forward_flops,
                "training_per_token": self.training_flops,
                "convention": self.setting.convention.name,
                "attention_length": plain(self.setting.attention_length),
            },
            "kv_cache": {
                "bytes_per_token": self.bytes_of(self.kv_elements_per_token),
                "bytes_at_context": self.bytes_of(self.kv_elements_at_context),
                "context": self.setting.context,
                "executed_layers": self.spec.effective_depth,
            },
            "layers": {"physical": self.spec.num_hidden_layers, "effective": self.spec.effective_depth},
            "sparsity": {
                "compute_equivalent": self.compute_equivalent_sparsity,
                "expert": self.expert_sparsity,
            },
        }
