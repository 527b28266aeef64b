"""The command that plans a whole comparison: ladder. Read, call, print, exit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from smelt_budget.errors import BadInput, Infeasible
from smelt_budget.flags import emit_targets, share


def ladder(
    grid: Annotated[
        Path | None, typer.Argument(help="A YAML file of scales and sparsities.", show_default="the paper's 12 cells")
    ] = None,
    heads: Annotated[
        Literal["auto", "uniform", "sectioned"] | None,
        typer.Option(help="As solve's; left out: the grid's.", show_default=False),
    ] = None,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="a100, h100, h200, b200 or mi300x.")] = "h100",
    gpu_tflops: Annotated[
        float | None, typer.Option(metavar="N", help="Its bf16 peak instead, in TFLOP/s without sparsity.")
    ] = None,
    gpu_memory: Annotated[float | None, typer.Option(metavar="GB", help="Its memory instead, in 1e9 bytes.")] = None,
    mfu: Annotated[
        float, typer.Option(parser=share, metavar="SHARE", help="Share of the peak that is reached (0.4, 40%).")
    ] = "0.4",  # pyright: ignore[reportArgumentType]
    price: Annotated[
        float | None, typer.Option(metavar="MONEY", min=0, help="Of a GPU-hour; left out: no cost is shown.")
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="Machines.")] = 1,
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="GPUs of each.")] = 8,
    tensor_parallel: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks that share heads.")] = 1,
    expert_parallel: Annotated[
        int, typer.Option(metavar="N", min=1, help="Ranks that share experts; their counts step by it.")
    ] = 1,
    pipeline_parallel: Annotated[int, typer.Option(metavar="N", min=1, help="Stages; the core is in one.")] = 1,
    shard: Annotated[
        Literal["none", "optimizer", "full"], typer.Option(help="What data-parallel ranks share (ZeRO 0, 1, 3).")
    ] = "full",
    recompute: Annotated[
        Literal["none", "full"], typer.Option(help="Keep activations, or recompute layers in the backward pass.")
    ] = "none",
    micro_batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences that go through together.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Write every pair here; what is solved is kept."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="Also emit each cell and horizon for a trainer; see emit --list.",
            autocompletion=emit_targets,
        ),
    ] = None,
    launch: Annotated[
        Literal["local", "torchrun", "slurm"] | None,
        typer.Option(help="With --to: also write launch files.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace cells of another request.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Plan a whole comparison: every pair, what it takes to train it, and the files of the study.

    Scales x sparsities x horizons; left out, the paper's grid of 4 x 3 x 6. Each twin is solved; GPU-hours, memory
    per GPU and cost follow from stated formulas. Keys of a grid of your own: docs/ladder-and-report.md. Stopped, the
    same command goes on.

    Example: `smelt-budget ladder --gpu h200 --nodes 8 --price 2.50`
    """
    from smelt_budget.emit import TARGETS
    from smelt_budget.emit.launch import Layout
    from smelt_budget.ladder.gpus import gpu as gpu_named
    from smelt_budget.ladder.grid import PAPER, cells, read_grid, with_heads
    from smelt_budget.ladder.study import Means, planned
    from smelt_budget.report.console import print_json, show
    from smelt_budget.report.ladder import ladder_view

    check_flags(mfu, price, out, to, launch, tuple(TARGETS))
    layout = Layout(launch or "torchrun", nodes, gpus, tensor_parallel, expert_parallel, pipeline_parallel)
    means = Means(gpu_named(gpu, gpu_tflops, gpu_memory), mfu, layout, shard, recompute, micro_batch, price)
    origin = PAPER if grid is None else str(grid)
    asked = with_heads(read_grid(grid), heads)
    wanted = cells(asked, origin, expert_parallel)
    for note in dict.fromkeys(f"{cell.scale}: {note}" for cell in wanted for note in cell.notes):
        typer.echo(f"note: {note}", err=True)
    before = {} if out is None else begun(asked, wanted, out, force)
    pairs, fresh, missing = found(wanted, before, out)
    have = [cell for cell in wanted if cell.name in pairs]
    if not have:
        raise Infeasible("no cell has a twin", *missing)
    flags = {
        "heads": heads, "gpu": gpu, "gpu-tflops": gpu_tflops, "gpu-memory": gpu_memory, "mfu": mfu, "price": price,
        "nodes": nodes, "gpus": gpus, "tensor-parallel": tensor_parallel, "expert-parallel": expert_parallel,
        "pipeline-parallel": pipeline_parallel, "shard": shard, "recompute": recompute, "micro-batch": micro_batch,
        "out": out, "to": to, "launch": launch,
    }  # fmt: skip
    result = planned(asked, origin, wanted, pairs, means) | {"command": command_line(grid, flags)}
    if out is not None:
        result = kept(result, out)
        if to is not None:
            result = emit_all(result, asked, have, pairs, fresh, out, TARGETS[to], launch and layout, force)
        typer.echo(f"wrote {out}", err=True)
    if as_json:
        print_json(result)
    else:
        show(ladder_view(result))
    if missing:
        raise Infeasible(f"{len(missing)} of {len(wanted)} cells have no twin", *missing)


DEFAULTS = {
    "gpu": "h100", "mfu": 0.4, "nodes": 1, "gpus": 8, "tensor-parallel": 1, "expert-parallel": 1,
    "pipeline-parallel": 1, "shard": "full", "recompute": "none", "micro-batch": 1,
}  # fmt: skip


