"""Which published models come with the package? Data files, each with its source and its published size."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from smelt_budget.spec.text import parse

FOLDER = files("smelt_budget.spec") / "models"


@cache
def names() -> tuple[str, ...]:
    """Built-in names, sorted."""
    return tuple(sorted(f.name.removesuffix(".yaml") for f in FOLDER.iterdir() if f.name.endswith(".yaml")))


def has(name: str) -> bool:
    """Whether a built-in goes by this name."""
    return name in names()


@cache
def load(name: str) -> dict[str, Any]:
    """`name`, `source`, `published`, perhaps `total_parameters`, and `config` as published."""
    return parse((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), name)
