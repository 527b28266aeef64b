"""What is on each picture? Curves and points of two arms, told apart by line and marker as well as by colour.

Both arms see the same batches, so the difference by step is far quieter than either loss: it is the difference that is
smoothed and drawn, not two smooth curves to be compared by eye.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from smelt_budget.verify.interval import Interval
from smelt_budget.verify.strokes import (
    ARMS,
    GREY,
    STYLES,
    Runs,
    Style,
    banded,
    between,
    finite,
    framed,
    keyed,
    layers_on_x,
    lined,
    noted,
    ranged,
    smoothed,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def loss(figure: Figure, runs: Runs) -> bool:
    """Both losses by step, then what lies between them."""
    if not any(runs.metrics.values()):
        return False
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    last = 0
    for arm in ARMS:
        curves = {seed: {row["step"]: row["loss"] for row in rows} for seed, rows in runs.metrics[arm].items()}
        last = max([last, *(step for curve in curves.values() for step in curve)])
        banded(above, [smoothed(curve) for curve in curves.values()], STYLES[arm])
    for arm, shift in zip(ARMS, (1.025, 1.045), strict=True):
        ends = [run["held_out"]["nats_per_token"] for run in runs.by_arm[arm]]
        if ends:
            ranged(above, last * shift, ends, STYLES[arm], f"{STYLES[arm].words}, held-out")
    marked(above, runs.result)
    differing(below, runs, last)
    framed(above, "loss (nats / token)")
    framed(below, "twin - baseline\n(nats / token)", f"step ({step_words(runs.result['recipe'])})")
    above.legend(frameon=False, fontsize=8, ncols=2)
    below.set_xlim(0, last * 1.07)
    words = "Curves: means over seeds, smoothed over about ten steps. Bands and bars: lowest to highest seed."
    if len(runs.result["data"]["domains"]) > 1:
        words += "\nHeld-out rows are as many of every domain, training has the text's own mix: their levels differ."
    noted(figure, words)
    return True


def step_words(recipe: dict[str, Any]) -> str:
    """What a step is."""
    return f"{recipe['batch_size']:,} x {recipe['context']:,} tokens"


def marked(axes: Axes, result: dict[str, Any]) -> None:
    """What letters and pairs of letters alone would reach, the mean over domains."""
    marks = (result.get("data") or {}).get("yardsticks") or {}
    for name in ("unigram", "bigram"):
        values = [mark.get(name) for mark in marks.values()]
        if values and None not in values:
            level = fmean(value for value in values if value is not None)
            lined(axes, level, f"{name}s, held-out {level:.2f}")


def differing(axes: Axes, runs: Runs, last: int) -> None:
    """The paired difference by step, and at the end that of the held-out losses."""
    curves = []
    for seed, rows in runs.metrics["baseline"].items():
        before = {row["step"]: row["loss"] for row in rows}
        after = {row["step"]: row["loss"] for row in runs.metrics["twin"].get(seed, ())}
        curves.append(smoothed({step: after[step] - before[step] for step in before if step in after}))
    axes.axhline(0, color=GREY, linewidth=0.7)
    banded(axes, [curve for curve in curves if curve], Style("black", "", "-", "training"))
    ends = [after["held_out"]["nats_per_token"] - before["held_out"]["nats_per_token"] for before, after in runs.pairs]
    if ends:
        between(axes, last * 1.035, ends, "held-out, 95 % interval" if len(ends) > 1 else "held-out, 1 seed")
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    settled = [value for curve in curves for step, value in curve.items() if step > last * 0.1]
    if settled:  # the first steps swing widely and say nothing
        reach = [0.0, *settled, *ends]
        if len(ends) > 1:
            reach += [Interval.over(ends).as_dict()[end] for end in ("low", "high")]
        room = max(max(reach) - min(reach), 1e-3)
        axes.set_ylim(min(reach) - 0.1 * room, max(reach) + 0.35 * room)  # the legend is at the top


def parts(figure: Figure, runs: Runs) -> bool:
    """Three ways of cutting the held-out text; names of buckets are in tokens."""
    if not runs.pairs:
        return False
    kinds = {"domains": "domain", "document_length": "document length (tokens)", "position": "position (tokens)"}
    names = {kind: part_names(runs, kind) for kind in kinds}
    kinds = {kind: words for kind, words in kinds.items() if names[kind]}
    if not kinds:
        return False
    widths = [max(2, len(names[kind])) for kind in kinds]
    grid = figure.subplots(
        2, len(kinds), sharex="col", sharey="row", width_ratios=widths, height_ratios=(3, 2), squeeze=False
    )
    for (above, below), (kind, words) in zip(grid.T, kinds.items(), strict=True):
        below.axhline(0, color=GREY, linewidth=0.7)
        for at, name in enumerate(names[kind]):
            for arm, shift in zip(ARMS, (-0.12, 0.12), strict=True):
                values = [run["held_out"][kind][name]["nats_per_token"] for run in runs.by_arm[arm]]
                ranged(above, at + shift, values, STYLES[arm], STYLES[arm].words if at == 0 else None)
            paired = [[run["held_out"][kind][name]["nats_per_token"] for run in pair] for pair in runs.pairs]
            between(below, at, [after - before for before, after in paired])
        short = [name if len(name) <= LONGEST else f"...{name[-LONGEST:]}" for name in names[kind]]
        tilted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor", "parse_math": False}
        below.set_xticks(range(len(short)), short, **tilted)
        below.set_xlim(-0.6, len(names[kind]) - 0.4)
        framed(above, "loss (nats / token)" if above is grid[0, 0] else "")
        interval = ", 95 % intervals" if runs.seeds > 1 else ""
        framed(below, f"twin - baseline\n(nats / token{interval})" if below is grid[1, 0] else "", words)
    keyed(figure, grid[0, 0])
    noted(figure, "Above: means over seeds, bars from the lowest to the highest. Below: paired by seed.")
    return True


LONGEST = 20
"""Characters of a domain's name; its end tells more than its beginning where it is a path."""


