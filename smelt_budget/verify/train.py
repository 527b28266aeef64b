"""One run: one arm, one seed, one rate, from its first step or from where it was stopped.

Each step's rows depend on (seed, step) only, so both arms see identical tokens in identical order and a resumed run
sees what it would have seen. B sequences a step, T tokens each, over all micro-batches and ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from smelt_budget.errors import BadInput, SmeltError
from smelt_budget.model import Transformer, initialise
from smelt_budget.model.router import Routed, auxiliary_loss, correct
from smelt_budget.spec import ModelSpec
from smelt_budget.verify import state
from smelt_budget.verify.data import Packed, Split
from smelt_budget.verify.place import Place, whole
from smelt_budget.verify.recipe import Recipe
from smelt_budget.verify.routing import load_summary

ROUTER_EVERY = 10
"""Steps between router loads in the metrics."""
Told = Callable[[dict[str, Any]], None]


class Interrupted(Exception):
    """Asked to stop; everything up to the last step is on disk."""


class Diverged(SmeltError):
    """The loss is no number any more, or worse than knowing nothing."""


@dataclass(frozen=True)
class Job:
    """What is trained: an arm with a rate and a seed, and where its files go."""

    arm: str
    name: str
    spec: ModelSpec
    seed: int
    rate: float
    folder: Path


class Trainer:
    """A run in progress."""

    def __init__(self, job: Job, recipe: Recipe, split: Split, place: Place):
        self.job, self.recipe, self.place = job, recipe, place
        self.packed: Packed = split.packed(recipe.context, job.seed)
        with torch.device("meta"):
            model = Transformer(job.spec)
        self.model = initialise(place.prepared(model), job.seed)
        self.optimiser = adamw(self.model, recipe, place)
        self.done, self.rows = 0, list[dict[str, Any]]()

    def resume(self) -> None:
        """Go on from the last whole checkpoint, if there is one; later lines of the metrics are dropped."""
        about = state.restore(self.job.folder, self.model, self.optimiser, self.place)
        self.done = 0 if about is None else int(about["step"])
        metrics = self.job.folder / "metrics.jsonl"
        lines = metrics.read_bytes().decode(errors="replace").splitlines() if metrics.exists() else []
        try:
            self.rows = [json.loads(line) for line in lines[: self.done]]
            steps = [row["step"] for row in self.rows]
        except (ValueError, KeyError, TypeError):
            steps = None
        if steps != [*range(1, self.done + 1)]:
            raise BadInput(f"{metrics} is not what {self.done} steps wrote", state.again(self.job.folder))
        self.place.wait()
        if self.place.leads:
            self.job.folder.mkdir(parents=True, exist_ok=True)
            state.replaced(metrics, "".join(line + "\n" for line in lines[: self.done]))
        self.place.wait()

    def train(self, told: Told, stopping: Callable[[], bool]) -> None:
        """To the last step.

        Raises:
            Interrupted: `stopping` said so; the state is saved.
            Diverged: the loss or the gradient is not finite, or the loss is far above knowing nothing.
        """
        self.model.train()
        with contextlib.ExitStack() as opened:
            file = None
            if self.place.leads:
                file = opened.enter_context((self.job.folder / "metrics.jsonl").open("a", encoding="utf-8"))
            while self.done < self.recipe.steps:
                row = self.step()
                self.rows.append(row)
                if file is not None:
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                told({"event": "step", **{key: row[key] for key in ("arm", "run", "step", "loss", "seconds")}})
                stop = bool(self.place.total(torch.tensor(float(stopping()), device=self.place.device)))
                if stop or self.done % self.recipe.checkpoint_every == 0 or self.done == self.recipe.steps:
                    if file is not None:
                        os.fsync(file.fileno())
                    state.save(self.job.folder, self.done, {}, self.model, self.optimiser, self.place)
                if stop:
                    raise Interrupted

    def step(self) -> dict[str, Any]:
        """One optimiser step; returns its line of the metrics."""
        recipe, place, began = self.recipe, self.place, time.perf_counter()
        rate = self.job.rate * recipe.share(self.done)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        ids, document = self.packed.rows(self.done, recipe.batch_size, place.rank, place.world)
        loss, seen = torch.zeros((), device=place.device), list[tuple[Routed | None, ...]]()
        for part in range(recipe.accumulate):
            rows = slice(*(len(ids) * at // recipe.accumulate for at in (part, part + 1)))
            x, where = (torch.from_numpy(a[rows]).to(place.device) for a in (ids, document))
            with place.autocast():
                out = self.model(x[:, :-1], x[:, 1:], document_BT=where[:, :-1])
            share = len(x) / len(ids)
            nats = out.losses.mean()
            ((nats + self.balance(out.routed)) * share).backward()
            loss += nats.detach() * share
            seen.append(out.routed)
        loss = float(place.total(loss)) / place.world
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)))
        self.check(loss, norm)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if recipe.balance == "bias":
            self.correct(seen)
        self.done += 1
        row = {
            "arm": self.job.arm,
            "run": self.job.name,
            "seed": self.job.seed,
            "step": self.done,
            "tokens": self.done * recipe.batch_size * recipe.context,
            "loss": loss,
            "rate": rate,
            "gradient_norm": norm,
            "seconds": round(time.perf_counter() - began, 6),
        }
        if self.done % ROUTER_EVERY == 0:
            row["router"] = load_summary(seen[-1], self.model.order)
        return row

    def balance(self, routed: tuple[Routed | None, ...]) -> Tensor:
        """Auxiliary and z-loss, the mean over executed MoE layers; the load is that of all ranks' tokens."""
        moe = [r for r in routed if r is not None]
        if not moe or self.recipe.balance == "none":
            return torch.zeros((), device=self.place.device)
        z = self.recipe.z * torch.stack([r.z for r in moe]).mean()
        if self.recipe.balance == "bias":
            return z
        counts = self.place.total(torch.cat([r.count_E for r in moe])).split([len(r.count_E) for r in moe])
        losses = [auxiliary_loss(count, r.mean_score_E) for count, r in zip(counts, moe, strict=True)]
        return z + self.recipe.auxiliary * torch.stack(losses).mean()

    def correct(self, seen: list[tuple[Routed | None, ...]]) -> None:
        """Move each router's correction against its load over visits, micro-batches and ranks."""
        load: dict[int, Tensor] = {}
        for routed in seen:
            for execution, r in zip(self.model.order, routed, strict=True):
                if r is not None:
                    load[execution.layer] = load.get(execution.layer, torch.zeros_like(r.count_E)) + r.count_E
        for layer, count in load.items():
            correct(self.model.layers[layer].mlp.gate, self.place.total(count), self.recipe.bias_step)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]

    def check(self, loss: float, norm: float) -> None:
        """Stop before a broken number gets into the weights."""
        worst = 2 * math.log(self.job.spec.vocab_size)
        why = None
        if not math.isfinite(loss) or not math.isfinite(norm):
            why = f"the loss is {loss:g} and the gradient's norm {norm:g}"
        elif self.done > self.recipe.warmup_steps and loss > worst:
            why = f"the loss is {loss:.2f} nats, knowing nothing is {worst / 2:.2f}"
        if why is not None:
            raise self.diverged(self.done + 1, why)

    def diverged(self, step: int, why: str) -> Diverged:
        """What to say of a run that left the numbers."""
        return Diverged(
            f"{self.job.arm}, {self.job.name}: diverged at step {step} of {self.recipe.steps}: {why}",
            f"rate {self.job.rate:g}, seed {self.job.seed}",
            "fix: another --out with smaller --rate-factors",
        )

    def summary(self) -> dict[str, Any]:
        """What the metrics of the run come to."""
        losses, seconds = ([row[key] for row in self.rows] for key in ("loss", "seconds"))
        few = max(1, len(losses) // 20)
        step = median(seconds)
        return {
            "steps": len(losses),
            "tokens": self.recipe.tokens,
            "first_loss": fmean(losses[:few]),
            "last_loss": fmean(losses[-few:]),
            "seconds": sum(seconds),
            "step_seconds": step,
            "tokens_per_second": self.recipe.tokens / self.recipe.steps / step,
            "peak_memory_bytes": self.place.peak_memory(),
            "gradient_norm_max": max(row["gradient_norm"] for row in self.rows),
        }


def adamw(model: Transformer, recipe: Recipe, place: Place) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101); decay on what multiplies a vector, none on gains, biases and sinks."""
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and not name.endswith("_bias")]
    kept = {id(p) for p in decayed}
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": [p for p in model.parameters() if id(p) not in kept], "weight_decay": 0.0},
    ]
    sharded = place.world > 1
    return torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.epsilon, fused=not sharded, foreach=sharded)
