# SPDX-License-Identifier: Apache-2.0
"""Train one arm with the training loop that megatron-core 0.19 ships (its wheel has no script of its own).

    torchrun --nproc-per-node 8 pretrain.py @twin/arguments.txt @transformer_engine.txt \\
        --data-path /data/corpus_text_document --save checkpoints/twin

`@FILE` stands for the words in FILE; of a flag given twice the later holds, so anything can be changed behind them.
`--mock-data` in place of `--data-path` tries it out. The same argument files run Megatron-LM's own pretrain_gpt.py,
with this folder on PYTHONPATH: `pretrain_gpt.py $(cat twin/arguments.txt transformer_engine.txt)`; there the logged
TFLOP/s count a looped layer once.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron wants it so with tensor parallelism
sys.path.insert(0, str(Path(__file__).resolve().parent))

import smelt_layers
import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_tokenizer, pretrain, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

ON_EACH_STAGE = ("tokens", "labels", "loss_mask", "position_ids")


def expanded(words: list[str]) -> list[str]:
    """Words of the command line, `@FILE` replaced by what is in the file."""
    found: list[str] = []
    for word in words:
        inside = Path(word[1:]).read_text(encoding="utf-8").split() if word.startswith("@") else [word]
        found += inside
    return found


def datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test data, on every rank that embeds or predicts."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        kind, samples, partial(is_first_or_last_pipeline_stage, vp_stage), config
    ).build()


datasets.is_distributed = True  # every rank reads for itself, also within a tensor-parallel group


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """One micro-batch through one pipeline stage: its output, and what makes a loss of it."""
    tokens = labels = loss_mask = positions = None
    if is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage")):
        batch = next(data)
        tokens, labels, loss_mask, positions = (batch[name].cuda(non_blocking=True) for name in ON_EACH_STAGE)
    output = model(tokens, positions, None, labels=labels, loss_mask=loss_mask)
    return output, partial(loss, loss_mask)


def loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over the tokens that count, their number, and both for the log; Megatron divides."""
    counted = loss_mask.float().flatten()
    total, number = (losses.float().flatten() * counted).sum(), counted.sum().int()
    return total, number, {"lm loss": torch.stack((total.detach(), number.to(total.dtype)))}


def meter(plain: Any, arm: smelt_layers.Arm) -> Any:
    """Megatron's FLOP counter, which knows stored layers, made to count executed ones."""

    def layers(kinds: list[int], own: dict[str, int], args: Any, *given: Any, **named: Any) -> float:
        """A model of these layers: 1 for experts, 0 for dense."""
        seen = copy.copy(args)
        vars(seen).update(own, num_layers=len(kinds), moe_layer_freq=kinds)
        return plain(seen, *given, **named)

    def counted(args: Any, *given: Any, **named: Any) -> float:
        every = args.moe_layer_freq
        kinds = every if isinstance(every, list) else [int(i % every == 0) for i in range(args.num_layers)]
        total = plain(args, *given, **named)
        for kind in kinds[arm.start : arm.stop]:
            stored, core = (
                layers([kind] * 2, own, args, *given, **named) - layers([kind], own, args, *given, **named)
                for own in ({}, arm.core)
            )
            total += arm.visits * core - stored
        return total

    return counted


def main() -> None:
    """Read the arguments, build the arm that --spec names, train."""
    sys.argv[1:] = expanded(sys.argv[1:])
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        dataset_utils.compile_helpers = lambda: (
            None
        )  # the wheel has them, and no makefile, at which Megatron would stop
    args = parse_and_validate_args()
    if not args.spec or args.spec[0] != "smelt_layers":
        raise SystemExit("--spec smelt_layers baseline|twin is missing: @baseline/arguments.txt or @twin/arguments.txt")
    if args.context_parallel_size > 1:
        raise SystemExit("pretrain.py does not cut sequences into pieces; use Megatron-LM's pretrain_gpt.py for that")
    if get_tokenizer().vocab_size > args.padded_vocab_size:
        raise SystemExit(
            f"the tokenizer has {get_tokenizer().vocab_size} ids, the model {args.padded_vocab_size} rows: solve the "
            "pair again with this vocabulary, or take the tokenizer it was solved for"
        )
    arm = smelt_layers.Arm.named(args.spec[1])
    training.num_floating_point_operations = meter(training.num_floating_point_operations, arm)
    settings = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(settings, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
