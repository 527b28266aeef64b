"""Which pairs are asked for? Scales x sparsities, from our own YAML; left out, the paper's twelve cells.

    name, source        what the grid is, and where its shapes are from
    scales              name: fields of a model without its expert count, or a built-in name, config.json or YAML file
    experts             label: expert count           one of these two; without either each scale keeps its own experts
    sparsities          a list of S (0.95)            experts moved until S is met, as solve --sparsity does
    convention, attention_length, bytes_per_element   what to count under, as the flags of solve
    solve               heads, policy, span, visits, start, layers, top_k, hidden_multiple, head_multiple,
                        expert_multiple, experts_multiple, tolerance, tolerance_flops, tolerance_parameters,
                        tolerance_kv, keep: as the flags of solve
    horizons            context, batch_sequences, warmup_steps, stable_steps, decay_tokens

The twin of every cell is found by our solver; a grid holds baselines only. An unknown key is an error that names it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from smelt_budget.errors import BadInput
from smelt_budget.ladder.horizons import Horizons
from smelt_budget.ledger import CONVENTIONS
from smelt_budget.solver import Lattice, Plan, Request, Tolerance
from smelt_budget.solver.request import HeadsAsked
from smelt_budget.spec import ModelSpec, Reading, builtin, read
from smelt_budget.spec.blocks import Count, Frozen
from smelt_budget.spec.model import checked, explained
from smelt_budget.spec.read import NUMBER
from smelt_budget.spec.text import parse, read_text

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
"""Scales and labels become names of folders."""
MOST_CELLS = 1000
PAPER = "smelt"
Number = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Solve(Frozen):
    """The flags of `solve`, for every cell."""

    heads: HeadsAsked = "auto"
    policy: Literal["nearest", "at-most"] = "nearest"
    span: float | str = "1/2"
    """Share of the layers that loops: 0.5 or 1/3."""
    visits: Annotated[int, Field(ge=1, le=1000)] = 2
    start: Annotated[int, Field(ge=0)] | None = None
    layers: Number | None = None
    top_k: Number | None = None
    hidden_multiple: Number = 16
    head_multiple: Number = 8
    expert_multiple: Number = 8
    experts_multiple: Number = 1
    tolerance: Share = 0.02
    tolerance_flops: Share | None = None
    tolerance_parameters: Share | None = None
    tolerance_kv: Share | None = None
    keep: dict[str, int] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _span_is_a_number(self) -> Solve:
        if not NUMBER.fullmatch(str(self.span)):
            raise ValueError(f"span {self.span!r:.40} is not a number such as 0.5 or 1/3")
        return self

    def tolerances(self) -> Tolerance:
        """Each budget's own, else the common one."""
        own = (self.tolerance_flops, self.tolerance_parameters, self.tolerance_kv)
        return Tolerance(*(self.tolerance if one is None else one for one in own))


class Grid(Frozen):
    """A file of the shape above."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    source: str = ""
    scales: Annotated[dict[str, dict[str, Any] | str], Field(min_length=1)]
    experts: Annotated[dict[str, Count], Field(min_length=1)] | None = None
    sparsities: Annotated[list[Share], Field(min_length=1)] | None = None
    convention: Literal["smelt", "megatron", "torchtitan", "full-square"] = "smelt"
    attention_length: float | None = None
    """Mean positions a token attends to; left out: the scale's own, or (context + 1) / 2."""
    bytes_per_element: Annotated[float, Field(ge=1 / 16, le=16)] = 2
    solve: Solve = Solve()
    horizons: Horizons = Horizons()

    @model_validator(mode="after")
    def _consistent(self) -> Grid:
        if self.experts is not None and self.sparsities is not None:
            raise ValueError("experts and sparsities both say how sparse; give one")
        for key, names in (("scales", self.scales), ("experts", self.experts or {})):
            wrong = [name for name in names if not NAME.fullmatch(name)]
            if wrong:
                raise ValueError(f"{key}: {wrong[0]!r:.60} cannot name a folder: letters, digits, . _ - and no more")
        if len(set(self.sparsities or ())) != len(self.sparsities or ()):
            raise ValueError("sparsities: one of them stands twice")
        if self.attention_length is not None and self.attention_length < 1:
            raise ValueError(f"attention_length {self.attention_length:g} is below 1: a token attends to itself")
        if len(self.scales) * max(len(self.experts or ()), len(self.sparsities or ()), 1) > MOST_CELLS:
            raise ValueError(f"more than {MOST_CELLS} cells")
        return self


@dataclass(frozen=True)
class Cell:
    """One pair to be solved."""

    name: str
    scale: str
    label: str | None
    """Of its sparsity."""
    given: ModelSpec
    request: Request
    notes: tuple[str, ...] = ()
    """What the reader of the baseline has to say."""
    functions: tuple[str, ...] = ()
    """What the torch model does otherwise than the baseline's family."""


