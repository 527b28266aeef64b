"""Read, call, print, exit. Results go to stdout, everything else to stderr; `--json` prints JSON and nothing else.

Exit codes: 0 met, 2 bad input, 3 infeasible, 4 counts disagree, 130 interrupted, 1 anything else. Heavy imports
stand inside the commands: `--help` and `models` start without numpy, scipy, sympy or torch.
"""

from __future__ import annotations

import errno
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import smelt_budget
from smelt_budget.emit_command import emit
from smelt_budget.errors import BadInput, SmeltError
from smelt_budget.flags import fraction, known_models, pins, setting_asked, share
from smelt_budget.ladder_command import ladder
from smelt_budget.law_commands import app as law
from smelt_budget.report.console import print_json, show
from smelt_budget.report_command import report
from smelt_budget.training_commands import INTERRUPTED, evaluate, generate, verify

ConventionName = Literal["smelt", "megatron", "torchtitan", "full-square"]
EXAMPLE = "smelt-200m-s95"


USAGE_ERROR: Any = typer.BadParameter.__base__  # typer vendors click and gives this no public name


class Commands(TyperGroup):
    """Turns errors into one voice and their exit code; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except SmeltError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except USAGE_ERROR as error:
            where = error.ctx.command_path if error.ctx is not None else "smelt-budget"
            message = error.format_message().replace("Value error, ", "")
            typer.echo(f"error: {message}\n  fix: see {where} --help", err=True)
            raise typer.Exit(BadInput.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            typer.echo(f"error: cannot write the output: {error.strerror}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="smelt-budget",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The console script."""
    app()


def show_version(value: bool) -> None:
    """Print the version and leave."""
    if value:
        typer.echo(f"smelt-budget {smelt_budget.__version__}")
        raise typer.Exit


