"""Does a model use examples in its context? A key that stood there before comes again, and its value is wanted.

    BOS ab=7 \\n qx=1 \\n ... ab=      -> 7          k examples, keys distinct, values drawn evenly from V of them

With no example the best anyone can do is guess among the values: accuracy 1/V, ln V nats. Who copies a value from the
context without looking at its key gets 1/k + (1 - 1/k)/V: only above that is a key looked up. The paper's gains grow
with in-context examples (arXiv:2609.01343); so may the sink, here the mass of the query that answers on the row's BOS.
Rows are a pure function of (seed, k). R rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smelt_budget.errors import BadInput
from smelt_budget.model import Step, Transformer
from smelt_budget.verify.look import Autocast, looking
from smelt_budget.verify.sink import start_mass

EXAMPLES = (0, 1, 2, 4, 8)
MOST_VALUES, MOST_LETTERS = 10, 26  # as digits and lower-case letters


class Alphabet(NamedTuple):
    """Ids that rows are written in."""

    letters: tuple[int, ...]
    """A key is two of them."""
    values: tuple[int, ...]
    equals: int
    newline: int


BYTES = Alphabet(tuple(b"abcdefghijklmnopqrstuvwxyz"), tuple(b"0123456789"), ord("="), ord("\n"))


def frequent(ids: np.ndarray, bos_id: int) -> Alphabet:
    """For any other vocabulary: the commonest ids of a text, which training has surely moved.

    Raises:
        BadInput: fewer than 8 different ids.
    """
    found, count = np.unique(ids[ids != bos_id], return_counts=True)
    common = found[np.argsort(-count, kind="stable")].tolist()
    if len(common) < 8:
        raise BadInput(f"in-context recall needs 8 different ids; this text has {len(common)}")
    equals, newline, *rest = common
    values = min(MOST_VALUES, len(rest) // 3)
    return Alphabet(tuple(rest[values : values + MOST_LETTERS]), tuple(rest[:values]), equals, newline)


def recall(
    model: Transformer,
    alphabet: Alphabet,
    bos_id: int,
    batch_size: int,
    autocast: Autocast = nullcontext,
    *,
    rows: int = 256,
    examples: Sequence[int] = EXAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """By number of examples: nats of the answer among all ids, accuracy among the values, and the sink."""
    values = len(alphabet.values)
    with looking(model):
        found = [
            asked(model, *prompts(alphabet, bos_id, rows, k, seed), alphabet, batch_size, autocast) for k in examples
        ]
    return {
        "rows": rows,
        "values": values,
        "chance": {"accuracy": 1 / values, "nats_per_answer": math.log(values)},
        "examples": [
            {"examples": k, "copying_accuracy": copying(k, values), **answers}
            for k, answers in zip(examples, found, strict=True)
        ],
    }


def copying(k: int, values: int) -> float:
    """Expected accuracy of repeating any value in view."""
    return 1 / values if k == 0 else 1 / k + (1 - 1 / k) / values


def prompts(alphabet: Alphabet, bos_id: int, rows: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids [R, T] up to the question, answers [R]); T = 4 + 5 k."""
    rng = np.random.default_rng([seed, k])
    letters, values = np.array(alphabet.letters), np.array(alphabet.values)
    pairs = len(letters) ** 2
    key = np.stack([rng.choice(pairs, max(k, 1), replace=False) for _ in range(rows)])
    value = values[rng.integers(len(values), size=key.shape)]
    wanted = rng.integers(key.shape[1], size=rows)
    written = np.stack(
        [
            letters[key // len(letters)],
            letters[key % len(letters)],
            np.full(key.shape, alphabet.equals),
            value,
            np.full(key.shape, alphabet.newline),
        ],
        -1,
    )
    row = np.arange(rows)
    context, question = written[:, :k].reshape(rows, 5 * k), written[row, wanted, :3]
    return np.concatenate((np.full((rows, 1), bos_id), context, question), 1), value[row, wanted]


def asked(
    model: Transformer,
    ids_RT: np.ndarray,
    answer_R: np.ndarray,
    alphabet: Alphabet,
    batch_size: int,
    autocast: Autocast,
) -> dict[str, Any]:
    """What the model answers, and where its answering query looks."""
    device = next(model.parameters()).device
    values = torch.tensor(alphabet.values, device=device)
    mass = dict.fromkeys(model.order, 0.0)
    nats = right = 0.0

    def watch(step: Step, q: Tensor, k: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None) -> None:
        last = torch.ones(k.shape[2], dtype=torch.bool, device=device) if mask is None else mask[..., -1:, :]
        start = torch.zeros(1, dtype=torch.long, device=device)
        mass[step] += float(start_mass(q[:, :, -1:], k, scale, last, start, sinks).mean(1).sum())

    for first in range(0, len(ids_RT), batch_size):
        ids = torch.from_numpy(ids_RT[first : first + batch_size]).to(device)
        answer = torch.from_numpy(answer_R[first : first + batch_size]).to(device)
        with autocast():
            logits = model(ids, logits_to_keep=1, watch=watch).logits
        assert logits is not None
        logits_RV = logits[:, -1].float()
        nats += float(torch.nn.functional.cross_entropy(logits_RV, answer, reduction="sum"))
        right += int((values[logits_RV[:, values].argmax(-1)] == answer).sum())
    rows, tokens = ids_RT.shape
    return {
        "tokens": tokens,
        "nats_per_answer": nats / rows,
        "accuracy": right / rows,
        "sink": [{"layer": s.layer, "visit": s.visit, "mass_mean": total / rows} for s, total in mass.items()],
        "floor": 1 / tokens,
    }
