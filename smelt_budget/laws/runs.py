"""Which training runs are there? CSV, JSONL, Parquet, or the results that `verify` wrote, checked row by row.

    one row a run:  loss (nats per token), arm (baseline, twin or any two names), the columns of the form,
                    and if known cell (which shape), convention (of the FLOP count), seed

The first row counts as 1, as a spreadsheet without its heading does. Nothing is dropped: a row that cannot be used
refuses the file.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.laws.forms import Array, Form

OTHER_NAMES = {"S": "sparsity", "F": "flops_per_token", "D": "tokens", "N": "parameters", "L": "loss"}
"""The paper's letters are taken too."""
FROM_ZERO = ("sparsity", "looped")
"""Columns that may be 0; of the others a logarithm is taken."""
ONE_ARM = "all"
"""Where the runs of all arms are one surface."""
MOST_SHOWN = 5


@dataclass(frozen=True)
class Runs:
    """The runs of one arm."""

    columns: dict[str, Array]
    loss: Array
    cell: tuple[str, ...]
    """Shape of each run; runs of one cell are drawn together by the bootstrap."""
    rows: tuple[int, ...]
    """Where each stands in the file."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Each once, in order."""
        return tuple(dict.fromkeys(self.cell))


def read_runs(source: str | Path, form: Form) -> dict[str, Runs]:
    """Runs by arm, in the order in which arms appear.

    Raises:
        BadInput: the file cannot be read, a column is missing, or a row cannot be used; with the row and the reason.
    """
    path = Path(source)
    if path.is_dir():
        rows = verify_rows(path)
    elif not path.is_file():
        raise BadInput(
            f"there is no file {str(source)!r:.200}", "fix: a CSV, JSONL or Parquet file, or a folder of verify results"
        )
    else:
        reader = {".csv": csv_rows, ".jsonl": jsonl_rows, ".parquet": parquet_rows}.get(path.suffix.lower())
        if reader is None:
            raise BadInput(f"{path} is neither .csv, .jsonl nor .parquet", "fix: save it as one of these")
        rows = reader(path)
    return checked(rows, form, str(source))


def csv_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a table with a heading."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}") from None
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    rows = list(reader)
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise BadInput(f"{path}, row {number}: not as many values as the heading has names")
    return rows


