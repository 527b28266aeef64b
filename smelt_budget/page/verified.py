"""A verified pair: three counts, losses of both arms, where attention sinks, how the router spreads its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from smelt_budget.page import commands
from smelt_budget.page.charts import (
    ARMS,
    NEUTRAL,
    arm_style,
    band,
    by_step,
    curve,
    frame,
    label,
    level,
    ranged,
)
from smelt_budget.page.parts import Chapter, Plot, Section, Table
from smelt_budget.page.sources import Source
from smelt_budget.report.verify import (
    arm_table,
    convention_words,
    count_table,
    domain_table,
    gap_table,
    rate_table,
    trained_on,
)
from smelt_budget.verify.strokes import Runs, smoothed

Data = dict[str, Any]
FEWEST = 3
EARLY = 0.1
"""Share of the steps in which losses swing widely and say nothing."""


def chapter(source: Source, number: int) -> Chapter:
    """Counts; and where something was trained, loss, sink and router."""
    result, path = source.data, str(source.path)
    command = commands.verified(path, result, source.asked)
    counted = Section(
        f"counts{number}",
        "Three counts",
        path,
        commands.verified(path, {"origin": result.get("origin", "smelt.yaml")}, {}),
        (Table.of(count_table(result["counts"])), Table.of(gap_table(result))),
        (*result["verdict"]["words"][:1], *convention_words(result)),
    )
    sections = [counted]
    if "difference" in result["verdict"]:
        runs = Runs.of(result, source.metrics)
        made = (losses(result, runs, number), parts_of_text(runs, number), sinks(result, runs, number))
        every = [*made, router(result, runs, number)]
        sections += [
            Section(name, title, path, command, parts, says, marks(result), caveats)
            for name, title, parts, says, caveats in (one for one in every if one is not None)
        ]
    return Chapter("verify", path, tuple(sections), slim(result))


Draft = tuple[str, str, tuple[Any, ...], tuple[str, ...], tuple[str, ...]]


def marks(result: Data) -> tuple[str, ...]:
    """How little this is."""
    found, seeds = result["verdict"], len(result["verdict"]["difference"]["seeds"])
    return (
        *(("toy scale",) if found["scale"]["proxy"] else ()),
        *((f"{seeds} seed{'' if seeds == 1 else 's'}",) if seeds < FEWEST else ()),
        *(() if found["resolved"] else ("difference not resolved",)),
    )


def slim(result: Data) -> Data:
    """The result without the loss of every held-out row."""
    runs = {
        arm: [
            run | {"held_out": {key: value for key, value in (run.get("held_out") or {}).items() if key != "rows"}}
            for run in every
        ]
        for arm, every in result.get("runs", {}).items()
    }
    return result | ({"runs": runs} if runs else {})


def losses(result: Data, runs: Runs, number: int) -> Draft:
    """Curves with bands, the paired difference, the tables of the terminal, and what may be said."""
    found = result["verdict"]
    parts: list[Any] = []
    if any(runs.metrics[arm] for arm in ARMS):
        parts += [loss_plot(runs, f"loss{number}"), difference_plot(runs, f"difference{number}")]
    parts.append(Table.of(arm_table(found), "What each arm came to"))
    if result.get("rates"):
        parts.append(Table.of(rate_table(result["rates"]), "Rates that were tried"))
    says = (*trained_on(result), *found["words"][1:])
    caveats = ["a difference counts only where at least 3 seeds give an interval without 0"]
    if found["scale"]["proxy"]:
        caveats.append("a proxy this small says nothing about which arm is better at a useful size")
    return f"training{number}", "Loss of both arms", tuple(parts), says, tuple(caveats)


def loss_plot(runs: Runs, name: str) -> Plot:
    """Means over seeds in bands; each seed can be switched on."""
    traces = []
    for arm in ARMS:
        colour, _, dash = arm_style(arm)
        every = {seed: smoothed(by_step(rows)) for seed, rows in runs.metrics[arm].items()}
        traces += banded(arm, list(every.values()), colour, dash)
        for place, one in enumerate(every.values()):
            steps = sorted(one)
            group = {"visible": "legendonly", "legendgroup": f"{arm} seeds", "showlegend": place == 0}
            traces.append(curve(f"{arm}, each seed", steps, [one[s] for s in steps], colour, "dot", **group))
    recipe = runs.result["recipe"]
    layout = frame(f"step of {recipe['batch_size']:,} x {recipe['context']:,} tokens", "training loss, nats / token")
    settled = [
        v for trace in traces for step, v in zip(trace["x"], trace["y"], strict=True) if step > EARLY * recipe["steps"]
    ]
    if settled:
        room = 0.08 * max(max(settled) - min(settled), 1e-3)
        layout["yaxis"] |= {"range": [min(settled) - room, max(settled) + room]}
    words = (
        "Means over seeds, smoothed over about ten steps; bands from the lowest to the highest seed. "
        "Drawn from where the first tenth is over; a double click shows all of it."
    )
    return Plot(name, "Training loss", tuple(traces), layout, words, "step")


def difference_plot(runs: Runs, name: str) -> Plot:
    """Paired by seed: both arms saw the same batches, so it is quieter than either loss."""
    every = []
    for seed, rows in runs.metrics["baseline"].items():
        before, after = by_step(rows), by_step(runs.metrics["twin"].get(seed, ()))
        both = {step: after[step] - before[step] for step in before if step in after}
        if both:
            every.append(smoothed(both))
    traces = banded("training", every, NEUTRAL, "solid")
    nats = runs.result["verdict"]["difference"]["nats_per_token"]
    if nats is not None and every:
        width = nats.get("half_width")
        interval = f", 95 % interval of {nats['seeds']} seeds" if width is not None else ", 1 seed"
        bars = {} if width is None else {"error_y": {"type": "data", "array": [width], "color": arm_style("twin")[0]}}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"held out{interval}",
                "x": [max(max(one) for one in every)],
                "y": [nats["mean"]],
                "marker": {"size": 10, "symbol": "diamond", "color": arm_style("twin")[0]},
                **bars,
            }
        )
    layout = frame("step", "twin - baseline, nats / token", shapes=[level(0, "", "solid")])
    settled = [value for one in every for step, value in one.items() if step > EARLY * max(one)]
    if settled:
        ends = (
            [] if nats is None else [nats["mean"], *(nats[end] for end in ("low", "high") if nats.get(end) is not None)]
        )
        low, high = min(0.0, *settled, *ends), max(0.0, *settled, *ends)
        room = 0.08 * max(high - low, 1e-3)
        layout["yaxis"] |= {"range": [low - room, high + room]}
    words = "Paired by seed, smoothed; above 0 the twin is behind."
    return Plot(name, "Difference, twin - baseline", tuple(traces), layout, words, "step")


def banded(name: str, curves: Sequence[dict[int, float]], colour: str, dash: str) -> list[dict[str, Any]]:
    """Mean and range over the steps that all share."""
    if not curves:
        return []
    steps = sorted(set.intersection(*(set(one) for one in curves)))
    values = [[one[step] for one in curves] for step in steps]
    line = curve(name, steps, [fmean(at) for at in values], colour, dash, legendgroup=name)
    if len(curves) < 2:
        return [line]
    return [band(steps, [min(at) for at in values], [max(at) for at in values], colour, name), line]


def parts_of_text(runs: Runs, number: int) -> Draft | None:
    """By domain, document length and position."""
    if not runs.pairs:
        return None
    parts: list[Any] = []
    kinds = {"domains": "domain", "document_length": "document length, tokens", "position": "position, tokens"}
    for kind, words in kinds.items():
        every = [run["held_out"].get(kind, {}) for arm in ARMS for run in runs.by_arm[arm]]
        names = [name for name in every[0] if all(one.get(name, {}).get("nats_per_token") is not None for one in every)]
        if len(names) < 2:
            continue
        traces = tuple(
            ranged(
                arm,
                [label(name) for name in names],
                [[run["held_out"][kind][name]["nats_per_token"] for run in runs.by_arm[arm]] for name in names],
                arm_style(arm),
                **({"mode": "markers"} if kind == "domains" else {}),
            )
            for arm in ARMS
        )
        layout = frame(words, "held-out loss, nats / token", xaxis={"type": "category"})
        parts.append(Plot(f"{kind}{number}", f"By {words.split(',')[0]}", traces, layout, "", words))
    domains = runs.result["verdict"]["difference"]["by_domain"]
    if len(domains) > 1:
        parts.append(Table.of(domain_table(domains), "Difference by domain"))
    if not parts:
        return None
    return f"parts{number}", "Held-out loss by part of the text", tuple(parts), (), ()


def sinks(result: Data, runs: Runs, number: int) -> Draft | None:
    """Attention mass on the document's start, by layer and visit."""
    every = {
        arm: [run["sink"]["layers"] for run in runs.by_arm[arm] if (run.get("sink") or {}).get("queries")]
        for arm in ARMS
    }
    says = tuple(result["verdict"].get("sink", ()))
    if not all(every.values()):
        return (f"sink{number}", "Attention sink", (), says, ()) if says else None
    traces = visits_of(every, lambda entry: entry["mass_mean"])
    floor = fmean(entry["floor"] for one in every["baseline"] for entry in one)
    layout = frame("layer", "attention on the document's start", shapes=[level(floor, "uniform attention")])
    layout["xaxis"] |= {"dtick": 1} if max(len(one) for one in every["baseline"]) <= 16 else {}
    layout["yaxis"] |= {"rangemode": "tozero"}
    words = "Means over heads and seeds, bars over seeds. A layer of the core stands there once for each visit."
    plot = Plot(f"sinks{number}", "Sink by layer and visit", tuple(traces), layout, words, "layer")
    return f"sink{number}", "Attention sink", (plot,), says, ()


