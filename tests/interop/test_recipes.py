"""Recipes on top of model directories: LLaMA-Factory by its own parser, axolotl and MaxText by their recorded keys.

axolotl 0.21 and MaxText 0.2.5 need Python 3.12; `recorded/` lists the fields of axolotl's schema and the keys of
MaxText's base.yml. Where axolotl is installed its schema reads the file too.
"""

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from smelt_budget.emit import TARGETS, folder
from smelt_budget.emit.launch import Layout
from smelt_budget.emit.target import ARMS, Job, lines
from smelt_budget.emit.training import training
from smelt_budget.errors import BadInput
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.spec.model import checked

RECORDED = Path(__file__).with_name("recorded")
TOY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "loop": {"start": 2, "stop": 6, "visits": 2, "residual_scale": 0.5},
}


def job_of(balance="aux", layout=None, **fields):
    """A toy pair."""
    twin = checked({**TOY, **fields})
    baseline = twin.replace(loop=None, core=None)
    told = training(baseline, twin, 64, tokens=64 * 8 * 100, batch_sequences=8, balance=balance, rates=(1e-3, 2e-3))
    return Job("toy", baseline, twin, told, layout)


def emitted(place, target, job):
    """The folder that a target makes of a job."""
    lines(TARGETS[target], job)
    folder.write(place, TARGETS[target].emit(job).files, force=False)
    return place