def part_names(runs: Runs, kind: str) -> list[str]:
    """Parts with tokens in every run."""
    every = [run["held_out"].get(kind, {}) for arm in ARMS for run in runs.by_arm[arm]]
    return [name for name in every[0] if all(finite(one.get(name, {}).get("nats_per_token")) for one in every)]


def sink(figure: Figure, runs: Runs) -> bool:
    """Mass on the start by layer: means over heads and seeds as markers, each head as a dot."""
    sinks = {arm: [run["sink"]["layers"] for run in runs.by_arm[arm] if measured(run.get("sink"))] for arm in ARMS}
    if not all(sinks.values()):
        return False
    grid = figure.subplots(1, 2, sharey=True)
    floor = fmean(entry["floor"] for run in sinks["baseline"] for entry in run)
    eps = next(run["sink"]["eps"] for run in runs.by_arm["baseline"] if measured(run.get("sink")))
    most = max(mass for arm in ARMS for run in sinks[arm] for layer in run for mass in layer["mass_per_head"])
    for axes, arm in zip(grid, ARMS, strict=True):
        steps = sinks[arm][0]
        visits = 1 + max(entry["visit"] for entry in steps)
        core = sorted(entry["layer"] for entry in steps if entry["visit"] == visits - 1 > 0)
        for visit, entries in by_visit(steps):
            look, shift = style(arm, visit, visits), 0.16 * (visit - (visits - 1) / 2)
            layers = [steps[index]["layer"] for index in entries]
            places = [layer + 1 + (shift if layer in core else 0) for layer in layers]
            same = [[run[index] for run in sinks[arm]] for index in entries]
            for place, layer in zip(places, same, strict=True):
                heads = [mass for entry in layer for mass in entry["mass_per_head"]]
                axes.plot([place] * len(heads), heads, ".", color=look.colour, alpha=0.35, markersize=3, zorder=1)
                ranged(axes, place, [e["mass_mean"] for e in layer], look, look.words if place == places[0] else None)
        if core:
            axes.axvspan(core[0] + 0.5, core[-1] + 1.5, color="#000000", alpha=0.05, linewidth=0)
            axes.text(core[0] + 0.55, most * 1.09, "core", va="top", fontsize=8, color=GREY)
        lined(axes, floor)
        if most > eps / 2:
            lined(axes, eps, line="--")
        framed(axes, "attention mass on the document's start" if arm == "baseline" else "", "layer")
        layers_on_x(axes, 1 + max(entry["layer"] for entry in steps))
    grid[0].set_ylim(0, most * 1.1)
    keyed(figure, *grid)
    words = "Dots: every head of every seed. Markers: means over heads and seeds, bars from lowest to highest seed.\n"
    words += f"Dotted: uniform attention, {floor:.3f}."
    noted(figure, words + (f" Dashed: a head above {eps:g} is a sink." if most > eps / 2 else ""))
    return True


