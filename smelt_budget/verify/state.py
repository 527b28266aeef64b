"""What must be kept to go on bit by bit? Weights, AdamW's two moments, the step; in safetensors and JSON only.

torch's distributed checkpointing writes the tensors, each rank its shards, so that a run may go on with another number
of ranks. Its own format has a pickled index; the safetensors one has none. A checkpoint is a folder `state-<step>`,
and `state.json` names the one that is whole: it is replaced atomically once all ranks have written.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from smelt_budget.errors import BadInput, SmeltError
from smelt_budget.model import Transformer
from smelt_budget.verify.place import Place

POINTER = "state.json"


def tensors_of(model: Transformer, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the state by name; they share memory with what is running."""
    kept = {f"model.{name}": x.detach() for name, x in model.named_parameters()}
    kept |= {f"buffer.{name}": x for name, x in model.named_buffers()}
    for name, weight in model.named_parameters():
        kept |= {f"{what}.{name}": x for what, x in optimiser.state[weight].items()}
    return kept


def save(folder: Path, step: int, about: dict[str, Any], model: Transformer, optimiser: Any, place: Place) -> None:
    """Keep the state after `step` steps, with plain data `about` beside it."""
    name = f"state-{step}"
    try:
        if place.leads:
            shutil.rmtree(folder / name, ignore_errors=True)  # half a checkpoint, from a run that was killed here
            (folder / name).mkdir(parents=True)
        place.wait()
        with quiet():
            writer = HuggingFaceStorageWriter(str(folder / name), save_distributed=True)
            save_shards(tensors_of(model, optimiser), storage_writer=writer, no_dist=place.world == 1)
        place.wait()
        if place.leads:
            for file in (folder / name).iterdir():
                flushed(file)
            replaced(folder / POINTER, json.dumps({"step": step, "folder": name, **about}))
            for old in folder.glob("state-*"):
                if old.name != name:
                    shutil.rmtree(old)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise not_written(folder, error) from error


def restore(folder: Path, model: Transformer, optimiser: Any, place: Place) -> dict[str, Any] | None:
    """The plain data of the last whole checkpoint, its tensors loaded; `None` where there is none.

    Raises:
        BadInput: it is there and cannot be read.
    """
    try:
        about = json.loads((folder / POINTER).read_text(encoding="utf-8"))
        about = {**about, "step": int(about["step"]), "folder": str(about["folder"])}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / POINTER} cannot be read: {error!r:.200}", again(folder)) from None
    started(model, optimiser)
    kept = tensors_of(model, optimiser)
    try:
        with quiet():
            reader = HuggingFaceStorageReader(str(folder / about["folder"]))
            load_shards(kept, storage_reader=reader, no_dist=place.world == 1)
    except (Exception, CheckpointException) as error:  # whatever a damaged file makes of the reader
        raise BadInput(
            f"the checkpoint {folder / about['folder']} cannot be read: {reason(error)}", again(folder)
        ) from None
    return about


def again(folder: Path) -> str:
    """What helps when a file of a run is damaged."""
    return f"fix: rm -r {folder}, which starts this run again"


def started(model: Transformer, optimiser: Any) -> None:
    """Give AdamW its moments, as its first step would, so that there is something to load into."""
    for weight in model.parameters():
        optimiser.state[weight] = {
            "step": torch.zeros((), device=weight.device if weight.is_cuda else "cpu"),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }


def forget(folder: Path) -> None:
    """Remove the state of a run that is done."""
    (folder / POINTER).unlink(missing_ok=True)
    for old in folder.glob("state-*"):
        shutil.rmtree(old)


def replaced(path: Path, text: str) -> None:
    """Write whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def flushed(path: Path) -> None:
    """Until the disk has it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def not_written(folder: Path, error: BaseException) -> SmeltError:
    """Disk full, a folder gone: what was kept before is still there."""
    return SmeltError(
        f"cannot write into {folder}: {reason(error)}",
        "the checkpoint before it is kept",
        "fix: make room, then --resume",
    )


def reason(error: BaseException) -> str:
    """One line of it; torch's checkpointing wraps the error of each rank, and is no `Exception` itself."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Checkpointing warns that it is not distributed, which is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
