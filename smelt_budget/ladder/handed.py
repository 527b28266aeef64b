"""How do the pairs of a ladder become a trainer's folders? One for each cell and horizon, both arms in it.

Every horizon is a whole run: warmup, stable, decay. Up to its branch point it is the same run as the longer ones, so a
trainer that loads the trunk's checkpoint of that step may skip it. A folder that stands is kept where it was emitted
for the same target, layout and horizons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smelt_budget.emit.launch import Layout
from smelt_budget.emit.target import Job, Target
from smelt_budget.emit.training import Training, training
from smelt_budget.emit.whole import emitted
from smelt_budget.ladder.folder import PAIR
from smelt_budget.ladder.grid import Cell
from smelt_budget.ladder.horizons import Horizons
from smelt_budget.spec.model import checked

Data = dict[str, Any]


def asked(target: Target, layout: Layout | None, lengths: Horizons) -> Data:
    """What decides the folders of a target, beside the pairs; kept in ladder.json."""
    own = None if layout is None else {name: getattr(layout, name) for name in layout.__dataclass_fields__}
    return {"target": target.name, "layout": own, "horizons": lengths.model_dump()}


def handed(
    folder: Path,
    cells: Sequence[Cell],
    pairs: dict[str, Data],
    target: Target,
    layout: Layout | None,
    lengths: Horizons,
    kept: Callable[[str], bool],
    force: bool,
    advanced: Callable[[int, int], None],
) -> list[str]:
    """Emit what is missing; every folder's path relative to `folder`.

    Args:
        folder: of the ladder.
        cells: those that were solved.
        pairs: what was found, by name of cell.
        target: the trainer.
        layout: for launch files, or none.
        lengths: the horizons.
        kept: whether a cell's folders, if they stand, were emitted for what is asked now.
        force: replace those that were not.
        advanced: told how many are done.

    Raises:
        BadInput: the target cannot hold a pair, the layout does not divide, or a folder is in the way.
    """
    places = []
    for cell in cells:
        longest = job(cell, pairs[cell.name], layout, lengths, lengths.stable_steps[-1])
        each = lengths.stable_steps if target.emit(longest).train else []  # a bare spec has no length
        for steps in each or [None]:
            place = folder / cell.name / target.name
            work = longest
            if steps is not None:
                place, work = place / f"stable-{steps}", job(cell, pairs[cell.name], layout, lengths, steps)
            places.append(place.relative_to(folder).as_posix())
            if not (place.is_dir() and kept(cell.name)):
                place.parent.mkdir(parents=True, exist_ok=True)
                emitted(target, work, place, False, force, f"{cell.name}/{PAIR}")
            advanced(len(places), len(cells) * max(1, len(each)))
    return places


def job(cell: Cell, pair: Data, layout: Layout | None, lengths: Horizons, steps: int) -> Job:
    """One horizon of one pair."""
    baseline, twin = (checked(pair[arm]["spec"], arm) for arm in ("baseline", "twin"))
    tokens = steps * lengths.batch_tokens + lengths.decay_tokens
    plain = training(baseline, twin, lengths.context, tokens, lengths.batch_sequences)
    shares = {
        "warmup_share": lengths.warmup_steps / plain.steps,
        "decay_share": lengths.decay_steps / plain.steps,
    }
    name = re.sub(r"\W", "_", f"ladder_{cell.name}_{steps}")
    return Job(name, baseline, twin, Training.model_validate(plain.model_dump() | shares), layout)
