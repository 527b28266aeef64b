"""What do the counts and the runs say? Plain data for programs, and the sentences that may be said of it.

A difference is twin minus baseline, paired by seed; it is resolved where at least 3 seeds give a 95 % t-interval that
excludes 0. Its sign decides nothing: what is verified is that both arms build, cost what the ledger says, and train.
An arm trains where, on every seed, every loss is a number and the training loss fell by more than `FALL`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

from smelt_budget.verify.interval import Interval, rows_error, seeds_for

ARMS = ("baseline", "twin")
FALL = 0.1
"""Nats. The loss of a batch of 2,048 bytes was measured to move by about this much from step to step."""
FEWEST = 3
"""Seeds for a statement about the sign: with 2 the t quantile is 12.7."""
WIDTHS = (0.02, 0.05)
"""Half-widths, nats per token, for which the number of seeds is told."""
MEASURED = ("step_seconds", "tokens_per_second", "peak_memory_bytes", "gradient_norm_max", "first_loss", "last_loss")
Run = dict[str, Any]


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """What `result`, the content of verify.json, comes to; of the counts alone where nothing was trained.

    `seeds_needed` assumes that the sd, and for the last of them also the mean, stay what these seeds show.
    """
    from smelt_budget.verify.words import words

    found: dict[str, Any] = {"counts_agree": bool(result["counts"]["agree"])}
    if result.get("runs"):
        found |= trained(result)
    return found | {"words": words(result, found)}


def trained(result: dict[str, Any]) -> dict[str, Any]:
    """Everything that needs runs."""
    runs = {arm: result["runs"].get(arm) or [] for arm in ARMS}
    pairs, excluded = paired(runs)
    difference = differences(pairs)
    nats = difference["nats_per_token"]
    sd = None if nats is None else nats["sd"]
    needed = {f"for_half_width_{width}": seeds_for(width, sd) for width in WIDTHS}
    needed["to_resolve_this_difference"] = None if nats is None else seeds_for(abs(nats["mean"]), sd)
    return {
        "loss_fell": {arm: fell(runs[arm]) for arm in ARMS},
        "below": {arm: below(runs[arm], yardsticks(result)) for arm in ARMS},
        "scale": scale(result, pairs),
        "difference": difference | {"excluded": excluded},
        "resolved": resolved(nats),
        "seeds_needed": needed,
        "equal": equal(result, pairs),
        "rates": {arm: rate(result, arm) for arm in ARMS},
        "arms": {arm: summary(runs[arm]) for arm in ARMS},
        "health": {arm: health(runs[arm]) for arm in ARMS},
        "recall": {arm: recall(runs[arm]) for arm in ARMS},
        "sink": sink_sentences(runs),
    }


def loss_of(run: Run) -> float:
    """Held-out nats per token; NaN where the run has none."""
    value = (run.get("held_out") or {}).get("nats_per_token")
    return math.nan if value is None else float(value)


def paired(runs: dict[str, list[Run]]) -> tuple[list[tuple[Run, Run]], list[dict[str, Any]]]:
    """(baseline, twin) of every seed that both arms finished; and the seeds left out, with the reason."""
    by_seed = {arm: {run["seed"]: run for run in runs[arm]} for arm in ARMS}
    pairs, excluded = [], []
    for seed in sorted(set().union(*by_seed.values())):
        both = [by_seed[arm].get(seed) for arm in ARMS]
        lacking = [arm for arm, run in zip(ARMS, both, strict=True) if run is None]
        broken = [arm for arm, run in zip(ARMS, both, strict=True) if run and not math.isfinite(loss_of(run))]
        if lacking or broken:
            excluded += [{"seed": seed, "arm": arm, "why": "missing"} for arm in lacking]
            excluded += [{"seed": seed, "arm": arm, "why": "its held-out loss is not a number"} for arm in broken]
        else:
            pairs.append((by_seed["baseline"][seed], by_seed["twin"][seed]))
    return pairs, excluded


def differences(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Overall and by domain, in nats per token and, where the text's bytes are known, in bits per byte."""
    domains = list(pairs[0][0]["held_out"].get("domains", {})) if pairs else []
    errors = [rows_error(*(run["held_out"]["rows"] for run in pair)) for pair in pairs if "rows" in pair[0]["held_out"]]
    known = [error for error in errors if error is not None]
    return {
        **both_units(pairs, lambda run: run["held_out"]),
        "by_domain": {name: both_units(pairs, part("domains", name)) for name in domains},
        "rows_standard_error": fmean(known) if known else None,
        "seeds": [pair[0]["seed"] for pair in pairs],
    }


