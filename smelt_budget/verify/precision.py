"""fp32 or bf16? On a CPU whichever is faster here, measured on both arms; the same for both.

bf16 matrix products are 5 to 12 times faster with AMX, a step is not until the widths are some hundreds: what is
around the products stays, and casts are added (docs/log.md). T tokens.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from smelt_budget.errors import BadInput
from smelt_budget.model import Transformer, initialise
from smelt_budget.model.experts_choice import Asked
from smelt_budget.model.ffn import ask
from smelt_budget.spec import ModelSpec
from smelt_budget.verify.place import Place, Precision
from smelt_budget.verify.recipe import Recipe

STEPS = 3
MOST_TOKENS = 2048
MOST_PARAMETERS = 200_000_000
"""Larger models are not built twice only to be timed."""


def chosen(
    asked: str, device: str, specs: tuple[ModelSpec, ...], recipe: Recipe, experts: Asked = "auto"
) -> tuple[Precision, str]:
    """The precision, and why.

    Raises:
        BadInput: bf16 was asked for where nothing can do it.
    """
    if asked == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise BadInput("--dtype bf16, but this GPU has no bf16", "fix: --dtype fp32")
    if asked in ("fp32", "bf16"):
        return asked, "as asked"  # pyright: ignore[reportReturnType]
    if experts in ("cuda", "emulated"):
        return "bf16", "the expert kernels take it"
    if device == "cuda":
        return ("bf16", "a GPU with bf16") if torch.cuda.is_bf16_supported() else ("fp32", "a GPU without bf16")
    if not torch.cpu._is_avx512_bf16_supported():
        return "fp32", "this CPU has no bf16 instructions"
    with torch.device("meta"):
        largest = max(sum(p.numel() for p in Transformer(spec).parameters()) for spec in specs)
    if largest > MOST_PARAMETERS:
        return "bf16", f"{largest:,} parameters: not measured, wide products are faster in bf16"
    seconds = {precision: sum(step_time(spec, recipe, precision) for spec in specs) for precision in ("fp32", "bf16")}
    ratio = seconds["fp32"] / seconds["bf16"]
    words = f"measured: a step of both arms in bf16 takes {1 / ratio:.2f} of its time in fp32"
    return ("bf16" if ratio > 1 else "fp32"), words


def step_time(spec: ModelSpec, recipe: Recipe, precision: Precision) -> float:
    """Median seconds of a forward and backward pass on random ids, after one that is not timed."""
    place = Place(precision=precision)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = initialise(Transformer(spec), 0)
    ask(model, "torch")
    rows = max(1, min(recipe.batch_size, MOST_TOKENS // recipe.context))
    ids = torch.randint(spec.vocab_size, (rows, recipe.context + 1), generator=torch.Generator().manual_seed(0))
    taken = []
    for _ in range(STEPS + 1):
        began = time.perf_counter()
        with place.autocast():
            losses = model(ids[:, :-1], ids[:, 1:]).losses
        losses.mean().backward()
        taken.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return median(taken[1:])
