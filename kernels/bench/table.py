"""What does a run say? Rates, percent of the floor and ratios from milliseconds, the aims, and all of it as text.

    TFLOP/s        FLOPs of the definition (floor.py) / time; a multiply and an add count as two
    % of floor     floor / time, with the ceilings that were measured on the same card
    ratio          time of the form / time of our faster tier, forward, backward, both: above 1 we are faster

Where there is no figure there is "-", or in a rehearsal that it needs a GPU; nothing is filled in for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import floor
from records import Record
from shapes import ROUTINGS, Shape

FORMS_OF_OURS = ("smelt 80", "smelt 90")
WITH_GLUE = ("grouped op", "grouped plain")
"""What the first aim is about: `grouped_mm` and the eager operations around it, the faster of the two."""
AIM_NARROW, AIM_WIDE, WIDE = 1.4, 1.1, 768
"""Times faster than WITH_GLUE at expert widths below WIDE, and from there on (issue: Kernels, point 6)."""
AIM_FLOOR = 55
"""Percent of the floor, on Hopper."""
PASSES = ("forward", "backward")
WORDS = {True: "met", False: "not met", None: "not measured"}
Row = dict[str, Any]


def findings(about: dict[str, Any], steps: list[Record], results: list[Record], *, rehearsal: bool) -> dict[str, Any]:
    """What gpu.json holds."""
    ceilings = measured_ceilings(results)
    rows = compared([rated(result, ceilings or floor.REFERENCE) for result in results if is_measurement(result)])
    return {
        "rehearsal": rehearsal,
        "machine": about,
        "steps": steps,
        "ceilings": None if ceilings is None else {"flops": ceilings.flops, "bytes": ceilings.bytes},
        "rows": rows,
        "aims": aims(rows, hopper=about.get("capability", "").startswith("9.")),
        "wrong": [result for result in results if is_wrong(result)],
        "results": results,
    }


def is_measurement(result: Record) -> bool:
    """Whether a row of the table comes of it."""
    return result["step"].startswith("shape") and result["state"] == "done"


def is_wrong(result: Record) -> bool:
    """A result that is not as it must be, or a step of ours that broke; rivals may break as they like."""
    rival = result["step"].startswith("shape") and not result["unit"].endswith(FORMS_OF_OURS)
    if result["state"] in ("failed", "died"):
        return not rival
    return result["state"] == "done" and not rival and not result.get("ok", True)


def measured_ceilings(results: Sequence[Record]) -> floor.Ceilings | None:
    """None if one of the two is missing."""
    found = {result["unit"]: result for result in results if result["step"] == "ceilings"}
    flops, bytes_ = found.get("product", {}).get("flops"), found.get("copy", {}).get("bytes")
    return None if flops is None or bytes_ is None else floor.Ceilings(flops, bytes_)


def rated(result: Record, ceilings: floor.Ceilings) -> Row:
    """A row: rates from times."""
    shape = Shape(*result["shape"])
    row = {"shape": str(shape), "width": shape.F, **{name: result[name] for name in ("routing", "form", "ok")}}
    row |= {name: result.get(name) for name in ("distance", "held", "peak")}
    for name, stages in (("forward", floor.forward), ("backward", floor.backward)):
        parts, ms = stages(shape, result["busy"]), result[f"{name}_ms"]
        row[f"{name}_ms"] = ms
        row[f"{name}_tflops"] = None if ms is None else floor.flops(parts) / ms / 1e9
        routed = result["form"] != "dense"  # moves other bytes
        row[f"{name}_floor"] = 100 * 1e3 * floor.seconds(parts, ceilings) / ms if ms and routed else None
    return row


def compared(rows: list[Row]) -> list[Row]:
    """With the ratios to ours, under the same routing; dense has none and is compared with every one."""
    done = []
    for row in rows:
        ours = best(rows, row["shape"], row["routing"], FORMS_OF_OURS)
        ratios = dict.fromkeys((*PASSES, "both"))
        if ours and row["forward_ms"] is not None:
            ratios = {name: row[f"{name}_ms"] / ours[f"{name}_ms"] for name in PASSES}
            ratios["both"] = both(row) / both(ours)
        done.append({**row, **{f"{name}_ratio": ratio for name, ratio in ratios.items()}})
    return done


def best(rows: Sequence[Row], shape: str, routing: str, forms: Sequence[str]) -> Row | None:
    """The fastest of these forms both ways, if one was measured and right."""
    found = [row for row in rows if row["shape"] == shape and row["routing"] == routing and row["form"] in forms]
    found = [row for row in found if row["forward_ms"] is not None and row["ok"]]
    return min(found, key=both) if found else None


def both(row: Row) -> float:
    """Milliseconds."""
    return row["forward_ms"] + row["backward_ms"]


def aims(rows: Sequence[Row], *, hopper: bool) -> list[dict[str, Any]]:
    """Each, judged by the worse of forward and backward, under balanced routing."""
    found = []
    for shape, width in {row["shape"]: row["width"] for row in rows}.items():
        ours, glue = (best(rows, shape, ROUTINGS[0], forms) for forms in (FORMS_OF_OURS, WITH_GLUE))
        least = AIM_WIDE if width >= WIDE else AIM_NARROW
        ratio = None if ours is None or glue is None else min(glue[f"{name}_ratio"] for name in PASSES)
        found.append(aim(shape, "times as fast as grouped_mm with glue", least, ratio))
        if hopper:
            percent = None if ours is None else min(ours[f"{name}_floor"] for name in PASSES)
            found.append(aim(shape, "percent of the floor", AIM_FLOOR, percent))
    return found


def aim(shape: str, what: str, least: float, found: float | None) -> dict[str, Any]:
    """One line."""
    met = WORDS[None if found is None else found >= least]
    return {"shape": shape, "what": what, "least": least, "found": found, "met": met}


def text(result: dict[str, Any]) -> str:
    """As Markdown."""
    parts = [heading(result), steps(result), problems(result), measurements(result), aims_text(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(result: dict[str, Any]) -> str:
    """What ran where."""
    about = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    if result["rehearsal"]:
        return f"# Rehearsal on the CPU\n\nNothing was measured: times, rates, ratios and memory need a GPU. {about}"
    ceilings = result["ceilings"]
    words = "not measured; percent of the floor by those of an H200: 790 TFLOP/s, 4.30 TB/s"
    if ceilings:
        words = f"{ceilings['flops'] / 1e12:.0f} TFLOP/s (8192^3 bf16), {ceilings['bytes'] / 1e12:.2f} TB/s (copy)"
    return f"# Expert kernels on a GPU\n\n{about}\n\nCeilings: {words}"


def steps(result: dict[str, Any]) -> str:
    """How each step went, and what its units came to."""
    rows = []
    for step in result["steps"]:
        units = [unit for unit in result["results"] if unit["step"] == step["step"]]
        states = [unit["state"] if unit.get("ok", True) else "wrong" for unit in units]
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        rows.append([step["step"], step["words"], f"{step['used']:.0f} of {step['allowed']:.0f} s", counts])
    return grid(["step", "how it went", "time", "units"], rows)


def problems(result: dict[str, Any]) -> str:
    """Whatever is not done and right, in words."""
    lines = []
    for unit in result["results"]:
        state = unit["state"] if unit.get("ok", True) else "wrong"
        if state != "done":
            why = (
                unit.get("reason") or unit.get("what") or (f"distance {unit['distance']}" if "distance" in unit else "")
            )
            lines.append(f"- {unit['step']}, {unit['unit']}: {state}{f': {why}' if why else ''}")
    return "\n".join(lines)


def measurements(result: dict[str, Any]) -> str:
    """A table for every shape and routing."""
    head = ["form", "fwd ms", "bwd ms", "fwd TFLOP/s", "bwd TFLOP/s", "fwd % floor", "bwd % floor"]
    head += ["fwd ratio", "bwd ratio", "both", "held MiB", "peak MiB", "distance"]
    tables = []
    for shape, routing in dict.fromkeys((row["shape"], row["routing"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["shape"], row["routing"]) == (shape, routing)]
        lines = [cells(row, "needs a GPU" if result["rehearsal"] else "-") for row in rows]
        tables.append(f"## {shape}, {routing}\n\n{grid(head, lines)}")
    return "\n\n".join(tables)


def cells(row: Row, missing: str) -> list[str]:
    """Of one form."""
    found = [row["form"] if row["ok"] else f"{row['form']} (wrong)"]
    for name, digits in (("ms", 3), ("tflops", 0), ("floor", 0), ("ratio", 2)):
        found += [number(row[f"{each}_{name}"], digits, missing) for each in PASSES]
    found.append(number(row["both_ratio"], 2, missing))
    found += [number(None if row[name] is None else row[name] / 2**20, 0, missing) for name in ("held", "peak")]
    return [*found, number(row["distance"], 4)]


def aims_text(result: dict[str, Any]) -> str:
    """Met or not."""
    rows = [
        [each["shape"], each["what"], f"{each['least']:g}", number(each["found"], 2), each["met"]]
        for each in result["aims"]
    ]
    return "## Aims, by the worse of forward and backward\n\n" + grid(["shape", "aim", "least", "found", ""], rows)


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns stand under one another."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | str | None, digits: int, missing: str = "-") -> str:
    """What is no number says so itself."""
    return missing if value is None else value if isinstance(value, str) else f"{value:.{digits}f}"
