"""What does every cell cost, and what does the whole study? Budgets, runs, GPU-hours, memory and price, as plain data.

    training FLOPs   C = F D, F counted under the grid's convention: what laws are fitted to
    work             C + 6 H V D: the lm-head too, which convention smelt leaves out and a GPU does not
    GPU-hours        work / (MFU x peak x 3600)
    cost             GPU-hours x price

Shared: horizons of one cell and arm branch off one trunk; separate: each is trained from its first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import smelt_budget
from smelt_budget.emit import launch
from smelt_budget.emit.launch import Layout
from smelt_budget.errors import BadInput
from smelt_budget.ladder.gpus import Gpu
from smelt_budget.ladder.grid import Cell, Grid
from smelt_budget.ladder.memory import Recompute, Shard, Split, memory
from smelt_budget.ledger import CONVENTIONS
from smelt_budget.spec import ModelSpec
from smelt_budget.spec.model import checked

ARMS = ("baseline", "twin")
WAYS = ("shared", "separate")
MOST_NODES = 1024
Data = dict[str, Any]


@dataclass(frozen=True)
class Means:
    """With what it is trained, and what an hour costs."""

    gpu: Gpu
    mfu: float
    layout: Layout
    shard: Shard = "full"
    recompute: Recompute = "none"
    micro_batch: int = 1
    price: float | None = None

    def as_dict(self) -> Data:
        """As plain data."""
        layout = self.layout
        return {
            "gpu": self.gpu.as_dict(),
            "mfu": self.mfu,
            "price": self.price,
            "layout": {
                "nodes": layout.nodes,
                "gpus": layout.gpus,
                "tensor_parallel": layout.tensor,
                "expert_parallel": layout.expert,
                "pipeline_parallel": layout.pipeline,
                "shard": self.shard,
                "recompute": self.recompute,
                "micro_batch": self.micro_batch,
            },
        }


def planned(grid: Grid, origin: str, cells: Sequence[Cell], pairs: Mapping[str, Data], means: Means) -> Data:
    """The whole study; `pairs` holds what `solve` found, by name of cell.

    Raises:
        BadInput: the layout does not divide some arm; named.
    """
    check_layout(grid, cells, pairs, means)
    found = [planned_cell(grid, cell, pairs[cell.name], means) for cell in cells if cell.name in pairs]
    lengths = grid.horizons.as_dict()
    return {
        "smelt_budget": smelt_budget.__version__,
        "grid": {"name": grid.name, "source": grid.source, "origin": origin},
        "convention": grid.convention,
        **means.as_dict(),
        "horizons": lengths,
        "cells": found,
        "totals": totals(found, lengths, means),
        "window": {arm: span(found, arm) for arm in ARMS},
        "notes": notes(grid, found, means),
    }


def check_layout(grid: Grid, cells: Sequence[Cell], pairs: Mapping[str, Data], means: Means) -> None:
    """Every arm of every cell has to divide, and a step into micro-batches."""
    problems, layout, batch = list[str](), means.layout, grid.horizons.batch_sequences
    if means.micro_batch > 1 and layout.data and batch % (layout.data * means.micro_batch):
        ways = f"{layout.data} data-parallel ranks x micro-batch {means.micro_batch}"
        problems.append(f"{batch} sequences of a step do not divide by {ways}")
    for cell in cells:
        if cell.name not in pairs:
            continue
        specs = {arm: spec_of(pairs[cell.name], arm) for arm in ARMS}
        try:
            launch.check(
                layout, specs, grid.horizons.batch_sequences, frozenset(("data", "tensor", "expert", "pipeline"))
            )
        except BadInput as error:
            first, *lines = str(error).splitlines()
            problems += [f"{cell.name}: {line.strip()}" for line in lines or [first]]
    if problems:
        more = [f"and {len(problems) - 6} more"] if len(problems) > 6 else []
        raise BadInput(f"{layout.nodes} x {layout.gpus} GPUs cannot hold this ladder so", *problems[:6], *more)


def spec_of(pair: Data, arm: str) -> ModelSpec:
    """One arm of a pair as it is written."""
    return checked(pair[arm]["spec"], arm)


def planned_cell(grid: Grid, cell: Cell, pair: Data, means: Means) -> Data:
    """One pair and what its runs take."""
    return {
        "name": cell.name,
        "scale": cell.scale,
        "label": cell.label,
        "gaps": pair["gaps"],
        "sparsity": {arm: pair[arm]["ledger"]["sparsity"]["compute_equivalent"] for arm in ARMS},
        "baseline": pair["baseline"],
        "twin": pair["twin"],
        "heads": pair["heads"],
        "notes": pair["notes"],
        "arms": {arm: planned_arm(grid, pair, arm, means) for arm in ARMS},
    }


def planned_arm(grid: Grid, pair: Data, arm: str, means: Means) -> Data:
    """What one arm of one cell takes, over all horizons."""
    spec, lengths = spec_of(pair, arm), grid.horizons
    per_token = pair[arm]["ledger"]["flops"]["training_per_token"]
    head = 0 if "lm_head" in CONVENTIONS[grid.convention].counted else 6 * spec.hidden_size * spec.vocab_size
    split = Split(
        means.layout, means.shard, means.recompute, means.micro_batch, lengths.context, lengths.batch_sequences
    )
    held = memory(spec, split)
    return {
        "training_flops_per_token": per_token,
        "lm_head_flops_per_token": head,
        "runs": [{"tokens": tokens, "training_flops": per_token * tokens} for tokens in lengths.tokens],
        **{way: spent(tokens, per_token, head, means) for way, tokens in ways(lengths.as_dict()).items()},
        "memory": held | {"fits": held["total"] <= means.gpu.memory * 1e9},
    }


def ways(lengths: Data) -> dict[str, int]:
    """Tokens of one arm of one cell, shared and separate."""
    return {way: lengths[f"{way}_tokens"] for way in WAYS}


def spent(tokens: int, per_token: int, head: int, means: Means) -> Data:
    """Tokens as FLOPs, hours and money."""
    work = tokens * (per_token + head)
    hours = work / (means.mfu * means.gpu.tflops * 1e12 * 3600)
    return {
        "tokens": tokens,
        "training_flops": tokens * per_token,
        "work": work,
        "gpu_hours": hours,
        "days": hours / means.layout.ranks / 24,
        "cost": None if means.price is None else hours * means.price,
    }


def totals(found: Sequence[Data], lengths: Data, means: Means) -> Data:
    """Of each arm and of both, shared and separate."""
    every: Data = {}
    for name, arms in (("baseline", ARMS[:1]), ("twin", ARMS[1:]), ("both", ARMS)):
        every[name] = {}
        for way in WAYS:
            parts = [cell["arms"][arm][way] for cell in found for arm in arms]
            keys = ["tokens", "training_flops", "work", "gpu_hours", "days"]
            summed = {key: sum(part[key] for part in parts) for key in keys}
            cost = None if means.price is None else sum(part["cost"] for part in parts)
            runs = len(parts) * len(lengths["stable_steps"])
            every[name][way] = {"cells": len(found), "runs": runs, **summed, "cost": cost}
    return every


def span(found: Sequence[Data], arm: str) -> list[int] | None:
    """Least and most training FLOPs of a run: the window a law of these runs covers."""
    spent_by_run = [run["training_flops"] for cell in found for run in cell["arms"][arm]["runs"]]
    return [min(spent_by_run), max(spent_by_run)] if spent_by_run else None


def notes(grid: Grid, found: Sequence[Data], means: Means) -> list[str]:
    """What the numbers rest on, and where they are not enough."""
    said = [
        f"GPU-hours: of the FLOPs with lm-head, at an assumed MFU of {100 * means.mfu:g} % of {means.gpu.tflops:g} "
        f"TFLOP/s (bf16, dense; {means.gpu.source}), the same for both arms: equal FLOPs are not equal time, and a "
        "twin's narrower, more numerous layers usually reach less of the peak",
        "memory: a formula (docs/ladder-and-report.md), without fragmentation and communication buffers",
        "one run a cell, arm and horizon: what seeds change is not in a study of single runs",
    ]
    over = [(cell["name"], arm) for cell in found for arm in ARMS if not cell["arms"][arm]["memory"]["fits"]]
    if over:
        most = max(cell["arms"][arm]["memory"]["total"] for cell in found for arm in ARMS)
        said.append(
            f"does not fit into {means.gpu.memory:g} GB: {', '.join(f'{name} {arm}' for name, arm in over[:4])}"
            f"{f' and {len(over) - 4} more' if len(over) > 4 else ''}, up to {most / 1e9:.0f} GB; "
            f"{roomier(grid, found, means)}"
        )
    return said


def roomier(grid: Grid, found: Sequence[Data], means: Means) -> str:
    """More nodes, and then recomputation, until every arm fits; or that none of it was enough."""
    arms = [checked(cell[arm]["spec"], arm) for cell in found for arm in ARMS]
    lengths = grid.horizons
    for recompute in dict.fromkeys((means.recompute, "full")):
        nodes = means.layout.nodes
        while nodes <= MOST_NODES:
            layout = replace(means.layout, nodes=nodes)
            split = Split(layout, means.shard, recompute, means.micro_batch, lengths.context, lengths.batch_sequences)
            if lengths.batch_sequences % (layout.data * means.micro_batch):
                break
            if all(memory(spec, split)["total"] <= means.gpu.memory * 1e9 for spec in arms):
                more = "" if recompute == means.recompute else " --recompute full"
                return f"tried: all fit with --nodes {nodes}{more}"
            nodes *= 2
    return f"more nodes (up to {MOST_NODES}) and recomputation were tried and are not enough: split it more ways"


def runs(result: Data) -> list[Data]:
    """A row a run in the columns `law fit` reads, its loss still to come."""
    return [
        {
            "cell": cell["name"],
            "arm": arm,
            "convention": result["convention"],
            "flops_per_token": cell["arms"][arm]["training_flops_per_token"],
            "sparsity": cell["sparsity"][arm],
            "tokens": run["tokens"],
            "stable_steps": steps,
            "loss": "",
        }
        for cell in result["cells"]
        for arm in ARMS
        for steps, run in zip(result["horizons"]["stable_steps"], cell["arms"][arm]["runs"], strict=True)
    ]
