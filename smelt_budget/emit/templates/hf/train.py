# SPDX-License-Identifier: Apache-2.0
"""Train one arm with transformers' Trainer, by the recipe in train.json; the same for both arms but for the rate.

    python train.py twin --data tokens.bin
    torchrun --nproc-per-node 8 train.py twin --data tokens.bin --arguments fsdp.json

`--data` is a file of token ids, uint16 or uint32, one document after another; the tokenizer is yours. Weights that lie
in the arm's directory are the start, otherwise the model draws its own. The rate is warmed up, stable, and decays
linearly to 0.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

HERE = Path(__file__).resolve().parent
MOST_SEQUENCES = 8  # of a device at a time, where --per-device does not say


class Rows(Dataset):
    """Sequences of `context` tokens, cut one after another from a file of ids."""

    def __init__(self, file: Path, dtype: str, context: int):
        self.ids, self.context = np.memmap(file, dtype=dtype, mode="r"), context
        if len(self.ids) < context:
            raise SystemExit(f"{file} has {len(self.ids)} tokens, a sequence has {context}")

    def __len__(self) -> int:
        return len(self.ids) // self.context

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.ids[index * self.context : (index + 1) * self.context]
        ids = torch.from_numpy(row.astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class LossFree(TrainerCallback):
    """Loss-free balancing: routers' corrections move after each optimiser step (arXiv:2408.15664)."""

    def __init__(self, step: float):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Move them against the load of the step."""
        getattr(model, "module", model).move_corrections(self.step)


class SmeltTrainer(Trainer):
    """The recipe's schedule, and weight decay on matrices only: not on gains, biases and sinks."""

    def __init__(self, *args, recipe: dict, **kwargs):
        super().__init__(*args, **kwargs)
        self.recipe = recipe

    def create_scheduler(self, num_training_steps, optimizer=None):
        """Warmup, stable, linear decay to 0."""
        steps, warmup, decay = (self.recipe[name] for name in ("steps", "warmup_steps", "decay_steps"))

        def share(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return min(1.0, max(0, steps - step) / decay) if decay else 1.0

        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return self.lr_scheduler

    def get_decay_parameter_names(self, model):
        """What multiplies a vector."""
        return [name for name, weight in model.named_parameters() if weight.ndim > 1 and not name.endswith("_bias")]


def options() -> argparse.Namespace:
    """The command line."""
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("arm", choices=("baseline", "twin"))
    told.add_argument("--data", type=Path, default=HERE / "tokens.bin")
    told.add_argument("--token-dtype", choices=("uint16", "uint32"), help="left out: by the size of the vocabulary")
    told.add_argument("--out", type=Path, help="left out: run-ARM")
    told.add_argument("--per-device", type=int, help="sequences of a device at a time")
    told.add_argument("--steps", type=int, help="stop after so many; the schedule is that of the whole run")
    told.add_argument("--seed", type=int, default=0)
    told.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward pass")
    told.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    told.add_argument("--arguments", type=Path, help="JSON with more of transformers' TrainingArguments")
    return told.parse_args()


def start(arm: Path):
    """The model: with the weights that are there, or drawn."""
    if any(arm.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(arm, trust_remote_code=True)
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(arm, trust_remote_code=True), trust_remote_code=True
    )


def main() -> None:
    """Train."""
    asked = options()
    recipe = json.loads((HERE / "train.json").read_text(encoding="utf-8"))
    set_seed(asked.seed)
    model = start(HERE / asked.arm)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local, rest = divmod(recipe["batch_sequences"], world)
    if rest:
        raise SystemExit(f"{recipe['batch_sequences']} sequences of a step do not divide by {world} ranks")
    most = asked.per_device or MOST_SEQUENCES
    each = asked.per_device or max(n for n in range(1, min(local, most) + 1) if local % n == 0)
    if local % each:
        raise SystemExit(f"{local} sequences of a rank do not divide by --per-device {each}")
    more = {} if asked.arguments is None else json.loads(asked.arguments.read_text(encoding="utf-8"))
    arguments = {
        "output_dir": str(asked.out or HERE / f"run-{asked.arm}"),
        "max_steps": min(asked.steps or recipe["steps"], recipe["steps"]),
        "per_device_train_batch_size": each,
        "gradient_accumulation_steps": local // each,
        "learning_rate": recipe["rates"][asked.arm],
        "weight_decay": recipe["weight_decay"],
        "adam_beta1": recipe["betas"][0],
        "adam_beta2": recipe["betas"][1],
        "adam_epsilon": recipe["epsilon"],
        "max_grad_norm": recipe["clip"],
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": asked.checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "ddp_find_unused_parameters": model.config.early_exit_gate,
        "ddp_broadcast_buffers": False,
        "logging_steps": 10,
        "save_steps": 1000,
        "report_to": "none",
        "seed": asked.seed,
    }
    dtype = asked.token_dtype or ("uint16" if model.config.vocab_size <= 2**16 else "uint32")
    trainer = SmeltTrainer(
        model=model,
        args=TrainingArguments(**arguments | more),
        train_dataset=Rows(asked.data, dtype, recipe["context"]),
        callbacks=[LossFree(recipe["bias_step"])] if recipe["balance"] == "bias" else [],
        recipe=recipe,
    )
    trainer.train(resume_from_checkpoint=asked.resume or None)
    trainer.save_model()


if __name__ == "__main__":
    main()
