"""One arm from its choice of rate to its last seed; what is done already is not done again.

rate-<factor>   each factor x 0.75/hidden in a quarter of the steps, on a seed of its own; while the best is at the
                edge of what was tried, one more beyond it (a comparison at one shared rate says nothing: its sign
                turns with the rate, docs/log.md)
seed-<n>        the comparison: same seeds, rows and recipe as the other arm, at the rate this one chose
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from smelt_budget.errors import BadInput, SmeltError
from smelt_budget.model import save
from smelt_budget.verify import sink, state
from smelt_budget.verify.asked import Asked
from smelt_budget.verify.data import HeldOut, Split
from smelt_budget.verify.evaluate import evaluate
from smelt_budget.verify.place import Place, whole
from smelt_budget.verify.recall import BYTES, frequent, recall
from smelt_budget.verify.recipe import Recipe
from smelt_budget.verify.routing import Tally
from smelt_budget.verify.train import Diverged, Interrupted, Job, Told, Trainer

RATE_SEED = 1_000_003
"""The choice of rate sees other rows and other weights than the comparison."""
TIE = 0.01
"""Nats per token that a choice from one short run cannot tell apart (docs/log.md)."""
MOST_BEYOND = 3
"""How often the choice goes one factor further when the best is at the edge."""
SINK_ROWS, RECALL_ROWS = 64, 128


class Study:
    """An arm, its text and its place."""

    def __init__(self, arm: str, asked: Asked, split: Split, place: Place, folder: Path):
        self.arm, self.asked, self.split, self.place = arm, asked, split, place
        self.folder = folder / arm
        self.spec = asked.spec(arm)
        self.held_out = split.judged(asked.recipe.context, asked.recipe.held_out_rows)

    def run(self, told: Told, stopping: Callable[[], bool]) -> None:
        """Choose the rate, then train every seed.

        Raises:
            Interrupted, Diverged, SmeltError: as `Trainer.train`; no rate was fit to train at.
        """
        chosen = self.rate(told, stopping)
        for seed in range(self.asked.recipe.seeds):
            job = Job(self.arm, f"seed-{seed}", self.spec, seed, chosen["rate"], self.folder / f"seed-{seed}")
            self.one(job, self.asked.recipe, self.looked_at, told, stopping)

    def rate(self, told: Told, stopping: Callable[[], bool]) -> dict[str, float]:
        """The factor with the least held-out loss, and its rate."""
        factors = sorted(self.asked.recipe.factors)
        first = self.asked.recipe.first_rate(self.spec)
        losses: dict[float, float | None] = {}
        beyond = 0
        while len(factors) > 1:
            for factor in factors:
                if factor not in losses:
                    losses[factor] = self.tried(factor, first * factor, told, stopping)
            best = taken(losses)
            if best is None:
                why = [(read_result(self.folder / rate_name(f)) or {})["diverged"].splitlines()[0] for f in factors]
                raise SmeltError(f"{self.arm}: every rate diverged", *why, "fix: another --out, smaller --rate-factors")
            edge = best in (factors[0], factors[-1])
            if not edge or beyond == MOST_BEYOND:
                break
            beyond += 1
            ratio = factors[1] / factors[0] if best == factors[0] else factors[-2] / factors[-1]
            factors = sorted([*factors, best / ratio])
            told({"event": "more", "arm": self.arm, "steps": self.asked.recipe.shorter().steps})
        else:
            best, edge = factors[0], False
        chosen = {"factor": best, "rate": first * best}
        tried = [{"factor": f, "rate": first * f, "loss": losses.get(f)} for f in factors]
        if self.place.leads:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"tried": tried if losses else [], "chosen": chosen, "at_edge": edge})
            state.replaced(self.folder / "rates.json", text)
        return chosen

    def tried(self, factor: float, rate: float, told: Told, stopping: Callable[[], bool]) -> float | None:
        """Held-out nats per token after the short run; `None` where it diverged."""
        name = rate_name(factor)
        job = Job(self.arm, name, self.spec, RATE_SEED, rate, self.folder / name)
        recipe = self.asked.recipe.shorter()
        try:
            result = self.one(job, recipe, lambda trainer: {"held_out": self.loss(trainer)}, told, stopping)
        except Diverged as error:
            self.finished(job, {"diverged": str(error)}, told)
            return None
        return None if "diverged" in result else result["held_out"]["nats_per_token"]

    def one(
        self,
        job: Job,
        recipe: Recipe,
        look: Callable[[Trainer], dict[str, Any]],
        told: Told,
        stopping: Callable[[], bool],
    ) -> dict[str, Any]:
        """A run with what is seen of its model afterwards, or what was seen before."""
        result = read_result(job.folder)
        if result is not None:
            if self.place.leads:
                state.forget(job.folder)  # it may have been killed in between
            told({"event": "had", "arm": job.arm, "run": job.name, "steps": recipe.steps})
            return result
        trainer = Trainer(job, recipe, self.split, self.place)
        trainer.resume()
        told({"event": "begin", "arm": job.arm, "run": job.name, "done": trainer.done, "steps": recipe.steps})
        trainer.train(told, stopping)
        told({"event": "look", "arm": job.arm, "run": job.name})
        result = {"seed": job.seed, "rate": job.rate, **trainer.summary(), **look(trainer)}
        if not math.isfinite(result["held_out"]["nats_per_token"]):
            raise trainer.diverged(trainer.done, "its held-out loss is no number")
        self.finished(job, result, told)
        return result

    def finished(self, job: Job, result: dict[str, Any], told: Told) -> None:
        """Keep the result; what was needed to go on is needed no more."""
        if self.place.leads:
            state.replaced(job.folder / "result.json", json.dumps(result))
            state.forget(job.folder)
        self.place.wait()
        loss = result.get("held_out", {}).get("nats_per_token")
        told({"event": "end", "arm": job.arm, "run": job.name, "loss": loss})

    def loss(self, trainer: Trainer) -> dict[str, Any]:
        """The held-out loss alone."""
        return evaluate(trainer.model, self.held_out, self.split.domains, self.batch, self.place.autocast)

    @property
    def batch(self) -> int:
        """Rows looked at together."""
        return max(1, self.asked.recipe.batch_size // self.asked.recipe.accumulate)

    def looked_at(self, trainer: Trainer) -> dict[str, Any]:
        """Loss, router load, sink and recall of a trained model; its weights are kept."""
        model, tally = trainer.model, Tally(trainer.model.order)
        cast, split, context = self.place.autocast, self.split, self.asked.recipe.context
        seen = {
            "held_out": evaluate(model, self.held_out, split.domains, self.batch, cast, also=tally.add),
            "routing": tally.result(),
        }
        try:
            openings = sink.openings(split.held_out, context)
            rows = HeldOut(openings, context, SINK_ROWS, split.bos_id)
            seen["sink"] = sink.sink(model, rows, split.bos_id, self.batch, cast)
        except BadInput as error:  # documents too short to fill a row: no sink to measure, and that is said
            seen["sink"] = {"layers": [], "why": str(error).splitlines()[0]}
        try:
            alphabet = (
                BYTES
                if split.token_bytes is None or split.vocab_size == 257
                else frequent(self.held_out.whole.ids, split.bos_id)
            )
            seen["recall"] = recall(model, alphabet, split.bos_id, self.batch, cast, rows=RECALL_ROWS)
        except BadInput as error:
            seen["recall"] = {"examples": [], "why": str(error).splitlines()[0]}
        self.keep(trainer)
        return seen

    @torch.no_grad()
    def keep(self, trainer: Trainer) -> None:
        """The weights, and the spec they belong to."""
        tensors = {**dict(trainer.model.named_parameters()), **dict(trainer.model.named_buffers())}
        tensors = {name: whole(x) for name, x in tensors.items()}
        if self.place.leads:
            try:
                save(trainer.model, trainer.job.folder, tensors)
            except (OSError, SafetensorError) as error:
                raise state.not_written(trainer.job.folder, error) from error
            state.replaced(trainer.job.folder / "spec.json", json.dumps(self.spec.compact(), indent=1))


def rate_name(factor: float) -> str:
    """The run that tries a factor."""
    return f"rate-{factor:g}"


def taken(losses: Mapping[float, float | None]) -> float | None:
    """The smallest factor within `TIE` of the best loss: a short run flatters large rates; `None` if all diverged."""
    finite = {factor: loss for factor, loss in losses.items() if loss is not None}
    return min((f for f, loss in finite.items() if loss <= min(finite.values()) + TIE), default=None)


def read_result(folder: Path) -> dict[str, Any] | None:
    """What a finished run came to."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if not {"held_out", "diverged"} & result.keys():
            raise ValueError("it holds no result")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{folder / 'result.json'} cannot be read: {error}", state.again(folder)) from None
    return result


__all__ = ["Interrupted", "Study", "read_result"]
