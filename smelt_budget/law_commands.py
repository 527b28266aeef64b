"""The commands about what losses say: law fit, gain, allocate, plot. Read, call, print, exit."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from smelt_budget.errors import BadInput
from smelt_budget.flags import fraction, numbers

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
    str | None,
    typer.Option(metavar="NAME", help="A published law instead: smelt, chinchilla, chinchilla-refit, looped-moe."),
]
Compute = Annotated[str, typer.Option(metavar="LIST", help="Training FLOPs.")]
SPARSITIES = "0.85,0.95,0.97"
Sparsity = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Compute-equivalent sparsities, of the form smelt.", show_default=SPARSITIES),
]
Memory = Annotated[
    Fraction | None,
    typer.Option(
        metavar="GB", parser=fraction, help="Most that the weights may take, of looped-moe.", show_default="no limit"
    ),
]
BytesPerParameter = Annotated[
    Fraction | None,
    typer.Option(metavar="BYTES", parser=fraction, help="Of a weight in --memory.", show_default="0.5: INT4"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command("fit")
def fit(
    runs: Annotated[Path, typer.Argument(help="CSV, JSONL, Parquet, or a folder of verify results.")],
    form: Annotated[Literal["smelt", "chinchilla", "looped-moe"], typer.Option(help="The law.")] = "smelt",
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

    Columns: flops_per_token, sparsity, tokens, loss, arm, and if known cell. Of chinchilla: parameters in the place of
    the first two. Of looped-moe, one surface over all runs: active, total, looped (parameters), loops, experts (over
    top-k), tokens, loss. Coefficients come with 95 % intervals of refits in which whole cells are drawn; what the runs
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
    with SlowWork("fitting") as work:
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
    sparsity: Sparsity = None,
    memory: Memory = None,
    bytes_per_parameter: BytesPerParameter = None,
    as_json: Json = False,
) -> None:
    """Show the share of compute that looping saves at equal loss.

    The looped arm's frontier loss at each budget, and the budget at which the baseline's frontier has that loss. Of
    looped-moe: the best shape that loops against the best that does not.

    Example: `smelt-budget law gain --preset smelt`
    """
    from smelt_budget.laws import gains, looped_moe_shapes
    from smelt_budget.report.console import print_json, show
    from smelt_budget.report.law import gain_view
    from smelt_budget.report.looped_moe import shape_gain_view

    found, computes = chosen(law, preset), numbers(compute, "--compute")
    if found.has_frontier:
        rows = gains.gains(found, computes, sparsities(found, sparsity, memory, bytes_per_parameter))
        view = gain_view(found.origin, found.window, rows)
    else:
        shapes = family(found, sparsity, memory, bytes_per_parameter)
        rows = looped_moe_shapes.gains(found, computes, shapes)
        view = shape_gain_view(found.origin, found.window, rows)
    if as_json:
        print_json({"origin": found.origin, "window": found.window, "gains": rows})
    else:
        show(view)


@app.command("allocate")
def allocate(
    law: Source = None,
    preset: Preset = None,
    compute: Compute = "1e20,1e21,1e22",
    sparsity: Sparsity = None,
    memory: Memory = None,
    bytes_per_parameter: BytesPerParameter = None,
    as_json: Json = False,
) -> None:
    """Split a budget best: FLOPs per token, tokens, tokens per parameter, loss.

    Of looped-moe the best shape: active, total and looped parameters, loops, experts over top-k, tokens, loss; with
    --memory among those whose weights fit.

    Example: `smelt-budget law allocate --preset looped-moe --compute 5e21 --memory 3`
    """
    from smelt_budget.laws import gains, looped_moe_shapes
    from smelt_budget.report.console import print_json, show
    from smelt_budget.report.law import allocation_view
    from smelt_budget.report.looped_moe import shape_view

    found, computes = chosen(law, preset), numbers(compute, "--compute")
    if found.has_frontier:
        rows = gains.allocations(found, computes, sparsities(found, sparsity, memory, bytes_per_parameter))
        view = allocation_view(found.origin, found.window, rows)
    else:
        shapes = family(found, sparsity, memory, bytes_per_parameter)
        rows = looped_moe_shapes.allocations(found, computes, shapes)
        view = shape_view(found.origin, found.window, rows)
    if as_json:
        print_json({"origin": found.origin, "window": found.window, "allocations": rows})
    else:
        show(view)


@app.command("plot")
def plot(
    law: Source = None,
    preset: Preset = None,
    kind: Annotated[Literal["loss", "gain", "residuals"], typer.Option(help="Which picture.")] = "gain",
    sparsity: Sparsity = None,
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
    if kind == "residuals" and sparsity is not None:
        raise BadInput("--sparsity chooses frontiers; residuals have none", "fix: leave it out")
    if kind != "residuals" and not found.has_frontier:
        raise BadInput(
            f"{found.origin} has a best shape for a budget and no frontier to draw",
            "fix: smelt-budget law allocate --preset looped-moe, or --kind residuals of a fitted law",
        )
    chosen_sparsities = sparsities(found, sparsity) if found.has_frontier else []
    draw(found, kind, chosen_sparsities, out, residuals(law))
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


def sparsities(
    law: Any, typed: str | None, memory: Fraction | None = None, bytes_per_parameter: Fraction | None = None
) -> list[float]:
    """Those typed, or the paper's three; one of no meaning where the form knows none.

    Raises:
        BadInput: an option that says nothing to this law.
    """
    for flag, value in (("--memory", memory), ("--bytes-per-parameter", bytes_per_parameter)):
        if value is not None:
            raise BadInput(f"{flag} chooses among shapes; the form {law.form.name} has none", "fix: leave it out")
    if law.form.name == "smelt":
        return numbers(SPARSITIES if typed is None else typed, "--sparsity", below=1)
    if typed is not None:
        raise BadInput(f"--sparsity says nothing to the form {law.form.name}", "fix: leave it out")
    return [0.0]


def family(law: Any, sparsity: str | None, memory: Fraction | None, bytes_per_parameter: Fraction | None) -> Any:
    """The shapes of looped-moe whose weights fit.

    Raises:
        BadInput: an option that says nothing to this law, or no shape fits.
    """
    from smelt_budget.laws.looped_moe_shapes import Family

    if sparsity is not None:
        raise BadInput(
            f"--sparsity says nothing to the form {law.form.name}: it chooses the experts itself", "fix: leave it out"
        )
    if memory is None and bytes_per_parameter is not None:
        raise BadInput("--bytes-per-parameter without --memory says nothing", "fix: --memory 3")
    size = Fraction(1, 2) if bytes_per_parameter is None else bytes_per_parameter
    for flag, value in (("--memory", memory), ("--bytes-per-parameter", size)):
        if value is not None and value <= 0:
            raise BadInput(f"{flag} {float(value):g} is not above 0")
    return Family().within(None if memory is None else float(memory * 10**9), float(size))
