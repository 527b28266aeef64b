# SPDX-License-Identifier: Apache-2.0
"""One arm of a compute-matched pair as a Megatron-Bridge recipe, for megatron-bridge 0.6.

    torchrun --nproc-per-node 8 recipe.py twin dataset.data_path=/data/corpus_text_document checkpoint.save=out/twin

`baseline.json` and `twin.json` hold the values, under Bridge's own field names; `smelt_layers.py` is the module that
runs the core several times, the same for both arms. Words behind the arm replace values, `section.field=value`;
without `dataset.data_path` the data are mock. `from recipe import twin` gives the ConfigContainer to other scripts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import smelt_layers
import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.tokenizers.config import TokenizerConfig
from megatron.core.distributed import DistributedDataParallelConfig

HERE = Path(__file__).resolve().parent


def baseline() -> ConfigContainer:
    """The recipe of the baseline."""
    return recipe("baseline")


def twin() -> ConfigContainer:
    """The recipe of the twin."""
    return recipe("twin")


def recipe(arm: str) -> ConfigContainer:
    """Everything about one arm but its data."""
    given = json.loads((HERE / f"{arm}.json").read_text(encoding="utf-8"))
    model = given["model"]
    if "window_size" in model:
        model["window_size"] = tuple(model["window_size"])
    provider = MLAModelProvider if model.get("multi_latent_attention") else GPTModelProvider
    return ConfigContainer(
        model=provider(
            **model,
            activation_func=torch.nn.functional.silu,
            transformer_layer_spec=getattr(smelt_layers, arm),
        ),
        train=TrainingConfig(**given["train"]),
        validation=ValidationConfig(**given["validation"]),
        optimizer=OptimizerConfig(**given["optimizer"]),
        scheduler=SchedulerConfig(**given["scheduler"]),
        ddp=DistributedDataParallelConfig(**given["ddp"]),
        dataset=GPTDatasetConfig(**given["dataset"]),
        logger=LoggerConfig(**given["logger"]),
        tokenizer=TokenizerConfig(**given["tokenizer"]),
        checkpoint=CheckpointConfig(**given["checkpoint"]),
        rng=RNGConfig(**given["rng"]),
        mixed_precision="bf16_mixed",
    )


def changed(config: ConfigContainer, words: list[str]) -> ConfigContainer:
    """`section.field=value`, the value as JSON where it is, else as text; a field has to exist."""
    for word in words:
        name, _, value = word.partition("=")
        section, _, field = name.partition(".")
        owner = getattr(config, section)
        if not hasattr(owner, field):
            raise SystemExit(f"{section} has no field {field}")
        setattr(owner, field, read(value))
    return config


def read(value: str) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def main() -> None:
    """Train the arm that the first word names."""
    if len(sys.argv) < 2 or sys.argv[1] not in ("baseline", "twin"):
        raise SystemExit("usage: recipe.py baseline|twin [section.field=value ...]")
    pretrain(changed(recipe(sys.argv[1]), sys.argv[2:]), forward_step)


if __name__ == "__main__":
    main()
