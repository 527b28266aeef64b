"""The commands about what losses say: law fit, gain, allocate, plot. Read, call, print, exit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from smelt_budget.errors import BadInput
from smelt_budget.flags import numbers

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Fit losses, and say how much compute looping saves at equal loss.

Example: `smelt-budget law gain --preset smelt`""",
)
Source = Annotated[
    Path | None, typer.Argument(metavar="[LAW]", help="The folder that law fit wrote.", show_default=False)
]
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help="A published law instead: smelt, chinchilla, chinchilla-refit.")
]
Compute = Annotated[str, typer.Option(metavar="LIST", help="Training FLOPs.")]
Sparsity = Annotated[str, typer.Option(metavar="LIST", help="Compute-equivalent sparsities.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command("fit")
def fit(
    runs: Annotated[Path, typer.Argument(help="CSV, JSONL, Parquet, or a folder of verify results.")],
    form: Annotated[Literal["smelt", "chinchilla"], typer.Option(help="The law.")] = "smelt",
    starts: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="Descents from seeded places.")] = 200,
    bootstrap: Annotated[
        int, typer.Option(metavar="N", min=0, max=10**6, help="Refits of drawn cells, for intervals.")
    ] = 2000,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of starts and draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Keep the law here; a stopped fit goes on.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a law to each arm of a table of runs.

    Columns: flops_per_token, sparsity, tokens, loss, arm, and if known cell (chinchilla: parameters in the place of
    the first two). Coefficients come with 95 % intervals of refits in which whole cells are drawn; what the runs
    cannot identify is said and not printed.

    Example: `smelt-budget law fit runs.csv --out law`
    """
    from smelt_budget.laws.runs import read_runs
    from smelt_budget.laws.study import form_named, study
    from smelt_budget.report.console import print_json, show
    from smelt_budget.report.law import fit_view
    from smelt_budget.report.progress import SlowWork

    law = form_named(form)
    arms = read_runs(runs, law)
    with SlowWork("refitting") as work:
        result = study(law, arms, str(runs), starts, bootstrap, seed, out, work.advanced)
    if as_json:
        print_json({key: value for key, value in result.items() if key != "draws"})
    else:
        show(fit_view(result))


@app.command("gain")
def gain(
    law: Source = None,
    preset: Preset = None,
    compute: Compute = "1e20,1e21,1e22",
    sparsity: Sparsity = "0.85,0.95,0.97",
    as_json: Json = False,
) -> None:
    """Show the share of compute that looping saves at equal loss.

    The looped arm's frontier loss at each budget, and the budget at which the baseline's frontier has that loss.

    Example: `smelt-budget law gain --preset smelt`
    """
    from smelt_budget.laws.gains import gains
    from smelt_budget.report.console import print_json, show
    from smelt_budget.report.law import gain_view

    found = chosen(law, preset)
    rows = gains(found, numbers(compute, "--compute"), numbers(sparsity, "--sparsity", below=1))
    if as_json:
        print_json({"origin": found.origin, "window": found.window, "gains": rows})
    else:
        show(gain_view(found.origin, found.window, rows))


@app.command("allocate")
def allocate(
    law: Source = None,
    preset: Preset = None,
    compute: Compute = "1e20,1e21,1e22",
    sparsity: Sparsity = "0.85,0.95,0.97",
    as_json: Json = False,
) -> None:
    """Split a budget best: FLOPs per token, tokens, tokens per parameter, loss.

    Example: `smelt-budget law allocate --preset smelt --compute 1e21`
    """
    from smelt_budget.laws.gains import allocations
    from smelt_budget.report.console import print_json, show
    from smelt_budget.report.law import allocation_view

    found = chosen(law, preset)
    rows = allocations(found, numbers(compute, "--compute"), numbers(sparsity, "--sparsity", below=1))
    if as_json:
        print_json({"origin": found.origin, "window": found.window, "allocations": rows})
    else:
        show(allocation_view(found.origin, found.window, rows))


@app.command("plot")
def plot(
    law: Source = None,
    preset: Preset = None,
    kind: Annotated[Literal["loss", "gain", "residuals"], typer.Option(help="Which picture.")] = "gain",
    sparsity: Sparsity = "0.85,0.95,0.97",
    out: Annotated[Path, typer.Option(help="A .png or .svg file.")] = Path("law.png"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite --out if it exists.")] = False,
) -> None:
    """Draw frontiers, savings or residuals.

    Example: `smelt-budget law plot --preset smelt --out gain.svg`
    """
    from smelt_budget.laws.gains import residuals
    from smelt_budget.laws.pictures import draw
    from smelt_budget.report.write import check_free

    check_free(out, force)
    found = chosen(law, preset)
    draw(found, kind, numbers(sparsity, "--sparsity", below=1), out, residuals(law))
    typer.echo(f"wrote {out}", err=True)


def chosen(law: Path | None, preset: str | None) -> Any:
    """The law that is meant.

    Raises:
        BadInput: none is, or two are.
    """
    from smelt_budget.laws import gains

    if (law is None) == (preset is None):
        raise BadInput("give a folder of law fit, or --preset", f"fix: --preset {'|'.join(gains.PRESETS)}")
    return gains.load(law) if law is not None else gains.preset(preset or "")