def read(path):
    """As YAML 1.1, which is what axolotl and LLaMA-Factory read."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def keys_of(name):
    """A recorded list."""
    return set((RECORDED / f"{name}.txt").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("target", ["llama-factory", "axolotl"])
def test_numbers_are_numbers(tmp_path, target):
    """In YAML 1.1 1e-08 is text."""
    place = emitted(tmp_path / "out", target, job_of())
    for arm, rate in zip(ARMS, (1e-3, 2e-3), strict=True):
        told = read(place / f"{arm}.yaml")
        assert told["learning_rate"] == rate
        assert told["adam_epsilon"] == 1e-8
        assert told["lr_scheduler_kwargs"]["num_stable_steps"] == 79
        assert (told["warmup_steps"], told["lr_scheduler_kwargs"]["num_decay_steps"], told["max_steps"]) == (1, 20, 100)


@pytest.mark.parametrize("target", ["llama-factory", "axolotl"])
def test_a_step_has_the_sequences_of_the_batch(tmp_path, target):
    """256 sequences over 2 x 4 devices: 4 passes of 8."""
    job = job_of(layout=Layout("local", nodes=2, gpus=4))
    job = Job(job.name, job.baseline, job.twin, job.training.model_copy(update={"batch_sequences": 256}), job.layout)
    told = read(emitted(tmp_path / "out", target, job) / "twin.yaml")
    each = told["per_device_train_batch_size" if target == "llama-factory" else "micro_batch_size"]
    assert (each, told["gradient_accumulation_steps"]) == (8, 4)


@pytest.mark.parametrize("target", ["llama-factory", "axolotl"])
def test_balancing_between_steps_is_dropped_by_name(target):
    how = {line.feature: line.how for line in lines(TARGETS[target], job_of("bias"))}
    assert how["balancing"] == "dropped"
    assert how["schedule"] == "otherwise"
    none = {line.feature: line.how for line in lines(TARGETS[target], job_of("none"))}
    assert none["router z-loss"] == "dropped"


@pytest.mark.parametrize("target", ["llama-factory", "axolotl"])
def test_directories_are_those_of_hf(tmp_path, target):
    job = job_of()
    mine, theirs = emitted(tmp_path / "out", target, job), emitted(tmp_path / "hf", "hf", job)
    for arm in ARMS:
        for file in (theirs / arm).iterdir():
            assert (mine / arm / file.name).read_bytes() == file.read_bytes()
        assert read(mine / f"{arm}.yaml")["model_name_or_path" if target == "llama-factory" else "base_model"] in (
            arm,
            f"./{arm}",
        )


def test_llama_factory_takes_the_file(tmp_path, monkeypatch):
    """Its own parser, with every value where it belongs; an unknown key is refused; the data set is found by name."""
    pytest.importorskip("llamafactory", reason="llamafactory is not installed")
    get_train_args = importlib.import_module("llamafactory.hparams").get_train_args
    place = emitted(tmp_path / "out", "llama-factory", job_of())
    monkeypatch.chdir(place)
    for arm in ARMS:
        told = read(place / f"{arm}.yaml") | {"bf16": False}  # there is no GPU
        model, data, train, finetuning, _ = get_train_args(dict(told))
        assert (model.model_name_or_path, model.train_from_scratch, model.trust_remote_code) == (arm, True, True)
        assert (data.dataset, data.cutoff_len, data.packing) == (["text"], 64, True)
        assert (train.max_steps, train.learning_rate) == (told["max_steps"], told["learning_rate"])
        assert train.lr_scheduler_kwargs["num_decay_steps"] == 20
        assert (finetuning.stage, finetuning.finetuning_type) == ("pt", "full")
        with pytest.raises(ValueError, match="num_expertz"):
            get_train_args(told | {"num_expertz": 3})


CHANGES = {
    "bf16": False,
    "use_cpu": True,
    "max_steps": 2,
    "warmup_steps": 0,
    "lr_scheduler_kwargs": {"num_stable_steps": 1, "num_decay_steps": 1, "decay_type": "linear", "min_lr_ratio": 0.0},
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
}
"""What a CPU and a second need."""


@pytest.mark.parametrize("arm", ARMS)
def test_llama_factory_trains(tmp_path, arm):
    """Two steps of its own trainer, from scratch, on text of its own packing: a loss near ln 96 = 4.56, parameters."""
    pytest.importorskip("llamafactory", reason="llamafactory is not installed")
    tokenizers = importlib.import_module("tokenizers")
    job = job_of()
    place = emitted(tmp_path / "out", "llama-factory", job)
    vocabulary = {"<eos>": 0, **{str(i): i for i in range(1, 96)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="1"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(place / arm / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
    (place / arm / "tokenizer_config.json").write_text(json.dumps(told))
    drawn = random.Random(0)
    texts = [" ".join(str(drawn.randrange(1, 96)) for _ in range(80)) for _ in range(40)]
    (place / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (place / "changes.json").write_text(json.dumps(CHANGES))
    program = [sys.executable, str(Path(__file__).with_name("llama_factory_on_cpu.py")), f"{arm}.yaml", "changes.json"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, check=False, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    log = [json.loads(line) for line in (place / "runs" / arm / "trainer_log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert len(losses) == 2
    assert all(4 < loss < 6 for loss in losses)
    spec = job.spec(arm)
    total = Ledger(spec, Setting.of(spec)).total
    assert f"all params: {total:,}" in done.stdout + done.stderr


def test_llama_factorys_data_set_is_described(tmp_path):
    place = emitted(tmp_path / "out", "llama-factory", job_of())
    told = json.loads((place / "data" / "dataset_info.json").read_text())
    assert told[read(place / "twin.yaml")["dataset"]]["file_name"] == "train.jsonl"


def test_axolotls_schema_has_every_key(tmp_path):
    """It accepts unknown keys in silence; recorded from axolotl 0.21.0, utils/schemas."""
    known = keys_of("axolotl-0.21.0")
    place = emitted(tmp_path / "out", "axolotl", job_of())
    for arm in ARMS:
        told = read(place / f"{arm}.yaml")
        assert told.keys() <= known
        for source in told["pretraining_dataset"]:
            assert {f"pretraining_dataset.{key}" for key in source} <= known


def test_axolotl_reads_the_file(tmp_path):
    """Its own schema, where it is installed."""
    config = pytest.importorskip("axolotl.utils.schemas.config", reason="axolotl is not installed")
    place = emitted(tmp_path / "out", "axolotl", job_of())
    for arm in ARMS:
        told = read(place / f"{arm}.yaml")
        found = config.AxolotlInputConfig(**told)
        assert (found.sequence_len, found.max_steps, found.learning_rate) == (64, 100, told["learning_rate"])


def test_maxtext_has_every_key(tmp_path):
    """Recorded from maxtext 0.2.5, configs/base.yml; the baseline's shape under MaxText's names."""
    job = job_of()
    place = emitted(tmp_path / "out", "maxtext", job)
    told = read(place / "baseline.yml")
    assert told.pop("base_config") == "base.yml"
    assert told.keys() <= keys_of("maxtext-0.2.5")
    assert [path.name for path in place.iterdir()] == ["baseline.yml"]
    assert (
        told["base_mlp_dim"] == told["base_moe_mlp_dim"] == 32
    )  # MaxText wants them equal where all layers have experts
    assert (told["base_num_decoder_layers"], told["num_experts"], told["vocab_size"]) == (8, 8, 96)
    how = {line.feature: line.how for line in lines(TARGETS["maxtext"], job)}
    assert how["loop"] == how["residual scale in the core"] == "dropped"


@pytest.mark.parametrize(
    "fields",
    [
        {"qk_norm": "full"},
        {"shared_expert_intermediate_size": 32},
        {"mlp_only_layers": [0], "intermediate_size": 64},
        {"scoring_func": "sigmoid"},
        {"attention_bias": True},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_maxtext_refuses_what_its_block_has_not(fields):
    with pytest.raises(BadInput, match="maxtext cannot hold this pair"):
        lines(TARGETS["maxtext"], job_of(**fields))


def test_maxtext_has_nothing_to_launch():
    assert not TARGETS["maxtext"].emit(job_of()).train
