"""A run small enough to be repeated a hundred times: two specs, sixty short documents, a recipe of a few steps."""

import random

from smelt_budget.spec.model import checked
from smelt_budget.verify.asked import Asked, Text
from smelt_budget.verify.recipe import Recipe

TOY = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 257,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "mlp_only_layers": (0,),
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
LOOP = {"loop": {"start": 1, "stop": 2, "visits": 2, "residual_scale": 0.5}}
SHORT = {"batch_size": 4, "context": 32, "held_out_rows": 4, "seeds": 1, "checkpoint_every": 1}


def documents(folder):
    """Sixty of them, written into a folder."""
    folder.mkdir(exist_ok=True)
    draw, words = random.Random(0), ["the", "loop", "costs", "what", "baseline", "every", "token"]
    for i in range(60):
        (folder / f"{i}.txt").write_text(" ".join(draw.choices(words, k=120)) + f" {i}")
    return folder


def begun(folder, text, fields=(), **recipe):
    """What is asked, written into a folder in which a run may then begin."""
    source, baseline = Text(sources=(str(text),)), TOY | dict(fields)
    asked = Asked(
        baseline=checked(baseline, "baseline"),
        twin=checked(baseline | LOOP, "twin"),
        recipe=Recipe(**(SHORT | recipe)),
        text=source,
        fingerprint=source.load(folder / "data").fingerprint,
    )
    folder.mkdir(exist_ok=True)
    asked.write(folder)
    return asked
