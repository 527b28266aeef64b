"""What is asked? The baseline, the loop, the lattice, the tolerances; and the twin as a function of what is free.

`Problem.draft` is the one place where free quantities become a model. It takes integers, arrays or symbols, so
the relaxation, the search and the returned spec cannot disagree about what a twin is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import lcm
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.ledger import Setting
from smelt_budget.solver.plan import Placed
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.runs import Varied

Heads = Literal["uniform", "sectioned"]
Policy = Literal["nearest", "at-most"]

GROUPED_FREE = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "moe_intermediate_size",
)
LATENT_FREE = (
    "hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "num_experts",
    "moe_intermediate_size",
)
FOLLOWING = ("shared_expert_intermediate_size", "intermediate_size")
"""Widths that keep their share of the expert width, unless pinned."""


@dataclass(frozen=True)
class Lattice:
    """The steps a hardware-friendly shape is made in."""

    hidden_multiple: int = 16
    head_multiple: int = 8
    expert_multiple: int = 8
    """Step of expert, shared and dense widths."""
    experts_multiple: int = 1
    """Step of expert counts: the expert-parallel size."""

    def __post_init__(self) -> None:
        for name in ("hidden_multiple", "head_multiple", "expert_multiple", "experts_multiple"):
            if not 1 <= getattr(self, name) <= 65536:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)} is not between 1 and 65536")


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted |gap| per budget, as a fraction of the baseline."""

    flops: float = 0.02
    non_embedding_parameters: float = 0.02
    kv_cache: float = 0.02

    def __post_init__(self) -> None:
        for name, value in self.by_budget.items():
            if not 0 <= value < 1:
                raise BadInput(
                    f"the tolerance for {name} is {value:g}, not at least 0 and below 1",
                    "fix: 0.02 or 2% is two percent",
                )

    @property
    def by_budget(self) -> dict[str, float]:
        """Budget name to tolerance, in the order of `Gaps`."""
        return {
            "flops": self.flops,
            "non_embedding_parameters": self.non_embedding_parameters,
            "kv_cache": self.kv_cache,
        }

    def scaled(self, factor: float) -> Tolerance:
        """Every tolerance times a factor; a zero one opens to 0.1 % first."""
        return Tolerance(*(min(0.99, max(v, 1e-3) * factor) for v in self.by_budget.values()))


def whole_groups(spec: ModelSpec, multiple: int) -> int:
    """Step of the expert counts: `multiple`, and whole groups where experts are chosen by group."""
    return lcm(multiple, spec.n_group or 1)