def command_line(grid: Path | None, flags: dict[str, Any]) -> str:
    """What gives this plan again."""
    given = {name: value for name, value in flags.items() if value != DEFAULTS.get(name)}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return shlex.join(["smelt-budget", "ladder", *([] if grid is None else [str(grid)]), *words])


def check_flags(
    mfu: float, price: float | None, out: Path | None, to: str | None, launch: str | None, targets: tuple[str, ...]
) -> None:
    """What does not go together."""
    if not 0 < mfu <= 1:
        raise BadInput(f"--mfu {mfu:g} is not above 0 and at most 1", "fix: --mfu 0.4, or 40%")
    if price is not None and not 0 <= price < float("inf"):
        raise BadInput(f"--price {price} is not a price", "fix: --price 2.50")
    if to is not None and to not in targets:
        raise BadInput(f"there is no target {to!r:.60}", f"fix: one of {', '.join(targets)}")
    if to is not None and out is None:
        raise BadInput("--to writes files, and --out is missing", f"fix: --to {to} --out DIR")
    if launch is not None and to is None:
        raise BadInput("--launch goes with --to", "fix: --to megatron --launch slurm --out DIR")


def begun(asked: Any, wanted: Any, out: Path, force: bool) -> dict[str, Any]:
    """The folder, and the grid in it, which says that the folder is ours; pairs that need no solving."""
    from smelt_budget.ladder import folder
    from smelt_budget.spec.text import as_yaml, parse, read_text

    folder.begin(out, wanted, force)
    pairs = folder.earlier(out, wanted, force)
    place, fields = out / folder.GRID, asked.model_dump(exclude_none=True)
    if not place.is_file() or parse(read_text(str(place)), str(place)) != fields:
        put(place, as_yaml(fields, "The grid of this ladder, defaults written out."))
    return pairs


def found(wanted: Any, before: dict[str, Any], out: Path | None) -> tuple[dict[str, Any], set[str], list[str]]:
    """Every pair by name, those kept and those solved now; names of the latter; and why others have none."""
    import smelt_budget
    from smelt_budget.ladder import folder
    from smelt_budget.ladder.solved import solved
    from smelt_budget.report.progress import SlowWork

    pairs = dict(before)
    todo, fresh, missing = [cell for cell in wanted if cell.name not in pairs], set[str](), list[str]()
    heading = f"A compute-matched pair by smelt-budget {smelt_budget.__version__}, from a ladder"
    try:
        with SlowWork("solving") as work:
            for number, (cell, pair, texts, why) in enumerate(solved(todo, heading), 1):
                if pair is None:
                    missing.append(f"{cell.name}: {why.splitlines()[0]}")
                else:
                    pairs[cell.name] = pair
                    fresh.add(cell.name)
                    if out is not None:
                        folder.save(out, cell.name, texts, put)
                work.advanced(number, len(todo))
    except KeyboardInterrupt:
        if out is not None:
            typer.echo(f"{len(pairs)} of {len(wanted)} cells are in {out}; the same command goes on", err=True)
        raise
    return {cell.name: pairs[cell.name] for cell in wanted if cell.name in pairs}, fresh, missing


def put(path: Path, text: str) -> None:
    """Whole or not at all; what stands there was found to be ours."""
    from smelt_budget.report.write import write_text

    write_text(path, text, force=True)


def kept(result: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write the plan and the table of runs; earlier emissions stay listed."""
    from smelt_budget.ladder import folder, study

    result = result | {"emitted": earlier_emissions(out)}
    put(out / folder.RESULT, json.dumps(result, indent=1) + "\n")
    if not folder.save_runs(out, study.runs(result), put):
        typer.echo(f"kept {out / folder.RUNS}, which holds losses", err=True)
    return result


def earlier_emissions(out: Path) -> dict[str, Any]:
    """What was emitted here before, by target."""
    from smelt_budget.ladder.folder import RESULT

    try:
        before = json.loads((out / RESULT).read_text(encoding="utf-8")).get("emitted", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return before if isinstance(before, dict) else {}


def emit_all(
    result: dict[str, Any],
    asked: Any,
    have: Any,
    pairs: dict[str, Any],
    fresh: set[str],
    out: Path,
    target: Any,
    layout: Any,
    force: bool,
) -> dict[str, Any]:
    """A folder for each cell and horizon; what the plan says of it is written first, so that a stopped one goes on."""
    from smelt_budget.ladder import folder, handed
    from smelt_budget.report.progress import SlowWork

    now = handed.asked(target, layout, asked.horizons)
    before = result["emitted"].get(target.name, {}).get("asked")
    if before is None or force:
        result = result | {"emitted": result["emitted"] | {target.name: {"asked": now, "folders": []}}}
        put(out / folder.RESULT, json.dumps(result, indent=1) + "\n")
    with SlowWork("emitting") as work:
        places = handed.handed(
            out, have, pairs, target, layout, asked.horizons, lambda name: before == now and name not in fresh, force,
            work.advanced,
        )  # fmt: skip
    result = result | {"emitted": result["emitted"] | {target.name: {"asked": now, "folders": places}}}
    put(out / folder.RESULT, json.dumps(result, indent=1) + "\n")
    return result
