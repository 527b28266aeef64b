"""What does the text of a flag mean? Numbers as typed, pins, the setting to count under, completions."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import typer

from smelt_budget.errors import BadInput


def known_models(incomplete: str) -> list[str]:
    """Completions for a model: built-in names, and paths that begin so."""
    from smelt_budget.spec import builtin

    head, _, tail = incomplete.rpartition("/")
    folder = Path(head or (incomplete[:1] if incomplete.startswith("/") else "."))
    try:
        found = sorted(p for p in folder.iterdir() if p.name.startswith(tail) and not p.name.startswith("."))
    except OSError:
        found = []
    paths = [str(p) + ("/" if p.is_dir() else "") for p in found]
    return [name for name in builtin.names() if name.startswith(incomplete)] + paths


def emit_targets(incomplete: str) -> list[str]:
    """Completions for --to."""
    from smelt_budget.emit import TARGETS

    return [name for name in TARGETS if name.startswith(incomplete)]


NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d{0,18})?|\.\d{1,18})([eE][+-]?\d{1,2})?(/0*[1-9]\d{0,17})?%?")


def fraction(text: str) -> Fraction:
    """A number as typed, exactly: 390, 2048.5, 1/3, 95%."""
    typed = text.strip()
    if not NUMBER.fullmatch(typed) or ("/" in typed and not typed.split("/")[0].lstrip("+-").isdigit()):
        raise typer.BadParameter(f"{text!r:.40} is not a number")
    value = Fraction(typed.removesuffix("%"))
    return value / 100 if typed.endswith("%") else value


def numbers(text: str, flag: str, below: float = float("inf")) -> list[float]:
    """Positive numbers with commas between them.

    Raises:
        BadInput: one is not a number, not above 0, or not below `below`.
    """
    found = []
    for each in text.split(","):
        try:
            value = float(each.strip().removesuffix("%")) / (100 if each.strip().endswith("%") else 1)
        except ValueError:
            raise BadInput(f"{flag} {each.strip()!r:.40} is not a number", f"fix: {flag} 1e20,1e21") from None
        if not 0 <= value < below or value == float("inf") or (value == 0 and below == float("inf")):
            raise BadInput(f"{flag} {each.strip()} is out of range")
        found.append(value)
    return found


def share(text: str) -> float:
    """A fraction of one: 0.02 or 2%."""
    return float(fraction(text))


def setting_asked(
    reading: Any,
    convention: str | None,
    context: int | None,
    attention_length: Fraction | None,
    kv_bytes: Fraction | None,
) -> dict[str, Any]:
    """What to count under: what the user said, else what comes with the model, else the rules C8 to C12."""
    from smelt_budget.ledger import CONVENTIONS

    own = reading.setting
    name = own.get("convention", "smelt") if convention is None else convention
    if context is None and convention is None:
        context = own.get("context")
    if attention_length is None and context == own.get("context", context):
        attention_length = own.get("attention_length")
    length = None if attention_length is None else fraction(str(attention_length))
    if length is not None and not 1 <= length <= 10**12:
        raise BadInput(f"--attention-length {float(length):g} is not at least 1: a token attends to itself")
    size = fraction(str(own.get("bytes_per_element", 2) if kv_bytes is None else kv_bytes))
    if not Fraction(1, 16) <= size <= 16:
        raise BadInput(f"--kv-bytes {float(size):g} is not between 0.0625 and 16", "fix: --kv-bytes 2")
    return {
        "convention": CONVENTIONS[name],
        "context": context,
        "attention_length": length,
        "bytes_per_element": size,
    }


def pins(keep: list[str]) -> dict[str, int]:
    """`FIELD=VALUE` pairs."""
    out: dict[str, int] = {}
    for pair in keep:
        name, equals, value = pair.partition("=")
        if not equals or not value.strip().isascii() or not value.strip().isdigit():
            raise BadInput(f"--keep {pair} is not FIELD=VALUE with a whole number", "fix: --keep head_dim=128")
        if name.strip() in out:
            raise BadInput(f"--keep {name.strip()} is given twice")
        out[name.strip()] = int(value)
    return out


def factors(text: str) -> tuple[float, ...]:
    """Positive numbers between commas, each once."""
    numbers = [fraction(part) for part in text.split(",")]
    if any(number <= 0 for number in numbers) or len({f"{float(n):g}" for n in numbers}) != len(numbers):
        raise BadInput(f"--rate-factors {text!r:.60} is not a list of different positive numbers", "fix: 0.5,1,2")
    return tuple(float(number) for number in numbers)
