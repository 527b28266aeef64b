"""Does the twin cost what the solver says, and does it train? Counts, a proxy, paired training, a verdict.

    counts  ->  proxy pair  ->  text  ->  both arms trained side by side  ->  verify.json, metrics.jsonl, plots

Everything is kept in one folder, from which a stopped run goes on.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import smelt_budget
from smelt_budget.errors import BadInput, SmeltError
from smelt_budget.ledger import Ledger
from smelt_budget.model.experts_choice import Asked as AskedExperts
from smelt_budget.model.experts_choice import check_device
from smelt_budget.solver import Gaps
from smelt_budget.verify import precision
from smelt_budget.verify.asked import ARMS, CACHE, FILE, Asked, Text, differences, read_asked
from smelt_budget.verify.conduct import conduct, conduct_ranks, usable_cores
from smelt_budget.verify.counts import Counts, count
from smelt_budget.verify.data.yardsticks import yardsticks
from smelt_budget.verify.kernels import experts_of, taken
from smelt_budget.verify.pair import Pair
from smelt_budget.verify.place import Place, device_asked
from smelt_budget.verify.proxy import Proxy, Size, proxy
from smelt_budget.verify.recipe import Recipe
from smelt_budget.verify.state import replaced
from smelt_budget.verify.study import read_result
from smelt_budget.verify.verdict import verdict

MOST_SHOWN = 8  # differences between two runs
Told = Callable[[dict[str, Any]], None]
Result = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """How much is trained, where, and on what; the options of the command."""

    out: Path
    recipe: Recipe = Recipe()
    text: Text = Text()
    size: Size = "tiny"
    active_parameters: int | None = None
    device: str = "auto"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    experts: AskedExperts = "auto"
    compiled: bool = False
    checkpointing: bool = False
    resume: bool = False


def counted(pair: Pair) -> Result:
    """The three counts of both arms, and what the ledger says lies between them."""
    counts = {arm: count(spec, pair.setting) for arm, spec in (("baseline", pair.baseline), ("twin", pair.twin))}
    arms = [Ledger(spec, pair.setting) for spec in (pair.baseline, pair.twin)]
    result = {
        "version": smelt_budget.__version__,
        "origin": pair.origin,
        "pair": {
            "baseline": pair.baseline.compact(),
            "twin": pair.twin.compact(),
            "gaps": Gaps.between(*arms).as_dict(),
            "setting": pair.setting.as_dict(),
            "notes": list(pair.notes),
        },
        "counts": as_dict(counts),
    }
    return result | {"verdict": verdict(result)}


def as_dict(counts: dict[str, Counts]) -> Result:
    """The `counts` of verify.json."""
    return {arm: one.as_dict() for arm, one in counts.items()} | {"agree": all(one.agree for one in counts.values())}


def begin(pair: Pair, options: Options, told: Told) -> tuple[Asked, Proxy]:
    """What will be trained, written into a folder of its own; or, resuming, what was begun there.

    Raises:
        BadInput: the folder holds something else, or another run than the one asked for.
    """
    check_folder(options)
    device = device_asked(options.device)
    check_device(options.experts, device)
    given: dict[str, Any] = {
        "recipe": options.recipe,
        "text": options.text,
        "size": options.size,
        "active_parameters": options.active_parameters,
        "device": device,
        "compiled": options.compiled,
        "checkpointing": options.checkpointing,
        "experts": options.experts,
    }
    before = read_asked(options.out) if options.resume else None
    if before is not None:
        dtype = {} if options.dtype == "auto" else {"precision": options.dtype}
        check_same(options.out, before, before.model_copy(update=given | dtype))
    told({"event": "phase", "words": "reading the text"})
    split = options.text.load(options.out / CACHE)
    told({"event": "phase", "words": "solving a proxy pair"})
    small = proxy(pair, options.size, options.active_parameters, split.vocab_size, options.recipe.context)
    check_vocabulary(small, split.vocab_size)
    if before is None:
        if options.dtype == "auto":
            told({"event": "phase", "words": "measuring fp32 against bf16"})
        kind, why = precision.chosen(
            options.dtype, device, (small.baseline, small.twin), options.recipe, options.experts
        )
    else:
        kind, why = before.precision, "as begun"
    told({"event": "note", "words": f"precision: {kind} ({why})"})
    found = experts_of({"baseline": small.baseline, "twin": small.twin}, Place(device, kind, experts=options.experts))
    told({"event": "experts", "experts": found})
    asked = Asked(
        baseline=small.baseline,
        twin=small.twin,
        fingerprint=split.fingerprint,
        precision=kind,
        taken=taken(found),
        **given,
    )
    split.judged(options.recipe.context, options.recipe.held_out_rows)  # too little held-out text is said now
    check_enough(split.train.tokens, options.recipe)
    if before is not None:
        check_same(options.out, before, asked)
    asked.write(options.out)
    return asked, small


def check_same(out: Path, before: Asked, now: Asked) -> None:
    """A run goes on as it was begun."""
    changed = differences(before, now)
    if changed:
        raise BadInput(f"{out} holds another run", *changed[:MOST_SHOWN], "fix: the same options, or another --out")


def ready(pair: Pair, options: Options, told: Told, ranks: tuple[int, int]) -> tuple[Asked, Proxy | None]:
    """`begin` on the first rank; the others wait, and read what it wrote."""
    rank, world = ranks
    small = None
    if rank == 0:
        asked, small = begin(pair, options, told)
    if world > 1:
        torch.distributed.barrier()
        asked = read_asked(options.out)
    return asked, small  # pyright: ignore[reportPossiblyUnboundVariable]


def restarted(options: Options) -> Options:
    """What torchrun starts again after a failure goes on with what is there."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (options.out / FILE).is_file()
    return replace(options, resume=True) if again else options


