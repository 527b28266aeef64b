"""May a package be called so? What is emitted is imported from the folder it lies in, before anything installed."""

from __future__ import annotations

import keyword
import sys


def taken(name: str, others: frozenset[str]) -> list[str]:
    """A finding, where the name is Python's, or one of `others`: what the trainer and the package import."""
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or name in sys.stdlib_module_names or name in others:
        return [f"{name!r} is the name of another module; fix: --name"]
    return []