def least_experts(spec: ModelSpec) -> int:
    """At least two, and as many as the chosen groups need to hold the experts each token runs."""
    k, groups = spec.num_experts_per_tok or 1, spec.n_group or 1
    return max(2, -(-k * groups // (spec.topk_group or 1)))


@dataclass(frozen=True)
class Problem:
    """One search: everything fixed but the free quantities."""

    baseline: ModelSpec
    setting: Setting
    placed: Placed
    heads: Heads = "uniform"
    lattice: Lattice = Lattice()
    tolerance: Tolerance = Tolerance()
    policy: Policy = "nearest"
    keep: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        allowed = (*self.free, *(name for name in FOLLOWING if getattr(self.baseline, name) is not None))
        for name, value in self.keep.items():
            if name not in allowed:
                raise BadInput(f"--keep {name}: not a free quantity here", f"free are: {', '.join(allowed)}")
            if type(value) is not int or not 1 <= value <= 10_000_000:
                raise BadInput(f"--keep {name}={value} is not a whole number between 1 and 10000000")
        self.check_experts(self.keep.get("num_experts"))
        heads, kv_heads = self.keep.get("num_attention_heads"), self.keep.get("num_key_value_heads")
        if heads is not None and kv_heads is not None and heads % kv_heads:
            raise BadInput(f"--keep: num_attention_heads {heads} does not divide by num_key_value_heads {kv_heads}")

    def check_experts(self, pin: int | None) -> None:
        """A pinned expert count has to suffice for every token, and to fill every group."""
        k, groups = self.baseline.num_experts_per_tok or 1, self.baseline.n_group or 1
        if pin is None:
            return
        if pin < k:
            raise BadInput(f"--keep num_experts={pin} is below the {k} experts each token runs")
        least = -(-least_experts(self.baseline) // groups) * groups
        if groups > 1 and (pin % groups or pin < least):
            raise BadInput(
                f"--keep num_experts={pin} does not fill the baseline's {groups} groups of experts (n_group)",
                f"fix: --keep num_experts={max(least, round(pin / groups) * groups)}",
            )

    @property
    def latent(self) -> bool:
        """Whether attention is latent, so that the KV rank is solved for."""
        return self.baseline.kv_lora_rank is not None

    @property
    def free(self) -> tuple[str, ...]:
        """The free quantities, by field."""
        if not self.latent:
            return GROUPED_FREE
        return tuple(name for name in LATENT_FREE if getattr(self.baseline, name) is not None)

    @property
    def experts_step(self) -> int:
        """Step of the expert counts: the lattice's, in whole groups."""
        return whole_groups(self.baseline, self.lattice.experts_multiple)

    @cached_property
    def frame(self) -> ModelSpec:
        """The baseline's fields at the twin's depth and loop; what is free is still the baseline's."""
        return self.baseline.replace(**self.placed.depth, loop=self.placed.loop.model_dump())

    @cached_property
    def depth_ratio(self) -> Fraction:
        """rho: layers executed by the twin over layers of the baseline."""
        return Fraction(self.frame.effective_depth, self.baseline.num_hidden_layers)

    @cached_property
    def depth_kept(self) -> bool:
        """Whether the twin has the baseline's physical depth; only then is a sectioned cache exact."""
        return self.frame.num_hidden_layers == self.baseline.num_hidden_layers

    def core_kv_rank(self, rank: Any) -> Any:
        """The core's KV rank in a sectioned latent twin: its cache per layer is the prelude's over visits."""
        rope = self.baseline.qk_rope_head_dim
        return (rank + rope) // self.placed.loop.visits - rope

    def fields(self, free: Mapping[str, Any], core_experts: Any, following: Callable[[Any], Any]) -> dict[str, Any]:
        """Twin fields from free quantities. `following` rounds a width that keeps its share."""
        out = dict(free)
        if self.latent and "q_lora_rank" not in free:  # queries are not compressed
            out["q_lora_rank"] = None
        width = free["moe_intermediate_size"]
        for name in FOLLOWING:
            old = getattr(self.baseline, name)
            if old is not None and name in self.keep:
                out[name] = self.keep[name]
            elif old is not None:
                out[name] = following(old * width / self.baseline.moe_intermediate_size)
        if self.heads == "sectioned":
            visits = self.placed.loop.visits
            out["core"] = {
                "num_key_value_heads": None if self.latent else free["num_key_value_heads"] // visits,
                "num_experts": core_experts,
                "kv_lora_rank": self.core_kv_rank(free["kv_lora_rank"]) if self.latent else None,
            }
        return out

    def draft(self, free: Mapping[str, Any], core_experts: Any = None, *, rounded: bool = True) -> Varied:
        """The twin over arrays or symbols; not validated. `rounded=False` leaves following widths continuous."""
        fields = self.fields(free, core_experts, self.whole_width if rounded else lambda x: x)
        if "core" in fields:
            fields["core"] = SimpleNamespace(**fields["core"])
        return Varied(self.frame, **fields)

    def twin(self, free: Mapping[str, int], core_experts: int | None = None) -> ModelSpec:
        """The twin as a validated spec."""
        fields = self.fields(free, core_experts, lambda x: int(self.whole_width(x)))
        if "core" in fields and core_experts == free["num_experts"]:
            fields["core"]["num_experts"] = None
        if self.latent:
            fields["num_key_value_heads"] = None
        return self.frame.replace(**fields)

    def whole_width(self, width: Any) -> Any:
        """A following width on the lattice: the nearest multiple, halves up, at least one."""
        step = self.lattice.expert_multiple
        return np.maximum(np.floor(width / step + 0.5), 1) * step
