"""How is a matched pair shown? To be judged in five seconds: before and after, gaps, what was searched."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from smelt_budget.ledger import Ledger
from smelt_budget.report.frame import plain_table
from smelt_budget.report.numbers import exact, short, signed_percent
from smelt_budget.solver.solution import Solution
from smelt_budget.spec import ModelSpec


def solution_view(solution: Solution, name: str) -> Group:
    """Before and after, the three budgets with gaps, what was searched."""
    parts: list[RenderableType] = [choice_table(solution, name), budget_table(solution)]
    if solution.alternatives:
        parts.append(alternative_table(solution))
    parts += [Text(line, style="dim") for line in (*solution.notes, *searched(solution))]
    return Group(*parts)


def choice_table(solution: Solution, name: str) -> Table:
    """Each chosen quantity, before and after."""
    baseline, twin, relaxed = solution.baseline, solution.twin, solution.certificate.relaxed
    table = plain_table(name, "baseline", "twin", "relaxed", title=None)
    shown = {
        "hidden_size": f"{relaxed.hidden_size:.1f}",
        "num_experts": f"{relaxed.num_experts:.1f}",
        "moe_intermediate_size": f"{relaxed.moe_intermediate_size:.1f}",
    }
    for words, before, after, key in choices(baseline, twin):
        table.add_row(words, before, after, shown.get(key, ""))
    cache = "cached width / layer"
    table.add_row(
        cache, cached_width(solution.baseline_ledger), cached_width(solution.twin_ledger), f"{relaxed.kv_width:.1f}"
    )
    return table


def choices(baseline: ModelSpec, twin: ModelSpec) -> Iterable[tuple[str, str, str, str]]:
    """(what, before, after, field) for everything the solver decides."""
    loop = twin.loop
    assert loop is not None
    ran = f"{loop.start + 1}..{loop.stop} x {loop.visits}"
    yield (
        "layers stored / run",
        f"{baseline.num_hidden_layers} / {baseline.effective_depth}",
        (f"{twin.num_hidden_layers} / {twin.effective_depth}"),
        "",
    )
    yield "core layers (from 1) x visits", "-", ran, ""
    for words, field in (
        ("hidden size", "hidden_size"),
        ("query heads", "num_attention_heads"),
        ("KV heads", "num_key_value_heads"),
        ("head size", "head_dim"),
        ("KV rank", "kv_lora_rank"),
        ("query rank", "q_lora_rank"),
        ("query/key head size (unrotated)", "qk_nope_head_dim"),
        ("value head size", "v_head_dim"),
        ("experts", "num_experts"),
        ("experts per token", "num_experts_per_tok"),
        ("expert width", "moe_intermediate_size"),
        ("shared expert width", "shared_expert_intermediate_size"),
        ("dense width", "intermediate_size"),
    ):
        if getattr(baseline, field) is None or (field == "num_key_value_heads" and baseline.kv_lora_rank):
            continue
        yield words, exact(getattr(baseline, field)), in_sections(twin, field), field
        if field == "num_key_value_heads":
            yield "GQA ratio", ratio(baseline), ratio(twin), ""


def in_sections(twin: ModelSpec, field: str) -> str:
    """A twin's value; where the core has its own, prelude and coda first."""
    own = getattr(twin.core, field, None) if twin.core is not None else None
    value = exact(getattr(twin, field))
    return value if own is None else f"{value}, core {exact(own)}"


def ratio(spec: ModelSpec) -> str:
    """Query heads per KV head."""
    outer = f"{spec.num_attention_heads / (spec.num_key_value_heads or 1):g}"
    own = spec.core.num_key_value_heads if spec.core is not None else None
    return outer if own is None else f"{outer}, core {spec.num_attention_heads / own:g}"


def cached_width(ledger: Ledger) -> str:
    """Cached elements per executed layer and token; where the core has its own, prelude and coda first."""
    widths = {row.sections[0]: row.cache for row in reversed(ledger.rows) if row.kind == "cache"}
    outer, core = widths.get("prelude", widths.get("core")), widths.get("core")
    return exact(outer or 0) if core in (None, outer) else f"{outer:,}, core {core:,}"


def budget_table(solution: Solution) -> Table:
    """The three budgets and S, with signed gaps."""
    before, after, gaps = solution.baseline_ledger, solution.twin_ledger, solution.gaps
    table = plain_table("budget", "baseline", "twin", "gap")
    lines = (
        ("training FLOPs / token", before.training_flops, after.training_flops, gaps.flops),
        ("non-embedding parameters", before.non_embedding, after.non_embedding, gaps.non_embedding_parameters),
        (
            f"KV bytes at {solution.setting.context:,} tokens",
            before.bytes_of(before.kv_elements_at_context),
            after.bytes_of(after.kv_elements_at_context),
            gaps.kv_cache,
        ),
    )
    for (words, old, new, gap), tolerance in zip(lines, solution.problem.tolerance.by_budget.values(), strict=True):
        style = "green" if abs(gap) <= tolerance else "red"
        table.add_row(words, short(old), short(new), Text(signed_percent(gap), style=style))
    table.add_row("active parameters, one pass", short(before.active_non_embedding), short(after.active_non_embedding))
    sparsity = (before.compute_equivalent_sparsity, after.compute_equivalent_sparsity)
    table.add_row("compute-equivalent sparsity S", *(f"{100 * s:.2f} %" for s in sparsity))
    return table


def alternative_table(solution: Solution) -> Table:
    """Runners-up, best first."""
    table = plain_table("alternative", "hidden", "heads", "experts", "width", "FLOPs", "params", "KV", "score")
    for i, other in enumerate(solution.alternatives):
        spec, gaps = other.spec, other.gaps
        kv = f"rank {spec.kv_lora_rank}" if spec.kv_lora_rank else f"{spec.num_key_value_heads}"
        size = spec.head_dim or spec.v_head_dim
        table.add_row(
            str(i + 2),
            exact(spec.hidden_size),
            f"{spec.num_attention_heads}/{kv} x {size}",
            in_sections(spec, "num_experts"),
            exact(spec.moe_intermediate_size or 0),
            *(signed_percent(g) for g in gaps.as_dict().values()),
            f"{other.score:.3f}",
        )
    return table


def searched(solution: Solution) -> Iterable[str]:
    """What was looked at, what it proves, and under which convention."""
    c, setting = solution.certificate, solution.setting
    yield (
        f"searched: all {short(c.points)} points of the lattice: hidden {c.hidden_sizes[0]}..{c.hidden_sizes[1]} step "
        f"{c.hidden_sizes[2]}, {c.geometries:,} attention shapes, experts {c.expert_counts[0]}..{c.expert_counts[1]}"
    )
    yield f"certificate: no point scores below {c.score:.3f} ({c.evaluated:,} shapes computed, bounds exclude the rest)"
    if not c.relaxed.exact:
        yield "relaxed: no real-valued twin keeps attention's share; first-order values stand in its place"
    length = f"{float(setting.attention_length):g}"
    yield f"counted: convention {setting.convention.name}, attention over {length} positions on average"
