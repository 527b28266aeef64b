"""The command that hands a pair to a trainer: emit. Read, call, print, exit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from smelt_budget.errors import BadInput
from smelt_budget.flags import emit_targets


def emit(
    pair: Annotated[Path | None, typer.Argument(help="What solve --out wrote.", show_default="smelt.yaml")] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TARGET", help="The trainer or format; see --list.", autocompletion=emit_targets),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="The folder to make.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of module and job; left out: smelt_pair.", show_default=False)
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", min=8, help="Tokens of a sequence; left out: the pair's.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Of a run; left out: 20 per active parameter of the baseline."),
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences of a step, over all ranks.")] = 256,
    rate_baseline: Annotated[
        float | None, typer.Option(metavar="RATE", min=0, help="Peak learning rate; left out: 0.75 / hidden_size.")
    ] = None,
    rate_twin: Annotated[
        float | None, typer.Option(metavar="RATE", min=0, help="The twin's own; left out: 0.75 / hidden_size.")
    ] = None,
    balance: Annotated[
        Literal["aux", "bias", "none"], typer.Option(help="Auxiliary loss, loss-free bias, or no balancing.")
    ] = "aux",
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="random|RUN",
            help="Also write weights: our initial ones, or those of a run that verify trained.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of --weights: initial ones, or which run.")] = 0,
    launch: Annotated[
        Literal["local", "torchrun", "slurm"] | None, typer.Option(help="Also write launch files.", show_default=False)
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="Machines.")] = 1,
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="GPUs of each.")] = 8,
    tensor_parallel: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks that share heads.")] = 1,
    expert_parallel: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks that share experts.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(metavar="N", min=1, help="Stages; the core is in one.")] = 1,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where something is emitted otherwise or dropped.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that emit wrote.")] = False,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the targets, what was tested, what each needs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Write what a trainer takes, for both arms, so that the comparison can be trained for real.

    No trainer loops layers by configuration alone, so a target is a configuration and the smallest code beside it;
    neither needs smelt-budget. What a target cannot express is printed, and with --strict is an error.

    Example: `smelt-budget emit --to yaml examples/smelt.yaml -o pair`
    """
    from smelt_budget.emit import TARGETS
    from smelt_budget.report.console import print_json, show
    from smelt_budget.report.emission import emission_view, target_table

    if listing:
        rows = [{"name": t.name, "title": t.title, "tested": t.tested, "needs": t.needs} for t in TARGETS.values()]
        print_json(rows) if as_json else show(target_table(rows))
        return
    if to is None or out is None:
        raise BadInput(f"{'--to' if to is None else '--out'} is missing", f"fix: --to {'|'.join(TARGETS)} -o DIR")
    if to not in TARGETS:
        raise BadInput(f"there is no target {to!r:.60}", f"fix: one of {', '.join(TARGETS)}")
    from smelt_budget.emit.launch import Layout
    from smelt_budget.emit.target import Job
    from smelt_budget.emit.training import training
    from smelt_budget.emit.whole import emitted
    from smelt_budget.verify.pair import read_pair

    solved = read_pair(pair)
    for note in solved.notes:
        typer.echo(f"note: {note}", err=True)
    job = Job(
        name=name or "smelt_pair",
        baseline=solved.baseline,
        twin=solved.twin,
        training=training(
            solved.baseline,
            solved.twin,
            context or solved.setting.context,
            tokens,
            batch_size,
            (rate_baseline, rate_twin),
            balance,
        ),
        layout=launch and Layout(launch, nodes, gpus, tensor_parallel, expert_parallel, pipeline_parallel),
        weights=weights,
        seed=seed,
    )
    told = emitted(TARGETS[to], job, out, strict, force, solved.origin)
    if as_json:
        print_json(told)
    else:
        show(emission_view(told))