def measured(one: dict[str, Any] | None) -> bool:
    """Whether a sink was looked for and found countable."""
    return bool(one and one.get("layers") and one.get("queries"))


def router(figure: Figure, runs: Runs) -> bool:
    """Two measures of evenness, each by layer at the end and, where steps were logged, over training."""
    finals = {arm: [run["routing"]["load"] for run in runs.by_arm[arm] if run["routing"]["load"]] for arm in ARMS}
    if not any(finals.values()):
        return False
    told = any("router" in row for by_seed in runs.metrics.values() for rows in by_seed.values() for row in rows)
    grid = figure.subplots(2, 1 + told, sharey="row", width_ratios=(3, 2) if told else None, squeeze=False)
    for axes, of, words in zip(grid, (entropy, busiest), ("entropy of the load\n(1 is even)", BUSIEST), strict=True):
        for arm in ARMS:
            if finals[arm]:
                loads(axes, finals[arm], runs.metrics[arm], arm, of)
        framed(axes[0], words)
    depth = max(1 + entry["layer"] for arm in ARMS for final in finals[arm] for entry in final)
    for axes in grid[:, -1]:
        layers_on_x(axes, depth)
    if told:
        framed(grid[0, 1], "")
        framed(grid[1, 0], BUSIEST, "step: batches of training")
        for axes in grid[:, 0]:
            axes.set_xlim(left=0)
    framed(grid[1, -1], "" if told else BUSIEST, "layer: held-out text, at the end")
    keyed(figure, grid[0, -1])
    curves = "Curves: means over layers and seeds, in bands over all of them. " if told else ""
    noted(figure, f"{curves}Bars: lowest to highest seed.")
    return True


BUSIEST = "busiest expert\n(1 is an even share)"


def loads(
    axes: Sequence[Axes],
    finals: Sequence[Sequence[Mapping[str, Any]]],
    by_seed: Mapping[int, list[dict[str, Any]]],
    arm: str,
    of: Callable[[Mapping[str, Any], int], float],
) -> None:
    """One arm's visits under one measure: the last axes are by layer, the first of two over training."""
    experts = {(entry["layer"], entry["visit"]): entry["experts"] for entry in finals[0]}
    visits = 1 + max(visit for _, visit in experts)
    for visit, entries in by_visit(finals[0]):
        look, shift = style(arm, visit, visits), -0.2 if arm == "baseline" else 0.2 * visit
        if len(axes) > 1:
            banded(axes[0], list(training(by_seed, visit, experts, of)), look)
        for index in entries:
            values = [of(final[index], finals[0][index]["experts"]) for final in finals]
            words = look.words if index == entries[0] else None
            ranged(axes[-1], finals[0][index]["layer"] + 1 + shift, values, look, words)


def entropy(entry: Mapping[str, Any], experts: int) -> float:
    """Normalised; 1 is even."""
    del experts
    return entry["entropy"]


def busiest(entry: Mapping[str, Any], experts: int) -> float:
    """Largest share in multiples of an even one."""
    return entry["max_share"] * experts


def training(
    by_seed: Mapping[int, list[dict[str, Any]]],
    visit: int,
    experts: Mapping[tuple[int, int], int],
    of: Callable[[Mapping[str, Any], int], float],
) -> Iterator[dict[int, float]]:
    """By step, a curve for each seed and layer that has this visit."""
    for rows in by_seed.values():
        told = [(row["step"], row["router"]) for row in rows if "router" in row]
        for layer in sorted(layer for layer, v in experts if v == visit):
            curve = {}
            for step, columns in told:
                index = list(zip(columns["layer"], columns["visit"], strict=True)).index((layer, visit))
                entry = {name: columns[name][index] for name in ("entropy", "max_share")}
                if entry["entropy"] is not None:
                    curve[step] = of(entry, experts[layer, visit])
            if curve:
                yield curve


def by_visit(entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, list[int]]]:
    """Each visit with the places of its layers."""
    for visit in sorted({entry["visit"] for entry in entries}):
        yield visit, [index for index, entry in enumerate(entries) if entry["visit"] == visit]
