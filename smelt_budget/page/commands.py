"""Which command gives a result again? Built from what the result says of itself, without flags at their default."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

Data = Mapping[str, Any]
Flag = tuple[str, Any, Any]
"""Name, value, default."""


def line(command: str, arguments: Iterable[str], flags: Iterable[Flag]) -> str:
    """One command, as a shell takes it; a list repeats its flag."""
    words = ["smelt-budget", *command.split(), *arguments]
    for name, value, default in flags:
        if value in (None, default):
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if each is True else [f"--{name}", str(each)]
    return shlex.join(words)


def solved(path: str, pair: Data) -> str:
    """The search that found a pair; the file's own baseline and setting are taken."""
    request, steps, tolerance = pair.get("request", {}), pair.get("lattice", {}), pair.get("tolerance", {})
    plan = request.get("plan", {})
    flags = [
        ("heads", request.get("heads"), "auto"),
        ("policy", pair.get("policy"), "nearest"),
        ("span", plan.get("span"), 0.5),
        ("visits", plan.get("visits"), 2),
        ("start", plan.get("start"), None),
        ("layers", plan.get("layers"), None),
        ("hidden-multiple", steps.get("hidden_multiple"), 16),
        ("head-multiple", steps.get("head_multiple"), 8),
        ("expert-multiple", steps.get("expert_multiple"), 8),
        ("experts-multiple", steps.get("experts_multiple"), 1),
        ("tolerance-flops", tolerance.get("flops"), 0.02),
        ("tolerance-parameters", tolerance.get("non_embedding_parameters"), 0.02),
        ("tolerance-kv", tolerance.get("kv_cache"), 0.02),
        ("keep", [f"{name}={value}" for name, value in (pair.get("keep") or {}).items()], []),
    ]
    return line("solve", ["--baseline", f"{path}#baseline"], flags)


def verified(path: str, result: Data, asked: Data) -> str:
    """The training of both arms."""
    recipe, text = result.get("recipe") or {}, asked.get("text", {})
    if not recipe:
        return line("verify", [result.get("origin", "smelt.yaml"), "--counts-only"], [])
    factors = ",".join(f"{factor:g}" for factor in recipe.get("factors", ()))
    flags = [
        ("size", asked.get("size", (result.get("proxy") or {}).get("size")), "tiny"),
        ("active-params", asked.get("active_parameters"), None),
        ("steps", recipe.get("steps"), 160),
        ("seeds", recipe.get("seeds"), 3),
        ("batch-size", recipe.get("batch_size"), 8),
        ("accumulate", recipe.get("accumulate"), 1),
        ("context", recipe.get("context"), 256),
        ("rate-factors", factors, "0.5,1,2"),
        ("balance", recipe.get("balance"), "aux"),
        ("data", list(text.get("sources") or []), []),
        ("tokenizer", text.get("tokenizer"), None),
        ("text-field", text.get("text_field"), None),
        ("token-dtype", text.get("token_dtype"), None),
        ("vocab-size", text.get("vocab_size"), None),
        ("bos-id", text.get("bos_id"), None),
        ("dtype", asked.get("precision"), None),
        ("out", path.removesuffix("/verify.json"), "smelt-verify"),
    ]
    return line("verify", [result.get("origin", "smelt.yaml")], flags)


def fitted(path: str, law: Data) -> str:
    """The fit and its refits."""
    asked = law["asked"]
    flags = [
        ("form", asked.get("form"), "smelt"),
        ("starts", asked.get("starts"), 200),
        ("bootstrap", asked.get("draws"), 2000),
        ("seed", asked.get("seed"), 0),
        ("out", path.removesuffix("/law.json"), None),
    ]
    return line("law fit", [law.get("origin", "runs.csv")], flags)


def gained(path: str) -> str:
    """The savings of a fitted law, at the budgets and sparsities that are its defaults."""
    return line("law gain", [path], [])
