"""A model that verify trained, evaluated by lm-evaluation-harness: offline, from the emitted directory, remote code on.

The right values are our own model's log-likelihoods of the same bytes. The tokenizer is the user's part; here it is one
of bytes, with the ids that the run was trained on.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smelt_budget.emit import TARGETS, folder
from smelt_budget.emit.target import ARMS, Job
from smelt_budget.emit.training import training
from smelt_budget.verify.asked import read_asked
from smelt_budget.verify.conduct import conduct
from smelt_budget.verify.trained import Trained

pytest.importorskip("lm_eval")
TOY = runpy.run_path(str(Path(__file__).parents[1] / "numerics" / "toy_run.py"))
BEGIN = 256  # of a document: the id after the bytes
TEXTS = ("the loop costs what the baseline costs", "every token of every loop", "baseline baseline the")
CHOICES = (" loop", " xq~!")

ROLLING = """
task: toy_bits
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
CHOICE = """
task: toy_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: {choices}
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def byte_tokenizer(place):
    """The id of a byte is the byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ids = {letter: byte for byte, letter in bytes_to_unicode().items()} | {"<begin>": BEGIN}
    made = Tokenizer(models.BPE(vocab=ids, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<begin>", eos_token="<begin>").save_pretrained(place)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Both arms, forty steps on sixty documents."""
    place = tmp_path_factory.mktemp("verify")
    text = TOY["documents"](place / "texts")
    asked = TOY["begun"](place / "run", text, steps=40, factors=(1.0,), checkpoint_every=40)
    conduct(place / "run", asked, lambda _: None)
    return place / "run"


@pytest.fixture(scope="module")
def models(run, tmp_path_factory):
    """The emitted folder with a tokenizer in both directories."""
    asked = read_asked(run)
    job = Job("toy", asked.baseline, asked.twin, training(asked.baseline, asked.twin, 64), weights=str(run))
    place = tmp_path_factory.mktemp("emitted") / "pair"
    folder.write(place, TARGETS["hf"].emit(job).files, force=False)
    for arm in ARMS:
        byte_tokenizer(place / arm)
    return place


def harness(model, tasks, names):
    """The results of the command that docs/emit-hf.md has."""
    out = tasks / "results"
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "hf",
        "--tasks",
        ",".join(names),
        "--include_path",
        str(tasks),
    ]
    command += ["--model_args", f"pretrained={model},trust_remote_code=True,dtype=float32", "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "cache")}
    done = subprocess.run(
        [*command, "--output_path", str(out)], capture_output=True, text=True, env=os.environ | offline, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.rglob("results_*.json")
    return json.loads(file.read_text())["results"]


def nats(model, text, after=""):
    """Our model's -log p of the bytes, after the beginning of a document and what comes before."""
    before, said = [BEGIN, *after.encode()], list(text.encode())
    ids = torch.tensor([before + said])
    with torch.no_grad():
        return float(model(ids[:, :-1], ids[:, 1:]).losses[0, len(before) - 1 :].sum())


def test_the_harness_finds_our_likelihoods(run, models, tmp_path):
    """Bits per byte of texts to 1e-4, and the accuracy of a choice between two continuations, exactly."""
    data = tmp_path / "toy.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "toy_bits.yaml").write_text(ROLLING.format(data=data))
    (tmp_path / "toy_choice.yaml").write_text(CHOICE.format(data=data, choices=json.dumps(CHOICES)))
    found = harness(models / "twin", tmp_path, ["toy_bits", "toy_choice"])
    ours = Trained.read(run, "twin", 0).model
    bits = sum(nats(ours, text) for text in TEXTS) / sum(map(len, TEXTS)) / torch.log(torch.tensor(2.0))
    assert abs(found["toy_bits"]["bits_per_byte,none"] / float(bits) - 1) < 1e-4
    right = [nats(ours, CHOICES[0], text) < nats(ours, CHOICES[1], text) for text in TEXTS]
    assert found["toy_choice"]["acc,none"] == sum(right) / len(right) == 1.0
