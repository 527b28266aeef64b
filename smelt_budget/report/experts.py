"""What computes the experts, in words: a line for each arm, or one where both are alike."""

from __future__ import annotations

from typing import Any


def expert_words(experts: dict[str, list[dict[str, Any]]], verbose: bool = False) -> list[str]:
    """experts: native (16 floats at a time); `verbose` gives every arm and every reason."""
    lines = {arm: ", ".join(one(choice, verbose) for choice in choices) or "none" for arm, choices in experts.items()}
    if len(set(lines.values())) == 1 and not verbose:
        return [f"experts: {next(iter(lines.values()))}"]
    return [f"experts of {arm}: {words}" for arm, words in lines.items()]


def one(choice: dict[str, Any], verbose: bool) -> str:
    """native (16 floats at a time), or with all that speaks against a kernel."""
    if not verbose or not choice["reasons"]:
        return choice["words"]
    reasons = "; ".join(choice["reasons"])
    return f"{choice['name']} ({reasons})" if choice["tier"] is None else f"{choice['words']}, not cuda: {reasons}"
