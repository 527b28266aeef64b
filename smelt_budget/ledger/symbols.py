"""What is the formula of a row? The same code that counts, run once over symbols.

The only module that makes sympy symbols: two symbols of one name and other assumptions are not equal, and a
substitution by name silently does nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sympy

from smelt_budget.ledger.rows import rows
from smelt_budget.spec.model import ModelSpec
from smelt_budget.spec.runs import Varied


def symbol(name: str) -> sympy.Symbol:
    """A positive quantity."""
    return sympy.Symbol(name, positive=True)


H, V, E, F, K = map(symbol, "HVEFK")
LETTERS: dict[str, tuple[sympy.Symbol, str]] = {
    "hidden_size": (H, "hidden size"),
    "vocab_size": (V, "vocabulary"),
    "num_attention_heads": (symbol("n"), "query heads"),
    "num_key_value_heads": (symbol("g"), "KV heads"),
    "head_dim": (symbol("d"), "head size"),
    "kv_lora_rank": (symbol("R"), "KV rank"),
    "q_lora_rank": (symbol("Q"), "query rank"),
    "qk_nope_head_dim": (symbol("d_nope"), "unrotated query/key head size"),
    "qk_rope_head_dim": (symbol("d_rope"), "rotary head size"),
    "v_head_dim": (symbol("d_v"), "value head size"),
    "intermediate_size": (symbol("D"), "dense width"),
    "num_experts": (E, "experts"),
    "num_experts_per_tok": (K, "experts per token"),
    "moe_intermediate_size": (F, "expert width"),
    "shared_expert_intermediate_size": (symbol("F_s"), "shared expert width"),
}


Formula = tuple[Any, Any, Any]


def equations(spec: ModelSpec) -> dict[tuple[str, str], Formula]:
    """(row name, section) to (parameters, multiply-adds, cached elements) of one instance, as expressions.

    Rows outside the layers have no section. A core's own g, E or R stand as g_core, E_core, R_core.
    """
    return {(row.name, "".join(row.sections)): (row.params, row.macs, row.cache) for row in rows(symbolic(spec))}


def legend(spec: ModelSpec) -> dict[str, str]:
    """Letter to meaning and value, for the letters a spec uses."""
    found = {}
    for name, (letter, meaning) in LETTERS.items():
        if getattr(spec, name) is not None:
            found[str(letter)] = f"{meaning} {getattr(spec, name):,}"
        own = getattr(spec.core, name, None) if spec.core is not None else None
        if own is not None:
            found[str(core_letter(name))] = f"{meaning} in the core {own:,}"
    return found


def core_letter(name: str) -> sympy.Symbol:
    """The core's own letter for a field."""
    return symbol(f"{LETTERS[name][0]}_core")


def symbolic(spec: ModelSpec) -> Varied:
    """The spec with every width a letter; depth, windows and switches stay."""
    letters = {name: letter for name, (letter, _) in LETTERS.items() if getattr(spec, name) is not None}
    core = spec.core and SimpleNamespace(
        **{name: value and core_letter(name) for name, value in dict(spec.core).items()}
    )
    return Varied(spec, **letters, core=core)
