"""How do weights lie on disk? Safetensors under the names of Hugging Face's qwen3_moe, each layer stored once.

    embed_tokens.weight                    model.embed_tokens.weight
    layers.3.mlp.experts.gate_up_proj      model.layers.3.mlp.experts.{e}.gate_proj.weight, ....up_proj.weight
    layers.3.mlp.experts.down_proj         model.layers.3.mlp.experts.{e}.down_proj.weight
    lm_head.weight                         lm_head.weight; left out where it is the embedding

What qwen3_moe does not have keeps the name of the family that does (q_a_proj and kv_b_proj from DeepSeek, sinks from
gpt-oss). A router's correction is stored once it has moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from smelt_budget.errors import BadInput
from smelt_budget.model.transformer import Transformer

SHARD_BYTES = 5 * 10**9
"""Size at which Hugging Face's files are split too."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CORRECTION = "e_score_correction_bias"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Safetensors' names of what can be copied as it is; of quantised weights the scales would be lost."""
MOST_SHOWN = 5


def disk_views(model: Transformer, tensors: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint under its name on disk, as a view of the model's (or the given) tensors."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())} if tensors is None else tensors
    for name, tensor in tensors.items():
        outer = name if name.startswith("lm_head.") else f"model.{name}"
        prefix, _, leaf = outer.rpartition(".")
        if not prefix.endswith(".experts"):
            yield outer, tensor
            continue
        of_bias = leaf.endswith("_bias")
        kind = "bias" if of_bias else "weight"
        for e, expert in enumerate(tensor):
            if leaf.startswith("gate_up"):
                gate, up = expert.chunk(2, 0)
                yield f"{prefix}.{e}.gate_proj.{kind}", gate
                yield f"{prefix}.{e}.up_proj.{kind}", up
            else:
                yield f"{prefix}.{e}.down_proj.{kind}", expert


def save(model: Transformer, folder: Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write the weights into `folder`: one file, or shards with an index where they are large.

    `tensors`: whole tensors under the model's own names, where the model itself holds shards.
    """
    from safetensors.torch import save_file

    kept = {name: x for name, x in disk_views(model, tensors) if not name.endswith(CORRECTION) or bool(x.any())}
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in kept.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor.detach().contiguous().cpu()
        room -= tensor.nbytes
    meta = {"format": "pt"}
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, meta)
        (folder / INDEX).unlink(missing_ok=True)  # of an earlier checkpoint; load would follow it
        return
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, meta)
    index = {
        "metadata": {"total_size": sum(x.nbytes for x in kept.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / SINGLE).unlink(missing_ok=True)  # of an earlier checkpoint; transformers would prefer it


@torch.no_grad()
def load(model: Transformer, folder: Path) -> Transformer:
    """Read the weights in `folder` into the model; its dtype and device stay.

    Raises:
        BadInput: a file is missing or broken, a name is missing, unknown or there twice, a shape differs, or the
            numbers are quantised; nothing was loaded.
    """
    from safetensors import SafetensorError, safe_open

    wanted = dict(disk_views(model))
    try:
        opened = [safe_open(file, "pt") for file in weight_files(folder)]
        found = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        slices = {name: file.get_slice(name) for name, file in found.items()}
        twice = sum(len(file.keys()) for file in opened) - len(found)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"the weights in {folder} cannot be read: {error}") from None
    missing = [name for name in wanted if name not in found and not name.endswith(CORRECTION)]
    unknown = [name for name in found if name not in wanted]
    shaped = [
        f"{name} is {slices[name].get_shape()}, the model's is {list(x.shape)}"
        for name, x in wanted.items()
        if name in found and slices[name].get_shape() != list(x.shape)
    ]
    coded = [f"{name} is {kind}" for name, x in slices.items() if (kind := x.get_dtype()) not in FLOATS]
    if missing or unknown or shaped or coded or twice:
        raise BadInput(
            f"the weights in {folder} are not this model's",
            *named("missing", missing),
            *named("unknown", unknown),
            *named("shape", shaped),
            *named("not plain floats", coded),
            *([f"{twice} names stand in two files"] if twice else []),
        )
    for name, x in wanted.items():
        x.copy_(found[name].get_tensor(name)) if name in found else x.zero_()
    return model


def weight_files(folder: Path) -> list[Path]:
    """The one file, or all that the index lists."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise BadInput(f"{folder} holds neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise BadInput(f"{index} is not an index of safetensors files") from None
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise BadInput(f"{index} names files outside its folder")
    return [folder / name for name in sorted(names)]


def named(what: str, names: list[str]) -> list[str]:
    """The first few of a list, and how many more there are."""
    shown = [f"{what}: {name}" for name in names[:MOST_SHOWN]]
    return shown + ([f"{what}: and {len(names) - MOST_SHOWN} more"] if len(names) > MOST_SHOWN else [])