def part(kind: str, name: str) -> Callable[[Run], dict[str, Any]]:
    """Looks up a part of a run's held-out loss."""
    return lambda run: run["held_out"][kind][name]


def both_units(pairs: list[tuple[Run, Run]], of: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    """Intervals of the paired difference; `None` where a value is missing."""
    return {unit: interval(pairs, lambda run: of(run).get(unit)) for unit in ("nats_per_token", "bits_per_byte")}  # noqa: B023


def interval(pairs: list[tuple[Run, Run]], of: Callable[[Run], float | None]) -> dict[str, Any] | None:
    """Twin minus baseline."""
    values = [(of(before), of(after)) for before, after in pairs]
    known = [after - before for before, after in values if before is not None and after is not None]
    return Interval.over(known).as_dict() if known and len(known) == len(pairs) else None


def resolved(nats: dict[str, Any] | None) -> bool:
    """Whether the sign may be spoken of."""
    return nats is not None and nats["seeds"] >= FEWEST and abs(nats["mean"]) > nats["half_width"]


def fell(runs: list[Run]) -> bool:
    """On every seed, and on at least one."""
    return bool(runs) and all(
        math.isfinite(loss_of(run)) and math.isfinite(run["last_loss"]) and run["last_loss"] < run["first_loss"] - FALL
        for run in runs
    )


def yardsticks(result: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """By domain: nats per token of letter and letter-pair statistics, where they were counted."""
    return (result.get("data") or {}).get("yardsticks") or {}


def below(runs: list[Run], marks: dict[str, dict[str, float | None]]) -> dict[str, bool | None]:
    """Whether, in every domain, the mean held-out loss is below what letters and pairs of letters would give."""
    found: dict[str, bool | None] = {}
    for name in ("unigram", "bigram"):
        values = ((domain, mark.get(name)) for domain, mark in marks.items())
        known = {domain: value for domain, value in values if value is not None}
        held = [run["held_out"].get("domains", {}) for run in runs if math.isfinite(loss_of(run))]
        if not known or not held or any(domain not in parts for domain in known for parts in held):
            found[name] = None
            continue
        found[name] = all(fmean(parts[d]["nats_per_token"] for parts in held) < mark for d, mark in known.items())
    return found


def scale(result: dict[str, Any], pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """How small this is: stored non-embedding parameters, tokens of a run, training FLOPs of a run."""
    proxy = result.get("proxy")
    tokens = pairs[0][0]["tokens"] if pairs else None
    if proxy is not None:
        ledger = proxy["baseline"]["ledger"]
        parameters, flops = ledger["parameters"]["non_embedding"], ledger["flops"]["training_per_token"]
    else:  # the full pair itself, of which the counts tell all parameters and the forward pass
        counts = result["counts"]["baseline"]
        forward, unit = counts["flops"]["ledger"], counts["flops"].get("unit", "token")
        tokens_counted = 1 if unit == "token" else int(unit.split()[0])
        parameters, flops = counts["parameters"]["ledger"], 3 * forward / tokens_counted
    return {
        "proxy": proxy is not None and proxy["size"] != "full",
        "parameters": parameters,
        "tokens": tokens,
        "tokens_per_parameter": None if tokens is None else tokens / parameters,
        "training_flops": None if tokens is None else tokens * flops,
    }


def equal(result: dict[str, Any], pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """What both arms had alike, and the signed gaps of what is alike up to a tolerance."""
    proxy = result.get("proxy")
    gaps = proxy["gaps"] if proxy is not None else result.get("arm_gaps", result["pair"]["gaps"])
    sparsity = None
    if proxy is not None:
        before, after = (proxy["sparsity"][arm] for arm in ARMS)
        sparsity = {"baseline": before, "twin": after, "points": 100 * (after - before)}
    return {
        "tokens": all(before["tokens"] == after["tokens"] for before, after in pairs),
        "steps": all(before["steps"] == after["steps"] for before, after in pairs),
        **{f"{budget}_gap": gap for budget, gap in gaps.items()},
        "sparsity": sparsity,
    }


def rate(result: dict[str, Any], arm: str) -> dict[str, Any] | None:
    """An arm's own peak rate, whether others were tried, whether the best lies at the edge of those."""
    found = (result.get("rates") or {}).get(arm)
    if found is None:
        return None
    tried = [one for one in found["tried"] if one.get("loss") is not None]
    return {**found["chosen"], "tried": len(tried), "at_edge": bool(found["at_edge"])}


def summary(runs: list[Run]) -> dict[str, Any]:
    """Mean and sd over seeds of what a run measures."""
    finished = [run for run in runs if math.isfinite(loss_of(run))]
    held = [run["held_out"] for run in finished]
    columns = {unit: [part.get(unit) for part in held] for unit in ("nats_per_token", "bits_per_byte")}
    columns |= {name: [run.get(name) for run in finished] for name in MEASURED}
    found: dict[str, Any] = {"seeds": [run["seed"] for run in finished]}
    for name, values in columns.items():
        known = [value for value in values if value is not None and math.isfinite(value)]
        complete = known and len(known) == len(values)
        whole = Interval.over(known) if complete else None
        found[name] = whole and {"mean": whole.mean, "sd": whole.sd, "min": min(known), "max": max(known)}
    return found


def health(runs: list[Run]) -> dict[str, Any]:
    """The worst load of any seed, layer and visit, and overlap of visits beside chance; `None` without experts."""
    load = [entry for run in runs for entry in (run.get("routing") or {}).get("load", [])]
    overlap = [entry for run in runs for entry in (run.get("routing") or {}).get("overlap", [])]
    worst = min(load, key=lambda entry: entry["entropy"], default=None)
    return {
        "entropy_min": worst and worst["entropy"],
        "max_violation": max((entry["max_violation"] for entry in load), default=None),
        "dead_max": max((entry["dead"] for entry in load), default=None),
        "dead_share": max((entry["dead"] / entry["experts"] for entry in load), default=None),
        "experts": worst and worst["experts"],
        "load_tokens": min((entry["tokens"] for entry in load), default=None),
        "overlap": fmean(entry["overlap"] for entry in overlap) if overlap else None,
        "overlap_by_chance": fmean(entry["chance_given_load"] for entry in overlap) if overlap else None,
    }


def recall(runs: list[Run]) -> list[dict[str, Any]]:
    """By number of examples, means over seeds; accuracies beside that of copying any value in view."""
    measured = [run["recall"]["examples"] for run in runs if (run.get("recall") or {}).get("examples")]
    return [
        {
            "examples": same[0]["examples"],
            "copying_accuracy": same[0]["copying_accuracy"],
            **{name: fmean(entry[name] for entry in same) for name in ("accuracy", "nats_per_answer")},
        }
        for same in zip(*measured, strict=True)
    ]


def sink_sentences(runs: dict[str, list[Run]]) -> list[str]:
    """What `sink_words` says of all seeds together; or why nothing was measured."""
    sinks = {arm: [run["sink"] for run in runs[arm] if run.get("sink")] for arm in ARMS}
    every = [sink for arm in ARMS for sink in sinks[arm]]
    if not all(sinks.values()):
        return []
    if not all(sink.get("queries") for sink in every):
        why = next((sink["why"] for sink in every if "why" in sink), "no document begins inside a held-out row")
        return [f"attention sinks were not measured: {why}"]
    from smelt_budget.verify.sink import sink_words

    return sink_words(*(pool(sinks[arm]) for arm in ARMS))


def pool(sinks: list[dict[str, Any]]) -> dict[str, Any]:
    """Seeds as one: means over them, their heads side by side, for heads of different seeds have nothing in common."""
    layers = []
    for same in zip(*(sink["layers"] for sink in sinks), strict=True):
        means = {
            name: fmean(entry[name] for entry in same) for name in ("mass_mean", "floor") if same[0][name] is not None
        }
        heads = [mass for entry in same for mass in entry["mass_per_head"] or ()]
        layers.append({**same[0], **means, "mass_per_head": heads})
    return {**sinks[0], "queries": sum(sink["queries"] for sink in sinks), "layers": layers}
