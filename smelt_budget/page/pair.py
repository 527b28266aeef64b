"""A solved pair: what became of each quantity, the three budgets, the layers in their order."""

from __future__ import annotations

from typing import Any

from smelt_budget.page import commands
from smelt_budget.page.charts import COLOURS, NEUTRAL, frame
from smelt_budget.page.layers import layers
from smelt_budget.page.parts import Chapter, Plot, Section, Table
from smelt_budget.page.sources import Source
from smelt_budget.report.numbers import exact, signed_percent
from smelt_budget.report.solution import choices
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.model import checked

ARMS = ("baseline", "twin")
BUDGETS = (
    # gap's name, words, group and key of the ledger
    ("flops", "training FLOPs / token", "flops", "training_per_token"),
    ("non_embedding_parameters", "non-embedding parameters", "parameters", "non_embedding"),
    ("kv_cache", "KV bytes of a sequence", "kv_cache", "bytes_at_context"),
)
Data = dict[str, Any]


def chapter(source: Source, number: int) -> Chapter:
    """Two sections."""
    data, path = source.data, str(source.path)
    file = str(source.path / "smelt.yaml") if source.path.is_dir() else path
    baseline, twin = (checked(data[arm].get("spec", {}), f"{path}#{arm}") for arm in ARMS)
    command = commands.solved(file, data)
    found = data.get("certificate", {})
    certified = (f"certificate: {found['claim']} ({found['points']:,} points)",) if "claim" in found else ()
    return Chapter(
        "pair",
        path,
        (
            Section(
                f"pair{number}",
                "The pair",
                path,
                command,
                (sides(baseline, twin), layers(baseline, twin)),
                (*data.get("notes", ()), *(f"built otherwise: {one}" for one in data.get("built_otherwise", ()))),
            ),
            Section(
                f"budgets{number}",
                "Three budgets",
                path,
                command,
                (budgets(data), distances(data, f"gaps{number}")),
                (*certified, counted_under(data["setting"])),
                caveats=(
                    "equal FLOPs are not equal time: the twin runs more, narrower layers, and no wall-clock is matched",
                ),
            ),
        ),
        data,
    )


def sides(baseline: ModelSpec, twin: ModelSpec) -> Table:
    """Each chosen quantity, side by side."""
    if twin.loop is None:
        return Table(("", *ARMS), ())
    return Table(("", *ARMS), tuple((words, before, after) for words, before, after, _ in choices(baseline, twin)))


def budgets(data: Data) -> Table:
    """Every digit, and the gap."""
    ledgers = [data[arm]["ledger"] for arm in ARMS]
    rows = [
        (words, *(exact(ledger[group][key]) for ledger in ledgers), signed_percent(data["gaps"][gap]))
        for gap, words, group, key in BUDGETS
    ]
    rows.append(
        ("total parameters", *(exact(ledger["parameters"]["total"]) for ledger in ledgers), ""),
    )
    rows.append(
        ("active parameters, one pass", *(exact(one["parameters"]["active_non_embedding"]) for one in ledgers), "")
    )
    sparsity = (f"{100 * ledger['sparsity']['compute_equivalent']:.2f} %" for ledger in ledgers)
    rows.append(("compute-equivalent sparsity S", *sparsity, ""))
    return Table(("budget", *ARMS, "gap, twin / baseline - 1"), tuple(rows))


def distances(data: Data, name: str) -> Plot:
    """Gaps beside what was tolerated."""
    tolerance = data.get("tolerance", {})
    names = [words for _, words, _, _ in BUDGETS]
    allowed = [100 * tolerance.get(gap, 0.0) for gap, *_ in BUDGETS]
    gaps = [100 * data["gaps"][gap] for gap, *_ in BUDGETS]
    bars = {"orientation": "h", "type": "bar", "y": names, "hovertemplate": "%{y}: %{x:.4f} %<extra></extra>"}
    tolerated = {
        "marker": {"color": NEUTRAL, "opacity": 0.25},
        "width": 0.7,
        "hoverinfo": "skip",
        "hovertemplate": None,
    }
    traces = (
        bars | tolerated | {"x": allowed, "name": "tolerated"},
        bars | tolerated | {"x": [-one for one in allowed], "showlegend": False},
        bars | {"x": gaps, "name": "gap", "marker": {"color": COLOURS[1]}, "width": 0.3},
    )
    layout = frame("gap of the twin, %", "", yaxis={"autorange": "reversed"}, barmode="overlay", height=230)
    layout["xaxis"] |= {"zeroline": True}
    return Plot(name, "Gaps", (traces[2], *traces[:2]), layout, "Signed and relative, beside the tolerance.", "budget")


def counted_under(setting: Data) -> str:
    """Which convention."""
    return (
        f"counted under convention {setting.get('convention')}, context {setting.get('context'):,}, attention over "
        f"{setting.get('attention_length')} positions on average, {setting.get('bytes_per_element')} bytes an element"
    )
