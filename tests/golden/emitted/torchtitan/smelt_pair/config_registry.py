# SPDX-License-Identifier: Apache-2.0
"""The functions that `--config` names: `baseline` and `twin`, trained alike but for the peak learning rate.

    torchrun --nproc-per-node 8 -m torchtitan.train --module THIS_PACKAGE --config twin \
        --hf_assets_path TOKENIZER_FOLDER --dataloader.dataset_path FOLDER_OF_JSON_LINES

Every setting can be overridden on the command line. Nothing is downloaded: the text is read from a folder of
files that `datasets.load_dataset` takes, one column `text`.
"""

import json
from pathlib import Path

from datasets import load_dataset

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from .model import Names, balance, model_config

PAIR = json.loads(Path(__file__).with_name("pair.json").read_text(encoding="utf-8"))

DATASETS["text_folder"] = DatasetConfig(
    path="data",
    loader=lambda path: load_dataset(path, split="train"),
    sample_processor=lambda sample: sample["text"],
)


def baseline() -> Trainer.Config:
    """The model that the twin is compared with."""
    return trainer("baseline")


def twin() -> Trainer.Config:
    """The looped model of equal cost."""
    return trainer("twin")


def trainer(arm: str) -> Trainer.Config:
    """One arm, from `pair.json`."""
    training, layout = PAIR["training"], PAIR["layout"]
    return Trainer.Config(
        model_spec=ModelSpec(
            name=PAIR["name"],
            flavor=arm,
            model=model_config(PAIR[arm]),
            parallelize_fn=parallelize_qwen3,
            pipelining_fn=None,  # the looped block may not be cut
            post_optimizer_build_fn=balance,
            state_dict_adapter=Names,
        ),
        hf_assets_path="tokenizer",
        dump_folder=f"outputs/{arm}",
        dataloader=HuggingFaceTextDataLoader.Config(dataset="text_folder", dataset_path="data"),
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=PAIR[arm]["vocab_size"]),
        ),
        optimizer=OptimizersContainer.Config(
            param_groups=[
                group(arm, r"norm\.weight$|\.bias$", 0.0),
                group(arm, r".*", training["weight_decay"]),
            ]
        ),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=training["warmup_steps"],
            decay_ratio=training["decay_share"],
            decay_type="linear",
            min_lr_factor=0.0,
        ),
        training=TrainingConfig(
            local_batch_size=layout["sequences_per_pass"],
            global_batch_size=training["batch_sequences"],
            seq_len=training["context"],
            steps=training["steps"],
            max_norm=training["clip"],
            disable_cuda_graphs=True,  # expert parallelism by all-to-all waits for the host
        ),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=-1,  # FSDP over the ranks that are left
            tensor_parallel_degree=layout["tensor"],
            expert_parallel_degree=layout["expert"],
        ),
        compile=CompileConfig(enable=layout["compile"]),
        activation_checkpoint=SelectiveAC.Config(),
        checkpoint=CheckpointManager.Config(interval=max(1, training["steps"] // 20), last_save_model_only=False),
    )


def group(arm: str, pattern: str, weight_decay: float) -> ParamGroupConfig:
    """AdamW for the parameters whose names match."""
    training = PAIR["training"]
    return ParamGroupConfig(
        pattern=pattern,
        optimizer_name="AdamW",
        optimizer_kwargs={
            "lr": training["rate"][arm],
            "betas": tuple(training["betas"]),
            "eps": training["epsilon"],
            "weight_decay": weight_decay,
        },
    )
