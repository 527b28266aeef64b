"""axolotl 0.21: a YAML for each arm on top of its model directory; `axolotl train twin.yaml`.

Pre-training from scratch (`reinit_weights`) on streamed text. axolotl accepts unknown keys in silence, so those below
are compared with its schema in a test.
"""

from __future__ import annotations

from typing import Any

from smelt_budget.emit import on_hf
from smelt_budget.emit.launch import Arm
from smelt_budget.emit.target import ARMS, Content, Emission, Job, Target


def emit(job: Job) -> Emission:
    """`baseline.yaml`, `twin.yaml`, and the two model directories."""
    made = on_hf.directories(job)
    about = f"of {job.name} for axolotl; text is data/train.jsonl, the tokenizer lies in the model directory."
    files: dict[str, Content] = {
        **made.files,
        **{f"{arm}.yaml": on_hf.as_yaml(settings(job, arm), f"The {arm} {about}") for arm in ARMS},
    }
    train: dict[Arm, tuple[str, ...]] = {arm: ("-m", "axolotl.cli.train", f"{arm}.yaml") for arm in ARMS}
    each, passes = on_hf.batches(job)
    devices = job.layout.data if job.layout else 1
    notes = (
        'your text is data/train.jsonl, a line {"text": ...} each',
        f"a step is {each} x {passes} sequences of {devices} devices: change "
        "gradient_accumulation_steps with their number",
    )
    return Emission(files, train, (*made.notes, *notes))


def settings(job: Job, arm: Arm) -> dict[str, Any]:
    """Model, data and training settings of one arm."""
    training = job.training
    each, passes = on_hf.batches(job)
    return {
        "base_model": f"./{arm}",
        "trust_remote_code": True,
        "reinit_weights": job.weights is None,
        "pretraining_dataset": [
            {"path": "json", "data_files": "data/train.jsonl", "text_column": "text", "type": "pretrain"}
        ],
        "pretrain_multipack_attn": False,
        "sequence_len": training.context,
        "output_dir": f"./runs/{arm}",
        "micro_batch_size": each,
        "gradient_accumulation_steps": passes,
        "max_steps": training.steps,
        "optimizer": "adamw_torch_fused",
        "learning_rate": on_hf.rate(job, arm),
        "lr_scheduler": "warmup_stable_decay",
        "lr_scheduler_kwargs": on_hf.stable(training),
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.betas[0],
        "adam_beta2": training.betas[1],
        "adam_epsilon": training.epsilon,
        "max_grad_norm": training.clip,
        "bf16": True,
        "tf32": False,
        "seed": job.seed,
        "logging_steps": 10,
        "save_steps": max(1, training.steps // 20),
    }


AXOLOTL = Target(
    name="axolotl",
    title="axolotl: YAML on top of model directories",
    tested="key names of axolotl 0.21.0",
    needs="axolotl (Python 3.12)",
    emit=emit,
    answer=on_hf.answer,
    takes_weights=True,
)
