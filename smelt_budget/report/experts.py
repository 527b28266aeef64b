"""What computes the experts, in words: a line for each arm, or one where both are alike."""

from __future__ import annotations

from typing import Any


def expert_words(experts: dict[str, list[dict[str, Any]]], verbose: bool = False) -> list[str]:
    """experts: torch (no CUDA device); `verbose` gives every arm and every reason."""
    lines = {arm: ", ".join(one(choice, verbose) for choice in choices) or "none" for arm, choices in experts.items()}
    if len(set(lines.values())) == 1 and not verbose:
        return [f"experts: {next(iter(lines.values()))}"]
    return [f"experts of {arm}: {words}" for arm, words in lines.items()]


def one(choice: dict[str, Any], verbose: bool) -> str:
    """torch (no CUDA device), or with all that speaks against a kernel."""
    return f"{choice['name']} ({'; '.join(choice['reasons'])})" if verbose and choice["reasons"] else choice["words"]
