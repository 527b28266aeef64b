"""The commands that build, train and look at models: verify, generate, eval. Read, call, print, exit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from smelt_budget.errors import BadInput, CountsDisagree
from smelt_budget.flags import factors

INTERRUPTED = 130
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="[NAME=]PATH",
        help="Text, JSONL (.gz, .zst), Parquet, a dataset directory, Megatron .bin/.idx or token .npy; "
        "repeatable, one domain each. Left out: the text that came with this Python.",
    ),
]
TextField = Annotated[
    str | None, typer.Option(metavar="KEY", help="Field of JSONL or Parquet; left out: text, content or code.")
]
Tokenizer = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A tokenizer.json; left out: bytes.", show_default=False)
]
TokenDtype = Annotated[
    Literal["uint16", "uint32"] | None, typer.Option(help="Of a raw token .npy, which has no header.")
]
VocabSize = Annotated[int | None, typer.Option(metavar="N", min=2, help="Ids of tokenised data without a tokenizer.")]
BosId = Annotated[int | None, typer.Option(metavar="ID", min=0, help="The id that begins a document.")]
Experts = Annotated[
    Literal["auto", "cuda", "native", "torch"] | None,
    typer.Option(
        help="What computes them: our kernels where they can, or torch; left out: $SMELT_EXPERTS, or auto.",
        show_default=False,
    ),
]
Run = Annotated[Path, typer.Argument(help="The folder that verify wrote.", show_default=False)]
Arm = Annotated[Literal["baseline", "twin"], typer.Option(help="Which of the two models.")]
SeedOf = Annotated[int, typer.Option("--run-seed", metavar="N", min=0, help="Which of the trained seeds.")]


def verify(
    pair: Annotated[Path | None, typer.Argument(help="What solve --out wrote.", show_default="smelt.yaml")] = None,
    counts_only: Annotated[bool, typer.Option("--counts-only", help="Count and stop: seconds, at any size.")] = False,
    size: Annotated[
        Literal["tiny", "small", "full"], typer.Option(help="The proxy pair that is trained; full is the pair itself.")
    ] = "tiny",
    active_params: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Active parameters of the proxy, instead of --size's.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=10**9, help="Optimiser steps of a run.")] = 160,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Pairs of runs; the interval is over these.")
    ] = 3,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, max=2**20, help="Sequences of a step.")] = 8,
    accumulate: Annotated[
        int, typer.Option(metavar="N", min=1, help="Micro-batches a step is cut into; its tokens stay.")
    ] = 1,
    context: Annotated[int, typer.Option(metavar="N", min=8, max=2**20, help="Tokens of a training sequence.")] = 256,
    rate_factors: Annotated[
        str, typer.Option(metavar="LIST", help="Multiples of 0.75 / hidden_size each arm tries; one is taken untried.")
    ] = "0.5,1,2",
    balance: Annotated[
        Literal["aux", "bias", "none"], typer.Option(help="Auxiliary loss, loss-free bias, or no balancing.")
    ] = "aux",
    data: Data = None,
    tokenizer: Tokenizer = None,
    text_field: TextField = None,
    token_dtype: TokenDtype = None,
    vocab_size: VocabSize = None,
    bos_id: BosId = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.")] = "auto",
    dtype: Annotated[
        Literal["auto", "fp32", "bf16"], typer.Option(help="Of matrix products; auto measures which is faster.")
    ] = "auto",
    experts: Experts = None,
    compile_layers: Annotated[bool, typer.Option("--compile", help="Compile the layers (slow start).")] = False,
    checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Recompute layers in the backward pass.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for results and checkpoints.")] = Path("smelt-verify"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where --out was stopped, bit for bit.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="Also write an offline W&B run.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also say all that keeps the experts from our kernels.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Prove that the twin costs the same, and that it trains: three counts, then a paired run.

    Parameters, FLOPs and KV bytes of both arms are counted by the ledger and measured on the model at full size;
    any difference exits 4. Then a small pair solved from the full one is trained on identical tokens, each arm at
    a learning rate of its own, about three minutes on two cores. Ctrl-C keeps everything; --resume goes on.

    Example: `smelt-budget verify smelt.yaml --counts-only`
    """
    from smelt_budget.model.experts_choice import asked_for
    from smelt_budget.report.console import print_json, show
    from smelt_budget.report.verify import counts_difference, verify_view
    from smelt_budget.verify.asked import Text
    from smelt_budget.verify.pair import read_pair
    from smelt_budget.verify.recipe import Recipe
    from smelt_budget.verify.verify import Options, counted

    solved = read_pair(pair)
    recipe = Recipe(
        steps=steps,
        seeds=seeds,
        batch_size=batch_size,
        accumulate=accumulate,
        context=context,
        factors=factors(rate_factors),
        balance=balance,
    )
    if batch_size % accumulate:
        raise BadInput(f"--batch-size {batch_size} does not divide by --accumulate {accumulate}")
    text = Text(
        sources=tuple(data or ()),
        tokenizer=None if tokenizer is None else str(tokenizer),
        text_field=text_field,
        token_dtype=token_dtype,
        vocab_size=vocab_size,
        bos_id=bos_id,
    )
    options = Options(
        out,
        recipe,
        text,
        size,
        active_params,
        device,
        dtype,
        asked_for(experts),
        compile_layers,
        checkpointing,
        resume,
    )
    kernels_heard()
    if not counts_only:
        check_trackers(tensorboard, wandb)
        check_started(options)
    for note in solved.notes:
        typer.echo(f"note: {note}", err=True)
    result, leads = counted(solved), os.environ.get("RANK", "0") == "0"
    if counts_only and verbose:
        result["experts"] = experts_of_pair(solved, options)
    agree = result["counts"]["agree"]
    if agree and not counts_only:
        result = trained(solved, options, result)
        if leads:
            tracked(out, tensorboard, wandb)
    if leads:
        if as_json:
            print_json(result)
        else:
            show(verify_view(result, verbose))
    if not agree:
        raise CountsDisagree("formula and model disagree", *counts_difference(result["counts"]))