def jsonl_rows(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate((line for line in lines if line.strip()), 1):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise BadInput(f"{path}, row {number}: not an object")
            rows.append(row)
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {path}: {error}") from None
    return rows


def parquet_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a Parquet file."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise BadInput(f"{path} needs pyarrow", "fix: pip install 'smelt-budget[data]'") from None
    try:
        return parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        raise BadInput(f"cannot read {path}: {error}") from None


def verify_rows(folder: Path) -> list[dict[str, Any]]:
    """A run for every arm and seed of every `verify.json` in the folder and below."""
    files = sorted(folder.rglob("verify.json"))
    if not files:
        raise BadInput(f"{folder} holds no verify.json", "fix: smelt-budget verify --out FOLDER")
    rows = []
    for file in files:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            trained = result["proxy"] or result["pair"]
            convention = trained["setting"]["convention"]
            for arm, runs in result["runs"].items():
                ledger = trained[arm]["ledger"]
                rows += [
                    {
                        "arm": arm,
                        "cell": file.parent.relative_to(folder).as_posix(),
                        "convention": convention,
                        "flops_per_token": ledger["flops"]["training_per_token"],
                        "sparsity": ledger["sparsity"]["compute_equivalent"],
                        "parameters": ledger["parameters"]["non_embedding"],
                        "tokens": run["tokens"],
                        "loss": run["held_out"]["nats_per_token"],
                        "seed": run["seed"],
                    }
                    for run in runs
                ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{file} is no finished result of verify: {error!r:.100}") from None
    return rows


def checked(rows: Iterable[Mapping[str, Any]], form: Form, origin: str) -> dict[str, Runs]:
    """The rows as numbers, by arm."""
    rows = [{OTHER_NAMES.get(key, key): value for key, value in row.items()} for row in rows]
    if not rows:
        raise BadInput(f"{origin} has no rows")
    wanted = (*(("arm",) if form.by_arm else ()), *form.columns, "loss")
    missing = [name for name in wanted if name not in rows[0]]
    if missing:
        raise BadInput(
            f"{origin} has no column {', '.join(missing)}",
            f"it has: {', '.join(map(str, rows[0]))}",
            f"fix: name them so; {form.name} needs {', '.join(wanted)}",
        )
    problems: list[str] = []
    by_arm: dict[str, list[tuple[int, dict[str, float], str]]] = {}
    seen: dict[tuple[Any, ...], int] = {}
    conventions: dict[str, int] = {}
    for number, row in enumerate(rows, 1):
        values, wrong = numbers(row, form)
        problems += [f"row {number}: {problem}" for problem in wrong]
        if wrong:
            continue
        arm, convention = str(row["arm"]).strip() if form.by_arm else ONE_ARM, row.get("convention")
        if convention not in (None, ""):
            conventions.setdefault(str(convention), number)
        shape = " ".join(f"{name}={values[name]:g}" for name in form.columns if name != "tokens")
        cell = str(row.get("cell") or shape)
        same = (arm, cell, str(row.get("seed") or ""), *(values[name] for name in form.columns))
        if same in seen:
            problems.append(f"row {number}: the same run as row {seen[same]}; fix: a column seed, if it is another one")
        seen.setdefault(same, number)
        by_arm.setdefault(arm, []).append((number, values, cell))
    if len(conventions) > 1:
        told = ", ".join(f"{name} (row {row})" for name, row in conventions.items())
        problems.append(f"FLOPs under {len(conventions)} conventions, which are not comparable: {told}")
    if problems:
        more = [f"and {len(problems) - MOST_SHOWN} more"] if len(problems) > MOST_SHOWN else []
        raise BadInput(f"{origin} cannot be fitted", *problems[:MOST_SHOWN], *more)
    return {arm: runs(members, form) for arm, members in by_arm.items()}


def numbers(row: Mapping[str, Any], form: Form) -> tuple[dict[str, float], list[str]]:
    """A row's values, and what is wrong with them."""
    values: dict[str, float] = {}
    wrong = []
    for name in (*form.columns, "loss"):
        try:
            value = float(row[name])
        except (TypeError, ValueError, KeyError):
            wrong.append(f"{name} is {row.get(name)!r:.40}, not a number")
            continue
        if not math.isfinite(value):
            wrong.append(f"{name} is {value}")
        elif name == "sparsity" and not 0 <= value < 1:
            wrong.append(f"sparsity {value:g} is not in [0, 1)")
        elif name in FROM_ZERO and value < 0:
            wrong.append(f"{name} is {value:g}, below 0")
        elif name not in FROM_ZERO and value <= 0:
            wrong.append(f"{name} is {value:g}, and it has a logarithm only above 0")
        values[name] = value
    if form.by_arm and not str(row.get("arm") or "").strip():
        wrong.append("arm is empty")
    return values, wrong or form.wrong(values)


def runs(members: list[tuple[int, dict[str, float], str]], form: Form) -> Runs:
    """Rows of one arm as arrays."""
    return Runs(
        columns={name: np.array([values[name] for _, values, _ in members]) for name in form.columns},
        loss=np.array([values["loss"] for _, values, _ in members]),
        cell=tuple(cell for _, _, cell in members),
        rows=tuple(number for number, _, _ in members),
    )


def check_enough(arm: str, found: Runs, form: Form) -> None:
    """Refuse what no fit can come from.

    Raises:
        BadInput: fewer points than coefficients and one, or a column with too few values.
    """
    needed, points = len(form.names) + 1, len(found.loss)
    if points < needed:
        raise BadInput(f"{arm}: {points} runs for {len(form.names)} coefficients", f"fix: at least {needed} runs")
    for name in form.columns:
        different, least = np.unique(found.columns[name]), form.least_different(name)
        if len(different) < least:
            told = " or ".join(f"{value:g}" for value in different)
            raise BadInput(
                f"{arm}: all {points} runs have {name} {told}, from which its coefficients cannot be fitted",
                f"fix: runs at {least} or more values of {name}",
            )
