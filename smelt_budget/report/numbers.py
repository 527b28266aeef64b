"""How is a number shown? Exact where a person recounts, short where a person judges."""

from __future__ import annotations

SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def exact(value: float) -> str:
    """Every digit, in groups of three."""
    return f"{value:,}"


def short(value: float) -> str:
    """Four significant digits and a suffix: 3.872B."""
    for size, suffix in SUFFIXES:
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def signed_percent(gap: float) -> str:
    """A gap: +0.10 %; exactly nothing is 'exact'."""
    return "exact" if gap == 0 else f"{100 * gap:+.3f} %"
