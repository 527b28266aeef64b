"""What does a run look like? Four pictures of verify.json and metrics.jsonl, none of which needs colour to be read.

    loss.png     training loss and held-out end points; below, the paired difference by step
    parts.png    held-out loss by domain, document length and position; below, the paired differences
    sink.png     attention on the document's start by layer, baseline beside twin, one visit beside the other
    router.png   evenness and peak of the experts' load, over training and at the end by layer and visit

A picture there is nothing for is not written: no router without experts, no sink where none could be measured.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smelt_budget.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (7.2, 5.2)  # inches: the width of a printed page
DOTS_PER_INCH = 160


def draw(result: dict[str, Any], metrics_rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write the pictures; returns the paths of those there was something for.

    Raises:
        BadInput: matplotlib is missing, or the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("plots need matplotlib, which is not installed", "fix: pip install matplotlib") from None
    from smelt_budget.verify.panels import loss, parts, router, sink
    from smelt_budget.verify.strokes import TITLE, Runs

    runs = Runs.of(result, metrics_rows)
    written = []
    for title, picture in (
        ("Loss in training and on held-out text", loss),
        ("Held-out loss by part of the text", parts),
        ("Attention on the first token of a document", sink),
        ("Load of the experts", router),
    ):
        figure = Figure(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
        figure.suptitle(f"{title}: {caption(result, runs.seeds)}", x=0.01, ha="left", fontsize=TITLE)
        if picture(figure, runs):
            written.append(saved(figure, folder / f"{picture.__name__}.png"))
    return written


def caption(result: dict[str, Any], seeds: int) -> str:
    """How small this is; stands on every picture, for pictures travel alone."""
    recipe, proxy = result["recipe"], result.get("proxy")
    what = "the pair itself"
    if proxy is not None and proxy["size"] != "full":
        what = f"proxy of {proxy['baseline']['ledger']['parameters']['non_embedding'] / 1e6:.3g} M parameters"
    tokens = recipe["batch_size"] * recipe["context"]
    return f"{what}, {recipe['steps']:,} steps of {tokens:,} tokens, {seeds} seed{'' if seeds == 1 else 's'}"


def saved(figure: Figure, path: Path) -> Path:
    """The picture as PNG, whole or not at all."""
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a domain may be named in any script, the font has a few
        figure.savefig(data, format="png", metadata={"Software": None})
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(data.getvalue())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}", "fix: another --out") from None
    finally:
        if beside.exists():
            beside.unlink()
    return path