def check_folder(options: Options) -> None:
    """Nothing of the user's is written over, and what will be written can be."""
    out = options.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        begun, held = (out / FILE).is_file(), [path for path in out.iterdir() if not ours(path)]
    except (FileExistsError, NotADirectoryError):
        raise BadInput(f"{out} is not a directory", "fix: another --out") from None
    except OSError as error:
        raise BadInput(f"cannot write into {out}: {error.strerror}", "fix: another --out") from None
    if not os.access(out, os.W_OK):
        raise BadInput(f"cannot write into {out}: no permission", "fix: another --out")
    if options.resume and not begun:
        raise BadInput(f"{out} holds no run of verify", "fix: leave out --resume")
    if begun and not options.resume:
        raise BadInput(f"{out} holds a run already", "fix: --resume to go on with it, or another --out")
    if held and not begun:
        raise BadInput(f"{out} is not empty, and holds no run of verify", "fix: another --out")


def ours(path: Path) -> bool:
    """What a run leaves that was stopped before it began: the ids of its text."""
    return path.name == CACHE and path.is_dir() and all("tokens-" in place.name for place in path.iterdir())


def check_vocabulary(small: Proxy, vocab_size: int) -> None:
    """The full pair has a vocabulary of its own, which must hold the text's ids."""
    for arm, spec in (("baseline", small.baseline), ("twin", small.twin)):
        if spec.vocab_size < vocab_size:
            raise BadInput(
                f"the text has ids up to {vocab_size - 1:,}, the {arm}'s vocabulary ends at {spec.vocab_size - 1:,}",
                "fix: the tokenizer this model is made for, or a proxy (--size tiny)",
            )


def check_enough(tokens: int, recipe: Recipe) -> None:
    """At least one step's tokens."""
    need = recipe.batch_size * recipe.context + 1
    if tokens < need:
        raise BadInput(
            f"the text has {tokens:,} tokens to train on, one step needs {need:,}",
            "fix: more --data, or --batch-size 1",
        )


def train(asked: Asked, options: Options, told: Told, ranks: tuple[int, int] = (0, 1)) -> None:
    """Both arms, to the last seed.

    Raises:
        Interrupted: stopped; `--resume` goes on.
        SmeltError: diverged, disk full, a worker died.
    """
    rank, world = ranks
    if world > 1:
        conduct_ranks(options.out, asked, told, rank, world)
    else:
        conduct(options.out, asked, told)


def concluded(result: Result, asked: Asked, small: Proxy, options: Options) -> Result:
    """The whole of verify.json, from what the runs left; plots and metrics are put beside it."""
    from smelt_budget.verify.plots import draw

    split = asked.split(options.out)
    result = result | {
        "proxy": None if small.size == "full" else small.as_dict(),
        "arms": {arm: asked.spec(arm).compact() for arm in ARMS},
        "arm_gaps": small.gaps,
        "data": split.describe()
        | {
            "yardsticks": {name: yard._asdict() for name, yard in yardsticks(split).items()},
            "epochs": split.packed(asked.recipe.context, 0).epochs(asked.recipe.steps, asked.recipe.batch_size),
        },
        "recipe": asked.recipe.model_dump(mode="json") | {"tokens": asked.recipe.tokens},
        "machine": machine(asked),
        "experts": experts_of(
            {arm: asked.spec(arm) for arm in ARMS}, Place(asked.device, asked.precision, experts=asked.experts)
        ),
        "rates": {arm: json.loads((options.out / arm / "rates.json").read_text(encoding="utf-8")) for arm in ARMS},
        "runs": {arm: runs(options.out / arm, asked.recipe.seeds) for arm in ARMS},
    }
    result["verdict"] = verdict(result)
    rows = gathered(options.out)
    replaced(options.out / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    replaced(options.out / "verify.json", json.dumps(result, indent=1))
    draw(result, rows, options.out / "plots")
    shutil.rmtree(options.out / CACHE, ignore_errors=True)
    return result


def runs(folder: Path, seeds: int) -> list[Result]:
    """The results of every seed of an arm."""
    found = [read_result(folder / f"seed-{seed}") for seed in range(seeds)]
    if any(one is None for one in found):
        raise SmeltError(f"{folder} lacks the result of a seed", "fix: --resume")
    return [one for one in found if one is not None]


def gathered(folder: Path) -> list[Result]:
    """The metrics of every run, arm by arm."""
    files = [file for arm in ARMS for file in sorted((folder / arm).glob("*/metrics.jsonl"))]
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def machine(asked: Asked) -> Result:
    """Where it ran."""
    return {
        "device": torch.cuda.get_device_name()
        if asked.device == "cuda"
        else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "precision": asked.precision,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
