"""What was solved, and what was asked? Reads the file that `smelt-budget solve --out smelt.yaml` wrote.

The file is checked for form only. Whether the two arms still cost the same is for the rest of `verify` to find out,
so a twin edited by hand is read as it stands. The request comes back such that

    solve(pair.baseline, pair.request).twin == pair.twin        for a file as it was written

its plan from the file, or, where the file has none or the twin's loop is not that plan's, from the twin's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from smelt_budget.errors import BadInput
from smelt_budget.ledger import CONVENTIONS, Setting
from smelt_budget.solver import Lattice, Plan, Request, Tolerance
from smelt_budget.solver.plan import place
from smelt_budget.spec import ModelSpec, read
from smelt_budget.spec.read import NUMBER, Reading
from smelt_budget.spec.text import parse, read_text

DEFAULT = "smelt.yaml"
FIX = "fix: smelt-budget solve --out smelt.yaml"
Built = TypeVar("Built")


@dataclass(frozen=True)
class Pair:
    """Baseline and twin as they stand in the file, and how the twin was asked for."""

    baseline: ModelSpec
    twin: ModelSpec
    setting: Setting
    request: Request
    """Gives the twin again from `baseline`; its sparsity is `None`, for `baseline` has it already."""
    origin: str
    notes: tuple[str, ...] = ()
    """What was not in the file and was derived, and what the two readers had to say."""


def read_pair(path: str | Path | None = None) -> Pair:
    """The pair in a file; without a path the one in ./smelt.yaml.

    Raises:
        BadInput: no such file, not a solved pair, or an arm that cannot be read.
    """
    if path is None:
        if not Path(DEFAULT).is_file():
            raise BadInput(f"no pair is given and there is no ./{DEFAULT}", FIX)
        path = DEFAULT
    origin = str(path)
    if origin == "-":
        raise BadInput("a pair is read from a file, not from standard input", FIX)
    if not Path(origin).is_file():
        raise BadInput(f"there is no file {origin!r:.200}", FIX)
    data = parse(read_text(origin), origin)
    missing = [arm for arm in ("baseline", "twin") if arm not in data]
    if missing:
        raise BadInput(f"{origin} is no solved pair: {' and '.join(missing)} missing", FIX)
    baseline, twin = read(f"{origin}#baseline"), read(f"{origin}#twin")
    check_arms(baseline.spec, twin.spec, origin)
    otherwise = data.get("built_otherwise")
    listed = otherwise if isinstance(otherwise, list) else []
    told = [f"built otherwise: {one}" for one in listed if isinstance(one, str)]
    notes = list(dict.fromkeys((*baseline.notes, *twin.notes, *told)))
    setting = setting_of(baseline, origin, notes)
    request = request_of(data, baseline.spec, twin.spec, setting, Source(origin, notes))
    return Pair(baseline.spec, twin.spec, setting, request, origin, tuple(notes))


def check_arms(baseline: ModelSpec, twin: ModelSpec, origin: str) -> None:
    """One arm loops, and it is the twin."""
    if twin.loop is None:
        raise BadInput(f"{origin}#twin is not looped: it has no loop, so there is nothing to compare", FIX)
    if baseline.effective_depth != baseline.num_hidden_layers or baseline.core is not None:
        raise BadInput(f"{origin}#baseline is looped; a twin is found for an unlooped model", FIX)


def setting_of(baseline: Reading, origin: str, notes: list[str]) -> Setting:
    """The setting the pair was matched under."""
    own = baseline.setting
    lacking = [name for name in ("convention", "context", "attention_length", "bytes_per_element") if name not in own]
    if lacking:
        notes.append(f"{origin}: setting has no {', '.join(lacking)}; the default is taken (rules C8 to C12)")
    length = own.get("attention_length")
    return Setting.of(
        baseline.spec,
        CONVENTIONS[own.get("convention") or "smelt"],
        own.get("context"),
        None if length is None else Fraction(str(length)),
        Fraction(str(own.get("bytes_per_element") or 2)),
    )


@dataclass(frozen=True)
class Source:
    """Where values come from, and what to tell about those that are not there."""

    origin: str
    notes: list[str]

    def choice(self, data: dict[str, Any], name: str, allowed: tuple[str, ...], default: str) -> Any:
        """One of several words."""
        value = data.get(name)
        if value is None:
            self.notes.append(f"{self.origin} does not say {name}; {default} is taken")
            return default
        if value not in allowed:
            raise BadInput(f"{self.origin}: {name} is {value!r:.60}, not {' or '.join(allowed)}")
        return value

    def built(
        self, data: dict[str, Any], name: str, kind: Callable[..., Built], number: Callable[[Any], bool]
    ) -> Built:
        """A flat block of numbers as its dataclass; its defaults, with a note, where it is missing."""
        value = data.get(name)
        if value is None:
            self.notes.append(f"{self.origin} does not say {name}; the default is taken")
            return kind()
        if not isinstance(value, dict) or not all(map(number, value.values())):
            raise BadInput(f"{self.origin}: {name} is {value!r:.120}, not one that solve wrote", FIX)
        try:
            return kind(**value)
        except TypeError:
            raise BadInput(
                f"{self.origin}: {name} has keys that solve does not write: {', '.join(value)}", FIX
            ) from None


def whole(value: Any) -> bool:
    """An integer, and not true or false."""
    return type(value) is int


def real(value: Any) -> bool:
    """A number, and not true or false."""
    return type(value) in (int, float)


def request_of(data: dict[str, Any], baseline: ModelSpec, twin: ModelSpec, setting: Setting, source: Source) -> Request:
    """What was asked, from the file's own blocks."""
    asked = data.get("request") or {}
    if not isinstance(asked, dict):
        raise BadInput(f"{source.origin}: request is {asked!r:.60}, not a mapping", FIX)
    heads = source.choice(asked if "heads" in asked else data, "heads", ("auto", "uniform", "sectioned"), "auto")
    return Request(
        plan=plan_of(asked.get("plan"), baseline, twin, source),
        heads=heads,
        policy=source.choice(data, "policy", ("nearest", "at-most"), "nearest"),
        lattice=source.built(data, "lattice", Lattice, whole),
        tolerance=source.built(data, "tolerance", Tolerance, real),
        keep=source.built({"keep": data.get("keep") or {}}, "keep", dict, whole),
        convention=setting.convention,
        context=setting.context,
        attention_length=setting.attention_length,
        bytes_per_element=setting.bytes_per_element,
    )