Baseline = Annotated[
    str,
    typer.Option(
        help="YAML, config.json, a directory holding one, a built-in name (see `models`), or - for stdin.",
        autocompletion=known_models,
    ),
]
Spec = Annotated[
    str,
    typer.Argument(
        help="YAML, config.json, a directory holding one, a built-in name, - for stdin, or smelt.yaml#twin.",
        autocompletion=known_models,
    ),
]
ConventionOption = Annotated[
    ConventionName | None,
    typer.Option("--convention", help="What a FLOP count includes.", show_default="smelt"),
]
AttentionLength = Annotated[
    Fraction | None,
    typer.Option(
        parser=fraction,
        metavar="POSITIONS",
        help="Mean positions a token attends to; left out: (context + 1) / 2, or the convention's own.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Tokens of a sequence; left out: min(max_position_embeddings, 4096)."),
]
KvBytes = Annotated[
    Fraction | None,
    typer.Option(parser=fraction, metavar="BYTES", help="Bytes of one cached element.", show_default="2"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also list the keys that change no count.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite --out if it exists.")]


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fair comparison of looped and unlooped Mixture-of-Experts transformers.

    Give it a model you would have trained; it returns the looped one that costs the same: equal FLOPs per
    token, equal non-embedding parameters, equal KV cache (SMELT, arXiv 2609.01343).

    Example: `smelt-budget solve --baseline qwen3-30b-a3b`
    """


@app.command()
def solve(
    baseline: Baseline = EXAMPLE,
    heads: Annotated[
        Literal["auto", "uniform", "sectioned"],
        typer.Option(help="One head geometry everywhere, or KV heads divided by the visits in the core (KV exact)."),
    ] = "auto",
    policy: Annotated[
        Literal["nearest", "at-most"], typer.Option(help="Nearest on all budgets, or never above any.")
    ] = "nearest",
    sparsity: Annotated[
        float | None,
        typer.Option(parser=share, metavar="S", help="First move the baseline's expert count to this S (0.95, 95%)."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(metavar="N", help="Experts per token of a dense baseline under --sparsity (left out: 8)."),
    ] = None,
    span: Annotated[
        Fraction, typer.Option(parser=fraction, metavar="SHARE", help="Share of the layers that loops.")
    ] = "0.5",  # pyright: ignore[reportArgumentType]
    visits: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="How often the core runs.")] = 2,
    start: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="First core layer, from 0; left out: centred.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Physical depth of the twin; left out: kept.")
    ] = None,
    hidden_multiple: Annotated[int, typer.Option(metavar="N", min=1, help="Step of the hidden size.")] = 16,
    head_multiple: Annotated[int, typer.Option(metavar="N", min=1, help="Step of head sizes and KV ranks.")] = 8,
    expert_multiple: Annotated[
        int, typer.Option(metavar="N", min=1, help="Step of expert, shared and dense widths.")
    ] = 8,
    experts_multiple: Annotated[
        int, typer.Option(metavar="N", min=1, help="Step of expert counts (expert parallelism).")
    ] = 1,
    tolerance: Annotated[
        float, typer.Option(parser=share, metavar="SHARE", help="Largest gap of every budget (0.02, 2%).")
    ] = "0.02",  # pyright: ignore[reportArgumentType]
    tolerance_flops: Annotated[
        float | None, typer.Option(parser=share, metavar="SHARE", help="For FLOPs alone.")
    ] = None,
    tolerance_parameters: Annotated[
        float | None, typer.Option(parser=share, metavar="SHARE", help="For parameters alone.")
    ] = None,
    tolerance_kv: Annotated[
        float | None, typer.Option(parser=share, metavar="SHARE", help="For the KV cache alone.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help="Pin a free quantity of the twin; repeatable.")
    ] = None,
    top: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=1000, help="Runners-up to show, one per hidden size and attention shape."),
    ] = 3,
    convention: ConventionOption = None,
    attention_length: AttentionLength = None,
    context: Context = None,
    kv_bytes: KvBytes = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the pair to this YAML file, which later commands read.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Find the looped twin of a baseline: equal FLOPs, parameters and KV cache.

    With no baseline it solves the paper's 200M model at S 95 %. Exits 3 where no twin is within tolerance,
    and says which budget binds and what was tried.

    Example: `smelt-budget solve --baseline deepseek-v3 --heads sectioned --out smelt.yaml`
    """
    from smelt_budget.report.progress import SlowWork
    from smelt_budget.report.write import check_free, write_text
    from smelt_budget.solver import Lattice, Plan, Request, Tolerance
    from smelt_budget.solver import solve as find_twin
    from smelt_budget.spec.text import as_yaml

    if out is not None:
        check_free(out, force)
    reading = told(baseline, verbose)
    request = Request(
        plan=Plan(span, visits, start, layers),
        heads=heads,
        policy=policy,
        lattice=Lattice(hidden_multiple, head_multiple, expert_multiple, experts_multiple),
        tolerance=Tolerance(
            *(tolerance if own is None else own for own in (tolerance_flops, tolerance_parameters, tolerance_kv))
        ),
        sparsity=sparsity,
        top_k=top_k,
        keep=pins(keep or []),
        top=top,
        **setting_asked(reading, convention, context, attention_length, kv_bytes),
    )
    with SlowWork("searching") as work:
        solution = find_twin(reading.spec, request, work.advanced)
    found = solution.as_dict() | ({"built_otherwise": list(reading.functions)} if reading.functions else {})
    if out is not None:
        heading = f"A compute-matched pair by smelt-budget {smelt_budget.__version__}, from {reading.origin}."
        write_text(out, as_yaml(found, heading), force)
        typer.echo(f"wrote {out}", err=True)
    if as_json:
        print_json(found)
        return
    from smelt_budget.report.solution import solution_view

    show(solution_view(solution, reading.origin))


@app.command()
def ledger(
    spec: Spec,
    convention: ConventionOption = None,
    attention_length: AttentionLength = None,
    context: Context = None,
    kv_bytes: KvBytes = None,
    equations: Annotated[bool, typer.Option("--equations", help="Print each row's formula.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Count a model: every weight, what one token costs, and why.

    Parameters, FLOPs per token and KV bytes, row by row, with what is stored, read and run.

    Example: `smelt-budget ledger mixtral-8x7b --context 8192 --equations`
    """
    from smelt_budget.ledger import Ledger, Setting

    reading = told(spec, verbose)
    setting = Setting.of(reading.spec, **setting_asked(reading, convention, context, attention_length, kv_bytes))
    counted = Ledger(reading.spec, setting)
    if as_json:
        print_json({"spec": reading.spec.compact(), **counted.as_dict()})
        return
    from smelt_budget.report.ledger import ledger_view

    if not equations:
        show(ledger_view(counted, reading.origin))
        return
    from smelt_budget.ledger import symbols

    show(ledger_view(counted, reading.origin, symbols.equations(reading.spec)))
    show(", ".join(f"{letter} {meaning}" for letter, meaning in symbols.legend(reading.spec).items()))


@app.command()
def models(as_json: Json = False) -> None:
    """List the built-in models, each with its counted and its published size.

    Example: `smelt-budget models --json`
    """
    from smelt_budget.ledger import Ledger, Setting
    from smelt_budget.spec import builtin, read

    listed = []
    for name in builtin.names():
        model, spec = builtin.load(name), read(name).spec
        parameters = Ledger(spec, Setting.of(spec)).as_dict()["parameters"]
        listed.append(
            {
                "name": name,
                "family": model["config"].get("model_type", "own"),
                "layers": spec.num_hidden_layers,
                "experts": spec.num_experts,
                "top_k": spec.num_experts_per_tok,
                "published": model["published"],
                "source": model["source"],
                **parameters,
            }
        )
    if as_json:
        print_json(listed)
        return
    from smelt_budget.report.models import model_table

    show(model_table(listed))


def told(source: str, verbose: bool) -> Any:
    """Read a model; tell on stderr what its reader has to say."""
    from smelt_budget.spec import read

    reading = read(source)
    for note in reading.notes:
        typer.echo(f"note: {note}", err=True)
    if verbose and reading.harmless:
        typer.echo(f"note: {reading.origin}: these keys change no count: {', '.join(reading.harmless)}", err=True)
    for what in reading.functions if verbose else ():
        typer.echo(f"note: {reading.origin}: built otherwise: {what}", err=True)
    return reading


app.command("verify")(verify)
app.command("emit")(emit)
app.command("generate")(generate)
app.command("eval")(evaluate)
app.add_typer(law, name="law")
app.command("ladder")(ladder)
app.command("report")(report)
