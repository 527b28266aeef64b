"""What do the two models look like? Their layers in the order in which a token meets them, as SVG.

A row is one executed layer, as wide as its hidden size; the core stands there once for each visit, with one set of
weights.
Colours are classes of the page's style, so the picture is right in dark mode and in print.
"""

from __future__ import annotations

from html import escape
from typing import Any

from smelt_budget.page.parts import Picture
from smelt_budget.spec import ModelSpec

WIDTH, GAP, COLUMN = 360, 2, 128
"""Units of the picture; it is drawn as wide as a phone."""
TOP, FOOT = 46, 44
LEAST, MOST, ALL = 3.0, 16.0, 330.0
"""Height of a row, and of all rows together where they would be higher."""


def layers(baseline: ModelSpec, twin: ModelSpec) -> Picture:
    """Both models side by side."""
    runs = {"baseline": blocks(baseline), "twin": blocks(twin)}
    deepest = max(sum(count for _, count, _ in arm) for arm in runs.values())
    row = min(MOST, max(LEAST, ALL / deepest))
    widest = max(baseline.hidden_size, twin.hidden_size)
    height = TOP + deepest * row + GAP * 4 + FOOT
    drawn = [column(0, "baseline", baseline, runs["baseline"], row, widest)]
    drawn.append(column(WIDTH / 2, "twin", twin, runs["twin"], row, widest))
    words = f"baseline: {told(baseline)}; twin: {told(twin)}"
    return Picture(
        f'<svg class="layers" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(words)}">'
        f"<title>{escape(words)}</title>{''.join(drawn)}</svg>",
        words,
    )


def blocks(spec: ModelSpec) -> list[tuple[str, int, int]]:
    """(section, layers, visit) in the order of execution; empty ones left out."""
    loop = spec.loop
    if loop is None:
        return [("prelude", spec.num_hidden_layers, 0)]
    core = [("core", loop.stop - loop.start, visit) for visit in range(loop.visits)]
    every = [("prelude", loop.start, 0), *core, ("coda", spec.num_hidden_layers - loop.stop, 0)]
    return [block for block in every if block[1]]


def told(spec: ModelSpec) -> str:
    """In words: 3 layers, 6 layers 2 times, 3 layers; hidden 1,056, 294 experts."""
    loop = spec.loop
    if loop is None:
        order = f"{spec.num_hidden_layers} layers once"
    else:
        order = (
            f"prelude of {loop.start}, core of {loop.stop - loop.start} run {loop.visits} times, "
            f"coda of {spec.num_hidden_layers - loop.stop} layers"
        )
    return f"{order}; hidden {spec.hidden_size:,}, {inside(spec)}"


def inside(spec: ModelSpec) -> str:
    """What a layer holds."""
    own = spec.core.num_experts if spec.core is not None else None
    experts = f"{spec.num_experts:,}" if spec.num_experts else "no"
    return f"{experts} experts" + (f", {own:,} in the core" if own else "")


def column(x: float, name: str, spec: ModelSpec, runs: list[Any], row: float, widest: int) -> str:
    """One model: name, rows, what they are."""
    middle = x + 70
    parts = [
        text(middle, 16, name, "name"),
        text(middle, 33, f"hidden {spec.hidden_size:,}", "note"),
    ]
    y, width = float(TOP), COLUMN * spec.hidden_size / widest
    first_core = last_core = None
    for section, count, visit in runs:
        for i in range(count):
            shape = f'x="{middle - width / 2:.1f}" y="{y + i * row:.1f}" width="{width:.1f}" height="{row - 0.8:.1f}"'
            parts.append(f'<rect class="{section} visit{min(visit, 1)}" {shape} rx="1.5"/>')
        if spec.loop is not None:
            words = f"visit {visit + 1}" if section == "core" else section
            parts.append(text(middle + COLUMN / 2 + 5, y + count * row / 2 + 4, words, "side"))
        if section == "core":
            first_core = y if first_core is None else first_core
            last_core = y + count * row
        y += count * row + GAP
    if first_core is not None and last_core is not None:
        parts.append(arrow(middle - width / 2 - 3, first_core + row / 2, last_core - row / 2))
    executed = f"{spec.num_hidden_layers} layers stored, {spec.effective_depth} run"
    parts += [text(middle, y + 16, executed, "note"), text(middle, y + 32, inside(spec), "note")]
    return f"<g>{''.join(parts)}</g>"


def text(x: float, y: float, words: str, kind: str) -> str:
    """A line of text, escaped."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def arrow(x: float, top: float, bottom: float) -> str:
    """From the end of the core back to its beginning."""
    out = x - 12
    return (
        f'<path class="again" d="M{x:.1f} {bottom:.1f} C{out:.1f} {bottom:.1f} {out:.1f} {bottom:.1f} {out:.1f} '
        f'{bottom - 10:.1f} L{out:.1f} {top + 10:.1f} C{out:.1f} {top:.1f} {out:.1f} {top:.1f} {x - 2:.1f} {top:.1f}"/>'
        f'<path class="head" d="M{x - 6:.1f} {top - 4:.1f} L{x:.1f} {top:.1f} L{x - 6:.1f} {top + 4:.1f} Z"/>'
    )
