"""What does a table of runs say, arm by arm, and how surely? A fit for each arm and refits, kept in a folder.

    law.json       fits, intervals, the window the runs span; everything later commands need
    refits.jsonl   one line a draw, appended as they come: stopped, the study goes on where it was

Two processes draw; a draw is the same in any of them, so the result does not depend on who drew it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import smelt_budget
from smelt_budget.errors import BadInput
from smelt_budget.laws.bootstrap import Interval, Refits, identified
from smelt_budget.laws.fit import FORMS, Fit, fit
from smelt_budget.laws.forms import Form
from smelt_budget.laws.runs import Runs, check_enough

RESULT, DRAWS = "law.json", "refits.jsonl"
BATCH = 25  # draws between two lines of progress and two flushes
Advanced = Callable[[int, int], None]


def study(
    form: Form,
    arms: Mapping[str, Runs],
    origin: str,
    starts: int = 200,
    draws: int = 2000,
    seed: int = 0,
    folder: Path | None = None,
    advanced: Advanced = lambda _done, _total: None,
) -> dict[str, Any]:
    """Fit every arm, then refit drawn cells; with a folder, resumable there.

    Raises:
        BadInput: an arm cannot be fitted, or the folder belongs to another study.
    """
    for arm, runs in arms.items():
        check_enough(arm, runs, form)
    fits = {arm: fit(form, runs.columns, runs.loss, starts, seed, advanced) for arm, runs in arms.items()}
    refits = Refits(form, arms, fits, seed)
    asked = {"form": form.name, "seed": seed, "starts": starts, "runs": fingerprint(arms)}
    lines = drawn(refits, draws, asked, folder, advanced) if len(refits.cells) > 1 else []
    result = {
        "smelt_budget": smelt_budget.__version__,
        "form": form.name,
        "equation": form.equation,
        "origin": origin,
        "asked": asked | {"draws": len(lines)},
        "arms": {arm: summary(form, arms[arm], fits[arm], [line[arm] for line in lines]) for arm in arms},
        "draws": lines,
    }
    if folder is not None:
        beside = folder / f".{RESULT}"
        beside.write_text(json.dumps(result) + "\n", encoding="utf-8")
        beside.replace(folder / RESULT)
    return result


def fingerprint(arms: Mapping[str, Runs]) -> str:
    """Of all numbers and cells."""
    digest = hashlib.blake2b(digest_size=16)
    for arm, runs in arms.items():
        digest.update(
            repr((arm, runs.cell, runs.loss.tolist(), {k: v.tolist() for k, v in runs.columns.items()})).encode()
        )
    return digest.hexdigest()


def drawn(
    refits: Refits, draws: int, asked: dict[str, Any], folder: Path | None, advanced: Advanced
) -> list[dict[str, dict[str, float]]]:
    """All refits, those of an earlier start first."""
    lines: list[dict[str, dict[str, float]]] = []
    if folder is None:
        for first in range(0, draws, BATCH):
            lines += refits.batch((first, min(first + BATCH, draws)))
            advanced(len(lines), draws)
        return lines
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / DRAWS
    lines, kept = earlier(path, asked)
    if kept is None:
        path.write_text(json.dumps(asked) + "\n", encoding="utf-8")
    else:
        os.truncate(path, kept)  # a line cut short by a kill
    lines = lines[:draws]
    advanced(len(lines), draws)
    batches = [(first, min(first + BATCH, draws)) for first in range(len(lines), draws, BATCH)]
    if not batches:
        return lines
    with path.open("a", encoding="utf-8") as file, ProcessPoolExecutor(min(len(batches), os.cpu_count() or 1)) as pool:
        try:
            for batch in pool.map(refits.batch, batches):
                lines += batch
                file.write("".join(json.dumps(line) + "\n" for line in batch))
                file.flush()
                advanced(len(lines), draws)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return lines


def earlier(path: Path, asked: dict[str, Any]) -> tuple[list[dict[str, dict[str, float]]], int | None]:
    """Whole lines of an earlier start, and where they end; `None` if there was none.

    Raises:
        BadInput: the file is of another study.
    """
    if not path.is_file():
        return [], None
    whole = path.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    try:
        head, *lines = [json.loads(line) for line in whole.splitlines()]
    except ValueError:
        raise BadInput(f"{path} is not what law fit wrote", "fix: another --out") from None
    if head != asked:
        changed = [key for key in asked if head.get(key) != asked[key]]
        raise BadInput(f"{path} is of another study: {', '.join(changed)} differ", "fix: another --out")
    return lines, len(whole)


def summary(form: Form, runs: Runs, found: Fit, draws: list[dict[str, float]]) -> dict[str, Any]:
    """One arm: coefficients with intervals, misfit, and the window the runs span."""
    coefficients = {}
    for name, value in found.coefficients.items():
        interval = Interval.of(np.array([draw[name] for draw in draws])) if draws else None
        coefficients[name] = {
            "value": value,
            "low": interval and interval.low,
            "high": interval and interval.high,
            "identified": False if name in found.undetermined else interval and identified(value, interval),
        }
    return {
        "coefficients": coefficients,
        "objective": found.objective,
        "rmse": found.rmse,
        "starts": found.starts,
        "starts_agreeing": found.agreeing,
        "runs": len(runs.loss),
        "cells": len(runs.cells),
        "window": window(form, runs),
        "residuals": [
            {"row": row, "cell": cell, "compute": float(spent), "loss": float(loss), "residual": float(residual)}
            for row, cell, spent, loss, residual in zip(
                runs.rows, runs.cell, form.training_flops(runs.columns), runs.loss, found.residuals, strict=True
            )
        ],
    }


def window(form: Form, runs: Runs) -> dict[str, list[float]]:
    """Least and most of every column and of compute."""
    span = {name: [float(values.min()), float(values.max())] for name, values in runs.columns.items()}
    spent = form.training_flops(runs.columns)
    return span | {"compute": [float(spent.min()), float(spent.max())]}


def form_named(name: str) -> Form:
    """One of FORMS."""
    if name not in FORMS:
        raise BadInput(f"there is no form {name!r:.60}", f"fix: one of {', '.join(FORMS)}")
    return FORMS[name]
