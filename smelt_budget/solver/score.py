"""Which of two twins is better? One published score, lower is better, the same for arrays and single models.

    score = 100 * (|flops gap| + |parameter gap| + |kv gap|)                        percentage points, summed
          + 2 * ( |ln attention:FFN share| + |ln expert width / hidden| + |ln head size| / 4 + core experts )
          + 0.02 * (how many of hidden % 64, expert width % 16, experts % 8, head size % 16 are not 0)

each logarithm of the twin's value over the baseline's. Gaps come first: a shape 5 % off costs as much as 0.1 points
of a budget; a tile only breaks ties. `core experts` is how far the core's expert count is from the prelude's, over
the baseline's count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from smelt_budget.ledger import Row, rows

SHAPE_WEIGHT = 2.0
HEAD_WEIGHT = 0.25
TILE_WEIGHT = 0.02
EXPERTS_TILE = 8


@dataclass(frozen=True)
class Shape:
    """What the score compares between twin and baseline, beside the budgets."""

    share: Any
    """Multiply-adds in attention's matrices over those in the FFN's, router left out, all visits."""
    slenderness: Any
    """Expert width over hidden width."""
    head_size: Any
    """Size of a value head."""
    hidden_size: Any
    expert_width: Any
    ffn: Any
    """Multiply-adds in the FFN's matrices, all visits."""

    @classmethod
    def of(cls, spec: Any, table: list[Row] | None = None) -> Shape:
        """The shape of a spec, or of anything with its fields; the same under every convention."""
        table = [row for row in table or rows(spec) if row.kind == "matrix"]
        attention = sum(row.macs * row.run for row in table if row.name.startswith("attention."))
        ffn = sum(row.macs * row.run for row in table if not row.name.startswith("attention."))
        width = spec.moe_intermediate_size
        head = spec.head_dim if spec.kv_lora_rank is None else spec.v_head_dim
        return cls(attention / ffn, width / spec.hidden_size, head, spec.hidden_size, width, ffn)


def shape_distance(twin: Shape, baseline: Shape) -> Any:
    """How far a twin's proportions are from the baseline's; 0 for the baseline itself."""
    return (
        abs(np.log(twin.share / baseline.share))
        + abs(np.log(twin.slenderness / baseline.slenderness))
        + HEAD_WEIGHT * abs(np.log(twin.head_size / baseline.head_size))
    )


def misaligned(shape: Shape) -> Any:
    """How many of hidden, expert width and head size miss their tile; the expert count is added by `score`."""
    return (
        (shape.hidden_size % 64 != 0) * 1.0 + (shape.expert_width % 16 != 0) * 1.0 + (shape.head_size % 16 != 0) * 1.0
    )


def score(gap_sum: Any, distance: Any, off_tiles: Any, experts: Any, core_experts_off: Any = 0.0) -> Any:
    """The published score. `gap_sum` and `core_experts_off` are fractions."""
    off = off_tiles + (experts % EXPERTS_TILE != 0)
    return 100 * gap_sum + SHAPE_WEIGHT * (distance + core_experts_off) + TILE_WEIGHT * off
