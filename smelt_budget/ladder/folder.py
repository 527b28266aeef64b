"""What is kept between two runs of `ladder`? Cells that were solved for the same request; nothing foreign is touched.

    DIR/grid.yaml       the grid as it was read; `smelt-budget ladder DIR/grid.yaml` plans it again
    DIR/ladder.json     everything --json prints
    DIR/runs.csv        a row a run, the loss left empty: filled in, it is what `law fit` reads
    DIR/CELL/           smelt.yaml as `solve --out` writes it, baseline.yaml, twin.yaml
    DIR/CELL/TARGET/stable-N/   what `emit --to TARGET` makes of the pair for one horizon

A cell is kept where baseline, setting, lattice, tolerances and plan are those asked now and its gaps are what the
ledger counts; a cell of another request is an error, unless forced.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import smelt_budget
from smelt_budget.errors import BadInput
from smelt_budget.ladder.grid import Cell
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.solver import Gaps
from smelt_budget.spec.model import checked
from smelt_budget.spec.text import parse, read_text

GRID, RESULT, RUNS, PAIR = "grid.yaml", "ladder.json", "runs.csv", "smelt.yaml"
Write = Callable[[Path, str], None]
"""Puts a text in place, whole or not at all."""


def begin(folder: Path, wanted: Sequence[Cell], force: bool) -> None:
    """Make the folder; fail before the work where it is somebody else's.

    Raises:
        BadInput: it is a file, cannot be written, holds something and no ladder, or cells that are not asked for now.
    """
    others = sorted(set(listed(folder)) - {cell.name for cell in wanted})
    if others and not force:
        raise BadInput(
            f"{folder} holds the ladder of another grid: {len(others)} cells that this one lacks, {others[0]} first",
            "fix: --force, which leaves their folders and replaces the plan, or another --out",
        )
    try:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / GRID).is_file():
            raise BadInput(f"{folder} is not empty, and holds no ladder", "fix: another --out")
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".smelt-probe"
        probe.touch()
        probe.unlink()
    except FileExistsError:
        raise BadInput(f"{folder} is not a directory", "fix: another --out") from None
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror or error}", "fix: another --out") from None


def listed(folder: Path) -> list[str]:
    """Cells of the plan that stands there."""
    try:
        return [cell["name"] for cell in json.loads((folder / RESULT).read_text(encoding="utf-8"))["cells"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def earlier(folder: Path, wanted: Sequence[Cell], force: bool) -> dict[str, dict[str, Any]]:
    """Cells that need no solving, by name.

    Raises:
        BadInput: a cell's place holds another request's pair, or one that was changed, and nothing is forced.
    """
    found, problems = {}, []
    for cell in wanted:
        path = folder / cell.name / PAIR
        if not path.is_file():
            continue
        try:
            data = parse(read_text(str(path)), str(path))
            different = differs(cell, data)
            if different is None:
                found[cell.name] = data
        except BadInput as error:
            different = str(error).splitlines()[0]
        if different is not None and not force:
            problems.append(f"{cell.name}: {different}")
    if problems:
        raise BadInput(
            f"{folder} holds pairs of another request, which are not overwritten",
            *problems[:5],
            *([f"and {len(problems) - 5} more"] if len(problems) > 5 else []),
            "fix: --force, or another --out",
        )
    return found


def differs(cell: Cell, data: Mapping[str, Any]) -> str | None:
    """What a pair on disk was asked for otherwise; `None` where it is what would be found."""
    request = cell.request
    setting = Setting.of(
        cell.given, request.convention, request.context, request.attention_length, request.bytes_per_element
    )
    asked = {
        "smelt_budget": smelt_budget.__version__,
        "setting": setting.as_dict(),
        "request": request.as_dict(),
        "policy": request.policy,
        "tolerance": request.tolerance.by_budget,
        "lattice": asdict(request.lattice),
        "keep": dict(request.keep),
    }
    for name, value in asked.items():
        if data.get(name) != value:
            where, was, now = difference(name, data.get(name), value)
            return f"its {where} is {was!r:.60}, not {now!r:.60}"
    try:
        given = data.get("given", data["baseline"])["spec"]
        baseline, twin = (checked(data[arm]["spec"], arm) for arm in ("baseline", "twin"))
        stored = data["gaps"]
    except (KeyError, TypeError):
        return "it is not what solve writes"
    if checked(given, "given") != cell.given:
        return "its baseline is another one"
    if Gaps.between(Ledger(baseline, setting), Ledger(twin, setting)).as_dict() != stored:
        return "its gaps are not those of its two models: it was changed by hand"
    return None


def difference(where: str, was: Any, now: Any) -> tuple[str, Any, Any]:
    """The first value inside two mappings that is not the same."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in {**now, **was}:
            if was.get(key) != now.get(key):
                return difference(f"{where}.{key}", was.get(key), now.get(key))
    return where, was, now


def save(folder: Path, name: str, texts: Mapping[str, str], write: Write) -> None:
    """One cell's files, the pair last: where it stands, the others do."""
    place = folder / name
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write {place}: {error.strerror or error}") from None
    for file in sorted(texts, key=lambda file: file == PAIR):
        write(place / file, texts[file])


def save_runs(folder: Path, rows: Sequence[Mapping[str, Any]], write: Write) -> bool:
    """The table of runs; one into which somebody has put losses is left alone. Whether it was written."""
    path, text = folder / RUNS, io.StringIO()
    if path.is_file() and any((row.get("loss") or "").strip() for row in read_runs(path)):
        return False
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write(path, text.getvalue())
    return True


def read_runs(path: Path) -> list[dict[str, str]]:
    """Rows of a table; one that cannot be read is somebody's work too."""
    try:
        return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error):
        return [{"loss": "unreadable"}]
