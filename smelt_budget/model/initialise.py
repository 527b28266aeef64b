"""What are the weights before training? Normal, by fan-in, the ways back into the residual stream scaled by depth.

    matrices, router        std 1/sqrt(fan-in)
    o_proj, down_proj       std 1/sqrt(fan-in) / sqrt(2 D), D the effective depth: each of the 2 D additions to the
                            residual stream then carries 1/(2 D) of its variance (GPT-2's rule, over executed layers)
    embedding               std 1; 1/sqrt(H) where it is the lm-head too
    norm gains 1, biases, sinks and the correction of a router 0

Fan-in beats a flat 0.02 by 0.1 to 0.2 nats at the small widths this is verified at (docs/log.md). Each weight has a
generator of its own, seeded by (seed, its name): neither the order of modules nor sharding moves a number.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from smelt_budget.model.norms import RMSNorm
from smelt_budget.model.transformer import Transformer


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> Transformer:
    """Set every parameter and buffer, in place, on whatever device and in whatever shards they are."""
    for name, weight in model.named_parameters():
        fill(weight, initial(model, name, weight, seed))
    for buffer in model.buffers():
        buffer.zero_()
    return model


def initial(model: Transformer, name: str, weight: Tensor, seed: int) -> Tensor:
    """The whole tensor of one parameter, on the CPU, in fp32."""
    std = deviation(model, name, weight)
    if std is None:
        return torch.full(weight.shape, 1.0 if is_gain(model, name) else 0.0)
    return torch.empty(weight.shape).normal_(0, std, generator=generator(seed, name))


def deviation(model: Transformer, name: str, weight: Tensor) -> float | None:
    """Standard deviation of a matrix; `None` for vectors, which are not drawn."""
    if weight.ndim < 2:
        return None
    if name == "embed_tokens.weight":
        return model.spec.hidden_size**-0.5 if model.spec.tie_word_embeddings else 1.0
    if name.endswith("_bias"):  # the biases of experts are stored as a matrix
        return None
    back = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
    return weight.shape[-1] ** -0.5 / (math.sqrt(2 * model.spec.effective_depth) if back else 1.0)


def is_gain(model: nn.Module, name: str) -> bool:
    """Whether a vector multiplies, as norm gains do, or adds."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return name.endswith(".weight") and isinstance(owner, RMSNorm | nn.LayerNorm)


def generator(seed: int, name: str) -> torch.Generator:
    """A stream of its own for each weight and seed."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def fill(weight: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a plain or a sharded parameter."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(weight, DTensor):
        value = value.to(weight.device)
        weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None))
    else:
        weight.copy_(value)
