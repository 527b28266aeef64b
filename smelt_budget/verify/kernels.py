"""Which code computes the experts of each arm, and why? Asked of the arms' own models, built without memory."""

from __future__ import annotations

from typing import Any

import torch

from smelt_budget.errors import BadInput
from smelt_budget.model import Transformer
from smelt_budget.model.ffn import ask, choices
from smelt_budget.spec import ModelSpec
from smelt_budget.verify.place import Place


def experts_of(specs: dict[str, ModelSpec], place: Place) -> dict[str, list[dict[str, Any]]]:
    """By arm, each choice once: `name`, `tier`, `words` and `reasons`; no choice where all layers are dense.

    Raises:
        BadInput: kernels were asked for that this arm cannot have.
    """
    found = {}
    for arm, spec in specs.items():
        with torch.device("meta"):
            model = Transformer(spec)
        ask(model, place.experts)
        try:
            found[arm] = [choice.as_dict() for choice in choices(model, place.device, place.rows)]
        except BadInput as error:
            first, *more = str(error).splitlines()
            raise BadInput(f"{arm}: {first}", *(line.strip() for line in more)) from None
    return found


def taken(experts: dict[str, list[dict[str, Any]]]) -> dict[str, tuple[str, ...]]:
    """What gives other bits if it changes: cuda 90, torch; the reasons do not."""
    return {
        arm: tuple(" ".join(str(choice[key]) for key in ("name", "tier") if choice[key]) for choice in of_arm)
        for arm, of_arm in experts.items()
    }