def read_grid(path: Path | None) -> Grid:
    """The grid in a file, or the paper's.

    Raises:
        BadInput: unreadable, or a key that is unknown, missing or out of range; named.
    """
    if path is None:
        text, origin = (files("smelt_budget.ladder") / f"{PAPER}.yaml").read_text(encoding="utf-8"), PAPER
    elif str(path) != "-" and not path.exists():
        raise BadInput(f"there is no file {str(path)!r:.200}", "fix: a YAML file (docs/ladder-and-report.md), or none")
    else:
        text, origin = read_text(str(path)), str(path)
    try:
        grid = Grid.model_validate(parse(text, origin))
    except ValidationError as error:
        raise BadInput(f"{origin} is not a grid", *explained(error)) from None
    beside = Path.cwd() if path is None or str(path) == "-" else path.absolute().parent
    return grid.model_copy(update={"scales": {name: placed(one, beside) for name, one in grid.scales.items()}})


def with_heads(grid: Grid, heads: HeadsAsked | None) -> Grid:
    """The same grid, its heads as asked."""
    return grid if heads is None else grid.model_copy(update={"solve": grid.solve.model_copy(update={"heads": heads})})


def placed(described: dict[str, Any] | str, beside: Path) -> dict[str, Any] | str:
    """A scale's file is looked for beside the grid."""
    if isinstance(described, dict) or builtin.has(described):
        return described
    return str(beside / described)


def cells(grid: Grid, origin: str, experts_multiple: int = 1) -> list[Cell]:
    """Every pair, scale by scale.

    Args:
        grid: as read.
        origin: what to call it.
        experts_multiple: the least step of expert counts, which expert-parallel ranks share.

    Raises:
        BadInput: a scale that cannot be counted; named.
    """
    found = []
    for scale, described in grid.scales.items():
        for label, fields, sparsity in levels(grid):
            name = scale if label is None else f"{scale}-{label}"
            reading = baseline(described, fields, f"{origin}: scales.{scale}")
            asked = request(grid, reading.setting.get("attention_length"), sparsity, experts_multiple)
            found.append(Cell(name, scale, label, reading.spec, asked, reading.notes, reading.functions))
    twice = {cell.name for cell in found if sum(cell.name == other.name for other in found) > 1}
    if twice:
        raise BadInput(f"{origin}: two cells are called {', '.join(sorted(twice))}", "fix: other names of scales")
    return found


def levels(grid: Grid) -> list[tuple[str | None, dict[str, int], float | None]]:
    """(label, fields it sets, S asked) of each column."""
    if grid.experts is not None:
        return [(label, {"num_experts": count}, None) for label, count in grid.experts.items()]
    if grid.sparsities is not None:
        return [(f"S{round(100 * sparsity, 6):g}", {}, sparsity) for sparsity in grid.sparsities]
    return [(None, {}, None)]


def baseline(described: dict[str, Any] | str, fields: dict[str, int], where: str) -> Reading:
    """A scale as a model."""
    if isinstance(described, str):
        reading = read(described)
        if fields and not reading.spec.is_moe:
            raise BadInput(f"{where}: {described} is dense, so experts cannot be counted out", "fix: sparsities")
        return replace(reading, spec=reading.spec.replace(**fields))
    if fields and "num_experts" in described:
        raise BadInput(f"{where}.num_experts stands beside experts, which sets it", "fix: leave one out")
    moe = "moe_intermediate_size" in described and "num_experts" not in described | fields
    top_k = described.get("num_experts_per_tok", 1)
    start = {"num_experts": max(2, top_k)} if moe and type(top_k) is int else {}  # sparsities move it
    return Reading(checked(described | start | fields, where), where)


def request(grid: Grid, length: Any, sparsity: float | None, experts_multiple: int) -> Request:
    """What is asked of the solver in one cell."""
    asked, own = grid.solve, grid.attention_length if grid.attention_length is not None else length
    step = asked.experts_multiple
    if step % experts_multiple:
        step = step * experts_multiple
    return Request(
        plan=Plan(Fraction(str(asked.span)), asked.visits, asked.start, asked.layers),
        heads=asked.heads,
        policy=asked.policy,
        lattice=Lattice(asked.hidden_multiple, asked.head_multiple, asked.expert_multiple, step),
        tolerance=asked.tolerances(),
        sparsity=sparsity,
        top_k=asked.top_k,
        keep=asked.keep,
        convention=CONVENTIONS[grid.convention],
        context=grid.horizons.context,
        attention_length=None if own is None else Fraction(str(own)),
        bytes_per_element=Fraction(str(grid.bytes_per_element)),
    )
