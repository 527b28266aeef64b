"""What was handed over? A solved pair, or a folder of `verify`, `law fit` or `ladder`, told apart by what is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from smelt_budget.errors import BadInput
from smelt_budget.spec.text import parse, read_text

Kind = Literal["pair", "verify", "law", "ladder"]
Data = dict[str, Any]
FILES: dict[Kind, str] = {"verify": "verify.json", "law": "law.json", "ladder": "ladder.json", "pair": "smelt.yaml"}
"""Which file says what a folder is; the first that is there."""
NEEDED: dict[Kind, tuple[str, ...]] = {
    "pair": ("baseline", "twin", "gaps", "setting"),
    "verify": ("pair", "counts", "verdict"),
    "law": ("form", "arms", "asked", "draws"),
    "ladder": ("cells", "horizons", "totals", "command"),
}
FIX = "fix: a smelt.yaml, or a folder that verify, law fit or ladder wrote"


@dataclass(frozen=True)
class Source:
    """A result as it was written."""

    kind: Kind
    path: Path
    """As it was typed."""
    data: Data
    metrics: list[Data] = field(default_factory=list)
    """Of `verify`: a row a step."""
    asked: Data = field(default_factory=dict)
    """Of `verify`: its request.json."""


def read_source(path: Path) -> Source:
    """One argument of `report`.

    Raises:
        BadInput: there is nothing, or nothing that one of the commands wrote.
    """
    if not path.exists():
        raise BadInput(f"there is nothing at {str(path)!r:.200}", FIX)
    kind = kind_of(path)
    file = path / FILES[kind] if path.is_dir() else path
    data = parse(read_text(str(file)), str(file)) if kind == "pair" else json_file(file)
    missing = [key for key in NEEDED[kind] if key not in data]
    if missing:
        raise BadInput(f"{file} is no result of {'solve' if kind == 'pair' else kind}: it has no {missing[0]}", FIX)
    if kind != "verify":
        return Source(kind, path, data)
    request = file.parent / "request.json"
    return Source(kind, path, data, list(rows(file.parent / "metrics.jsonl")), json_file(request, may_lack=True))


def kind_of(path: Path) -> Kind:
    """By the file in a folder; a file by its name, and any other name is a pair's."""
    for kind, name in FILES.items():
        if (path / name).is_file() or path.name == name:
            return kind
    if path.is_dir():
        raise BadInput(f"{path} holds no {', '.join(FILES.values())}", FIX)
    return "pair"


def json_file(path: Path, may_lack: bool = False) -> Data:
    """A JSON object."""
    if may_lack and not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read: {str(error)[:120]}", FIX) from None
    if not isinstance(data, dict):
        raise BadInput(f"{path} holds no object", FIX)
    return data


def rows(path: Path) -> Iterator[Data]:
    """One object a line; none where the file is not there, as a copied verify.json has none."""
    if not path.is_file():
        return
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {str(error)[:120]}") from None
