"""Where does training run? One device, or several under torchrun, with FSDP2 sharding every layer.

Nothing here depends on the arm. A place without a process group answers every question alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from smelt_budget.errors import BadInput
from smelt_budget.model import Transformer
from smelt_budget.model.experts_choice import Asked
from smelt_budget.model.ffn import ask

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Place:
    """A device, a precision, and how many ranks share the work."""

    device: str = "cpu"
    precision: Precision = "fp32"
    compiled: bool = False
    checkpointing: bool = False
    rank: int = 0
    world: int = 1
    experts: Asked = "auto"

    @property
    def rows(self) -> torch.dtype:
        """What matrices are multiplied by."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """bf16 matrix products where that was chosen; parameters stay fp32."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16"):
            yield

    def prepared(self, model: Transformer) -> Transformer:
        """A model from the meta device with storage here, sharded over the ranks, compiled and recomputing as asked."""
        model.checkpointing = self.checkpointing
        ask(model, self.experts)
        if self.world > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device, (self.world,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        model.to_empty(device=self.device)
        if model.spec.tie_word_embeddings:
            model.lm_head.weight = model.embed_tokens.weight  # to_empty gives each of the two a tensor of its own
        if self.compiled:
            for layer in model.layers:
                layer.compile()
        return model

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            dist.barrier()

    @property
    def leads(self) -> bool:
        """Whether this rank writes and speaks."""
        return self.rank == 0

    def peak_memory(self) -> int:
        """Most bytes this process held: on the accelerator there, else in all."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def whole(x: Any) -> Any:
    """A tensor gathered from its shards, where it has any."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def device_asked(device: str) -> str:
    """`auto` is an accelerator where there is one.

    Raises:
        BadInput: cuda was asked for and is not there.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda, but torch finds no GPU", "fix: --device cpu")
    return device


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def group(device: str) -> Iterator[tuple[int, int]]:
    """(rank, world); under torchrun with a process group for the time being."""
    if not under_torchrun():
        yield 0, 1
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device == "cuda" else "gloo"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torch keeps the agent's store over restarts, with the addresses of processes that are gone (seen in 2.13)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
        store = PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    else:
        dist.init_process_group(backend)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
