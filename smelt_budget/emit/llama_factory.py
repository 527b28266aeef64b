"""LLaMA-Factory 0.9.5: a YAML for each arm on top of its model directory; `llamafactory-cli train twin.yaml`.

Pre-training from scratch (`stage: pt`, `train_from_scratch`), documents packed into sequences of `cutoff_len`. An
unknown key is an error there.
"""

from __future__ import annotations

import json
from typing import Any

from smelt_budget.emit import on_hf
from smelt_budget.emit.launch import Arm
from smelt_budget.emit.target import ARMS, Content, Emission, Job, Target

DATA = {"text": {"file_name": "train.jsonl", "columns": {"prompt": "text"}}}
"""LLaMA-Factory's list of data sets: yours is `data/train.jsonl`, one text a line under `text`."""


def emit(job: Job) -> Emission:
    """`baseline.yaml`, `twin.yaml`, and the two model directories."""
    made = on_hf.directories(job)
    about = f"of {job.name} for LLaMA-Factory; text is data/train.jsonl, the tokenizer lies in the model directory."
    files: dict[str, Content] = {
        **made.files,
        "data/dataset_info.json": json.dumps(DATA, indent=2) + "\n",
        **{f"{arm}.yaml": on_hf.as_yaml(arguments(job, arm), f"The {arm} {about}") for arm in ARMS},
    }
    train: dict[Arm, tuple[str, ...]] = {arm: ("-m", "llamafactory.launcher", f"{arm}.yaml") for arm in ARMS}
    each, passes = on_hf.batches(job)
    devices = job.layout.data if job.layout else 1
    notes = (
        'your text is data/train.jsonl, a line {"text": ...} each',
        f"a step is {each} x {passes} sequences of {devices} devices: change "
        "gradient_accumulation_steps with their number",
        "LLaMA-Factory 0.9.5 asks for transformers up to 5.6, on which the directories run too",
    )
    return Emission(files, train, (*made.notes, *notes))


def arguments(job: Job, arm: Arm) -> dict[str, Any]:
    """Model, data and training arguments of one arm."""
    training = job.training
    each, passes = on_hf.batches(job)
    return {
        "model_name_or_path": arm,
        "trust_remote_code": True,
        "train_from_scratch": job.weights is None,
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "text",
        "dataset_dir": "data",
        "template": "empty",
        "cutoff_len": training.context,
        "output_dir": f"runs/{arm}",
        "per_device_train_batch_size": each,
        "gradient_accumulation_steps": passes,
        "max_steps": training.steps,
        "learning_rate": on_hf.rate(job, arm),
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": on_hf.stable(training),
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
        "adam_epsilon": training.epsilon,
        "max_grad_norm": training.clip,
        "bf16": True,
        "seed": job.seed,
        "logging_steps": 10,
        "save_steps": max(1, training.steps // 20),
        "report_to": "none",
    }


LLAMA_FACTORY = Target(
    name="llama-factory",
    title="LLaMA-Factory: YAML on top of model directories",
    tested="llamafactory 0.9.5 with transformers 5.6.0",
    needs="llamafactory",
    emit=emit,
    answer=on_hf.answer,
    takes_weights=True,
)