def visits_of(every: dict[str, list[list[Data]]], of: Any) -> list[dict[str, Any]]:
    """A series for each arm and visit, over layers counted from 1."""
    traces = []
    for arm in ARMS:
        if not every[arm]:
            continue
        visits = 1 + max(entry["visit"] for entry in every[arm][0])
        for visit in range(visits):
            places = [i for i, entry in enumerate(every[arm][0]) if entry["visit"] == visit]
            name = arm if visits == 1 else f"{arm}, visit {visit + 1}"
            xs = [every[arm][0][i]["layer"] + 1 for i in places]
            values = [[of(one[i]) for one in every[arm]] for i in places]
            traces.append(ranged(name, xs, values, arm_style(arm, visit, visits)))
    return traces


def router(result: Data, runs: Runs, number: int) -> Draft | None:
    """How even the load is, and how busy the busiest expert, by layer and visit on held-out text."""
    every = {arm: [run["routing"]["load"] for run in runs.by_arm[arm] if run["routing"]["load"]] for arm in ARMS}
    if not any(every.values()):
        return None
    kinds = (
        ("entropy", "Evenness of the load", "entropy of the load (1 is even)", lambda entry: entry["entropy"]),
        (
            "busiest",
            "Busiest expert",
            "its share (1 is an even one)",
            lambda entry: entry["max_share"] * entry["experts"],
        ),
    )
    plots = []
    for name, title, words, of in kinds:
        layout = frame("layer", words, shapes=[level(1, "even")])
        layout["xaxis"] |= {"dtick": 1} if max(len(one) for arm in ARMS for one in every[arm]) <= 24 else {}
        plots.append(Plot(f"{name}{number}", title, tuple(visits_of(every, of)), layout, "Bars over seeds.", "layer"))
    overlap = result["verdict"]["health"]["twin"]
    says = ()
    if overlap.get("overlap") is not None:
        says = (
            f"of the experts a token ran on one visit of a core layer, it runs {100 * overlap['overlap']:.1f} % on the "
            f"next too; by chance, given the loads, {100 * overlap['overlap_by_chance']:.1f} %",
        )
    return f"router{number}", "Load of the experts", tuple(plots), says, ()
