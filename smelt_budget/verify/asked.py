"""What is to be trained? Everything that decides the numbers, in one file that a resumed run must find unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from smelt_budget.errors import BadInput
from smelt_budget.model.experts_choice import Asked as AskedExperts
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.model import Frozen
from smelt_budget.verify.data import Split, load
from smelt_budget.verify.recipe import Recipe
from smelt_budget.verify.state import replaced

FILE = "request.json"
CACHE = "data"
"""Folder for the ids of large texts, inside the run's."""
ARMS: tuple[Literal["baseline"], Literal["twin"]] = ("baseline", "twin")


class Text(Frozen):
    """Where the tokens come from; the options of `verify --data`."""

    sources: tuple[str, ...] = ()
    """Left out: the text already on the machine, as bytes."""
    tokenizer: str | None = None
    text_field: str | None = None
    token_dtype: str | None = None
    vocab_size: int | None = None
    bos_id: int | None = None
    most: int | None = None
    """About how many tokens are read of each source."""

    def load(self, cache: Path, advanced: Callable[[int, int], None] | None = None) -> Split:
        """Read it; large texts are kept as ids in `cache`."""
        return load(
            self.sources or None,
            None if self.tokenizer is None else Path(self.tokenizer),
            text_field=self.text_field,
            token_dtype=self.token_dtype,
            vocab_size=self.vocab_size,
            bos_id=self.bos_id,
            most=self.most,
            cache=cache,
            advanced=advanced,
        )


class Asked(Frozen):
    """A pair, a recipe, a text and a place."""

    baseline: ModelSpec
    twin: ModelSpec
    recipe: Recipe
    text: Text = Text()
    fingerprint: str
    """Of the text; other text would be another comparison."""
    size: Literal["tiny", "small", "full"] = "tiny"
    """Which proxy was asked for; the specs are what came of it."""
    active_parameters: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    compiled: bool = False
    checkpointing: bool = False
    experts: AskedExperts = "auto"
    taken: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """What came of that for each arm: other code adds up in another order."""

    def spec(self, arm: str) -> ModelSpec:
        """The arm's spec."""
        return self.baseline if arm == "baseline" else self.twin

    def split(self, folder: Path, advanced: Callable[[int, int], None] | None = None) -> Split:
        """The text, if it is still the same.

        Raises:
            BadInput: it changed since the run began.
        """
        split = self.text.load(folder / CACHE, advanced)
        if split.fingerprint != self.fingerprint:
            raise BadInput(
                f"the text is not the one {folder} began with: fingerprint {split.fingerprint[:12]}, "
                f"not {self.fingerprint[:12]}",
                "fix: a new --out, which starts again",
            )
        return split

    def write(self, folder: Path) -> None:
        """Into the run's folder."""
        replaced(folder / FILE, json.dumps(self.model_dump(mode="json"), indent=1))


def read_asked(folder: Path) -> Asked:
    """What a folder was begun with.

    Raises:
        BadInput: it holds no run, or one that cannot be read.
    """
    try:
        return Asked.model_validate_json((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{folder} holds no run of verify", "fix: leave out --resume") from None
    except (OSError, ValidationError, ValueError) as error:
        raise BadInput(f"{folder / FILE} cannot be read: {str(error).splitlines()[0]}") from None


def differences(before: Asked, now: Asked) -> list[str]:
    """Every option and every field of the specs that changed, with both values."""

    def flat(data: Any, name: str = "") -> dict[str, Any]:
        if not isinstance(data, dict):
            return {name: data}
        return {key: value for part in data for key, value in flat(data[part], f"{name}.{part}").items()}

    old, new = flat(before.model_dump(mode="json")), flat(now.model_dump(mode="json"))
    changed = [key.lstrip(".") for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    return [f"{option(key)}: {old.get(f'.{key}')} -> {new.get(f'.{key}')}" for key in changed]


def option(key: str) -> str:
    """What the user calls a field: its option, where it has one."""
    owner, _, name = key.rpartition(".")
    if owner == "taken":
        return f"experts of {name}"
    if owner.startswith(ARMS):
        return key
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


FLAGS = {
    "factors": "--rate-factors",
    "sources": "--data",
    "active_parameters": "--active-params",
    "precision": "--dtype",
    "compiled": "--compile",
    "checkpointing": "--activation-checkpointing",
    "fingerprint": "fingerprint of the text",
}
"""Fields whose option has another name; every other one is `--` and its name."""
