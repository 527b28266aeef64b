"""On how many GPUs, split how? A layout is checked against both arms before anything is written.

    ranks = nodes x gpus = data x tensor x pipeline,   expert parallelism inside data x tensor

Tensor ranks share heads and KV heads, expert ranks share experts, a pipeline stage holds whole layers and the core lies
in one stage: its weights are used twice, and no trainer sends gradients of one weight from two stages.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from smelt_budget.errors import BadInput
from smelt_budget.spec import ModelSpec

Kind = Literal["local", "torchrun", "slurm"]
Arm = Literal["baseline", "twin"]


@dataclass(frozen=True)
class Layout:
    """How a run is spread over GPUs."""

    kind: Kind
    nodes: int = 1
    gpus: int = 8
    """On each node."""
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus

    @property
    def data(self) -> int:
        """Copies of the model that see different sequences."""
        return self.ranks // (self.tensor * self.pipeline)


def check(layout: Layout, specs: dict[str, ModelSpec], batch_sequences: int, parallel: frozenset[str]) -> None:
    """Refuse what cannot run, naming everything that does not divide.

    Raises:
        BadInput: with one line a problem.
    """
    problems = []
    for way, size in (("tensor", layout.tensor), ("expert", layout.expert), ("pipeline", layout.pipeline)):
        if size > 1 and way not in parallel:
            problems.append(f"this target sets up no {way} parallelism: --{way}-parallel {size}")
    if layout.kind == "local" and layout.nodes > 1:
        problems.append(f"--launch local is one node, not {layout.nodes}; fix: --launch torchrun")
    if layout.ranks % (layout.tensor * layout.pipeline):
        problems.append(f"{layout.ranks} GPUs do not divide by tensor {layout.tensor} x pipeline {layout.pipeline}")
    elif layout.data * layout.tensor % layout.expert:
        problems.append(f"expert {layout.expert} does not divide data {layout.data} x tensor {layout.tensor}")
    elif batch_sequences % layout.data:
        problems.append(f"{batch_sequences} sequences of a step do not divide by {layout.data} data-parallel ranks")
    for arm, spec in specs.items():
        problems += [f"{arm}: {problem}" for problem in misfits(layout, spec)]
    if problems:
        raise BadInput(f"{layout.nodes} x {layout.gpus} GPUs cannot hold this pair so", *problems)


def misfits(layout: Layout, spec: ModelSpec) -> list[str]:
    """What of one arm does not divide."""
    core = spec.core.model_dump(exclude_none=True) if spec.core else {}
    shared = [
        ("num_attention_heads", layout.tensor, "tensor", spec.num_attention_heads),
        ("num_key_value_heads", layout.tensor, "tensor", spec.num_key_value_heads or 0),
        ("core.num_key_value_heads", layout.tensor, "tensor", core.get("num_key_value_heads", 0)),
        ("vocab_size", layout.tensor, "tensor", spec.vocab_size),
        ("num_experts", layout.expert, "expert", spec.num_experts or 0),
        ("core.num_experts", layout.expert, "expert", core.get("num_experts", 0)),
    ]
    found = [
        f"{name} {size} does not divide by {way} {ways}"
        for name, ways, way, size in shared
        if size % ways and not (name.endswith("key_value_heads") and spec.kv_lora_rank is not None)
    ]
    try:
        stages(spec, layout.pipeline)
    except BadInput as error:
        found.append(str(error))
    return found


def stages(spec: ModelSpec, number: int) -> tuple[range, ...]:
    """The layers of each pipeline stage, the core in one of them, the slowest stage as fast as it can be.

    Raises:
        BadInput: more stages than there are pieces to give.
    """
    loop = spec.loop
    cost = [loop.visits if loop and loop.start <= i < loop.stop else 1 for i in range(spec.num_hidden_layers)]
    pieces = [range(i, i + 1) for i in range(spec.num_hidden_layers)]
    if loop:
        pieces[loop.start : loop.stop] = [range(loop.start, loop.stop)]
    if number > len(pieces):
        raise BadInput(f"{number} pipeline stages, and the core in one leaves {len(pieces)} pieces")
    weights = [sum(cost[i] for i in piece) for piece in pieces]
    # smallest achievable maximum by trying every bound that a run of pieces can have
    bounds = sorted({sum(weights[i:j]) for i in range(len(pieces)) for j in range(i + 1, len(pieces) + 1)})
    for bound in bounds:
        cut = greedy(weights, bound, number)
        if cut is not None:
            return tuple(range(pieces[a].start, pieces[b - 1].stop) for a, b in cut)
    raise AssertionError(f"no cut of {weights} into {number}")


def greedy(weights: list[int], bound: int, number: int) -> list[tuple[int, int]] | None:
    """Cut into exactly so many runs of at most `bound`, filling from the left and leaving one piece for each later."""
    cut, start = [], 0
    for stage in range(number):
        left, stop, total = number - stage - 1, start, 0
        while stop < len(weights) - left and total + weights[stop] <= bound:
            total, stop = total + weights[stop], stop + 1
        if stop == start:
            return None
        cut.append((start, stop))
        start = stop
    return cut if start == len(weights) else None


def scripts(layout: Layout, name: str, train: Mapping[Arm, tuple[str, ...]]) -> dict[str, str]:
    """`launch-ARM.sh` (or `.sbatch`) for each arm, to be run in the emitted folder."""
    suffix = ".sbatch" if layout.kind == "slurm" else ".sh"
    return {f"launch-{arm}{suffix}": script(layout, f"{name}-{arm}", command) for arm, command in train.items()}


def script(layout: Layout, job: str, command: tuple[str, ...]) -> str:
    """One launch file."""
    what = " ".join(shlex.quote(word) for word in command)
    each = f"--nproc-per-node {layout.gpus}"
    shell = ["#!/usr/bin/env bash"]
    here = ["set -euo pipefail", 'cd "$(dirname "$0")"', 'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"']
    if layout.kind == "local":
        return "\n".join([*shell, *here, f'exec torchrun --standalone {each} {what} "$@"', ""])
    if layout.kind == "torchrun":
        meet = '--rdzv-backend c10d --rdzv-id "${JOB_ID:-' + job + '}" --rdzv-endpoint "${MASTER:?host:port of node 0}"'
        how = f"# on each of {layout.nodes} nodes: MASTER=host:port bash THIS"
        run = f'exec torchrun --nnodes {layout.nodes} {each} {meet} {what} "$@"'
        return "\n".join([*shell, how, *here, run, ""])
    batch = [
        f"#SBATCH --job-name={job}",
        f"#SBATCH --nodes={layout.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={layout.gpus}",
        "#SBATCH --output=%x-%j.log",
    ]
    lead = [
        'cd "${SLURM_SUBMIT_DIR:-.}"',
        'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"',
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    ]
    meet = '--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:29500"'
    return "\n".join(
        [*shell, *batch, "set -euo pipefail", *lead, f"srun torchrun --nnodes {layout.nodes} {each} {meet} {what}", ""]
    )