def check_trackers(tensorboard: bool, wandb: bool) -> None:
    """A tracker that is not installed is missed before the training, not after it."""
    from importlib.util import find_spec

    for name, asked in (("tensorboard", tensorboard), ("wandb", wandb)):
        if asked and find_spec(name) is None:
            raise BadInput(
                f"--{name} needs the package {name}, which is not installed",
                "fix: pip install 'smelt-budget[trackers]'",
            )


def check_started(options: Any) -> None:
    """Fail before the work; a process that torchrun started again goes on by itself."""
    from smelt_budget.verify.verify import check_folder

    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and os.environ.get("RANK", "0") == "0":
        check_folder(options)


def trained(solved: Any, options: Any, result: dict[str, Any]) -> dict[str, Any]:
    """Train both arms, alone or as one rank of several; the first rank concludes."""
    from smelt_budget.report.training import Training
    from smelt_budget.verify.asked import FILE
    from smelt_budget.verify.place import device_asked, group
    from smelt_budget.verify.train import Interrupted
    from smelt_budget.verify.verify import ARMS, concluded, ready, restarted, train

    try:
        with group(device_asked(options.device)) as ranks:
            asked, small = ready(solved, restarted(options), told, ranks)
            arm_steps = asked.recipe.seeds * asked.recipe.steps
            if len(asked.recipe.factors) > 1:
                arm_steps += len(asked.recipe.factors) * asked.recipe.shorter().steps
            with Training(dict.fromkeys(ARMS, arm_steps)) as bars:
                train(asked, options, bars.told, ranks)
            return result if small is None else concluded(result, asked, small, options)
    except (Interrupted, KeyboardInterrupt):
        begun = (options.out / FILE).is_file()
        on = f"everything is in {options.out}, and the same command with --resume goes on"
        typer.echo(f"stopped; {on if begun else 'nothing was trained yet'}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def told(event: dict[str, Any]) -> None:
    """What happens before training, on stderr."""
    if event["event"] == "experts":
        from smelt_budget.report.experts import expert_words

        for line in expert_words(event["experts"]):
            typer.echo(line, err=True)
    elif event["event"] in ("phase", "note"):
        typer.echo(f"{event['words']}{' ...' if event['event'] == 'phase' else ''}", err=True)


class Heard(logging.Handler):
    """Compiling takes a while: what is done, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        typer.echo(record.getMessage(), err=True)


def kernels_heard() -> None:
    """Let the user hear of the kernels."""
    log = logging.getLogger("smelt_budget.kernels")
    log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(Heard())


def experts_of_pair(solved: Any, options: Any) -> dict[str, Any]:
    """What would compute the experts of the pair itself, if it was trained in bf16 or as asked."""
    from smelt_budget.verify.kernels import experts_of
    from smelt_budget.verify.place import Place, device_asked

    precision = "fp32" if options.dtype == "fp32" else "bf16"
    specs = {"baseline": solved.baseline, "twin": solved.twin}
    return experts_of(specs, Place(device_asked(options.device), precision, experts=options.experts))


def tracked(out: Path, tensorboard: bool, wandb: bool) -> None:
    """Hand the metrics to the trackers that were asked for."""
    if not (tensorboard or wandb):
        return
    from smelt_budget.verify import trackers

    if tensorboard:
        trackers.tensorboard(out / "tensorboard", trackers.read(out / "metrics.jsonl"))
    if wandb:
        trackers.wandb(out / "wandb", trackers.read(out / "metrics.jsonl"))


def generate(
    run: Run,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Text to continue; repeatable, continued together.")
    ] = None,
    arm: Arm = "twin",
    run_seed: SeedOf = 0,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="How many new tokens.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the k likeliest; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest with this probability together.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Continue a text with a model that verify trained.

    Example: `smelt-budget generate smelt-verify --prompt "def " --tokens 80`
    """
    from smelt_budget.model import Sampling
    from smelt_budget.report.console import print_json
    from smelt_budget.verify.trained import Trained

    kernels_heard()
    model = Trained.read(run, arm, run_seed)
    told({"event": "experts", "experts": {arm: model.experts}})
    said = model.generate(prompt or [""], tokens, Sampling(temperature, top_k, top_p), seed)
    if as_json:
        print_json(said)
        return
    for one in said:
        typer.echo(one["prompt"] + one["continuation"])


def evaluate(
    run: Run,
    data: Data = None,
    arm: Annotated[Literal["baseline", "twin", "both"], typer.Option(help="Which of the two models.")] = "both",
    run_seed: SeedOf = 0,
    rows: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Sequences of each domain.", show_default="as verify judged")
    ] = None,
    text_field: TextField = None,
    token_dtype: TokenDtype = None,
    as_json: Json = False,
) -> None:
    """Loss of a verified model on text: by domain, document length and position.

    Without --data it is the run's own held-out text; with it, all of the given text.

    Example: `smelt-budget eval smelt-verify --data README.md --rows 4`
    """
    from smelt_budget.report.console import print_json, show
    from smelt_budget.report.evaluation import evaluation_view
    from smelt_budget.verify.trained import evaluated

    kernels_heard()
    arms = ("baseline", "twin") if arm == "both" else (arm,)
    result = evaluated(run, arms, run_seed, tuple(data or ()), rows, text_field, token_dtype)
    if as_json:
        print_json(result)
    else:
        show(evaluation_view(result))
