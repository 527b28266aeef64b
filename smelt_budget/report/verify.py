"""How is a verified pair shown? Three counts of two arms, what training gave, and the sentences that may be said.

Reads the content of verify.json with its `verdict`, and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from smelt_budget.report.experts import expert_words
from smelt_budget.report.frame import plain_table
from smelt_budget.report.numbers import exact, short, signed_percent

ARMS = ("baseline", "twin")
COUNTS = {"parameters": "parameters", "flops": "forward FLOPs", "kv_cache": "KV bytes"}
MOST_ROWS = 6
"""Rows named for each count that disagrees."""
Data = dict[str, Any]


def verify_view(result: Data, verbose: bool = False) -> Group:
    """Everything there is: the counts alone where nothing was trained. Rows that differ are for the error to name."""
    found = result.get("verdict", {})
    parts: list[RenderableType] = [count_table(result["counts"]), gap_table(result)]
    parts += [Text(line, style="dim") for line in convention_words(result)]
    if "difference" in found:
        parts += [Text(line, style="dim") for line in trained_on(result)]
    if "experts" in result:
        parts += [Text(line, style="dim") for line in expert_words(result["experts"], verbose)]
    if "difference" in found:
        if result.get("rates"):
            parts.append(rate_table(result["rates"]))
        parts.append(arm_table(found))
        if len(found["difference"]["by_domain"]) > 1:
            parts.append(domain_table(found["difference"]["by_domain"]))
        parts.append(Text("what this says", style="bold"))
        parts += [Text(line) for line in found["sink"]]
    return Group(*parts, *(Text(line) for line in found.get("words", ())))


def count_table(counts: Data) -> Table:
    """Each quantity of each arm, counted by the ledger and measured on the model."""
    table = plain_table("count", "arm", "ledger", "measured", "equal", "")
    for name, words in COUNTS.items():
        for arm in ARMS:
            one = counts[arm][name]
            equal = Text("yes", style="green") if one["agree"] else Text("no", style="red")
            about = Text(circumstances(name, one) if arm == ARMS[0] else "", style="dim")
            table.add_row(words, arm, exact(one["ledger"]), exact(one["measured"]), equal, about)
    return table


def circumstances(name: str, count: Data) -> str:
    """Under what a count was made."""
    if name == "parameters":
        return "of the whole model"
    if name == "flops":
        return f"of a {count.get('unit', 'token')}, convention {count['convention']}, {count['context']:,} tokens"
    return f"of a prefill of {count['tokens']:,} tokens, {count['bytes_per_element']} bytes an element"


def counts_difference(counts: Data) -> list[str]:
    """Every row that differs and by how much, for the error that ends in exit code 4; none where all agree."""
    lines = []
    for arm in ARMS:
        for name, words in COUNTS.items():
            one = counts[arm][name]
            if one["agree"]:
                continue
            rows = one["differ"] or [{"row": "total", "ledger": one["ledger"], "measured": one["measured"]}]
            lines += [f"{arm}, {words}: {row_difference(row)}" for row in rows[:MOST_ROWS]]
            if len(rows) > MOST_ROWS:
                lines.append(f"{arm}, {words}: and {len(rows) - MOST_ROWS} more rows")
        if counts[arm].get("uncounted"):
            lines.append(f"{arm}, FLOPs: no count is known for {', '.join(counts[arm]['uncounted'])}")
    return lines


def row_difference(row: Data) -> str:
    """One row: experts: ledger 1,200, measured 1,000, -200 (-16.667 %)."""
    gap = row["measured"] - row["ledger"]
    share = f" ({signed_percent(gap / row['ledger'])})" if row["ledger"] else ""
    return f"{row['row']}: ledger {row['ledger']:,}, measured {row['measured']:,}, {gap:+,}{share}"


def gap_table(result: Data) -> Table:
    """How far the twin is from the baseline: in the pair, and in the proxy that was trained."""
    pair, proxy = result["pair"]["gaps"], result.get("proxy")
    small = proxy["gaps"] if proxy is not None and proxy["size"] != "full" else {}
    table = plain_table("gap, twin to baseline", "pair", *(["proxy"] if small else []))
    for budget, gap in pair.items():
        cells = [signed_percent(gap)] + ([signed_percent(small[budget])] if budget in small else [])
        table.add_row(BUDGETS.get(budget, budget.replace("_", " ")), *cells)
    if proxy is not None:
        s = proxy["sparsity"]
        arms = [(s["full_baseline"], s["full_twin"])] + ([(s["baseline"], s["twin"])] if small else [])
        table.add_row("compute-equivalent sparsity S", *(f"{100 * a:.2f} -> {100 * b:.2f} %" for a, b in arms))
    return table


def convention_words(result: Data) -> Iterator[str]:
    """Why measured FLOPs of the arms may lie further apart than their gap says."""
    counted, matched = result["counts"]["baseline"]["flops"]["convention"], result["pair"]["setting"]["convention"]
    if counted != matched:
        yield f"gaps are under convention {matched}, measured FLOPs under {counted}, as torch counts attention"


BUDGETS = {"flops": "training FLOPs", "non_embedding_parameters": "non-embedding parameters", "kv_cache": "KV cache"}


def trained_on(result: Data) -> Iterator[str]:
    """What was trained, on what, for how long."""
    scale, recipe, data = result["verdict"]["scale"], result["recipe"], result["data"]
    seeds = len(result["verdict"]["difference"]["seeds"])
    what = "proxy" if scale["proxy"] else "the pair itself"
    yield (
        f"{what}: {short(scale['parameters'])} parameters, {recipe['steps']:,} steps of {recipe['batch_size']} x "
        f"{recipe['context']:,} tokens, {seeds} seed{'' if seeds == 1 else 's'} in both arms"
    )
    yield f"text: {data['name']}; fingerprint {data['fingerprint'][:12]}"
    if scale["proxy"]:
        yield from (f"proxy: {note}" for note in result["proxy"]["notes"])


def rate_table(rates: Data) -> Table:
    """Loss at each rate tried, by arm; the chosen one marked."""
    factors = sorted({one["factor"] for arm in ARMS for one in rates[arm]["tried"]})
    table = plain_table("loss by rate (* taken)", *(f"x{factor:g}" for factor in factors), "rate taken")
    for arm in ARMS:
        losses = {one["factor"]: one["loss"] for one in rates[arm]["tried"]}
        chosen, cells = rates[arm]["chosen"], []
        for factor in factors:
            mark = "*" if factor == chosen["factor"] else " "
            loss = losses.get(factor)
            shown = "diverged" if factor in losses and loss is None else "-" if loss is None else f"{loss:.4f}"
            cells.append(f"{shown}{mark}")
        edge = ", at the edge" if rates[arm]["at_edge"] else ""
        table.add_row(arm, *cells, f"{chosen['rate']:.4g}{edge}")
    return table


def arm_table(found: Data) -> Table:
    """What each arm came to, means over seeds with their sd, and what lies between them."""
    table = plain_table("trained", "baseline", "twin", "twin - baseline")
    difference = found["difference"]
    for unit, words in (("nats_per_token", "held-out nats / token"), ("bits_per_byte", "held-out bits / byte")):
        table.add_row(words, *(spread(found["arms"][arm][unit], "{:.4f}") for arm in ARMS), between(difference[unit]))
    for name, words, shape in (
        ("first_loss", "training loss, first 5 % of steps", "{:.4f}"),
        ("last_loss", "training loss, last 5 %", "{:.4f}"),
        ("step_seconds", "seconds / step, median", "{:.4f}"),
        ("tokens_per_second", "tokens / second", "{:,.0f}"),
    ):
        table.add_row(words, *(spread(found["arms"][arm][name], shape) for arm in ARMS), "")
    for name, words in (("peak_memory_bytes", "peak memory, bytes"), ("gradient_norm_max", "largest gradient norm")):
        most = [found["arms"][arm][name] for arm in ARMS]
        table.add_row(words, *("-" if one is None else short(one["max"]) for one in most), "")
    health = [found["health"][arm] for arm in ARMS]
    for words, of in HEALTH:
        table.add_row(words, *(of(one) if one["entropy_min"] is not None else "-" for one in health), "")
    recall = [found["recall"][arm] for arm in ARMS]
    if all(recall):
        words = f"recall after {recall[0][-1]['examples']} examples / by copying"
        table.add_row(words, *(f"{one[-1]['accuracy']:.3f} / {one[-1]['copying_accuracy']:.3f}" for one in recall), "")
    return table


HEALTH = (
    ("load entropy, lowest (even is 1)", lambda one: f"{one['entropy_min']:.3f}"),
    ("idle experts of a layer, most", lambda one: f"{one['dead_max']} in {one['load_tokens']:,} tokens"),
    (
        "overlap of visits / by chance",
        lambda one: "-" if one["overlap"] is None else f"{one['overlap']:.3f} / {one['overlap_by_chance']:.3f}",
    ),
)


def spread(one: Data | None, shape: str) -> str:
    """2.0405 ± 0.0330: the mean and the sd between seeds."""
    if one is None:
        return "-"
    mean = shape.format(one["mean"])
    return mean if one["sd"] is None else f"{mean} ± {shape.format(one['sd'])}"


def between(one: Data | None) -> str:
    """+0.0975 ± 0.0378: the paired difference and the half-width of its interval."""
    if one is None:
        return "-"
    width = "(1 seed)" if one["half_width"] is None else f"± {one['half_width']:.4f}"
    return f"{one['mean']:+.4f} {width}"


def domain_table(by_domain: Data) -> Table:
    """The paired difference by domain."""
    table = plain_table("twin - baseline, 95 % interval", "nats / token", "bits / byte")
    for name, units in by_domain.items():
        table.add_row(name, between(units["nats_per_token"]), between(units["bits_per_byte"]))
    return table
