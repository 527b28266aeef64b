"""What has a verified model learnt? Continue a text with it, or judge it on some."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smelt_budget.errors import BadInput
from smelt_budget.model import Sampling, Transformer, generate, load
from smelt_budget.model.ffn import choices
from smelt_budget.spec.model import checked
from smelt_budget.verify.asked import CACHE, Asked, read_asked
from smelt_budget.verify.data import HeldOut, Split
from smelt_budget.verify.data.documents import FIELDS, Documents
from smelt_budget.verify.data.tokenise import Bytes, Subwords, Tokeniser
from smelt_budget.verify.evaluate import evaluate
from smelt_budget.verify.state import again


@dataclass(frozen=True)
class Trained:
    """A model that verify trained, and what it was trained on."""

    model: Transformer
    asked: Asked
    name: str

    @classmethod
    def read(cls, run: Path, arm: str, seed: int) -> Trained:
        """The model of an arm and a seed.

        Raises:
            BadInput: the folder holds no such model.
        """
        asked = read_asked(run)
        folder = run / arm / f"seed-{seed}"
        if not (folder / "spec.json").is_file():
            done = sorted(path.parent.name for path in (run / arm).glob("seed-*/spec.json"))
            raise BadInput(
                f"{run} holds no trained {arm} of seed {seed}",
                f"fix: --run-seed {done[0].removeprefix('seed-')}" if done else "fix: verify --resume, to its end",
            )
        try:
            written = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BadInput(f"{folder / 'spec.json'} cannot be read: {error}", again(folder)) from None
        spec = checked(written, str(folder / "spec.json"))
        return cls(load(Transformer(spec), folder).eval(), asked, f"{arm}, seed {seed}")

    @property
    def tokeniser(self) -> Tokeniser:
        """What it was trained with.

        Raises:
            BadInput: it was trained on ids alone.
        """
        text = self.asked.text
        if text.tokenizer is None and text.vocab_size is not None:
            raise BadInput(f"{self.name} was trained on ids without a tokenizer: there is no text to continue")
        return Bytes() if text.tokenizer is None else Subwords(Path(text.tokenizer), text.bos_id)

    @property
    def experts(self) -> list[dict[str, Any]]:
        """What computes its experts, on the CPU and in float32, as it is read."""
        return [choice.as_dict() for choice in choices(self.model, "cpu", torch.float32)]

    def generate(self, prompts: list[str], tokens: int, sampling: Sampling, seed: int) -> list[dict[str, str]]:
        """Each prompt, begun as a document, and its continuation up to the next document."""
        tokeniser = self.tokeniser
        begun = [np.concatenate(([tokeniser.bos_id], ids)) for ids in tokeniser.encode([p.encode() for p in prompts])]
        longest = max(map(len, begun))
        ids = torch.full((len(begun), longest), tokeniser.bos_id)
        padding = torch.ones(ids.shape, dtype=torch.bool)
        for row, one in enumerate(begun):
            ids[row, longest - len(one) :] = torch.from_numpy(one.astype(np.int64))
            padding[row, longest - len(one) :] = False
        said = generate(
            self.model,
            ids,
            tokens,
            sampling,
            padding_BT=padding if bool(padding.any()) else None,
            stop=tokeniser.bos_id,
            seed=seed,
        )
        ends = [(row == tokeniser.bos_id).nonzero() for row in said]
        texts = [row[: end[0]] if len(end) else row for row, end in zip(said, ends, strict=True)]
        return [
            {"prompt": prompt, "continuation": tokeniser.decode(text.numpy()).decode(errors="replace")}
            for prompt, text in zip(prompts, texts, strict=True)
        ]


def evaluated(
    run: Path,
    arms: tuple[str, ...],
    seed: int,
    sources: tuple[str, ...],
    rows: int | None,
    text_field: str | None = None,
    token_dtype: str | None = None,
) -> dict[str, Any]:
    """The loss of each arm on the run's held-out text, or on all of the given text."""
    models = {arm: Trained.read(run, arm, seed) for arm in arms}
    asked = next(iter(models.values())).asked
    own = {"sources": sources, "text_field": text_field, "token_dtype": token_dtype} if sources else {}
    text = asked.text.model_copy(update=own)
    split = text.load(run / CACHE)
    documents = joined_again(split) if sources else split.held_out
    rows = rows or asked.recipe.held_out_rows
    held_out = HeldOut(documents, asked.recipe.context, rows, split.bos_id, split.token_bytes, split.domains)
    return {
        "text": split.name,
        "fingerprint": split.fingerprint,
        "which": "all of it" if sources else "held out of training",
        "seed": seed,
        "context": asked.recipe.context,
        "experts": {arm: one.experts for arm, one in models.items()},
        "arms": {
            arm: evaluate(one.model, held_out, split.domains, asked.recipe.batch_size) for arm, one in models.items()
        },
    }


def joined_again(split: Split) -> Documents:
    """Both sides of a split: it was given to be judged on, not to be trained on."""
    sides = (split.train, split.held_out)
    columns = {name: np.concatenate([getattr(side, name) for side in sides]) for name in FIELDS}
    assert set(columns) | {"parts"} == {field.name for field in fields(Documents)}
    return Documents(split.train.parts, **columns)