def plan_of(written: Any, baseline: ModelSpec, twin: ModelSpec, source: Source) -> Plan:
    """The plan that was asked for, where it places the loop that the twin has; else the twin's loop as a plan."""
    if written is None:
        source.notes.append(f"{source.origin} has no plan (an older file); it is derived from the twin's loop")
        return derived(baseline, twin)
    plan = read_plan(written, source.origin)
    if not places(baseline, plan, twin):
        source.notes.append(f"{source.origin}: the twin's loop is not the one its plan places; the twin's own is taken")
        return derived(baseline, twin)
    return plan


def read_plan(written: Any, origin: str) -> Plan:
    """A plan as `Request.as_dict` writes it."""
    known = {"span", "visits", "start", "layers"}
    if not isinstance(written, dict) or not {"span", "visits"} <= written.keys() <= known:
        raise BadInput(f"{origin}: the plan is {written!r:.120}, not one that solve wrote", FIX)
    span, counts = written["span"], [written.get(name) for name in ("start", "layers")]
    if (
        not NUMBER.fullmatch(str(span))
        or not whole(written["visits"])
        or not all(c is None or whole(c) for c in counts)
    ):
        raise BadInput(f"{origin}: the plan is {written!r:.120}, not one that solve wrote", FIX)
    return Plan(Fraction(str(span)), written["visits"], *counts)


def derived(baseline: ModelSpec, twin: ModelSpec) -> Plan:
    """The plan that gives exactly the twin's loop; its start is left open where centring finds it."""
    loop = twin.loop
    assert loop is not None
    layers = twin.num_hidden_layers
    plan = Plan(
        span=Fraction(loop.stop - loop.start, layers),
        visits=loop.visits,
        layers=None if layers == baseline.num_hidden_layers else layers,
    )
    return plan if places(baseline, plan, twin) else Plan(plan.span, plan.visits, loop.start, plan.layers)


def places(baseline: ModelSpec, plan: Plan, twin: ModelSpec) -> bool:
    """Whether a plan puts the loop where the twin has it."""
    try:
        placed = place(baseline, plan)
    except BadInput:
        return False
    got = (placed.loop.start, placed.loop.stop, placed.loop.visits, placed.depth["num_hidden_layers"])
    assert twin.loop is not None
    return got == (twin.loop.start, twin.loop.stop, twin.loop.visits, twin.num_hidden_layers)
