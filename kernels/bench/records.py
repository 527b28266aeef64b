"""What has been found so far? One JSON line a finding, on the disk at once, so that a run cut short leaves them.

A step is a list of units. A unit is `begun`, and then `done` (with what it found), `failed`, or `missing` (something is
not installed, or needs a GPU); or it is `left out` (no time). One that was begun and never ended has `died`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Unit = tuple[str, Callable[[], dict[str, Any]]]
"""Its name, and what finds something out. `ok` among the findings says whether that is as it must be."""


class Missing(Exception):
    """What a unit is about is not installed, or needs a GPU."""


class Records:
    """A file of findings; processes that write to it take turns."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, step: str, unit: str, state: str, **found: Any) -> None:
        """Append one."""
        line = json.dumps({"step": step, "unit": unit, "state": state, **plain(found)})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def begun(self, step: str) -> set[str]:
        """The units that need not be begun again."""
        return {record["unit"] for record in lines(self.path) if record["step"] == step}

    def latest(self) -> list[Record]:
        """The last word on every unit, in the order in which they were begun."""
        last: dict[tuple[str, str], Record] = {}
        for record in lines(self.path):
            last[record["step"], record["unit"]] = record
        return [{**record, "state": "died"} if record["state"] == "begun" else record for record in last.values()]


def lines(path: Path) -> list[Record]:
    """Without the one that a killed process did not finish."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def plain(value: Any) -> Any:
    """As strict JSON has it: no nan, no infinity."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
